"""Causes of wrong gradients, for messages only: wrong factors, missing reductions.

Each cause of a wrong factor predicts a factor. All causes that predict the observed one
are listed; the list may be empty. No status and no exit code depends on any cause.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..formulas import clip_factor
from ..status import rank_list
from .compare import Doubles, multiple_of

__all__ = ["Facts", "Replica", "causes_of", "is_sum_of", "missing_reduction"]


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a step whose values differ from the truth."""

    axes: Mapping[str, int]
    """Mesh axis -> number of its ranks."""
    passes: int
    """Number of backward passes of a rank in this step."""
    scales: Sequence[float] = ()
    """Scale of the loss at this step and, if there is one, at the step before."""
    clip_norm: float | None = None
    norm: float = 0.0
    """Norm of the whole true gradient before clipping."""
    may_clip: bool = True
    """True if the user's own ``train_step`` may clip."""


def causes_of(factor: float, off: float, facts: Facts) -> str:
    """Return the known mistakes that multiply all gradients, or a loss, by ``factor``.

    Args:
        factor: observed value divided by the right one.
        off: largest relative error of ``factor``.
        facts: facts of the step.

    Returns:
        The causes joined by "or"; empty if no known mistake fits.
    """
    texts = {
        words: None
        for expected, words in _known(factor, facts)
        # a cause whose factor is 1 explains no difference
        if abs(expected - 1) > 2 * off and abs(factor - expected) <= off * expected
    }
    return ", or ".join(texts)


def _known(factor: float, facts: Facts) -> Iterator[tuple[float, str]]:
    """Yield (factor, description) of each known mistake."""
    axes = {axis: size for axis, size in facts.axes.items() if size > 1}
    for axis, size in axes.items():
        yield 1 / size, f"averaged once too often over {axis} ({size} ranks)"
        yield size, f"added up where they are to be averaged over {axis} ({size} ranks)"
    ranks = math.prod(axes.values())
    if len(axes) > 1:
        yield 1 / ranks, f"averaged once too often over all {ranks} ranks"
        yield ranks, f"added up where they are to be averaged over all {ranks} ranks"
    if facts.passes > 1:
        yield 1 / facts.passes, f"divided twice by the {facts.passes} micro-batches"
        yield facts.passes, f"not divided by the {facts.passes} micro-batches"
    scale, *before = facts.scales or (1.0,)
    yield scale, f"not divided by the scale {scale:g}"
    yield 1 / scale, f"divided twice by the scale {scale:g}"
    for earlier in before:
        text = f"divided by the scale {earlier:g} of the step before, not {scale:g}"
        yield scale / earlier, text
        yield earlier / scale, f"scaled by {earlier:g}, and divided by {scale:g}"
    if facts.clip_norm is not None and facts.norm:
        due = clip_factor(facts.norm, facts.clip_norm)
        early = clip_factor(facts.norm * scale, facts.clip_norm)
        yield early / due, f"clipped before they were divided by the scale {scale:g}"
        yield 1 / due, "not clipped"
    elif facts.norm and factor < 1.0:
        limit = float(f"{factor * facts.norm:.2g}")  # limits have few digits
        text = f"clipped to the norm {limit:g}"
        if facts.may_clip:
            text += (
                f". If that is meant, declare clip_norm = {limit:g} in the workload "
                "and clip to self.clip_norm"
            )
        yield clip_factor(facts.norm, limit), text


Replica = tuple[int, Doubles, Doubles]
"""Rank, its gradient, and the right gradient of the same elements."""


def missing_reduction(
    replicas: Sequence[Sequence[Replica]],
    most: float,
    *,
    is_clipped: bool,
    moves_rightly: bool,
) -> str:
    """Describe gradients that were not reduced over replicas; "" if there are none.

    Args:
        replicas: replicas of each shard of a parameter.
        most: largest relative residual that rounding explains.
        is_clipped: true if gradients are clipped by a norm.
        moves_rightly: true if updates were compared and are right.
    """
    groups = [
        ([mine for _, mine, _ in group], group[0][2])
        for group in replicas
        if len(group) > 1 and group[0][2].any()
    ]
    ratios = [
        (len(parts), *multiple_of(np.sum(parts, axis=0), whole))
        for parts, whole in groups
    ]
    if not ratios:
        return ""
    # A clip by each rank's own norm gives the parts factors of their own.
    is_clipped = is_clipped and all(is_sum_of(*group, most) for group in groups)
    is_multiple = max(rest for *_, rest in ratios) <= most
    if not (is_multiple or is_clipped):
        return ""
    lacking = {
        rank
        for group in replicas
        for rank, mine, whole in group
        if whole.any() and not mine.any()
    }
    if lacking:
        return f": it is 0 on {rank_list(sorted(lacking))}"
    alike = max(
        float(np.abs(group[0][1] - mine).max(initial=0.0))
        for group in replicas
        for _, mine, _ in group
    )
    # Equal replicas were reduced by something. So were multiples of the truth, since
    # rows of one rank do not give these.
    multiples = [
        multiple_of(mine, whole)[1] <= most and mine.size > 1
        for group in replicas
        for _, mine, whole in group
    ]
    if alike == 0.0 or all(multiples):
        return ""
    inside = ""
    if moves_rightly:
        inside = (
            " before the optimizer's step; updates are right, so step does it, after "
            "any clip: reduce gradients in backward (a hook of the parameter), or in "
            "train_step before the clip"
        )
    if is_multiple and all(abs(ratio - 1) <= most for _, ratio, _ in ratios):
        return f": each rank has a part of the sum, and nothing adds them{inside}"
    if is_multiple and all(abs(ratio - n) <= most * n for n, ratio, _ in ratios):
        return (
            f": each rank has that of its own rows, and nothing averages them{inside}"
        )
    if is_clipped:
        # one norm clips all parts by one factor
        spreads = (_spread_of_factors(*group) for group in groups)
        norm = ", clipped by its own norm" if max(spreads) > most else ""
        return (
            f": each rank has its own part{norm}; nothing reduces them before the clip"
        )
    return ""


def _spread_of_factors(parts: Sequence[Doubles], whole: Doubles) -> float:
    """Return the spread of the factors with which ``parts`` add up to ``whole``.

    The factors are a least-squares fit. The spread is largest / smallest - 1.
    """
    factors, *_ = np.linalg.lstsq(np.stack(parts, axis=1), whole)
    return float(factors.max() / factors.min() - 1)


def is_sum_of(parts: Sequence[Doubles], whole: Doubles, most: float) -> bool:
    """Return True if a sum of the parts, each times a positive factor, is ``whole``.

    Args:
        parts: gradient of each replica.
        whole: right gradient.
        most: largest relative residual.
    """
    columns = np.stack(parts, axis=1)
    if whole.size <= len(parts) + 1:  # factors fit any few elements
        return False
    factors, *_ = np.linalg.lstsq(columns, whole)
    rest = np.linalg.norm(columns @ factors - whole)
    return bool(rest <= most * np.linalg.norm(whole) and factors.min() > 0.0)
