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

[Note: A clip left to a kernel]
A fused optimizer divides by ``grad_scale`` while it steps, which saves a write of all
gradients. Until then they carry the scale; the scaler holds them (``folded``), so that
a new gradient is another object, and the divisor (``fused_grad_scale``). `step` hands
the divisor over and forgets both, unless the optimizer raised. What comes instead of
that step divides those that are unchanged: a step that goes past the kernel or without
one of them, another optimizer that shares a gradient, `update`. `step` refuses
gradients that were changed or replaced in between, because nothing shows whether they
carry the scale.

Under FSDP2 and DDP gradients are views of one buffer and have one version: clipping
those of another optimizer changes it. So where there may be several optimizers, views
are not left to a kernel, and what was left to one is divided when another optimizer is
seen for the first time.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch

from .config import HIGHEST_SCALE, LOWEST_SCALE
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
from .optimizer_state import OptimizerRecord
from .torch_internals import foreach_mul_, specs

MESHES = 4
"""Meshes that the gradients of one optimizer may lie on, on one rank."""


class Layout(NamedTuple):
    """Where gradients lie.

    Attributes:
        mesh: 52 bits that stand for the ranks of the mesh, in its order.
        size: how many ranks these are.
        kind: the axes of the mesh and their sizes.
        copies: how often the mesh holds each element.
    """

    mesh: float
    size: int
    kind: str
    copies: int


@lru_cache(maxsize=1024)
def _layout_on(mesh: Any, placements: tuple[Any, ...]) -> Layout:
    copies = math.prod(
        mesh.size(axis) for axis, p in enumerate(placements) if p.is_replicate()
    )
    ranks = tuple(mesh.mesh.flatten().tolist())
    kind = f"{mesh.mesh_dim_names}{tuple(mesh.shape)}"
    return Layout(_hashed(str(ranks)), len(ranks), kind, copies)


class GradsByMesh(dict[Layout, Gradients]):
    """Local gradients by where they lie, then by device and dtype.

    Attributes:
        kinds: what kind of mesh and how many elements on it, as a number; of each mesh.
        gradients: all of them, as the parameters have them.
        locals: the local tensor of each, ``gradients`` itself if none is a DTensor;
            None if one was made for the norm: summed up, or the values of a sparse one.
    """

    kinds: dict[float, float]
    gradients: Sequence[Any] = ()
    locals: Sequence[torch.Tensor] | None = None


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


def grads_by_mesh(optimizer: Any, record: OptimizerRecord, rank: int) -> GradsByMesh:
    """Collect the local gradients of an optimizer by where they lie.

    Partial gradients are summed up first, a collective over their mesh. ``rank`` is
    that of this process in the group that syncs.
    """
    alone = Layout(_hashed(f"({rank},)"), 1, "plain", 1)
    by_mesh = GradsByMesh()
    by_mesh.gradients, by_mesh.locals = gradients, locals_ = gradients_of(optimizer)
    if locals_ is gradients and gradients:  # no DTensor among them
        by_mesh[alone] = by_device_and_dtype(gradients)
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
            by_mesh.gradients, locals_ = _one_by_one(optimizer, found)
            by_mesh.locals, found = None, specs(by_mesh.gradients)
        places = _places(found, locals_, alone)
        # Neither the rank of a plain tensor nor its size follows from a spec.
        is_plain = any(spec is None for spec in found)
        record.places = None if is_plain else places
    by_mesh.kinds = places.kinds
    for layout, indices in places.members.items():
        some = locals_
        if len(indices) < len(locals_):
            some = [locals_[index] for index in indices]
        by_mesh[layout] = by_device_and_dtype(some)
    return by_mesh


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
    if isinstance(scale, torch.Tensor):
        each = [tensor_of(some, scale.device) for some in parts.values()]
        values, scale = [_joined(some, norm_type) for some in each], scale.double()
        found = 1.0 - torch.stack(values).isfinite().all().float()
    else:
        values = [_joined(list(map(float, some)), norm_type) for some in parts.values()]
        bad = not all(map(math.isfinite, values))
        if bad:  # or a norm has left the range of fp64
            every = chain.from_iterable(some.values() for some in grads.values())
            bad = not all(bool(t.isfinite().all()) for t in chain.from_iterable(every))
        found = torch.full((), float(bad), device="cpu")
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
        entries: (..., 3), fp64: the entries of all ranks.
        norm_type: order of the norm; may be infinite.

    Returns:
        A number, or (), fp64, on the device of the entries; without a synchronisation.
    """
    rows = entries.reshape(-1, 3)
    if not rows.is_cpu:
        return _norm_on_device(rows, norm_type)
    found: list[list[float]] = [row for row in rows.tolist() if row[0]]
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
    # The same without reading anything: no size depends on the data, and the work grows
    # as n log n. Powers are added as integers, whose sum does not depend on the order.
    largest = rows[:, 2].amax()
    if math.isinf(norm_type):
        return largest
    is_usable = largest.isfinite() & (largest > 0.0)
    divisor = torch.where(is_usable, largest, 1.0)
    mesh, kind, norm = rows.T.contiguous()
    one = 2.0 ** min(52, 62 - len(rows).bit_length())  # the sum of all fits int64
    power = ((norm / divisor).pow(norm_type) * one).round().long()
    place = torch.searchsorted(mesh.sort().values, mesh)  # one for each mesh
    total = torch.zeros_like(power).index_add_(0, place, power)[place]
    order = total.argsort()
    order = order[kind[order].argsort(stable=True)]
    kind, total = kind[order], total[order]
    is_copy = (kind[1:] == kind[:-1]) & (total[1:] == total[:-1])
    total[1:].masked_fill_(is_copy, 0)
    whole = (total.sum().double() / one).pow(1.0 / norm_type) * divisor
    return torch.where(is_usable, whole, largest)


# - Clip


def clip_(
    grads: GradsByMesh, norm: Number, max_norm: float, scale: Number, *, fused: bool
) -> Number | None:
    """Clip local gradients, or return what a fused kernel divides by instead.

    Args:
        grads: local gradients, which carry ``scale``; multiplied in place.
        norm: of all unscaled gradients.
        max_norm: largest norm afterwards.
        scale: 1 if they are unscaled already.
        fused: leave the gradients to a kernel if fp32 can hold its divisor. On an
            accelerator, where reading it would synchronise, a norm beyond fp32 then
            clips to zero.

    Returns:
        The divisor; None if the gradients were multiplied.
    """
    # The factor of torch.nn.utils.clip_grad_norm_, in fp64.
    factor = max_norm / (norm + 1e-6)
    if isinstance(factor, torch.Tensor):
        factor = factor.clamp(max=1.0)
    else:
        factor = min(factor, 1.0)  # of nan and 1 it is nan
    if fused:
        is_unknown = isinstance(factor, torch.Tensor) or isinstance(scale, torch.Tensor)
        if is_unknown or scale <= HIGHEST_SCALE * factor:
            return scale / factor
    once = factor / scale
    # A product that is subnormal in fp32 has lost digits, or is zero.
    is_small = isinstance(once, float) and once < LOWEST_SCALE
    with torch.no_grad():
        for groups in grads.values():
            for (device, dtype), tensors in groups.items():
                is_wide = dtype is torch.float64
                factors = [1.0 / scale, factor] if is_small and not is_wide else [once]
                kind = torch.float64 if is_wide else torch.float32
                for number in factors:
                    value = torch.as_tensor(number, dtype=kind, device=device)
                    foreach_mul_(tensors, value)
    return None
