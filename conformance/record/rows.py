"""Digests of the rows of a model's inputs, and of a batch regardless of order.

Sets of digests over all ranks show whether two runs trained on the same rows, on
whichever rank or in whichever micro-batch. If ranks have parts of rows, or too many
rows, bags are compared instead: sums over the elements of all rows, in any order. A
batch is as long as its longest row on that rank, so a row of tokens may be padded on
either side. Floating-point rows may be computed by the job, such as by a generator: a
few sums of each row distinguish rounding from different rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .files import Recording
from .kept import mix

__all__ = [
    "MOST",
    "NEAR",
    "bags_of",
    "digests_of_floats",
    "keep_rows",
    "rows_of",
    "sums_of",
    "tensors_in",
    "unpadded_of",
]

SUMS = 4
"""Number of sums kept of a floating-point row."""
NEAR = 0.02
"""Largest difference of a sum between rows that differ by rounding only, relative to
the norm of the row. A bf16 forward causes half of this. Sums of different rows differ
by as much as the norm."""
IGNORED = -100
"""Label that torch's cross entropy leaves out by default."""
PIECE = 1 << 18
"""Number of elements that are mixed at once: their copies stay in the cache."""
MOST = 4096
"""Largest number of rows of a tensor that are recorded."""


def keep_rows(out: Recording, step: int, inputs: Sequence[Any]) -> list[Tensor]:
    """Add digests, bags, sums and counts of the rows of one model call to a recording.

    Returns:
        Digests of the rows of each integer input, or of the float inputs if none is
        integer.
    """
    tokens, floats = rows_of(inputs), rows_of(inputs, floats=True)
    if any(t.requires_grad for each in inputs for t in tensors_in(each)):
        out.received.add(step)
    if bags := bags_of(inputs):
        out.bags.setdefault(step, []).append(bags)
    if rows := tokens or floats:
        out.shares.setdefault(step, []).append([len(rows[0]), *_labels_of(inputs)])
    for rows_by_step, rows in (
        (out.rows, tokens),
        (out.rows_of_floats, floats),
        (out.unpadded, unpadded_of(inputs)),
        (out.sums_of_rows, sums_of(inputs)),
    ):
        if rows:
            calls = rows_by_step.setdefault(step, [])
            calls.extend(each[:MOST] for each in rows)
    return tokens or floats


def _labels_of(values: Iterable[Any]) -> list[int | Tensor]:
    """Return two counts for each integer input: labels, and IGNORED elements."""
    counts = list[int | Tensor]()
    for rows in _flat(values, False):
        ignored = (rows == IGNORED).sum()
        counts += [rows.numel() - ignored, ignored]
    return counts


def bags_of(values: Iterable[Any]) -> list[Tensor]:
    """Return an int64 hash of the elements of each input, whatever their order.

    The hashes of parts add up to the hash of the whole. So context parallelism may cut
    rows, and rows may lie along any dim. Floating-point inputs are used if no input has
    integers.

    Args:
        values: arguments of the model; dicts, tuples and lists are searched.
    """
    values = list(values)
    for is_float in (False, True):
        if bags := [_bag_of(rows, is_float) for rows in _flat(values, is_float)]:
            return bags
    return []


def _bag_of(rows: Tensor, is_float: bool) -> Tensor:
    bag = torch.zeros((), dtype=torch.int64, device=rows.device)
    for piece in rows.flatten().split(PIECE):
        bits = _bits(piece) if is_float else piece.to(torch.int64)
        words = mix(bits & 0xFFFFFFFF)
        bag += (words * words).sum()
    return bag


def rows_of(values: Iterable[Any], *, floats: bool = False) -> list[Tensor]:
    """Return a (rows,) int64 tensor of digests for each input with rows in dim 0.

    Args:
        values: arguments of the model; dicts, tuples and lists are searched.
        floats: true to use the floating-point inputs, false the integer ones.
    """
    return [_digests(rows) for rows in _flat(values, floats)]


def unpadded_of(values: Iterable[Any]) -> list[Tensor]:
    """Return digests of rows without padding, for each integer input.

    The longest row of a batch has no padding, and the padding token is unknown. So the
    run of equal tokens at an end of a row is taken for padding.

    Args:
        values: arguments of the model; dicts, tuples and lists are searched.

    Returns:
        (rows, 2) int64 for each input: the digest without the equal tokens at the end,
        and without those at the start.
    """
    digests = []
    for rows in _flat(values, False, MOST):
        length = rows.shape[1]
        places = torch.arange(length, device=rows.device)
        # of a row of equal tokens, one token is kept
        last = torch.where(rows != rows[:, -1:], places, 0).amax(1, keepdim=True)
        first = torch.where(rows != rows[:, :1], places, length - 1).amin(1, True)
        ends = _digests(rows * (places <= last))
        moved = (places + first).clamp(max=length - 1)
        start = rows.gather(1, moved) * (places + first < length)
        digests.append(torch.stack([ends, _digests(start)], 1))
    return digests


def sums_of(values: Iterable[Any]) -> list[Tensor]:
    """Return sums that identify rows up to rounding, for each float input.

    Args:
        values: arguments of the model; dicts, tuples and lists are searched.

    Returns:
        (rows, SUMS) float64 for each input: the norm of a row, and sums of its elements
        with random signs.
    """
    sums = []
    for rows in _flat(values, True, MOST):
        drawn = mix(torch.arange(rows.shape[1], device=rows.device) + 1)
        signs = [1 - 2 * ((drawn >> shift) & 1) for shift in range(1, SUMS)]
        doubles = rows.to(torch.float64)
        columns = [doubles.norm(dim=1), *((doubles * s).sum(1) for s in signs)]
        sums.append(torch.stack(columns, 1))
    return sums


def digests_of_floats(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield an int64 hash of each floating-point input, whatever the order of its rows.

    Costs less memory than `rows_of`: an input may be a batch of images. Equal rows give
    equal hashes on ranks with the same type of device.
    """
    for rows in _flat(values, True):
        if rows.element_size() > 1:
            drawn = mix(torch.arange(rows.shape[1], device=rows.device) + 1)
            sums = (rows * drawn.to(torch.float32)).sum(1, dtype=torch.float64)
            yield sums.view(torch.int64).sum()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a value; mappings, lists and dataclasses are searched."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            yield from tensors_in(getattr(value, each.name))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)


def _flat(
    values: Iterable[Any], is_float: bool, most: int | None = None
) -> Iterator[Tensor]:
    """Yield each float or integer input as (rows, elements), cut to ``most`` rows."""
    for tensor in _inputs(values, is_float):
        rows = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        yield rows[:most].flatten(1)


def _inputs(values: Iterable[Any], is_float: bool) -> Iterator[Tensor]:
    """Yield each float or integer input (``is_float``) that has rows in dim 0.

    Each part of a nested tensor is one row. Of a DTensor only this rank's part is read.
    If no input has two dims, each sequence of integers is one row: some jobs
    concatenate the tokens of all texts.
    """
    inputs = list[Tensor]()
    for tensor in (t.detach() for value in values for t in tensors_in(value)):
        # an operation on a DTensor may communicate
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        inputs += [t[None] for t in tensor.unbind()] if tensor.is_nested else [tensor]
    if not any(tensor.ndim > 1 for tensor in inputs):
        inputs = [t[None] for t in inputs if t.ndim and not _has_points(t)]
    for tensor in inputs:
        if tensor.ndim > 1 and tensor.numel() and _has_points(tensor) == is_float:
            yield tensor


def _has_points(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _digests(rows: Tensor) -> Tensor:
    places = torch.arange(rows.shape[1], dtype=torch.int64, device=rows.device)
    return (_bits(rows) * (mix(places + 1) | 1)).sum(1)


def _bits(rows: Tensor) -> Tensor:
    # in fp32, in which batches are made: a copy in half precision has other bits
    return rows.to(torch.float32).view(torch.int32).to(torch.int64)
