"""The global norm over ranks, and clipping by it.

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

The norm of order 2 or infinity of gradients that all lie on one mesh of all ranks needs
no table: the parts are added up by an all-reduce of one number.

[Note: Replicas that round apart]
Ranks with other numbers of threads may round the norm of one and the same gradient
apart. So where two meshes of one kind have norms that are equal up to rounding, but not
to the last bit, each rank adds up the bits of its gradients as integers, which no order
changes, and meshes of one kind with equal sums are counted once. This reads the
gradients once more, and is rare. On an accelerator, where looking would synchronise,
norms are compared as they are.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .grads import (
    Gradients,
    Number,
    by_device_and_dtype,
    gradients_of,
    local_tensor,
    parameters_of,
    tensor_of,
)
from .local_norms import Norms, norms, scaled_norm
from .optimizer_record import OptimizerRecord
from .sync import ROW_LENGTH
from .torch_internals import specs

MESHES = ROW_LENGTH // 3
"""Meshes that the gradients of one optimizer may lie on, on one rank."""


class Layout(NamedTuple):
    """Where gradients lie.

    Attributes:
        mesh: 52 bits that stand for the ranks of the mesh, in its order.
        ranks: in ascending order, as ranks of the default process group.
        kind: the axes of the mesh and their sizes.
        copies: how often the mesh holds each element.
    """

    mesh: float
    ranks: tuple[int, ...]
    kind: str
    copies: int


@lru_cache(maxsize=1024)
def _layout_on(mesh: Any, placements: tuple[Any, ...]) -> Layout:
    copies = math.prod(
        mesh.size(axis) for axis, p in enumerate(placements) if p.is_replicate()
    )
    ranks = tuple(mesh.mesh.flatten().tolist())
    kind = f"{mesh.mesh_dim_names}{tuple(mesh.shape)}"
    return Layout(_hashed(str(ranks)), tuple(sorted(ranks)), kind, copies)


class GradsByMesh(dict[Layout, Gradients]):
    """Local gradients by where they lie, then by device and dtype.

    Attributes:
        kinds: what kind of mesh and how many elements on it, as a number; of each mesh.
    """

    kinds: Mapping[float, float] = {}


class Places(NamedTuple):
    """Where the gradients of an optimizer lay in its last clip.

    Attributes:
        specs: of each gradient.
        members: the positions of the gradients of each layout.
        kinds: of the meshes, as in GradsByMesh.
    """

    specs: list[Any]
    members: dict[Layout, list[int]]
    kinds: dict[float, float]


# - This rank's gradients, by mesh


def grads_by_mesh(
    optimizer: Any,
    record: OptimizerRecord,
    rank: int,
    ranks: tuple[int, ...],
    *,
    allow_fp16: bool,
) -> GradsByMesh:
    """Collect the local gradients of an optimizer by where they lie.

    Partial gradients are summed up first, a collective over their mesh. ``rank`` is
    that of this process in the default process group, ``ranks`` are those that sync.

    Raises:
        ValueError: an fp16 gradient, and ``allow_fp16`` is false; or a mesh has other
            ranks than those that sync.
    """
    alone = Layout(_hashed(f"({rank},)"), (rank,), "plain", 1)
    by_mesh = GradsByMesh()
    gradients, locals_ = gradients_of(optimizer)
    if locals_ is gradients and gradients:  # no DTensor among them
        by_mesh[alone] = by_device_and_dtype(gradients, allow_fp16=allow_fp16)
        by_mesh.kinds = _kinds(by_mesh, {alone.mesh: sum(map(torch.numel, gradients))})
        return by_mesh
    found, places = specs(gradients), record.places
    # fully_shard gives the same spec to a parameter's gradient in every step.
    if (
        locals_ is None
        or places is None
        or len(places.specs) != len(found)
        or not all(map(is_, places.specs, found))
    ):
        if locals_ is None or any(map(_is_partial, found)):
            gradients, locals_ = _one_by_one(optimizer, found)
            found = specs(gradients)
        places = _places(found, locals_, alone)
        # Neither the rank of a plain tensor nor its size follows from a spec.
        is_plain = any(spec is None for spec in found)
        record.places = None if is_plain else places
    by_mesh.kinds = places.kinds
    for layout, indices in places.members.items():
        if layout.ranks != ranks and not set(layout.ranks) <= set(ranks):
            raise ValueError(_not_covered(layout, ranks))
        some = locals_
        if len(indices) < len(locals_):
            some = [locals_[index] for index in indices]
        by_mesh[layout] = by_device_and_dtype(some, allow_fp16=allow_fp16)
    return by_mesh


def _not_covered(layout: Layout, ranks: tuple[int, ...]) -> str:
    syncs = f"ranks {list(ranks)} only" if len(ranks) > 1 else "no other rank"
    return (
        f"A clip on rank {dist.get_rank()}: gradients lie on a mesh of ranks "
        f"{list(layout.ranks)}, and this scaler syncs with {syncs}, so it would clip "
        "by a part of the norm. Build the scaler with mesh= the root mesh of the "
        "parameters, or without process_group=, mesh= and agree_over=, which syncs all "
        "ranks."
    )


def _places(found: list[Any], locals_: list[torch.Tensor], alone: Layout) -> Places:
    members: dict[Layout, list[int]] = defaultdict(list)
    elements: dict[float, int] = Counter()  # on each mesh
    for index, (spec, local) in enumerate(zip(found, locals_, strict=True)):
        layout = alone if spec is None else _layout_on(spec.mesh, spec.placements)
        members[layout].append(index)
        count = local.numel() if spec is None else math.prod(spec.shape)
        elements[layout.mesh] += count
    return Places(found, members, _kinds(members, elements))


def _kinds(layouts: Iterable[Layout], elements: dict[float, int]) -> dict[float, float]:
    kinds = {layout.mesh: layout.kind for layout in layouts}
    return {mesh: _hashed(f"{kinds[mesh]} {count}") for mesh, count in elements.items()}


def _is_partial(spec: Any) -> bool:
    return spec is not None and any(p.is_partial() for p in spec.placements)


def _one_by_one(optimizer: Any, found: list[Any]) -> tuple[list[Any], list[Any]]:
    mine = [p for p in parameters_of(optimizer) if p.grad is not None]
    with torch.no_grad():
        for parameter, spec in zip(mine, found, strict=True):
            if _is_partial(spec):
                from torch.distributed.tensor import Replicate

                whole = [Replicate() if p.is_partial() else p for p in spec.placements]
                parameter.grad = parameter.grad.redistribute(placements=whole)
        locals_ = [local_tensor(parameter, coalesce=True) for parameter in mine]
    return [parameter.grad for parameter in mine], locals_


# - This rank's part of the norm


def local_norms(
    grads: GradsByMesh, norm_type: float, scale: Number
) -> tuple[list[Number], torch.Tensor | None]:
    """Read the gradients; return this rank's part of the global norm, unscaled.

    ``scale`` is what they are still multiplied by; a tensor decides on which device the
    result is wanted.

    Returns:
        For MESHES meshes: mesh, kind and norm, zeros where unused; and found_inf, (),
        fp32: 1 if a local gradient is not finite, None without any.

    Raises:
        ValueError: the gradients lie on more than MESHES meshes.
    """
    parts: dict[float, list[Number]] = defaultdict(list)
    for layout, groups in grads.items():
        copies = 1.0 if math.isinf(norm_type) else layout.copies ** (1.0 / norm_type)
        for tensors in groups.values():
            with torch.no_grad():  # after a backward that made a graph
                part = _joined(norms(tensors, norm_type), norm_type) / copies
            parts[layout.mesh].append(part)
    if len(parts) > MESHES:
        raise ValueError(
            f"The gradients lie on {len(parts)} meshes, clip_grad_norm_ knows at most "
            f"{MESHES}. Use several optimizers, or one mesh with more axes."
        )
    if not parts:
        return [0.0] * (3 * MESHES), None
    values: list[Any]
    numbers = (scale, *chain(*parts.values()))
    device = next((x.device for x in numbers if isinstance(x, torch.Tensor)), None)
    if device is not None:
        each = [tensor_of(some, device) for some in parts.values()]
        scale = torch.as_tensor(scale, dtype=torch.float64, device=device)
        values = [_joined(some, norm_type) for some in each]
        found = 1.0 - torch.stack(values).isfinite().all().float()
    else:
        values = [_joined(list(map(float, some)), norm_type) for some in parts.values()]
        bad = not all(map(math.isfinite, values))
        if bad:  # or a norm has left the range of fp64
            every = chain.from_iterable(some.values() for some in grads.values())
            bad = not all(bool(t.isfinite().all()) for t in chain.from_iterable(every))
        found = torch.full((), float(bad), dtype=torch.float32, device="cpu")
    entries: list[Number] = []
    for mesh, value in zip(parts, values, strict=True):
        entries += [mesh, grads.kinds[mesh], value / scale]
    return entries + [0.0] * (3 * MESHES - len(entries)), found


def _joined(each: Norms, norm_type: float) -> Number:
    # The norm of what these are the norms of, without leaving the range of fp64.
    if isinstance(each, torch.Tensor):
        return scaled_norm(each, norm_type)
    if norm_type == 2.0 and math.isfinite(norm := math.hypot(*each)):
        return norm
    # As amax: nan is higher than any.
    largest = math.nan if any(map(math.isnan, each)) else max(each, default=0.0)
    if math.isinf(norm_type) or not math.isfinite(largest) or len(each) < 2:
        return largest
    if largest == 0.0:
        return 0.0
    powers = math.fsum((part / largest) ** norm_type for part in each)
    return float(largest * powers ** (1.0 / norm_type))


@lru_cache(maxsize=65536)
def _hashed(text: str) -> float:
    # 52 bits, exact in fp64, and the same in every process, unlike hash().
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") >> 12) + 1.0


# - All ranks


def is_one_sum(grads: GradsByMesh, norm_type: float, ranks: tuple[int, ...]) -> bool:
    """Return whether the norm over ``ranks`` is one sum of what each rank has."""
    is_simple = norm_type == 2.0 or math.isinf(norm_type)
    return is_simple and all(layout.ranks == ranks for layout in grads)


def norm_alone(entries: list[Number], norm_type: float) -> Number:
    """Return the norm over all meshes of a rank that syncs with no other."""
    first, *others = entries[2::3]
    if not any(entries[3::3]):  # unused meshes are 0
        return first
    if isinstance(first, torch.Tensor):
        return scaled_norm(tensor_of([first, *others], first.device), norm_type)
    return _joined([first, *map(float, others)], norm_type)


def part_of_sum(entries: list[Number], norm_type: float) -> float:
    """Return what this rank adds to that sum, or brings to that maximum."""
    parts = [float(part) for part in entries[2::3]]
    return max(parts) if math.isinf(norm_type) else math.fsum(x * x for x in parts)


class AmbiguousError(Exception):
    """Meshes of one kind have norms that only rounding may tell apart."""


# Norms of one gradient that are rounded in another order differ by less: twice the
# 6e-5 of [Note: Exact enough] in local_norms.py.
_ROUNDING = 2.0**-12


def global_norm(
    entries: torch.Tensor, norm_type: float, sums: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the norm over all ranks. See [Note: Each replica once].

    Args:
        entries: (..., 3), fp64: the entries of all ranks.
        norm_type: order of the norm; may be infinite.
        sums: (...), int64: `bit_sums` of all ranks, if these must tell replicas.

    Returns:
        (), fp64, on the device of the entries.

    Raises:
        AmbiguousError: it takes ``sums``; never on an accelerator.
    """
    # No size depends on the data, so nothing is read; the work grows as n log n.
    mesh, kind, norm = entries.reshape(-1, 3).T.contiguous()  # (n,) each
    largest: torch.Tensor = norm.amax()
    if math.isinf(norm_type):
        return largest
    is_usable = largest.isfinite() & (largest > 0.0)
    divisor = torch.where(is_usable, largest, 1.0)
    # Powers are added as integers, so that ranks in another order have the same sum.
    one = 2.0 ** min(52, 62 - len(norm).bit_length())  # the sum of all fits int64
    power = ((norm / divisor).pow(norm_type) * one).round().long()
    # Entries of one mesh get one place, and with it the sum over the mesh.
    place = torch.searchsorted(mesh.sort().values, mesh)

    def over_mesh(each: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(each).index_add_(0, place, each)[place]

    total = over_mesh(power)
    known_by = total if sums is None else over_mesh(sums.flatten())
    # Sorted by kind, then by what replicas have in common, equal ones are neighbours:
    # all but one are copies, entries of one mesh among them.
    order = known_by.argsort()
    order = order[kind[order].argsort(stable=True)]
    kind, known_by, total = kind[order], known_by[order], total[order]
    is_one_kind = kind[1:] == kind[:-1]
    is_copy = is_one_kind & (known_by[1:] == known_by[:-1])
    if sums is None and entries.is_cpu:
        each = (total.double() / one).pow(1.0 / norm_type)
        is_near = each[1:] <= each[:-1] * (1.0 + _ROUNDING)
        if bool((is_one_kind & is_near & ~is_copy & is_usable).any()):
            raise AmbiguousError
    total[1:].masked_fill_(is_copy, 0)
    whole = (total.sum().double() / one).pow(1.0 / norm_type) * divisor
    return torch.where(is_usable, whole, largest)


def bit_sums(grads: GradsByMesh) -> torch.Tensor:
    """Return (MESHES,), int64: for each mesh the sum of the bits of the gradients."""
    sums: dict[float, int] = Counter()
    for layout, groups in grads.items():
        for tensor in chain.from_iterable(groups.values()):
            bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()])
            sums[layout.mesh] += int(bits.sum(dtype=torch.int64))
    row = torch.zeros(MESHES, dtype=torch.int64, device="cpu")
    for place, total in enumerate(sums.values()):
        row[place] = (total + 2**63) % 2**64 - 2**63
    return row


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def clip_factor(norm: Number, max_norm: float) -> Number:
    """Return the factor of ``torch.nn.utils.clip_grad_norm_``, in fp64."""
    factor = max_norm / (norm + 1e-6)
    if isinstance(factor, torch.Tensor):
        return factor.clamp(max=1.0)
    return min(factor, 1.0)  # of nan and 1 it is nan
