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
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .norms import norms
from .verdicts import any_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["MESHES", "Shares", "global_norm", "held_by", "shares_of"]

MESHES = 4
"""Meshes that the gradients of one optimizer may lie on, on one rank."""


class Held(NamedTuple):
    """One local gradient and how often the ranks of its mesh hold it."""

    local: torch.Tensor
    mesh: tuple[int, ...]
    kind: str
    copies: int


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
) -> list[Held]:
    """Collect the local gradients of an optimizer with their meshes.

    Partial gradients are summed up first, a collective over their mesh.
    """
    held: list[Held] = []
    alone: tuple[tuple[int, ...], str, int] = ((rank,), "plain", 1)
    known: dict[Any, tuple[tuple[int, ...], str, int]] = {}
    last: Any = (None, None)
    where = alone
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                spec = getattr(gradient, "_spec", None)
                if spec is None:
                    held.append(Held(local_of(parameter, gradient), *alone))
                    continue
                if any(p.is_partial() for p in spec.placements):
                    gradient = parameter.grad = _summed(gradient)
                    spec = gradient._spec
                key = (spec.mesh, spec.placements)
                if key[0] is not last[0] or key[1] is not last[1]:
                    last = key  # most neighbours are alike: spares the hashing
                    where = known.get(key) or known.setdefault(key, _where(spec))
                held.append(Held(local_of(parameter, gradient), *where))
    return held


def _summed(gradient: Any) -> Any:
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if p.is_partial() else p for p in gradient.placements]
    return gradient.redistribute(placements=whole)


def _where(spec: Any) -> tuple[tuple[int, ...], str, int]:
    mesh = spec.mesh
    copies = math.prod(
        mesh.size(axis) for axis, p in enumerate(spec.placements) if p.is_replicate()
    )
    ranks = tuple(mesh.mesh.flatten().tolist())
    return ranks, f"{mesh.mesh_dim_names}{tuple(mesh.shape)}", copies


def shares_of(held: Sequence[Held], norm_type: float, device: torch.device) -> Shares:
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
    finite: dict[Any, torch.Tensor] = {}
    for (mesh, kind, copies, *_), locals_ in _alike(held).items():
        each = norms(locals_, norm_type).to(device, non_blocking=True)
        sums.setdefault(mesh, []).append(
            _joined(each, norm_type) / _once(copies, norm_type)
        )
        _, count, numel = kinds.get(mesh, (kind, 0, 0))
        kinds[mesh] = (
            kind,
            count + len(locals_),
            numel + sum(t.numel() for t in locals_),
        )
        finite[len(finite)] = (~each.isfinite().all()).float()
    if len(sums) > MESHES:
        raise ValueError(
            f"The gradients lie on {len(sums)} meshes, clip_grad_norm_ knows at most "
            f"{MESHES}. Use several optimizers, or one mesh with more axes."
        )
    for row, (mesh, parts) in zip(entries, sums.items(), strict=False):
        row[0], row[1] = _number(str(mesh)), _number(str(kinds[mesh]))
        row[2] = _joined(torch.stack(parts), norm_type, powered=True)
    return Shares(entries, any_of(finite, device) if finite else None)


_Alike = dict[tuple[Any, ...], list[torch.Tensor]]


def _alike(held: Sequence[Held]) -> _Alike:
    groups: _Alike = {}
    for local, mesh, kind, copies in held:
        key = (mesh, kind, copies, local.device, local.dtype)
        groups.setdefault(key, []).append(local)
    return groups


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
