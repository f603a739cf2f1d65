"""Rows: a digest of each row of a model's inputs, and of a batch as a bag of tokens.

Sets of digests over all ranks say whether two runs saw the same rows, whatever rank or
micro-batch had them; bags say so where ranks have parts of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .kept import mix

__all__ = ["MOST", "bag_of", "rows_of", "tensors_in"]

MOST = 4096
"""Rows of a tensor that are digested: one digest a row is kept."""


def bag_of(values: Iterable[Any]) -> Tensor | None:
    """One int64 number for the elements of the first input of integers, in any order.

    It adds up over rows and over parts of rows: context parallelism cuts rows.
    """
    for tensor in (t for value in values for t in tensors_in(value)):
        if tensor.ndim > 1 and not tensor.is_floating_point():
            words = mix(tensor.detach().to(torch.int64) & 0xFFFFFFFF)
            return (words * words).sum()
    return None


def rows_of(values: Iterable[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """One (rows,) int64 tensor of digests for each input with rows in dim 0.

    Args:
        values: arguments of the model; dicts, tuples and lists are searched.

    Returns:
        Digests of inputs that hold integers, and digests of the others.
    """
    digests_by_kind: tuple[list[Tensor], list[Tensor]] = [], []
    for tensor in (t for value in values for t in tensors_in(value)):
        if tensor.ndim > 1 and len(tensor):
            digests = _digests(tensor.detach()[:MOST])
            digests_by_kind[tensor.is_floating_point()].append(digests)
    return digests_by_kind


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a value; dicts, tuples and lists are searched."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)


def _digests(rows: Tensor) -> Tensor:
    flat = rows.reshape(len(rows), -1)
    # as in fp32, in which a batch is made: a copy in half precision has other bits
    bits = flat.to(torch.float32).view(torch.int32).to(torch.int64)
    places = torch.arange(flat.shape[1], dtype=torch.int64, device=flat.device)
    return (bits * (mix(places + 1) | 1)).sum(1)
