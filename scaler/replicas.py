"""Parameters of which several ranks hold a replica, told apart by their gradients.

[Note: Replicas by parameter]
`global_norm` counts meshes of one kind with equal sums once: those of data parallel
replicas. But one optimizer may hold, on one mesh, parameters that other ranks hold as
well beside parameters that only these ranks hold (hand-written tensor or expert
parallelism). Then the sums of two meshes differ, and their replicas would be added
twice. So where meshes of one family have different sums, the ranks exchange a table
once: shape and sum of bits of each gradient. A parameter belongs to all meshes that
have it to the bit. From then on each rank sends one sum for each set of meshes. The
sums of one set must be equal; if they differ, or if a rank has gradients of other
parameters than before, the ranks exchange the table again.

An accelerator would have to wait for the host, so there replicas are told apart by the
sums of meshes alone.

In the entries of `global_norm` a mesh below zero is one that is not told apart.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .local_norms import hashed

COLUMNS = 4
"""Integers for each gradient in the table: mesh, family, shape and bits."""


class Holders(NamedTuple):
    """The meshes that hold each parameter of an optimizer.

    Attributes:
        parameters: weak references to those that had a gradient, in their order.
        sets: for each of them a number that stands for the meshes.
    """

    parameters: list[weakref.ref[Any]]
    sets: list[float]

    def are_of(self, parameters: list[Any]) -> bool:
        """Return whether these parameters have the gradients now."""
        return len(parameters) == len(self.parameters) and all(
            ref() is parameter
            for ref, parameter in zip(self.parameters, parameters, strict=True)
        )


def table_of(
    meshes: Sequence[float], families: Sequence[str], gradients: Iterable[Any]
) -> torch.Tensor:
    """Return this rank's table, (number of gradients, COLUMNS), int64, on the CPU.

    Args:
        meshes: of each gradient, as a number.
        families: likewise, as text; what differs in it is not compared.
        gradients: the local tensors.
    """
    rows = [
        [
            int(mesh),
            int(hashed(family)),
            int(hashed(f"{tuple(local.shape)} {local.dtype}")),
            sum_of_bits(local),
        ]
        for mesh, family, local in zip(meshes, families, gradients, strict=True)
    ]
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return table.reshape(-1, COLUMNS)


def sum_of_bits(tensor: torch.Tensor) -> int:
    """Return the sum of the elements as integers, in 64 bits; no order changes it."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()])
    return int(bits.sum(dtype=torch.int64))


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def told_apart(tables: Sequence[torch.Tensor]) -> list[list[float]]:
    """Return for each rank and gradient a number that stands for its set of meshes.

    The same on every rank, since it follows from the tables of all ranks.
    """
    listed = [table.tolist() for table in tables]
    # The parts of a parameter on all ranks of its mesh are added up.
    bits: dict[tuple[int, int], int] = defaultdict(int)
    what: dict[tuple[int, int], tuple[int, int]] = {}
    for rows in listed:
        for key, (_, family, shape, part) in _numbered(rows):
            bits[key] = (bits[key] + part) % 2**64
            what[key] = max(what.get(key, (0, 0)), (family, shape))
    names: dict[tuple[int, int], tuple[int, ...]] = {}
    seen: dict[tuple[int, ...], int] = Counter()
    meshes: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for key in sorted(bits):
        name = (*what[key], bits[key])
        seen[key[0], *name] += 1  # a mesh may have several that are equal
        names[key] = (*name, seen[key[0], *name])
        meshes[names[key]].append(key[0])
    return [
        [hashed(str(meshes[names[key]])) for key, _ in _numbered(rows)]
        for rows in listed
    ]


def _numbered(rows: list[list[int]]) -> Iterable[tuple[tuple[int, int], list[int]]]:
    # Each row with its mesh, and its position among the rows of that.
    count: dict[int, int] = Counter()
    for row in rows:
        count[row[0]] += 1
        yield (row[0], count[row[0]]), row
