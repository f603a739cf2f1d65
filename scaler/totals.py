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
from functools import lru_cache
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from .norms import Norms, norms
from .unscale import (
    Gradients,
    by_device_and_dtype,
    gradients_of,
    parameters_of,
    quick_locals,
)
from .verdicts import Number, number_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["MESHES", "Held", "Shares", "global_norm", "held_by", "shares_of"]

MESHES = 4
"""Meshes that the gradients of one optimizer may lie on, on one rank."""


class Place:
    """Where gradients lie: one object for equal places, so that identity tells.

    Attributes:
        ranks: of the mesh.
        kind: what kind of mesh it is: its axes and their sizes.
        copies: how often it holds each element.
        number: 52 bits that stand for the ranks.
    """

    __slots__ = ("copies", "kind", "number", "ranks")

    def __init__(self, ranks: tuple[int, ...], kind: str, copies: int) -> None:
        self.ranks, self.kind, self.copies = ranks, kind, copies
        self.number = _number(str(ranks))


@lru_cache(maxsize=65536)
def _place(ranks: tuple[int, ...], kind: str, copies: int) -> Place:
    return Place(ranks, kind, copies)


Held = dict[Place, Gradients]
"""Local gradients by where they lie, then by device and dtype."""


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
    alone = _place((rank,), "plain", 1)
    gradients = gradients_of(optimizer)
    locals_ = quick_locals(gradients)
    places = None if locals_ is None else _places(optimizer, gradients, alone)
    if locals_ is None or places is None:
        places, locals_ = _one_by_one(optimizer, local_of, alone)
    if places and places.count(places[0]) == len(places):  # by identity
        return {places[0]: by_device_and_dtype(locals_)}
    held: dict[Place, list[torch.Tensor]] = {}
    for place, local in zip(places, locals_, strict=True):
        held.setdefault(place, []).append(local)
    return {place: by_device_and_dtype(tensors) for place, tensors in held.items()}


class _Seen(NamedTuple):
    alone: Place
    specs: list[Any]
    places: list[Place]


# What an optimizer had in its last step: fully_shard gives the same spec to a
# parameter's gradient in every step.
_seen: WeakKeyDictionary[Optimizer, _Seen] = WeakKeyDictionary()


def _places(
    optimizer: Optimizer, gradients: list[Any], alone: Place
) -> list[Place] | None:
    # None if there is a partial gradient, which must be summed up first.
    if set(map(type, gradients)) == {torch.Tensor}:
        return [alone] * len(gradients)
    specs = [getattr(gradient, "_spec", None) for gradient in gradients]
    seen = _seen.get(optimizer)
    if seen is not None and seen.alone is alone and _are_same(seen.specs, specs):
        return seen.places
    if any(_is_partial(spec) for spec in specs if spec is not None):
        return None
    places = [_place_of(spec, alone) for spec in specs]
    _seen[optimizer] = _Seen(alone, specs, places)
    return places


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _is_partial(spec: Any) -> bool:
    return any(placement.is_partial() for placement in spec.placements)


def _place_of(spec: Any, alone: Place) -> Place:
    return alone if spec is None else _where(spec.mesh, spec.placements)


def _one_by_one(
    optimizer: Optimizer,
    local_of: Callable[[Any, Any], torch.Tensor],
    alone: Place,
) -> tuple[list[Place], list[torch.Tensor]]:
    places, locals_ = [], []
    with torch.no_grad():
        for parameter in parameters_of(optimizer):
            gradient = parameter.grad
            if gradient is None:
                continue
            spec = getattr(gradient, "_spec", None)
            if spec is not None and _is_partial(spec):
                gradient = parameter.grad = _summed(gradient)
                spec = gradient._spec
            places.append(_place_of(spec, alone))
            locals_.append(local_of(parameter, gradient))
    return places, locals_


def _summed(gradient: Any) -> Any:
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if p.is_partial() else p for p in gradient.placements]
    return gradient.redistribute(placements=whole)


@lru_cache(maxsize=1024)
def _where(mesh: Any, placements: tuple[Any, ...]) -> Place:
    copies = math.prod(
        mesh.size(axis) for axis, p in enumerate(placements) if p.is_replicate()
    )
    ranks = tuple(mesh.mesh.flatten().tolist())
    return _place(ranks, f"{mesh.mesh_dim_names}{tuple(mesh.shape)}", copies)


def shares_of(held: Held, norm_type: float, device: torch.device) -> Shares:
    """Read the gradients and add up this rank's shares.

    Args:
        held: what `held_by` collected.
        norm_type: order of the norm; may be infinite.
        device: where the result is wanted.

    Raises:
        ValueError: the gradients lie on more than MESHES meshes.
    """
    parts: dict[float, list[Number]] = {}
    kinds: dict[float, tuple[str, int, int]] = {}
    for place, groups in held.items():
        copies = 1 if math.isinf(norm_type) else place.copies
        _, count, numel = kinds.get(place.number, ("", 0, 0))
        for tensors in groups.values():
            part = _power_sum(norms(tensors, norm_type), norm_type) / copies
            parts.setdefault(place.number, []).append(part)
            count += len(tensors)
            numel += sum(map(torch.Tensor.numel, tensors))
        kinds[place.number] = place.kind, count, numel
    if len(parts) > MESHES:
        raise ValueError(
            f"The gradients lie on {len(parts)} meshes, clip_grad_norm_ knows at most "
            f"{MESHES}. Use several optimizers, or one mesh with more axes."
        )
    shares = [_total(some, norm_type, device) for some in parts.values()]
    rows = [[mesh, _number(str(kind)), 0.0] for mesh, kind in kinds.items()]
    rows += [[0.0] * 3] * (MESHES - len(rows))
    return _with_shares(rows, shares, device)


def _power_sum(each: Norms, norm_type: float) -> Number:
    # Sum of p-th powers; for the infinite norm the maximum.
    if isinstance(each, list):
        if math.isinf(norm_type):
            return _highest(each)
        if norm_type == 2.0:
            root = math.hypot(*each)
            return root * root  # ** would raise where this is infinite
        each = torch.tensor(each, dtype=torch.float64)
    if math.isinf(norm_type):
        return number_of(each.amax())
    return number_of(each.dot(each) if norm_type == 2.0 else each.pow(norm_type).sum())


def _total(parts: list[Number], norm_type: float, device: torch.device) -> Number:
    infinite = math.isinf(norm_type)
    if device.type == "cpu":
        values = list(map(float, parts))
        return _highest(values) if infinite else sum(values)
    on_device = [
        torch.as_tensor(part, dtype=torch.float64).to(device, non_blocking=True)
        for part in parts
    ]
    stacked = torch.stack(on_device)
    return stacked.amax() if infinite else stacked.sum()


def _with_shares(
    rows: list[list[float]], shares: list[Number], device: torch.device
) -> Shares:
    # A share is finite if and only if its gradients are: they were added in fp64.
    entries = torch.tensor(rows, dtype=torch.float64).to(device, non_blocking=True)
    if not shares:
        return Shares(entries, None)
    on_device = [share for share in shares if isinstance(share, torch.Tensor)]
    if on_device:
        entries[: len(shares), 2] = torch.stack(on_device)
        return Shares(entries, 1.0 - entries[:, 2].isfinite().all().float())
    for row, share in enumerate(shares):
        entries[row, 2] = share
    return Shares(entries, torch.tensor(float(not all(map(math.isfinite, shares)))))


@lru_cache(maxsize=65536)
def _number(text: str) -> float:
    # 52 bits, exact in fp64, and the same in every process, unlike hash().
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") >> 12) + 1.0


def global_norm(entries: torch.Tensor, norm_type: float) -> Number:
    """Return the norm over all ranks. See [Note: Each replica once].

    Args:
        entries: (number of ranks, MESHES, 3), fp64: the entries of all ranks.
        norm_type: order of the norm; may be infinite.

    Returns:
        A number, or (), fp64, on the device of the entries; without a synchronisation.
    """
    total: Number
    if entries.is_cpu:
        total = _counted_on_host(entries.tolist(), norm_type)
    else:
        total = _counted_on_device(entries.reshape(-1, 3), norm_type)
    if math.isinf(norm_type):
        return total
    if norm_type == 2.0 and isinstance(total, float):
        return math.sqrt(total)
    root = torch.as_tensor(total, dtype=torch.float64).pow(1.0 / norm_type)
    return number_of(root)


def _counted_on_host(rows: list[list[list[float]]], norm_type: float) -> float:
    # In the order of ranks, so that all of them round alike.
    shares: dict[float, list[float]] = {}
    kinds: dict[float, float] = {}
    for mesh, kind, share in chain.from_iterable(rows):
        if mesh:
            shares.setdefault(mesh, []).append(share)
            kinds.setdefault(mesh, kind)
    join = _highest if math.isinf(norm_type) else sum
    once = dict.fromkeys((kinds[mesh], join(part)) for mesh, part in shares.items())
    return join([total for _, total in once])


def _highest(values: Sequence[float]) -> float:
    # As amax: nan is higher than any.
    return math.nan if any(map(math.isnan, values)) else max(values, default=0.0)


def _counted_on_device(rows: torch.Tensor, norm_type: float) -> torch.Tensor:
    # The same without reading anything: sorting brings equal meshes together, so that
    # no size depends on the data and the work grows as n log n.
    mesh, kind, share = rows[rows[:, 0].argsort(stable=True)].unbind(1)
    infinite = math.isinf(norm_type)
    total = _totals(mesh, share, torch.maximum if infinite else torch.add)
    # Only the last entry of a mesh has all of it; of equal ones the first counts.
    is_last = torch.cat([mesh[1:] != mesh[:-1], mesh.new_ones(1, dtype=torch.bool)])
    kind = torch.where(is_last, kind, 0.0)
    order = total.argsort(stable=True)
    order = order[kind[order].argsort(stable=True)]
    kind, total = kind[order], total[order]
    is_copy = (kind[1:] == kind[:-1]) & (total[1:] == total[:-1])
    total[1:].masked_fill_(is_copy, 0.0)
    total.masked_fill_(kind == 0.0, 0.0)
    return total.amax() if infinite else total.sum()


def _totals(
    mesh: torch.Tensor,
    share: torch.Tensor,
    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Join the shares of each mesh up to and with each entry.

    The order of the sums follows from the place within the mesh alone, so that equal
    shares give equal totals to the last bit, wherever the mesh lies in the world.

    Args:
        mesh: (entries,), fp64, sorted.
        share: (entries,), fp64, in the same order.
        join: of two tensors, element by element.
    """
    reach = 1
    while reach < len(mesh):
        within = mesh[reach:] == mesh[:-reach]
        before = torch.where(within, share[:-reach], 0.0)
        share = torch.cat([share[:reach], join(share[reach:], before)])
        reach *= 2
    return share
