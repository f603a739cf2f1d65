"""Ratios: error / bound as a report writes it, its spread, and where its noise ends."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..conformance.status import Number, as_number

__all__ = ["LUCK", "Spread", "limit", "spread_of", "worst"]

LUCK = 0.5
"""Error / bound below which growth says nothing.

Measured, a right scaler reaches 0.47 over 80 runs and seeds (docs/parity.md): up to
half of the bound a ratio shows how a processor rounds, not what a change broke.
"""
_MARGIN = 1.25
_SPREADS = 3.0


def worst(values: Iterable[Number]) -> float:
    """The largest of ``values``; nan is larger than all, since it hides any error."""
    numbers = [float(value) for value in values]
    return max((x if x == x else float("inf") for x in numbers), default=0.0)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A ratio error / bound over repeated runs."""

    low: Number
    high: Number

    def __post_init__(self) -> None:
        if not 0 <= float(self.low) <= float(self.high):
            raise ValueError(
                f"{self.low} to {self.high} is not a range of error / bound"
            )


def spread_of(values: Iterable[float]) -> Spread:
    """From the least to the largest of ``values``."""
    ordered = sorted(values)
    return Spread(low=as_number(ordered[0]), high=as_number(ordered[-1]))


def limit(spread: Spread) -> float:
    """The largest ratio that the recorded noise explains."""
    low, high = float(spread.low), float(spread.high)
    if high == float("inf"):  # inf - inf is nan
        return high
    # A baseline of one run has no spread: the margin then stands for it. The largest of
    # the three counts: a gate that fails by chance is soon switched off.
    return max(LUCK, high * _MARGIN, high + _SPREADS * (high - low))
