"""Identify parameters of which several ranks hold a replica, by their gradients.

[Note: Replicas by parameter]
`global_norm` adds up the powers of the gradients on each mesh, and counts each replica
once. One optimizer may have two kinds of parameters on one mesh: parameters that other
ranks hold as well, and, as in expert parallelism, parameters that only these ranks
hold. So in the first clip the ranks exchange a table: shape and a hash of the bits of
each gradient, by position. A parameter belongs to all meshes with equal entries.

From then on each rank sends one sum for each set of meshes. The sums of one set must be
equal up to rounding: ranks with different numbers of threads may round the norm of
equal gradients differently. If the sums of a set differ by more, or if a rank has a
gradient of a parameter that was in no table, the ranks exchange the table again.

On an accelerator the host must read the rows at once for this, as in the first
iterations. A later clip may turn out to need a table when its rows are read at the next
sync. Then the scaler reads the next clips at once, and warns if the norm was wrong.

In the entries of `global_norm` a negative mesh is one whose replicas are not
identified.
"""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .errors import PeerFailedError
from .global_norm import (
    MESHES,
    GradsByMesh,
    grads_by_mesh,
    hashed,
    layout_of,
    local_norms,
    with_gradients,
)
from .grads import Number, local_tensor, tensor_of
from .iteration import Part
from .sync import OverflowSync, SyncResult
from .sync_group import exchange
from .torch_internals import specs


def entries_told_apart(
    sync: OverflowSync,
    result: SyncResult,
    part: Part,
    norm_type: float,
    carried: Number,
) -> list[list[float]]:
    """Identify replicas; return (mesh, kind, norm) of each entry of each rank.

    Makes three more collectives, on all ranks, because all read the same rows of
    ``result``. Sets `Holders` in the record of the optimizer.

    Raises:
        PeerFailedError: another rank could not read its gradients.
        ValueError: on some rank, too many different sets of ranks hold the parameters.
    """
    table, error = None, None
    try:
        table = _table(part.optimizer)
    except Exception as caught:  # the other ranks wait for the table
        error = caught
    try:
        tables = sync.tables_of(result, table)
    except PeerFailedError as failed:
        raise error or failed from None
    # a gradient of zeros does not show who holds its parameter
    zeros = [(table[:, 3] == 0).tolist() for table in tables]
    sets = [
        [
            None if is_zero else meshes
            for is_zero, meshes in zip(zero, of_rank, strict=True)
        ]
        for zero, of_rank in zip(zeros, _sets_of_meshes(tables), strict=True)
    ]
    ways = [
        {pair for pair in zip(table[:, 0].tolist(), of_rank, strict=True) if pair[1]}
        for table, of_rank in zip(tables, sets, strict=True)
    ]
    if (most := max(map(len, ways))) > MESHES:
        raise ValueError(
            f"{result.method}: other ranks hold some parameters of this optimizer, "
            f"too, in {most} different ways, a clip knows at most {MESHES}. Use one "
            "optimizer for the parameters that all ranks hold and another one for the "
            "rest."
        )
    grads = GradsByMesh()
    if part.record is not None:
        holders = part.record.holders = part.record.holders or Holders()
        holders.keep(with_gradients(part.optimizer), sets[result.group.rank()])
        grads = grads_by_mesh(
            part.optimizer,
            part.record,
            result.group,
            allow_fp16=True,
            only_identified=True,
        )
    entries, _ = local_norms(grads, norm_type, carried)
    mine = tensor_of(entries, result.rows.device)
    rows = exchange(result.group, result.method, mine)
    numbers: list[list[float]] = rows.reshape(-1, 3).tolist()
    return numbers


class Holders:
    """Meshes that hold each parameter of an optimizer, as far as known."""

    def __init__(self) -> None:
        self._sets: dict[int, tuple[weakref.ref[Any], float]] = {}
        self._all: tuple[list[weakref.ref[Any]], float] | None = None

    def of_all(self, parameters: Sequence[Any]) -> float | None:
        """Return a hash of the meshes that hold each of these parameters.

        Returns None if these are not the parameters that were identified last, or if
        some of them have other meshes.
        """
        if self._all is None:
            return None
        refs, meshes = self._all
        is_same = len(refs) == len(parameters) and all(
            ref() is parameter for ref, parameter in zip(refs, parameters, strict=True)
        )
        return meshes if is_same else None

    def of(self, parameters: Sequence[Any]) -> list[float | None]:
        """Return a hash of the meshes of each parameter; None if unknown."""
        sets: list[float | None] = []
        for parameter in parameters:
            ref, meshes = self._sets.get(id(parameter), (None, 0.0))
            sets.append(meshes if ref is not None and ref() is parameter else None)
        return sets

    def keep(self, parameters: Sequence[Any], sets: Sequence[float | None]) -> None:
        """Store a hash of the meshes that hold each parameter.

        Args:
            parameters: parameters; the references to them are weak.
            sets: hash for each parameter; None if it stays unknown.
        """
        self._sets = {
            key: entry for key, entry in self._sets.items() if entry[0]() is not None
        }
        for parameter, meshes in zip(parameters, sets, strict=True):
            if meshes is not None:
                self._sets[id(parameter)] = weakref.ref(parameter), meshes
        self._all = None
        if len({*sets}) == 1 and sets[0] is not None:
            self._all = [self._sets[id(each)][0] for each in parameters], sets[0]


COLUMNS = 4
"""Number of integers for each gradient in the table: mesh, kind, shape and bits."""


def _table(optimizer: Any) -> torch.Tensor:
    # Table of this rank: (number of gradients, COLUMNS), int64, on the CPU.
    mine = [] if optimizer is None else with_gradients(optimizer)
    rows: list[list[int]] = []
    with torch.no_grad():
        for parameter, spec in zip(
            mine, specs([parameter.grad for parameter in mine]), strict=True
        ):
            layout = layout_of(spec)
            family = layout.kind  # only gradients of equal families are compared
            if spec is not None:
                family = f"{family} {spec.placements} {spec.shape}"
            local = local_tensor(parameter, coalesce=True)
            shape = hashed(f"{tuple(local.shape)} {local.dtype}")
            bits = _hash_of_bits(local)
            if parameter.grad.is_sparse:
                bits ^= _hash_of_bits(parameter.grad.indices())
            row = [layout.mesh, hashed(family), shape, bits]
            rows.append(list(map(int, row)))
    return torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, COLUMNS)


def _hash_of_bits(tensor: torch.Tensor) -> int:
    # A sum of the bits of each element times an odd number for its position, mod 2**64.
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _CHUNK):
        chunk = bits[start : start + _CHUNK]
        places = torch.arange(start, start + len(chunk), device=bits.device)
        total += (chunk * (places * _STEP + 1)).sum()
    return int(total)


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**22
"""Number of elements hashed at once, which bounds the memory: 64 MiB."""
_STEP = 0x9E3779B97F4A7C16 - 2**64
"""Even, so that the number of each position is odd; from the golden ratio."""


def _sets_of_meshes(tables: Sequence[torch.Tensor]) -> list[list[float]]:
    # Give each set of meshes a number, for each rank and gradient. It follows from the
    # tables of all ranks, so it is the same on every rank.
    listed = [table.tolist() for table in tables]
    # Add up the parts of a parameter on all ranks of its mesh.
    bits: dict[tuple[int, int], int] = defaultdict(int)
    what: dict[tuple[int, int], tuple[int, int]] = {}
    for rows in listed:
        for key, (_, family, shape, part) in _numbered(rows):
            bits[key] += part
            what[key] = max(what.get(key, (0, 0)), (family, shape))
    names: dict[tuple[int, int], tuple[int, ...]] = {}
    seen: dict[tuple[int, ...], int] = Counter()
    meshes: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for key in sorted(bits):
        name = (*what[key], bits[key])
        seen[key[0], *name] += 1  # a mesh may have several equal gradients
        names[key] = (*name, seen[key[0], *name])
        meshes[names[key]].append(key[0])
    return [
        [hashed(str(meshes[names[key]])) for key, _ in _numbered(rows)]
        for rows in listed
    ]


def _numbered(rows: list[list[int]]) -> Iterable[tuple[tuple[int, int], list[int]]]:
    # Pair each row with its mesh, and with its position among the rows of that mesh.
    count: dict[int, int] = Counter()
    for row in rows:
        count[row[0]] += 1
        yield (row[0], count[row[0]]), row
