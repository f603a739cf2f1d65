"""Possible causes of a wrong factor, for messages only.

Each cause predicts a factor. All causes that predict the observed factor are listed;
the list may be empty. No status and no exit code depends on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..formulas import clip_factor
from .compare import Doubles

__all__ = ["Facts", "causes_of", "is_sum_of"]


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
        for expected, words in _known(facts)
        # a cause whose factor is 1 explains no difference
        if abs(expected - 1) > 2 * off and abs(factor - expected) <= off * expected
    }
    return ", or ".join(texts)


def _known(facts: Facts) -> Iterator[tuple[float, str]]:
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
