"""Numbers kept of many parts in one pass over each, by one Triton kernel on a GPU.

``kept.py`` defines the sums. Torch's kernels need 20 passes for them, and the host
launches each pass. Here a program reads a piece of one tile, and keeps the 32 buckets
of that tile in registers. ``kept.py`` itself reads the parts that are not made of few
rectangles of the whole, or have another dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .pieces import Piece

__all__ = ["DTYPES", "Request", "sums_of"]

DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float64: tl.float64,
}
"""dtypes of parts that the kernel reads."""
BLOCK = 128
"""Elements that a program works on at once: each has 32 buckets in registers."""
EACH = 8192
"""Elements of a tile that one program goes over."""
COLUMNS = 13
"""Numbers that the kernel needs of a piece: see `_table`."""


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]  # compiled by Triton
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _bits_of_bf16(x):  # type: ignore[no-untyped-def]  # compiled by Triton
    # To the nearest, ties to even, as on a CPU; a device has other bits for nan.
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
    is_vector = (flags & 16) != 0

    # The rectangle of this tile that the piece has.
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

    buckets = tl.zeros((BLOCK, BUCKETS), tl.float64)
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
        if has_weight:
            by = tl.load(weights + at, mask=is_here, other=0.0)
            x *= tl.abs(by.to(tl.float64))
        else:
            digest += value.to(BITS, bitcast=True).to(tl.int64) * odd
            if is_rounded:
                after += _bits_of_bf16(value.to(tl.float32)) * odd
            if has_sketch:
                squares += x * x
                largest = tl.maximum(largest, tl.abs(x))
                bad += (tl.abs(x) == float("inf")).to(tl.int32)
                unordered += (x != x).to(tl.int32)
        if has_sketch:
            if is_whole:
                alone = output * SLOTS + row.to(tl.int64) * n_columns + column
                tl.store(sketches + alone, x, mask=is_here)
            else:
                x = tl.where(((word >> 7) & 1) == 1, -x, x)
                bucket = ((word >> 20) % BUCKETS).to(tl.int32)
                hits = (bucket[:, None] == each[None, :]) & is_here[:, None]
                buckets += tl.where(hits, x[:, None], 0.0)
    if has_sketch and not is_whole:
        slot = output * SLOTS + tile * BUCKETS + each
        tl.atomic_add(sketches + slot, tl.sum(buckets, axis=0))
    tl.store(integers + program * 2, tl.sum(digest, axis=0))
    tl.store(integers + program * 2 + 1, tl.sum(after, axis=0))
    missing = tl.sum(unordered, axis=0)
    most = tl.max(largest, axis=0)
    tl.store(doubles + program * 3, tl.sum(squares, axis=0))
    tl.store(doubles + program * 3 + 1, tl.where(missing > 0, float("nan"), most))
    tl.store(doubles + program * 3 + 2, (tl.sum(bad, axis=0) + missing).to(tl.float64))


class Request(NamedTuple):
    """Numbers that are asked for of one part, and the pieces it is made of."""

    part: Tensor
    weight: Tensor | None
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    has_sketch: bool
    is_rounded: bool


def sums_of(
    requests: Sequence[Request], slots: int, grid: int, buckets: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum over parts of one device, one dtype and one dtype of weights.

    Returns:
        Digests and rounded digests, (n, 2) int64; sums of squares, largest sizes and
        non-finite elements, (n, 3) float64; sketches, (n, slots) float64.
    """
    part, weight = requests[0].part, requests[0].weight
    device = part.device
    table, programs, outputs = _table(requests, slots, grid)
    # One copy to the device for all of them.
    ends = np.cumsum([table.size, programs.size])
    numbers = torch.from_numpy(np.concatenate([table.ravel(), programs, outputs]))
    if device.type == "cuda":
        numbers = numbers.pin_memory().to(device, non_blocking=True)
    of_program = numbers[ends[1] :]
    count = len(requests)
    sketches = torch.zeros(count, slots, dtype=torch.float64, device=device)
    integers = torch.zeros(len(outputs), 2, dtype=torch.int64, device=device)
    doubles = torch.zeros(len(outputs), 3, dtype=torch.float64, device=device)
    launch: Any = _keep[(len(outputs),)]
    if len(outputs):
        launch(
            numbers,
            numbers[ends[0] : ends[1]],
            sketches,
            integers,
            doubles,
            VALUES=DTYPES[part.dtype],
            BITS={2: tl.int16, 4: tl.int32, 8: tl.int64}[part.element_size()],
            WEIGHTS=DTYPES[part.dtype if weight is None else weight.dtype],
            COLUMNS=COLUMNS,
            SLOTS=slots,
            BLOCK=BLOCK,
            GRID=grid,
            BUCKETS=buckets,
            num_warps=4,
        )
    digests = integers.new_zeros(count, 2).index_add_(0, of_program, integers)
    sums = doubles.new_zeros(count, 3).index_add_(0, of_program, doubles)
    sums[:, 1] = 0.0
    sums[:, 1].scatter_reduce_(0, of_program, doubles[:, 1], "amax")
    return digests, sums, sketches


def _table(
    requests: Sequence[Request], slots: int, grid: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rows for the kernel; the row and the request of each program; all int64."""
    rows: list[list[int]] = []
    counts: list[int] = []
    begin = 0
    for output, request in enumerate(requests):
        part, weight = request.part, request.weight
        shape = request.shape
        n_rows, n_columns = (shape[0] if shape else 1), math.prod(shape[1:])
        is_whole = n_rows * n_columns <= slots
        is_vector = n_columns == 1 and not is_whole
        flags = (
            (weight is not None)
            | request.has_sketch << 1
            | request.is_rounded << 2
            | is_whole << 3
            | is_vector << 4
        )
        for piece in request.pieces:
            (row, high), (column, wide) = piece.rows, piece.columns
            size = high * wide
            if not size:
                continue
            splits = max(1, math.ceil(size / (grid * grid) / EACH))
            pointers = [part.data_ptr() + piece.at * part.element_size(), 0]
            if weight is not None:
                pointers[1] = weight.data_ptr() + piece.at * weight.element_size()
            span = [row, row + high, column, column + wide]
            whole = [n_rows, n_columns]
            if is_vector:  # split into tiles like a single row
                span, whole = [*span[2:], *span[:2]], whole[::-1]
                span[:2] = [0, 1]
            rows.append(
                [*pointers, output, piece.pitch, *whole, *span, begin, splits, flags]
            )
            counts.append(splits * grid * grid)
            begin += counts[-1]
    table = np.array(rows, dtype=np.int64).reshape(-1, COLUMNS)
    programs = np.repeat(np.arange(len(rows)), counts)
    return table, programs, np.repeat(table[:, 2], counts)
