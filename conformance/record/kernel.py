"""Triton kernel that computes the kept numbers of many parts in one pass over each.

``kept.py`` defines the sums. Torch's own kernels need 20 passes for them, and the host
launches each pass. Here each program reads a piece of one tile, and keeps the 32
buckets of that tile in registers. Parts that consist of many rectangles, or have an
unsupported dtype, are left to ``kept.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from .kept import BUCKETS, GRID, SLOTS, Batch, Box, Wanted
from .pieces import pieces_of

__all__ = ["DTYPES", "batch_of", "rows_of"]

DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
}
"""Dtypes that the kernel supports."""
BLOCK = 128
"""Number of elements that a program processes at once; each has 32 buckets in
registers. Buckets lie along the last dim, so a thread holds those of its own elements.
Along the first dim, all threads of a warp would compute the same words."""
WARPS = 4
EACH = 8192
"""Number of elements of a tile that one program processes."""
COLUMNS, OUTPUT, BEGIN = 13, 2, 10
"""Number of arguments of a piece (see `rows_of`), column of its part's number, and
column of its first program."""


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]  # compiled by Triton
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _bits_of_bf16(x):  # type: ignore[no-untyped-def]  # compiled by Triton
    # Round to nearest, ties to even, as on a CPU; a device has other bits for nan.
    bits = x.to(tl.uint32, bitcast=True)
    half = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    half = tl.where(x != x, 0x7FC0, half)
    return half.to(tl.uint16).to(tl.int16, bitcast=True).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]  # no stubs are installed
def _keep(  # type: ignore[no-untyped-def]  # compiled by Triton
    table,
    programs,
    sketches,
    integers,
    doubles,
    VALUES: tl.constexpr,
    BITS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    GRID: tl.constexpr,
    BUCKETS: tl.constexpr,
):
    program = tl.program_id(0)
    own = table + tl.load(programs + program).to(tl.int64) * COLUMNS
    values = tl.load(own).to(tl.pointer_type(VALUES))
    weights = tl.load(own + 1).to(tl.pointer_type(WEIGHTS))
    output = tl.load(own + 2)
    pitch = tl.load(own + 3)
    n_rows, n_columns = tl.load(own + 4).to(tl.int32), tl.load(own + 5).to(tl.int32)
    row_0, row_1 = tl.load(own + 6).to(tl.int32), tl.load(own + 7).to(tl.int32)
    column_0, column_1 = tl.load(own + 8).to(tl.int32), tl.load(own + 9).to(tl.int32)
    number = program - tl.load(own + 10).to(tl.int32)
    splits = tl.load(own + 11).to(tl.int32)
    flags = tl.load(own + 12).to(tl.int32)
    has_weight, has_sketch = (flags & 1) != 0, (flags & 2) != 0
    is_rounded, is_whole = (flags & 4) != 0, (flags & 8) != 0
    is_vector, is_idle = (flags & 16) != 0, (flags & 32) != 0

    # Bounds of the rectangle of this tile that the piece has.
    tile = number % (GRID * GRID)
    over, down = tl.where(is_vector, GRID * GRID, GRID), tl.where(is_vector, 1, GRID)
    i, j = tile // over, tile % over
    top = tl.maximum(((i * n_rows.to(tl.int64) + down - 1) // down).to(tl.int32), row_0)
    low = ((i + 1) * n_rows.to(tl.int64) + down - 1) // down
    low = tl.minimum(low.to(tl.int32), row_1)
    left = ((j * n_columns.to(tl.int64) + over - 1) // over).to(tl.int32)
    left = tl.maximum(left, column_0)
    right = ((j + 1) * n_columns.to(tl.int64) + over - 1) // over
    right = tl.minimum(right.to(tl.int32), column_1)
    width = tl.maximum(right - left, 0)
    size = tl.maximum(low - top, 0) * width

    buckets = tl.zeros((BUCKETS, BLOCK), tl.float64)
    digest, after = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
    squares, largest = tl.zeros((BLOCK,), tl.float64), tl.zeros((BLOCK,), tl.float64)
    bad, unordered = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    each = tl.arange(0, BUCKETS)
    for start in range((number // (GRID * GRID)) * BLOCK, size, splits * BLOCK):
        place = start + tl.arange(0, BLOCK)
        is_here = place < size
        row, column = top + place // width, left + place % width
        at = (row - row_0).to(tl.int64) * pitch + (column - column_0)
        value = tl.load(values + at, mask=is_here, other=0.0)
        outer = tl.where(is_vector, column, row).to(tl.uint32)
        inner = tl.where(is_vector, row, column).to(tl.uint32)
        word = _mix(inner * 0x9E3779B1 + _mix(outer * 0x9E3779B1 + 1))
        odd = (word | 1).to(tl.int64)
        x = value.to(tl.float64)
        has_any = has_sketch
        if has_weight:
            by = tl.load(weights + at, mask=is_here, other=1.0).to(tl.float64)
            if is_idle:
                digest += tl.where(by == 0.0, odd, 0)
                x = tl.where(by == 0.0, x, 0.0)
                # most gradients have no zero, and buckets take most of the time
                has_any = has_sketch & (tl.max((by == 0.0).to(tl.int32), axis=0) > 0)
            else:
                x *= tl.abs(by)
        else:
            digest += value.to(BITS, bitcast=True).to(tl.int64) * odd
            if is_rounded:
                after += _bits_of_bf16(value.to(tl.float32)) * odd
            if has_sketch:
                squares += x * x
                largest = tl.maximum(largest, tl.abs(x))
                bad += (tl.abs(x) == float("inf")).to(tl.int32)
                unordered += (x != x).to(tl.int32)
        if has_any:
            if is_whole:
                alone = output * SLOTS + row.to(tl.int64) * n_columns + column
                tl.store(sketches + alone, x, mask=is_here)
            else:
                x = tl.where(((word >> 7) & 1) == 1, -x, x)
                bucket = ((word >> 20) % BUCKETS).to(tl.int32)
                buckets += tl.where(each[:, None] == bucket[None, :], x[None, :], 0.0)
    if has_sketch and not is_whole:
        slot = output * SLOTS + tile * BUCKETS + each
        tl.atomic_add(sketches + slot, tl.sum(buckets, axis=1))
    tl.store(integers + program * 2, tl.sum(digest, axis=0))
    tl.store(integers + program * 2 + 1, tl.sum(after, axis=0))
    missing = tl.sum(unordered, axis=0)
    most = tl.max(largest, axis=0)
    tl.store(doubles + program * 3, tl.sum(squares, axis=0))
    tl.store(doubles + program * 3 + 1, tl.where(missing > 0, float("nan"), most))
    tl.store(doubles + program * 3 + 2, (tl.sum(bad, axis=0) + missing).to(tl.float64))


def batch_of(parts: Sequence[Wanted], rows: Sequence[NDArray[np.int64]]) -> Batch:
    """Compute the numbers of parts that share a device, a dtype and weights' dtype.

    Args:
        parts: tensors with dtypes in ``DTYPES``.
        rows: result of `rows_of` for each part.
    """
    first = parts[0]
    device, dtype = first.part.device, first.part.dtype
    # the kernel reads rows that follow each other in memory
    values = [each.part.contiguous() for each in parts]
    weights = [each.weight.contiguous() for each in parts if each.weight is not None]
    table, programs = _table(rows, values, weights)
    size = len(programs)
    # One copy to the device brings all numbers.
    numbers = torch.from_numpy(
        np.concatenate([table.ravel(), programs, table[programs, OUTPUT]])
    )
    if device.type == "cuda":
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    of_program = numbers[table.size + size :]
    count = len(parts)
    slots = 0 if all(each.only_bits for each in parts) else SLOTS
    sketches = torch.zeros(count, slots, dtype=torch.float64, device=device)
    integers = torch.zeros(size, 2, dtype=torch.int64, device=device)
    doubles = torch.zeros(size, 3, dtype=torch.float64, device=device)
    launch: Any = _keep[(size,)]
    with torch.cuda.device_of(first.part):
        if size:
            launch(
                numbers,
                numbers[table.size : table.size + size],
                sketches,
                integers,
                doubles,
                VALUES=DTYPES[dtype],
                BITS={2: tl.int16, 4: tl.int32, 8: tl.int64}[dtype.itemsize],
                WEIGHTS=DTYPES[dtype if first.weight is None else first.weight.dtype],
                COLUMNS=COLUMNS,
                SLOTS=SLOTS,
                BLOCK=BLOCK,
                GRID=GRID,
                BUCKETS=BUCKETS,
                num_warps=WARPS,
            )
    digests = integers.new_zeros(count, 2).index_add_(0, of_program, integers)
    sums = doubles.new_zeros(count, 3).index_add_(0, of_program, doubles)
    sums[:, 1] = 0.0
    sums[:, 1].scatter_reduce_(0, of_program, doubles[:, 1], "amax")
    return Batch(digests, sums, sketches)


def _table(
    rows: Sequence[NDArray[np.int64]],
    values: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the kernel's table, a row for each piece, and the row of each program."""
    table: NDArray[np.int64] = np.concatenate(rows)
    of_part = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    for column, tensors in enumerate((values, weights)):
        if tensors:
            table[:, column] *= tensors[0].element_size()
            table[:, column] += np.array([t.data_ptr() for t in tensors])[of_part]
    table[:, OUTPUT] = of_part
    counts = table[:, BEGIN].copy()
    table[:, BEGIN] = np.cumsum(counts) - counts
    return table, np.repeat(np.arange(len(table)), counts)


def rows_of(each: Wanted) -> NDArray[np.int64] | None:
    """Return one row of arguments for each piece of a part; None if it has too many.

    `_table` replaces two kinds of entries. The positions of a piece's first element
    become pointers to its value and its weight. The number of programs of a piece
    becomes the number of its first program.
    """
    has_weight = each.weight is not None
    return _rows_of(each.box, has_weight, each.only_bits, each.rounded, each.idle)


@lru_cache(maxsize=100_000)  # each step asks seven times with equal arguments
def _rows_of(
    box: Box, has_weight: bool, only_bits: bool, is_rounded: bool, is_idle: bool
) -> NDArray[np.int64] | None:
    pieces = pieces_of(box.shape, box.offsets, box.local)
    if pieces is None:
        return None
    shape = box.shape
    n_rows, n_columns = (shape[0] if shape else 1), math.prod(shape[1:])
    is_whole = n_rows * n_columns <= SLOTS
    is_vector = n_columns == 1 and not is_whole
    flags = (
        has_weight
        | (not only_bits) << 1
        | is_rounded << 2
        | is_whole << 3
        | is_vector << 4
        | is_idle << 5
    )
    rows: list[list[int]] = []
    for piece in pieces:
        (row, high), (column, wide) = piece.rows, piece.columns
        size = high * wide
        if not size:
            continue
        splits = max(1, math.ceil(size / (GRID * GRID) / EACH))
        span = [row, row + high, column, column + wide]
        whole = [n_rows, n_columns]
        if is_vector:  # split into tiles like a single row
            span, whole = [0, 1, *span[:2]], whole[::-1]
        count = splits * GRID * GRID
        rows.append(
            [piece.at, piece.at, 0, piece.pitch, *whole, *span, count, splits, flags]
        )
    return np.array(rows, dtype=np.int64).reshape(-1, COLUMNS)
