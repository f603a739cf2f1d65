"""The global norm over ranks: each shard added, each replica counted once.

[Note: Each replica once]
Inside the mesh of a DTensor the placements say how often each element is held. Outside
of it, and for plain tensors, nothing says whether two ranks hold the same thing (data
parallel) or different things (pipeline stages, experts). But a replica has the same
gradient to the last bit, or training would drift apart, and different things do not
have the same norm to the last bit. So each rank sends, for each mesh it has gradients
on, the norm of its part, the identity of the mesh (its ranks; a plain tensor has a mesh
of this rank alone) and what kind of mesh it is. Every rank adds up the powers of each
mesh and counts meshes of one kind with equal sums once. The sums do not depend on the
order of the ranks, since replicas may list theirs in different orders. All ranks do
this on the same numbers, so they clip alike whatever happens.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch

from .grads import (
    Gradients,
    Number,
    by_device_and_dtype,
    dense_gradients,
    local_tensor,
    parameters_of,
)
from .local_norms import Norms, norms, scaled_norm
from .optimizer_state import OptimizerRecord
from .torch_internals import specs

MESHES = 4
"""Meshes that the gradients of one optimizer may lie on, on one rank."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Where gradients lie: one object for equal layouts, compared by identity.

    Attributes:
        ranks: of the mesh, in its order.
        kind: its axes and their sizes.
        copies: how often the mesh holds each element.
        number: 52 bits that stand for the ranks.
    """

    ranks: tuple[int, ...]
    kind: str
    copies: int
    number: float


@lru_cache(maxsize=65536)
def _layout(ranks: tuple[int, ...], kind: str, copies: int) -> Layout:
    return Layout(ranks, kind, copies, _hashed(str(ranks)))


@lru_cache(maxsize=1024)
def _layout_on(mesh: Any, placements: tuple[Any, ...]) -> Layout:
    copies = math.prod(
        mesh.size(axis) for axis, p in enumerate(placements) if p.is_replicate()
    )
    ranks = tuple(mesh.mesh.flatten().tolist())
    return _layout(ranks, f"{mesh.mesh_dim_names}{tuple(mesh.shape)}", copies)


class GradsOfMesh(NamedTuple):
    """Local gradients that lie on one mesh.

    Attributes:
        gradients: by device and dtype.
        elements: of the whole gradients, on all ranks of the mesh.
    """

    gradients: Gradients
    elements: int


class GradsByMesh(dict[Layout, GradsOfMesh]):
    """Local gradients by where they lie.

    Attributes:
        gradients: all of them, as the parameters have them.
        locals: the local tensor of each, ``gradients`` itself if none is a DTensor;
            None if one was made for the norm: summed up, or the values of a sparse one.
    """

    gradients: Sequence[Any] = ()
    locals: Sequence[torch.Tensor] | None = None


class Places(NamedTuple):
    """Where the gradients of an optimizer lay in its last clip.

    Attributes:
        alone: the layout of a plain tensor on this rank.
        specs: of each gradient.
        members: the positions of the gradients of each layout.
        elements: of the whole gradients of each layout.
    """

    alone: Layout
    specs: list[Any]
    members: dict[Layout, list[int]]
    elements: dict[Layout, int]


# - This rank's gradients, by mesh


def grads_by_mesh(optimizer: Any, record: OptimizerRecord, rank: int) -> GradsByMesh:
    """Collect the local gradients of an optimizer by where they lie.

    Partial gradients are summed up first, a collective over their mesh. ``rank`` is
    that of this process in the group that syncs.
    """
    alone = _layout((rank,), "plain", 1)
    gradients, locals_ = dense_gradients(optimizer)
    if locals_ is gradients and gradients:  # no DTensor among them
        elements = sum(map(torch.Tensor.numel, gradients))
        grouped = by_device_and_dtype(gradients)
        by_mesh = GradsByMesh({alone: GradsOfMesh(grouped, elements)})
        by_mesh.gradients = by_mesh.locals = gradients
        return by_mesh
    found, places, held = specs(gradients), record.places, locals_
    # fully_shard gives the same spec to a parameter's gradient in every step.
    if (
        locals_ is None
        or places is None
        or places.alone is not alone
        or len(places.specs) != len(found)
        or not all(map(is_, places.specs, found))
    ):
        if locals_ is None or any(map(_is_partial, found)):
            gradients, found, locals_ = _one_by_one(optimizer)
            held = None
        places = _places(found, locals_, alone)
        # How many elements a plain tensor has follows from no spec.
        is_plain = any(spec is None for spec in found)
        record.places = None if is_plain else places
    by_mesh = GradsByMesh()
    by_mesh.gradients, by_mesh.locals = gradients, held
    for layout, indices in places.members.items():
        some = locals_
        if len(indices) < len(locals_):
            some = [locals_[index] for index in indices]
        grouped = by_device_and_dtype(some)
        by_mesh[layout] = GradsOfMesh(grouped, places.elements[layout])
    return by_mesh


def _places(found: list[Any], locals_: list[torch.Tensor], alone: Layout) -> Places:
    members: dict[Layout, list[int]] = defaultdict(list)
    elements: dict[Layout, int] = Counter()
    for index, (spec, local) in enumerate(zip(found, locals_, strict=True)):
        layout = alone if spec is None else _layout_on(spec.mesh, spec.placements)
        members[layout].append(index)
        elements[layout] += local.numel() if spec is None else math.prod(spec.shape)
    return Places(alone, found, members, elements)


def _is_partial(spec: Any) -> bool:
    return spec is not None and any(p.is_partial() for p in spec.placements)


def _one_by_one(optimizer: Any) -> tuple[list[Any], list[Any], list[torch.Tensor]]:
    gradients: list[Any] = []
    found: list[Any] = []
    locals_: list[torch.Tensor] = []
    with torch.no_grad():
        for parameter in parameters_of(optimizer):
            if parameter.grad is None:
                continue
            [spec] = specs([parameter.grad])
            if _is_partial(spec):
                from torch.distributed.tensor import Replicate

                whole = [Replicate() if p.is_partial() else p for p in spec.placements]
                parameter.grad = parameter.grad.redistribute(placements=whole)
                [spec] = specs([parameter.grad])
            found.append(spec)
            locals_.append(local_tensor(parameter, coalesce=True))
            gradients.append(parameter.grad)
    return gradients, found, locals_


# - This rank's part of the norm


class LocalNorms(NamedTuple):
    """This rank's part of the global norm.

    Attributes:
        entries: (MESHES, 3), fp64: mesh, kind and norm, zeros where unused.
        found_inf: (), fp32: 1 if a local gradient is not finite; None without any.
    """

    entries: torch.Tensor
    found_inf: torch.Tensor | None


def local_norms(grads: GradsByMesh, norm_type: float, scale: Number) -> LocalNorms:
    """Read the gradients; return the norms of this rank's part, unscaled.

    ``scale`` is what the gradients are still multiplied by; a tensor decides on which
    device the result is wanted.

    Raises:
        ValueError: the gradients lie on more than MESHES meshes.
    """
    parts: dict[float, list[Number]] = {}
    kinds: dict[float, list[Any]] = {}
    for layout, (groups, elements) in grads.items():
        copies = 1.0 if math.isinf(norm_type) else layout.copies ** (1.0 / norm_type)
        kind = kinds.setdefault(layout.number, [layout.kind, 0])
        kind[1] += elements
        for tensors in groups.values():
            with torch.no_grad():  # after a backward that made a graph
                part = _joined(norms(tensors, norm_type), norm_type) / copies
            parts.setdefault(layout.number, []).append(part)
    if len(parts) > MESHES:
        raise ValueError(
            f"The gradients lie on {len(parts)} meshes, clip_grad_norm_ knows at most "
            f"{MESHES}. Use several optimizers, or one mesh with more axes."
        )
    rows = [[mesh, _hashed(str(kinds[mesh])), 0.0] for mesh in parts]
    rows += [[0.0] * 3] * (MESHES - len(rows))
    if not isinstance(scale, torch.Tensor):
        values = [_joined(list(map(float, some)), norm_type) for some in parts.values()]
        for row, value in zip(rows, values, strict=False):
            row[2] = float(value) / scale
        entries = torch.tensor(rows, dtype=torch.float64, device="cpu")
        bad = not all(math.isfinite(value) for value in values)
        # A norm may leave the range of fp64.
        every = chain.from_iterable(
            chain.from_iterable(some.gradients.values()) for some in grads.values()
        )
        bad = bad and not all(bool(tensor.isfinite().all()) for tensor in every)
        found = torch.full((), float(bad), device="cpu")
        return LocalNorms(entries, found if parts else None)
    entries = torch.tensor(rows, dtype=torch.float64, device="cpu")
    entries = entries.to(scale.device, non_blocking=True)
    if not parts:
        return LocalNorms(entries, None)
    joined = [
        _joined(_stacked(some, scale.device), norm_type) for some in parts.values()
    ]
    entries[: len(joined), 2] = _stacked(joined, scale.device)
    found = 1.0 - entries[:, 2].isfinite().all().float()
    entries[:, 2] /= scale.double()
    return LocalNorms(entries, found)


def _stacked(values: Sequence[Number], device: torch.device) -> torch.Tensor:
    return torch.stack(
        [
            torch.as_tensor(value, dtype=torch.float64).to(device, non_blocking=True)
            for value in values
        ]
    )


def _joined(each: Norms, norm_type: float) -> Number:
    # The norm of what these are the norms of, without leaving the range of fp64.
    if isinstance(each, torch.Tensor):
        return scaled_norm(each, norm_type)
    if norm_type == 2.0 and math.isfinite(norm := math.hypot(*each)):
        return norm
    largest = _highest(each)
    if math.isinf(norm_type) or not math.isfinite(largest) or len(each) < 2:
        return largest
    if largest == 0.0:
        return 0.0
    powers = math.fsum((part / largest) ** norm_type for part in each)
    return float(largest * powers ** (1.0 / norm_type))


def _highest(values: Sequence[float]) -> float:
    # As amax: nan is higher than any.
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


@lru_cache(maxsize=65536)
def _hashed(text: str) -> float:
    # 52 bits, exact in fp64, and the same in every process, unlike hash().
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") >> 12) + 1.0


# - All ranks


def global_norm(entries: torch.Tensor, norm_type: float) -> Number:
    """Return the norm over all ranks. See [Note: Each replica once].

    Args:
        entries: (number of ranks, MESHES, 3), fp64: the entries of all ranks.
        norm_type: order of the norm; may be infinite.

    Returns:
        A number, or (), fp64, on the device of the entries; without a synchronisation.
    """
    if entries.is_cpu:
        return _norm_on_host(entries.tolist(), norm_type)
    return _norm_on_device(entries.reshape(-1, 3), norm_type)


def _norm_on_host(rows: list[list[list[float]]], norm_type: float) -> float:
    found = [entry for entry in chain.from_iterable(rows) if entry[0]]
    largest = _highest([norm for _, _, norm in found])
    if math.isinf(norm_type) or not math.isfinite(largest) or largest == 0.0:
        return largest
    powers: dict[float, list[float]] = {}
    kinds: dict[float, float] = {}
    for mesh, kind, norm in found:
        powers.setdefault(mesh, []).append((norm / largest) ** norm_type)
        kinds.setdefault(mesh, kind)
    # fsum rounds once, whatever the order.
    once = {(kinds[mesh], math.fsum(some)) for mesh, some in powers.items()}
    total = math.fsum(power for _, power in once)
    return float(largest * total ** (1.0 / norm_type))


def _norm_on_device(rows: torch.Tensor, norm_type: float) -> torch.Tensor:
    # The same without reading anything: sorting brings equal meshes together, so that
    # no size depends on the data and the work grows as n log n.
    largest = rows[:, 2].amax()
    if math.isinf(norm_type):
        return largest
    is_usable = largest.isfinite() & (largest > 0.0)
    divisor = torch.where(is_usable, largest, 1.0)
    rows = rows[rows[:, 2].argsort()]  # each mesh adds up in the order of its norms
    mesh, kind, norm = rows[rows[:, 0].argsort(stable=True)].unbind(1)
    total = _totals(mesh, (norm / divisor).pow(norm_type))
    # Only the last entry of a mesh has all of it; of equal ones the first counts.
    is_last = torch.cat([mesh[1:] != mesh[:-1], mesh.new_ones(1, dtype=torch.bool)])
    kind = torch.where(is_last, kind, 0.0)
    order = total.argsort(stable=True)
    order = order[kind[order].argsort(stable=True)]
    kind, total = kind[order], total[order]
    is_copy = (kind[1:] == kind[:-1]) & (total[1:] == total[:-1])
    total[1:].masked_fill_(is_copy, 0.0)
    total.masked_fill_(kind == 0.0, 0.0)
    whole = total.sum().pow(1.0 / norm_type) * divisor
    return torch.where(is_usable, whole, largest)


def _totals(mesh: torch.Tensor, power: torch.Tensor) -> torch.Tensor:
    # The powers of each mesh up to and with each entry; ``mesh`` is sorted. The order
    # of the sums follows from the place within the mesh alone, so that equal powers
    # give equal totals to the last bit, wherever the mesh lies in the world.
    reach = 1
    while reach < len(mesh):
        within = mesh[reach:] == mesh[:-reach]
        before = torch.where(within, power[:-reach], 0.0)
        power = torch.cat([power[:reach], power[reach:] + before])
        reach *= 2
    return power
