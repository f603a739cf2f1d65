"""The global norm over ranks, and clipping by it.

[Note: Each replica once]
Inside the mesh of a DTensor, the placements determine how many ranks hold each element.
Outside of the mesh, and for plain tensors, two ranks may hold the same parameters (data
parallel) or different ones (pipeline stages, experts). But replicas have bitwise equal
gradients, or training would diverge. So the first clip compares their bits
(`replicas.py`). In every clip a rank sends three numbers for each mesh with gradients:
a hash of the mesh's ranks, its kind, and the norm of the local gradients. The kind is a
hash of the mesh's axes and of what holds its parameters. A plain tensor has a mesh of
this rank alone. Every rank raises the norms to the power of their order, and adds up
those of each mesh. Meshes of one kind count once. All ranks compute from the same
numbers, so they always clip by the same factor.

An accelerator may clip before the host has compared any bits. Until then the kind is a
hash of the axes and the number of elements, and meshes of one kind count once if their
norms are equal to the bit.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import is_
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from .grads import (
    Gradients,
    Norms,
    Number,
    by_device_and_dtype,
    gradients_of,
    local_tensor,
    norms,
    parameters_of,
    scaled_norm,
    tensor_of,
)
from .iteration import OptimizerRecord
from .sync import NORMS
from .torch_internals import specs

MESHES = NORMS // 3
"""Largest number of meshes of one optimizer's gradients on one rank."""


@lru_cache(maxsize=65536)
def hashed(text: str) -> float:
    """Return a 52-bit hash of ``text`` as a float, equal in all processes."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") >> 12) + 1.0


class Layout(NamedTuple):
    """Mesh and replication of gradients.

    Attributes:
        mesh: minus a hash of the mesh's ranks, in the order of the mesh. Once
            ``replicas.py`` has identified the replicas: a positive hash of that number
            and of all meshes that hold the same parameters.
        ranks: global ranks of the mesh, in ascending order.
        kind: names of the axes of the mesh, and their sizes; "plain" for plain tensors.
        copies: number of ranks of the mesh that hold each element.
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
    return Layout(-hashed(str(ranks)), tuple(sorted(ranks)), kind, copies)


def layout_of(spec: Any) -> Layout:
    """Return the layout of a gradient with this DTensor spec, or of a plain tensor.

    A plain tensor has a mesh of this rank alone.
    """
    if spec is not None:
        return _layout_on(spec.mesh, spec.placements)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return Layout(-hashed(f"({rank},)"), (rank,), "plain", 1)


_FAMILY = 2**26  # kinds of one family have their highest bits in common


@lru_cache(maxsize=65536)
def _kind_of(family: str, detail: str) -> float:
    # Encode a kind of mesh as a number: its family, and what distinguishes meshes of
    # the family.
    return hashed(family) // _FAMILY * _FAMILY + hashed(detail) % _FAMILY


class GradsByMesh(dict[Layout, Gradients]):
    """Local gradients by layout, then by device and dtype.

    Attributes:
        kinds: hash of a mesh -> its kind as a number; see [Note: Each replica once].
    """

    kinds: Mapping[float, float] = {}


class Places(NamedTuple):
    """Layouts of an optimizer's gradients in its last clip.

    Attributes:
        specs: DTensor spec of each gradient, or None.
        members: layout -> indices of its gradients.
        kinds: kinds of the meshes, as in GradsByMesh.
    """

    specs: list[Any]
    members: dict[Layout, list[int]]
    kinds: dict[float, float]


# - This rank's gradients, by mesh


def grads_by_mesh(
    optimizer: Any,
    record: OptimizerRecord,
    group: dist.ProcessGroup | None,
    *,
    allow_fp16: bool,
    only_identified: bool = False,
) -> GradsByMesh:
    """Collect the local gradients of an optimizer by layout.

    Partial gradients are summed first, by a collective over their mesh.

    Args:
        optimizer: optimizer of the gradients.
        record: record of the optimizer; its ``places`` are set.
        group: ranks that sync; None if this rank syncs with no other.
        allow_fp16: false to raise for an fp16 gradient.
        only_identified: true to leave out gradients whose replicas are unknown. Right
            after the ranks exchanged a table, only gradients of zeros are unknown.

    Raises:
        ValueError: there is an fp16 gradient and ``allow_fp16`` is false; or a mesh has
            ranks that do not sync.
    """
    holders = record.holders
    by_mesh = GradsByMesh()
    gradients, locals_ = gradients_of(optimizer)
    if locals_ is gradients and gradients:  # no DTensors
        elements, meshes = sum(map(torch.numel, gradients)), None
        if holders is not None:
            meshes = holders.of_all(with_gradients(optimizer))
        if holders is None or meshes is not None:
            layout, kind = _held_by(layout_of(None), meshes, elements)
            by_mesh[layout] = by_device_and_dtype(gradients, allow_fp16=allow_fp16)
            by_mesh.kinds = {layout.mesh: kind}
            return by_mesh
    layouts_now, places = specs(gradients), record.places
    # fully_shard gives the same spec to a parameter's gradient in every step.
    if (
        locals_ is None
        or places is None
        or len(places.specs) != len(layouts_now)
        or not all(map(is_, places.specs, layouts_now))
    ):
        if locals_ is None or any(map(_is_partial, layouts_now)):
            gradients, locals_ = _one_by_one(optimizer, layouts_now)
            layouts_now = specs(gradients)
        places = _places(layouts_now, locals_)
        # A plain tensor has no spec to show that its size is still the same.
        is_plain = any(spec is None for spec in layouts_now)
        record.places = None if is_plain else places
    if holders is not None:
        sets = holders.of(with_gradients(optimizer))
        identified = _told_apart(places, locals_, sets, only_identified)
        # Unidentified gradients may be one part too many for a row. Then the row sends
        # all gradients as unidentified, and the ranks identify them before they clip.
        places = identified if len(identified.kinds) <= MESHES else places
    by_mesh.kinds = places.kinds
    rank = dist.get_rank() if dist.is_initialized() else 0
    ranks: tuple[int, ...] = (rank,)
    if group is not None:
        ranks = tuple(sorted(dist.get_process_group_ranks(group)))
    for layout, indices in places.members.items():
        if layout.ranks != ranks and not set(layout.ranks) <= set(ranks):
            raise ValueError(_not_covered(layout, ranks))
        locals_of_it = locals_
        if len(indices) < len(locals_):
            locals_of_it = [locals_[index] for index in indices]
        by_mesh[layout] = by_device_and_dtype(locals_of_it, allow_fp16=allow_fp16)
    return by_mesh


def with_gradients(optimizer: Any) -> list[Any]:
    """Return the parameters of an optimizer that have a gradient."""
    return [p for p in parameters_of(optimizer) if p.grad is not None]


def _told_apart(
    places: Places,
    locals_: list[torch.Tensor],
    sets: list[float | None],
    only_identified: bool,
) -> Places:
    # Group gradients of one mesh by the set of meshes that hold them. Gradients without
    # a known set stay as before, or are left out.
    members: dict[Layout, list[int]] = {}
    kinds: dict[float, float] = {}
    for layout, indices in places.members.items():
        by_set: dict[float | None, list[int]] = defaultdict(list)
        for index in indices:
            by_set[sets[index]].append(index)
        if only_identified:
            by_set.pop(None, None)
        for meshes, indices_of_set in by_set.items():
            elements = sum(locals_[index].numel() for index in indices_of_set)
            part, kind = _held_by(layout, meshes, elements)
            members[part], kinds[part.mesh] = indices_of_set, kind
    return Places(places.specs, members, kinds)


def _held_by(
    layout: Layout, meshes: float | None, elements: int
) -> tuple[Layout, float]:
    # Layout and kind of gradients. ``meshes`` is a hash of the meshes that hold them;
    # None if unknown.
    if meshes is None:
        return layout, _kind_of(layout.kind, f"{elements}")
    kind = _kind_of(layout.kind, f"held by {meshes}")
    return layout._replace(mesh=hashed(f"{layout.mesh} {meshes}")), kind


def _not_covered(layout: Layout, ranks: tuple[int, ...]) -> str:
    syncs = f"ranks {list(ranks)} only" if len(ranks) > 1 else "no other rank"
    return (
        f"A clip on rank {dist.get_rank()}: gradients lie on a mesh of ranks "
        f"{list(layout.ranks)}, and this scaler syncs with {syncs}, so it would clip "
        "by a part of the norm. Build the scaler with sync_over= the root mesh of the "
        "parameters, or without sync_over=, which syncs all ranks."
    )


def _places(found: list[Any], locals_: list[torch.Tensor]) -> Places:
    members: dict[Layout, list[int]] = defaultdict(list)
    elements: dict[float, int] = Counter()  # on each mesh
    alone = layout_of(None)
    for index, (spec, local) in enumerate(zip(found, locals_, strict=True)):
        layout = alone if spec is None else layout_of(spec)
        members[layout].append(index)
        count = local.numel() if spec is None else math.prod(spec.shape)
        elements[layout.mesh] += count
    kinds = {
        layout.mesh: _kind_of(layout.kind, f"{elements[layout.mesh]}")
        for layout in members
    }
    return Places(found, members, kinds)


def _is_partial(spec: Any) -> bool:
    return spec is not None and any(p.is_partial() for p in spec.placements)


def _one_by_one(optimizer: Any, found: list[Any]) -> tuple[list[Any], list[Any]]:
    mine = with_gradients(optimizer)
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
    """Return this rank's part of the global norm of the unscaled gradients.

    ``scale`` is the scale that the gradients still carry. If ``scale`` is a tensor, the
    result is computed on its device.

    Returns:
        First a flat list: mesh, kind and norm of each of MESHES meshes; zeros if
        unused. Then found_inf, (), fp32: 1 if a local gradient is not finite; None if
        there are no gradients.

    Raises:
        ValueError: the gradients are on more than MESHES meshes.
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
    # If the scale is on the host, norms are read from an accelerator. Norms of fake
    # tensors cannot be read.
    tensors_here = [x for x in chain(*parts.values()) if isinstance(x, torch.Tensor)]
    device = next((x.device for x in tensors_here if x.is_cpu), None)
    device = scale.device if isinstance(scale, torch.Tensor) else device
    if device is not None:
        each = [tensor_of(values_of_part, device) for values_of_part in parts.values()]
        scale = torch.as_tensor(scale, dtype=torch.float64, device=device)
        values = [_joined(values_of_part, norm_type) for values_of_part in each]
        is_bad = 1.0 - torch.stack(values).isfinite().all().float()
    else:
        values = [
            _joined(list(map(float, values_of_part)), norm_type)
            for values_of_part in parts.values()
        ]
        bad = not all(map(math.isfinite, values))
        if bad:  # or a norm has left the range of fp64
            every = chain.from_iterable(group.values() for group in grads.values())
            bad = not all(bool(t.isfinite().all()) for t in chain.from_iterable(every))
        is_bad = torch.full((), float(bad), dtype=torch.float32, device="cpu")
    entries: list[Number] = []
    for mesh, value in zip(parts, values, strict=True):
        entries += [mesh, grads.kinds[mesh], value / scale]
    return entries + [0.0] * (3 * MESHES - len(entries)), is_bad


def _joined(each: Norms, norm_type: float) -> Number:
    # The norm of these norms, without leaving the range of fp64.
    if isinstance(each, torch.Tensor):
        return scaled_norm(each, norm_type)
    if norm_type == 2.0 and math.isfinite(norm := math.hypot(*each)):
        return norm
    largest = _largest(each)
    if math.isinf(norm_type) or not math.isfinite(largest) or len(each) < 2:
        return largest
    if largest == 0.0:
        return 0.0
    powers = math.fsum((part / largest) ** norm_type for part in each)
    return float(largest * powers ** (1.0 / norm_type))


def _largest(norms: Sequence[float]) -> float:
    # Like amax: nan is higher than any number.
    return math.nan if any(map(math.isnan, norms)) else max(norms, default=0.0)


# - All ranks


def norm_alone(entries: list[Number], norm_type: float) -> Number:
    """Return the norm over all meshes, for a rank that syncs with no other rank."""
    first, *others = entries[2::3]
    if not any(entries[3::3]):  # unused meshes are 0
        return first
    if isinstance(first, torch.Tensor):
        return scaled_norm(tensor_of([first, *others], first.device), norm_type)
    return _joined([first, *map(float, others)], norm_type)


ROUNDING = 2.0**-12
"""Largest relative difference between norms of equal gradients, if their elements were
added in different orders: twice the 6e-5 of [Note: Exact enough] in grads.py."""


Checks = Literal["bits", "sums", ""]


def norm_on_host(
    entries: Iterable[Sequence[float]], norm_type: float, checks: Checks = "bits"
) -> float | None:
    """Return the norm over all ranks; None if replicas must be identified first.

    See [Note: Each replica once].

    Args:
        entries: (mesh, kind, norm) of all ranks; unused ones have mesh 0.
        norm_type: order of the norm; may be infinite.
        checks: condition for a norm. ``"bits"``: replicas were identified by their
            bits. ``"sums"``: identified, or their sums are equal. ``""``: none.
    """
    # what is zero adds nothing, and need not be identified
    used = [entry for entry in entries if entry[0] and entry[2]]
    norms = [norm for _, _, norm in used]
    largest = _largest(norms)
    if math.isinf(norm_type) or not math.isfinite(largest) or largest == 0.0:
        return largest
    powers: dict[float, list[float]] = defaultdict(list)
    for mesh, _, norm in used:
        powers[mesh].append((norm / largest) ** norm_type)
    # fsum rounds once, so that ranks in another order have the same sum.
    totals = {mesh: math.fsum(each) for mesh, each in powers.items()}
    kinds = {mesh: kind for mesh, kind, _ in used}
    if checks and _must_identify(totals, kinds, norm_type, checks):
        return None
    counted = {
        (kinds[mesh], total if mesh < 0 else 0.0): total
        for mesh, total in totals.items()
    }
    return float(math.fsum(counted.values()) ** (1.0 / norm_type) * largest)


def _must_identify(
    totals: Mapping[float, float],
    kinds: Mapping[float, float],
    norm_type: float,
    checks: Checks,
) -> bool:
    # True if parameters of some mesh may have replicas that are not identified.
    families: dict[float, list[float]] = defaultdict(list)
    for mesh, kind in kinds.items():
        families[kind // _FAMILY].append(mesh)
    for meshes in families.values():
        if any(mesh < 0 for mesh in meshes):  # it may be a replica of any other
            sums = {(kinds[mesh], totals[mesh]) for mesh in meshes}
            if len(sums if checks == "sums" else meshes) > 1:
                return True
            continue
        by_kind: dict[float, list[float]] = defaultdict(list)
        for mesh in meshes:
            by_kind[kinds[mesh]].append(totals[mesh])
        for each in by_kind.values():
            if max(each) > min(each) * (1.0 + ROUNDING * norm_type):
                return True
    return False


def global_norm(entries: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm over all ranks like `norm_on_host`, without a host wait.

    Args:
        entries: (..., 3), fp64: mesh, kind and norm, of all ranks.
        norm_type: order of the norm; may be infinite.

    Returns:
        The norm, (), fp64, on the device of the entries.
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
    total = torch.zeros_like(power).index_add_(0, place, power)[place]
    # Identified replicas have the same kind. Others must also have an equal sum.
    known_by = torch.where(mesh > 0, 0, total)
    # Sort by kind, then by sum, so that equal entries are neighbours. All but one of
    # them are copies, also entries of the same mesh.
    order = known_by.argsort()
    order = order[kind[order].argsort(stable=True)]
    kind, known_by, total = kind[order], known_by[order], total[order]
    is_copy = (kind[1:] == kind[:-1]) & (known_by[1:] == known_by[:-1])
    total[1:].masked_fill_(is_copy, 0)
    whole = (total.sum().double() / one).pow(1.0 / norm_type) * divisor
    return torch.where(is_usable, whole, largest)
