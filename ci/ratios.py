"""Spread of the ratio of error to bound over runs, and its limit for the gate."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from ..conformance.status import Number, as_number

__all__ = ["LUCK", "Spread", "limit", "spread_of", "worst"]

LUCK = 0.5
"""Ratio of error to bound below which the gate ignores growth.

Ratios up to half of the bound depend on how a processor rounds: a correct scaler
reached 0.47 (docs/parity.md).
"""
_MARGIN = 1.25
_SPREADS = 3.0


def worst(values: Iterable[Number]) -> float:
    """Return the largest value, or 0 for none.

    A nan is returned as inf, since it hides any error.
    """
    numbers = [float(value) for value in values]
    return max((x if x == x else float("inf") for x in numbers), default=0.0)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Range of a ratio over repeated runs."""

    low: Number
    high: Number

    def __post_init__(self) -> None:
        if not 0 <= float(self.low) <= float(self.high):
            raise ValueError(
                f"{self.low} to {self.high} is not a range of error / bound"
            )


def spread_of(values: Iterable[float]) -> Spread:
    """Return the range from the smallest to the largest value."""
    ordered = sorted(values)
    return Spread(low=as_number(ordered[0]), high=as_number(ordered[-1]))


def limit(spread: Spread) -> float:
    """Return the largest ratio that passes, given the spread of earlier runs."""
    low, high = float(spread.low), float(spread.high)
    if high == float("inf"):  # inf - inf is nan
        return high
    # A baseline of one run has no spread, so use the margin. Take the largest of the
    # three: people switch off a gate that fails by chance.
    return max(LUCK, high * _MARGIN, high + _SPREADS * (high - low))
