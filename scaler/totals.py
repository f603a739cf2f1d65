"""The global norm over ranks: each shard added, each replica counted once.

[Note: Each replica once]
Inside the mesh of a DTensor the placements say how often each element is held. Outside
of it, and for plain tensors, nothing says whether two ranks hold the same thing (data
parallel) or different things (pipeline stages, experts). But a replica has the same
gradient to the last bit, or training would drift apart, and different things do not
have the same norm to the last bit. So each rank sends, for each mesh it has gradients
on, its share of the sum, the identity of the mesh (its ranks; a plain tensor has a mesh
of this rank alone) and what kind of mesh it is. Every rank adds up the shares of each
mesh and counts meshes of one kind with equal sums once. All ranks do this on the same
numbers, so they clip alike whatever happens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .norms import norms
from .unscale import by_device_and_dtype, parameters_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["MESHES", "Held", "Shares", "global_norm", "held_by", "shares_of"]

MESHES = 4
"""Meshes that the gradients of one optimizer may lie on, on one rank."""


Place = tuple[tuple[int, ...], str, int]
"""Ranks of a mesh, what kind of mesh it is, and how often it holds each element."""

Held = dict[Place, list[torch.Tensor]]
"""Local gradients by where they lie."""


class Shares(NamedTuple):
    """This rank's part of the global norm.

    Attributes:
        entries: (MESHES, 3), fp64: identity, kind and share, zeros where unused.
        found_inf: (), fp32: 1 if a local gradient is not finite; None without any.
    """

    entries: torch.Tensor
    found_inf: torch.Tensor | None


def held_by(
    optimizer: Optimizer, local_of: Callable[[Any, Any], torch.Tensor], rank: int
) -> Held:
    """Collect the local gradients of an optimizer by where they lie.

    Partial gradients are summed up first, a collective over their mesh.
    """
    held: Held = {}
    alone: Place = ((rank,), "plain", 1)
    with torch.no_grad():
        for parameter in parameters_of(optimizer):
            gradient = parameter.grad
            if gradient is None:
                continue
            place: Place | None = alone
            if type(gradient) is not torch.Tensor or gradient.is_sparse:
                if (spec := getattr(gradient, "_spec", None)) is not None:
                    # Looked up here first: this loop is what small tensors cost.
                    known = _places.get(id(spec))
                    place = _place(spec) if known is None else known[1]
                if place is None:
                    gradient = parameter.grad = _summed(gradient)
                    place = _where(gradient._spec)
                gradient = local_of(parameter, gradient)
            assert place is not None
            if (group := held.get(place)) is None:
                group = held[place] = []
            group.append(gradient)
    return held


# Where a spec lies, by its id; the spec is kept, so that the id stays its own.
# fully_shard gives the same spec to a parameter's gradient in every step.
_places: dict[int, tuple[Any, Place | None]] = {}
_MOST_PLACES = 65536


def _place(spec: Any) -> Place | None:
    if len(_places) >= _MOST_PLACES:
        _places.clear()
    partial = any(p.is_partial() for p in spec.placements)
    place = None if partial else _where(spec)
    _places[id(spec)] = spec, place
    return place


def _summed(gradient: Any) -> Any:
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if p.is_partial() else p for p in gradient.placements]
    return gradient.redistribute(placements=whole)


def _where(spec: Any) -> Place:
    mesh = spec.mesh
    copies = math.prod(
        mesh.size(axis) for axis, p in enumerate(spec.placements) if p.is_replicate()
    )
    ranks = tuple(mesh.mesh.flatten().tolist())
    return ranks, f"{mesh.mesh_dim_names}{tuple(mesh.shape)}", copies


def shares_of(held: Held, norm_type: float, device: torch.device) -> Shares:
    """Read the gradients and add up this rank's shares.

    Args:
        held: what `held_by` collected.
        norm_type: order of the norm; may be infinite.
        device: where the result is wanted.

    Raises:
        ValueError: the gradients lie on more than MESHES meshes.
    """
    entries = torch.zeros(MESHES, 3, dtype=torch.float64, device=device)
    sums: dict[tuple[int, ...], list[torch.Tensor]] = {}
    kinds: dict[tuple[int, ...], tuple[str, int, int]] = {}
    for (mesh, kind, copies), locals_ in held.items():
        each = _norms_on(locals_, norm_type, device)
        part = _joined(each, norm_type) / _once(copies, norm_type)
        sums.setdefault(mesh, []).append(part)
        _, count, numel = kinds.get(mesh, (kind, 0, 0))
        numel += sum(map(torch.Tensor.numel, locals_))
        kinds[mesh] = kind, count + len(locals_), numel
    if len(sums) > MESHES:
        raise ValueError(
            f"The gradients lie on {len(sums)} meshes, clip_grad_norm_ knows at most "
            f"{MESHES}. Use several optimizers, or one mesh with more axes."
        )
    for row, (mesh, parts) in zip(entries, sums.items(), strict=False):
        row[0], row[1] = _number(str(mesh)), _number(str(kinds[mesh]))
        row[2] = _joined(torch.stack(parts), norm_type, powered=True)
    if not sums:
        return Shares(entries, None)
    # A share is finite if and only if its gradients are: they were added in fp64.
    finite = entries[:, 2].isfinite().all()
    return Shares(entries, (~finite).float())


def _norms_on(
    tensors: list[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    groups = by_device_and_dtype(tensors).values()
    parts = [norms(group, norm_type).to(device, non_blocking=True) for group in groups]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _once(copies: int, norm_type: float) -> int:
    return 1 if math.isinf(norm_type) else copies


def _joined(
    values: torch.Tensor, norm_type: float, *, powered: bool = False
) -> torch.Tensor:
    # Sum of p-th powers; for the infinite norm the maximum.
    if math.isinf(norm_type):
        return values.amax()
    return (values if powered else values.pow(norm_type)).sum()


def _number(text: str) -> float:
    # 52 bits, exact in fp64, and the same in every process, unlike hash().
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") >> 12) + 1.0


def global_norm(entries: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm over all ranks. See [Note: Each replica once].

    Args:
        entries: (number of ranks, MESHES, 3), fp64: the entries of all ranks.
        norm_type: order of the norm; may be infinite.

    Returns:
        (), fp64, on the device of the entries; computed without a synchronisation.
    """
    identity, kind, share = entries.reshape(-1, 3).unbind(1)
    same = identity[:, None] == identity[None, :]
    zero = share.new_zeros(())
    shares = torch.where(same, share[None, :], zero)
    total = shares.amax(1) if math.isinf(norm_type) else shares.sum(1)
    first = same.int().argmax(1)
    place = torch.arange(len(first), device=first.device)
    like = (total[:, None] == total[None, :]) & (kind[first][:, None] == kind[first])
    earlier = first[:, None] > first[None, :]
    is_copy = (like & earlier).any(1)
    counted = torch.where((first == place) & ~is_copy, total, zero)
    if math.isinf(norm_type):
        return counted.amax()
    return counted.sum().pow(1.0 / norm_type)
