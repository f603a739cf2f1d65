"""Norms by which a job clips its gradients: recorded on ranks, compared between sides.

Below its limit, a wrong norm does not change a gradient yet. Above the limit, clipping
hides a wrong factor of the loss. So the norms themselves are compared.

[Note: Bound of a norm]
Gradients within their bounds have norms that differ by at most the norm of all bounds.
That also holds for a part of the gradients. torch adds up squares in the dtype of the
gradients, which gives a further error. A job may clip before it divides gradients by a
scale. Then the bound grows with the norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .files import copied

if TYPE_CHECKING:  # a recording does not import the modules that compare
    from .differences import Row
    from .merge import Run, Side

__all__ = ["call_of", "clipped", "norms_apart", "uncompared_norms"]

NORM = 1e-3
"""Largest relative error of a norm: torch adds up squares in the dtype of gradients."""
UNITS = 4
"""Largest error of a norm in units in its last place, for a norm in 16 bits."""
CLIPPED = 1e-4
"""Largest relative difference of norms that clipping made equal; torch's clipping adds
1e-6 to a norm."""


class _Call(NamedTuple):
    """One call of torch's clipping by norm; see ``Recording.norms``."""

    norm: float
    limit: float
    unit: float


_Pair = tuple[int, _Call, _Call]
"""Rank of the side to check, call of the reference, and call of this rank."""


def call_of(norm: Any, limit: float) -> list[Any]:
    """Return one call of clipping as a recording keeps it, without a wait for a device.

    Args:
        norm: number, tensor of one element, or DTensor.
        limit: largest norm that the call allows.
    """
    if not isinstance(norm, Tensor):
        norm = torch.tensor(float(norm), device="cpu")
    unit = torch.finfo(norm.dtype).eps
    if placements := getattr(norm, "placements", ()):  # of a DTensor
        is_whole = all(each.is_replicate() for each in placements)
        norm = norm.to_local() if is_whole else math.nan
    return [copied(norm), float(limit), unit]


def norms_apart(
    one: Side, other: Side, rows: Sequence[Row], steps: Sequence[int], *, differs: bool
) -> str:
    """Return a sentence if ranks clip by a wrong norm; else "".

    See [Note: Bound of a norm]. If the ranks of one side clip by unequal norms, the
    other side is right.

    Args:
        one: the reference.
        other: the side to check.
        rows: all compared tensors.
        steps: steps of both sides.
        differs: true if gradients differ. Then only norms that differ between ranks are
            a cause.
    """
    for step in steps:
        size, bound = _norm_and_bound(one.run, rows, step)
        for right, wrong in ((one, other), (other, one)):
            unlike = [
                pair
                for pair in _pairs(right.run, wrong.run, step)
                if size and _is_apart(*pair[1:], bound * max(1.0, pair[1].norm / size))
            ]
            on_all = {rank for rank, *_ in unlike} == wrong.run.norms.get(
                step, {}
            ).keys()
            are_equal = on_all and len({its.norm for *_, its in unlike}) == 1
            if unlike and not (are_equal and differs):
                text = _sentence(right, wrong, unlike[0], are_equal=are_equal)
                return f"step {step}: {text}"
    return ""


def _sentence(right: Side, wrong: Side, pair: _Pair, *, are_equal: bool) -> str:
    rank, mine, its = pair
    by = f"by the norm {its.norm:.4g}, and {right.name} by {mine.norm:.4g}"
    if are_equal:
        text = (
            f"{wrong.name} clips {by}, {its.norm / mine.norm:.3f} x that: has the loss "
            "that factor, or does the norm count gradients twice?"
        )
    else:
        text = (
            f"rank {rank} of {wrong.name} clips {by}: each rank must clip by the norm "
            "of the whole gradient"
        )
    if max(mine.norm, its.norm) <= mine.limit:
        text += ". The limit is not reached, so no gradient differs yet"
    return text


def _norm_and_bound(run: Run, rows: Sequence[Row], step: int) -> tuple[float, float]:
    """Return the norms of the whole gradient and of all its bounds.

    Returns zeros if a gradient of the step was not compared.
    """
    sizes = {
        name: whole.norm
        for (at, kind, name), whole in run.tensors.items()
        if (at, kind) == (step, "gradient")
    }
    bounds = {
        row.name: row.bound * sizes[row.name]
        for row in rows
        if (row.step, row.kind) == (step, "gradient")
    }
    if bounds.keys() != sizes.keys():
        return 0.0, 0.0
    return math.hypot(*sizes.values()), math.hypot(*bounds.values())


def _is_apart(mine: _Call, its: _Call, bound: float) -> bool:
    """Return True if two norms differ by more than the bound and their own rounding."""
    near = bound + mine.norm * max(NORM, UNITS * max(mine.unit, its.unit))
    return _are_comparable(mine, its) and abs(its.norm - mine.norm) > near


def _are_comparable(mine: _Call, its: _Call) -> bool:
    """Return True if both calls have the same finite limit, and their norms are known.

    A job may only log its norm, with an infinite limit.
    """
    return mine.limit == its.limit < math.inf and not math.isnan(mine.norm + its.norm)


def _pairs(right: Run, wrong: Run, step: int) -> Iterator[_Pair]:
    """Yield each call of clipping on each rank of ``wrong``, beside that of ``right``.

    Yields nothing if the ranks of ``right`` clip by unequal norms. Leaves out a rank
    with another number of calls.
    """
    first, *others = [*right.norms.get(step, {}).values()] or [()]
    if all(calls == first for calls in others):
        for rank, calls in wrong.norms.get(step, {}).items():
            if len(calls) == len(first):
                for mine, its in zip(first, calls, strict=True):
                    yield rank, _Call(*mine), _Call(*its)


def uncompared_norms(one: Side, other: Side, steps: Sequence[int]) -> Iterator[str]:
    """Yield a line if a side clips, and none of its norms could be compared."""
    runs = one.run, other.run
    clips = [_clips(run, steps) for run in runs]
    if not any(clips):
        return
    what = "not compared: the norms by which the"
    if not all(clips):
        calls, none = (one, other) if clips[0] else (other, one)
        yield f"{what} gradients are clipped: {_one_alone(calls, none)}"
        return
    pairs = (
        pair
        for step in steps
        for sides in (runs, runs[::-1])
        for pair in _pairs(*sides, step)
    )
    if not any(_are_comparable(mine, its) for _, mine, its in pairs):
        yield (
            f"{what} sides clip. They make other calls, or a norm is a DTensor that "
            "ranks have yet to sum"
        )


def _clips(run: Run, steps: Sequence[int]) -> bool:
    """Return True if torch's clipping is called with a finite limit."""
    calls = (calls for step in steps for calls in run.norms.get(step, {}).values())
    return any(_Call(*each).limit < math.inf for of_rank in calls for each in of_rank)


def _one_alone(calls: Side, none: Side) -> str:
    return f"{calls.name} calls torch's clipping, and {none.name} does not"


def clipped(
    one: Side, other: Side, steps: Sequence[int], *, differs: bool
) -> Iterator[str]:
    """Yield a warning if the whole gradient has the same norm at all steps.

    The cause is clipping, which hides a wrong factor of the loss if both sides clip. If
    the norm is the same on one side only, the warning needs ``differs``.

    Args:
        one: the reference.
        other: the side to check.
        steps: steps of both sides; with a single step nothing is yielded.
        differs: true if the comparison found a difference.
    """
    norms = []
    for side in (one, other):
        squares = dict.fromkeys(steps, 0.0)
        for (step, kind, _), whole in side.run.tensors.items():
            if kind == "gradient" and step in squares:
                squares[step] += whole.square
        norms.append([math.sqrt(square) for square in squares.values()])

    def are_alike(norms: Sequence[float]) -> bool:
        # False for nan, which is the norm of gradients that are yet to be summed
        near = CLIPPED * norms[0]
        return norms[0] > 0 and all(abs(norm - norms[0]) <= near for norm in norms)

    if len(steps) < 2:
        return
    mine, its = map(are_alike, norms)
    if are_alike([*norms[0], *norms[1]]):
        yield (
            f"clipped: the norm of the whole gradient is {norms[0][0]:.4g} at each "
            "step on both sides, which hides a wrong factor of the loss: record once "
            "without clipping"
        )
    elif differs and (mine or its):
        clips, free = (one, other) if mine else (other, one)
        (size, *_), others = norms if mine else norms[::-1]
        texts = ", ".join(f"{norm:.4g}" for norm in others)
        why = (
            "do both clip by the norm of all shards? If so, the loss has another "
            "factor: record once without clipping"
        )
        if _clips(clips.run, steps) and not _clips(free.run, steps):
            why = _one_alone(clips, free)
        yield (
            f"clipped: the norm of the whole gradient is {size:.4g} at each step of "
            f"{clips.name}, and {texts} in {free.name}: {why}"
        )
