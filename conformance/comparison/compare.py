"""Compare one tensor with its true value, relative to the spread of correct runs.

All comparisons with a reference are made here, without torch. An error has two sizes,
the norm and the largest element: a norm hides one bad element, an element hides a
drift.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "HALF",
    "SAFETY_FACTOR",
    "Doubles",
    "Measure",
    "Pair",
    "Spread",
    "compare",
    "multiple_of",
    "relative_floor",
    "sizes",
]

Name = TypeVar("Name")
Doubles = NDArray[np.float64]
Pair = tuple[float, float]
"""(norm, largest element) of a tensor or of a bound."""
MEASURES = ("norm", "largest element")
SAFETY_FACTOR = 8.0
"""Factor from the noise of correct runs to the bound; docs/parity.md derives it."""
HALF = 0.5
"""Fraction of a side run's effect that enters the bound; see [Note: Sides] in
bounds."""
NONE = (0.0, 0.0)
UNKNOWN = (math.inf, math.inf)


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One size of the difference between a value and the truth."""

    measure: str
    """``norm`` or ``largest element`` of the difference."""
    error: float
    """Size of the difference, divided by the truth's size unless that is 0."""
    bound: float
    """Bound of the error, in the unit of the error."""
    size: float
    """Size of the truth: its norm or its largest element."""

    @property
    def absolute(self) -> float:
        """Size of the difference, not divided by the truth's size."""
        return self.error * (self.size or 1.0)

    @property
    def compares(self) -> bool:
        """True if the bound is tight enough to reject zeros, or is exceeded.

        With a bound as large as the truth, zeros would pass. If the truth is zero, any
        finite bound compares.
        """
        return self.ratio > 1 or self.bound < (1.0 if self.size else math.inf)

    @property
    def ratio(self) -> float:
        """Error divided by bound; above 1 is a violation. 0 if the error is 0."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.bound if self.bound else math.inf


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Distances of correct runs from the truth of one tensor, up to one step."""

    noise: Pair = NONE
    """Largest error of runs that differ by rounding only."""
    effect: Pair = NONE
    """Largest change by a side run, which flips choices that rounding decides."""

    def widened(self, errors: Iterable[Pair], effects: Iterable[Pair] = ()) -> Spread:
        """Return the spread, extended by the runs at one more step.

        Args:
            errors: Errors of correct runs; non-finite ones do not count. Without a
                finite one the noise is unknown, and so is the bound.
            effects: Changes by side runs.
        """
        finite = [e for e in errors if all(map(math.isfinite, e))] or [UNKNOWN]
        changes = [e for e in effects if all(map(math.isfinite, e))]
        return Spread(
            noise=_largest(self.noise, *finite),
            effect=_largest(self.effect, *changes),
        )

    def bound(self, *least: Pair) -> Pair:
        """Return the largest permitted error.

        Args:
            *least: Lower limits of the noise.
        """
        half = (HALF * self.effect[0], HALF * self.effect[1])
        norm, largest = _largest(self.noise, half, *least)
        return SAFETY_FACTOR * norm, SAFETY_FACTOR * largest


def _largest(*pairs: Pair) -> Pair:
    return max(p[0] for p in pairs), max(p[1] for p in pairs)


def compare(
    values: NDArray[np.floating], truth: Doubles, spread: Pair, unit: Pair
) -> tuple[Measure, ...]:
    """Measure the difference of two tensors by its norm and by its largest element.

    Args:
        values: array of any shape.
        truth: array of the same shape.
        spread: largest permitted norm and largest permitted element of the difference.
        unit: norm and largest element of the whole true tensor, of which ``truth`` may
            be a part.

    Returns:
        One measure for each size. A difference that is nan counts as infinite.
    """
    errors = sizes(values.astype(np.float64) - truth)
    return tuple(
        Measure(
            measure=measure,
            error=math.inf if math.isnan(error) else error / (size or 1.0),
            bound=bound / (size or 1.0),
            size=size,
        )
        for measure, error, bound, size in zip(
            MEASURES, errors, spread, unit, strict=True
        )
    )


def sizes(tensor: Doubles) -> Pair:
    """Return norm and largest absolute element; (0, 0) for an empty tensor."""
    if not tensor.size:
        return 0.0, 0.0
    return float(np.linalg.norm(tensor)), float(np.abs(tensor).max())


def multiple_of(values: Doubles, truth: Doubles) -> Pair:
    """Return (factor, rest): ``values`` = factor x ``truth``, up to the rest.

    The factor is that of least squares. The rest is relative to the norm of ``values``.
    Returns (0, 1) if a tensor is zero, or if the shapes differ.
    """
    square = float((truth * truth).sum())
    size = float(np.linalg.norm(values))
    if not square or not size or values.shape != truth.shape:
        return 0.0, 1.0
    factor = float((values * truth).sum()) / square
    return factor, float(np.linalg.norm(values - factor * truth)) / size


def relative_floor(
    spreads: Mapping[Name, Spread], own: Mapping[Name, Pair], roundoff: float
) -> Pair:
    """Return the median relative noise of all tensors, but at least one unit roundoff.

    Args:
        spreads: name -> spread of correct runs.
        own: name -> norm and largest element of the tensor.
        roundoff: unit roundoff of the precision.
    """
    floors = []
    for measure in (0, 1):
        relative = [
            spreads[n].noise[measure] / own[n][measure]
            for n in spreads
            if n in own and own[n][measure] > 0
        ]
        finite = [r for r in relative if math.isfinite(r)]
        floors.append(max(median(finite or [0.0]), roundoff))
    return floors[0], floors[1]
