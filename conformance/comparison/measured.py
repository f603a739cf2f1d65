"""Result of comparing one run with the truth, as checks read it.

:mod:`.parity` computes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ..rank.trace import RankTrace, StepTrace
from .compare import Doubles, Measure
from .settings import OtherConstant, StackSchedule

__all__ = [
    "ORDER",
    "ClipRow",
    "Doubt",
    "Lack",
    "Parity",
    "ParityRow",
    "Seen",
    "gradient_of",
]

Seen = Sequence[tuple[RankTrace, StepTrace]]
"""For one step: (trace of the rank, trace of the step) of each rank."""
ORDER = ("loss", "gradient", "update")
"""Kinds of results of a step, in the order in which they are computed."""


class Lack(Enum):
    """Reason why a value cannot be compared."""

    UNSEEN = "gradparity did not see the gradient that an optimizer used"
    NOT_FINITE = "no correct run is finite"
    NOISE = "correct runs differ by as much as the value itself"
    DIRECTION = (
        "the gradient is below the bound of its error, so rounding decides the "
        "direction of a step"
    )
    COUNTS = "the losses of ranks differ and their numbers of tokens are unknown"
    OVERFLOW = "the step overflowed, and with it the loss"


@dataclass(frozen=True, kw_only=True)
class ParityRow(Measure):
    """One comparison of a tensor, on a rank at a step, with the fp64 truth."""

    kind: str
    """``gradient``, ``update`` (parameter minus its initial value) or ``loss``."""
    step: int
    parameter: str
    rank: int

    @property
    def by_how_much(self) -> str:
        """End of the sentence "X differs from Y": the difference and its bound."""
        if math.isinf(self.error):
            return ": it is inf or nan"
        if not self.size:
            return (
                f": its true value is 0, and here it is off by {self.error:.3g}, bound "
                f"{self.bound:.3g}"
            )
        if self.bound < 1:
            unit = "value" if self.kind == "loss" else self.measure
            return f" by {self.error:.3g} of its {unit}, bound {self.bound:.3g}"
        # a gradient of 0, as of a bias before a normalisation, has no relative error
        return (
            f": its true value is 0 but for rounding ({self.measure} {self.size:.2g}), "
            f"and here it is off by {self.absolute:.3g}, bound "
            f"{self.bound * self.size:.2g}"
        )


@dataclass(frozen=True, kw_only=True)
class ClipRow:
    """Factor by which a rank's gradient of a parameter was clipped."""

    step: int
    parameter: str
    rank: int
    factor: float
    """Factor from the true unclipped gradient to that of the rank, by least squares."""
    due: float
    """Factor by which the fp64 reference clips."""
    bound: float
    """Permitted difference of the two factors."""
    above_noise: bool
    """True if the factor is known: the gradient is a multiple of the true one up to
    noise, and ``bound`` is small enough to compare."""


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """Steps and parameters in which a correct run may differ from the reference."""

    since_step: int
    since: str = "loss"
    """First kind of comparison that may differ in ``since_step``; see :data:`ORDER`."""
    parameters: frozenset[str] = frozenset()
    """Parameters that may differ in ``since_step``, beside the loss; empty means all.
    In later steps all may differ."""
    text: str
    """Reason of the doubt, and how to remove it."""

    def covers(self, step: int, kind: str, parameter: str | None) -> bool:
        """Return True if this doubt explains a difference from the reference.

        Args:
            step: step of the difference.
            kind: kind of the comparison, one of :data:`ORDER`.
            parameter: name of the parameter; None for a value of all parameters.
        """
        if step != self.since_step:
            return step > self.since_step
        applies = kind == "loss" or parameter is None or parameter in self.parameters
        return ORDER.index(kind) >= ORDER.index(self.since) and (
            applies or not self.parameters
        )


@dataclass(kw_only=True)
class Parity:
    """Comparison of one run with the truth."""

    compared: Counter[str] = field(default_factory=Counter)
    """Kind -> number of compared elements, on all ranks at all steps."""
    lacking: dict[str, dict[Lack, tuple[int, int]]] = field(default_factory=dict)
    """Kind -> reason -> (number of elements that could not be compared, first step)."""
    worst: dict[str, ParityRow] = field(default_factory=dict)
    """Kind -> row with the largest error relative to its bound."""
    first_bad: dict[str, ParityRow] = field(default_factory=dict)
    """Kind -> worst row of the first step with a row beyond its bound."""
    departed: dict[str, list[ParityRow]] = field(default_factory=dict)
    """Kind -> all rows beyond their bound in the step of ``first_bad``."""
    per_step: list[float] = field(default_factory=list)
    """Largest ratio of error to bound at each step."""
    per_parameter: dict[str, float] = field(default_factory=dict)
    """Parameter -> largest ratio of error to bound."""
    reference_loss: list[float] = field(default_factory=list)
    """Loss of the fp64 truth at each step."""
    reference_norm: list[float] = field(default_factory=list)
    """Norm of the true, whole, unscaled gradient at each step, before clipping."""
    norm_bound: list[float] = field(default_factory=list)
    """Bound of the error of ``reference_norm`` at each step; infinite if unknown."""
    clip_norm: float | None = None
    """Norm to which gradients must be clipped; None if they are not clipped."""
    doubts: Sequence[Doubt] = ()
    """Reasons why a correct run may differ from the reference."""
    still: frozenset[tuple[int, int, int]] = frozenset()
    """(step, rank, optimizer) for which the fp64 reference moves no parameter."""
    clipped: list[ClipRow] = field(default_factory=list)
    """Clip factor of each gradient, in steps with finite gradients, if gradients are
    clipped."""
    reference: str = ""
    """Description of the reference; empty for the plain one."""
    unseen_gradients: tuple[str, ...] = ()
    """Parameters whose gradients were compared at no step and on no rank, because
    gradparity did not see what an optimizer used."""
    unseen_buffer: str = ""
    """First buffer that training changes and that no rank recorded; else empty."""
    moved_buffer: tuple[str, int, int] | None = None
    """(name, step, rank) of the first buffer that a rank changes, although training on
    one process leaves it unchanged; else None."""
    undecided: str = ""
    """Reason why no value can be compared with the reference; else empty."""
    narrow_loss: str = ""
    """Note that ranks returned the loss in a narrower dtype than the reference; else
    empty."""
    stack_schedule: StackSchedule = field(default_factory=StackSchedule)
    """Optimizer settings that the workload's own schedules changed; the reference
    follows them."""
    other_constant: OtherConstant | None = None
    """First setting, such as ``eps``, that no schedule changes and whose value on a
    rank differs from the reference's; else None."""

    @property
    def not_compared(self) -> Counter[str]:
        """Kind -> number of expected elements that could not be compared."""
        return Counter(
            {
                kind: sum(count for count, _ in by_reason.values())
                for kind, by_reason in self.lacking.items()
            }
        )

    def add(self, kind: str, rows: Sequence[ParityRow], elements: int) -> bool:
        """Add the measures of one tensor, on one rank at one step.

        Args:
            kind: see ``ParityRow``.
            rows: measures of the tensor; those with too large a bound are dropped.
            elements: number of elements that count as compared.

        Returns:
            True if at least one measure could be compared.
        """
        comparable = [row for row in rows if row.compares]
        if comparable:
            self.compared[kind] += elements
        for row in comparable:
            self._keep(row)
        return bool(comparable)

    def lacks(self, kind: str, why: Lack, step: int, elements: int) -> None:
        """Count elements that cannot be compared."""
        of_kind = self.lacking.setdefault(kind, {})
        count, since = of_kind.get(why, (0, step))
        of_kind[why] = count + elements, min(since, step)

    def _keep(self, row: ParityRow) -> None:
        worst = self.worst.get(row.kind)
        if worst is None or row.ratio > worst.ratio:
            self.worst[row.kind] = row
        first = self.first_bad.get(row.kind)
        if row.ratio > 1 and (first is None or first.step == row.step):
            self.departed.setdefault(row.kind, []).append(row)
        if row.ratio > 1 and (
            first is None or (first.step == row.step and row.ratio > first.ratio)
        ):
            self.first_bad[row.kind] = row
        self.per_step[row.step] = max(self.per_step[row.step], row.ratio)
        best = self.per_parameter.get(row.parameter, 0.0)
        self.per_parameter[row.parameter] = max(best, row.ratio)

    def other_setting(self, step: int) -> str:
        """Describe the first wrong setting up to a step; return "" if all are right.

        A setting is wrong if it differs between ranks, or from the reference.
        """
        differs = self.stack_schedule.differs
        return differs[1] if differs is not None and differs[0] <= step else ""

    def doubt(self, step: int, kind: str, parameter: str | None) -> Doubt | None:
        """Return the doubt that makes a difference inconclusive, or None.

        The doubt must also cover the first differences of gradients and updates: an
        earlier difference without a doubt may be the cause of all later ones.
        """
        rows = [*self.departed.get("gradient", ()), *self.departed.get("update", ())]
        places = [(step, kind, parameter)]
        places += [(row.step, row.kind, row.parameter) for row in rows]
        return next((d for d in self.doubts if all(d.covers(*p) for p in places)), None)


def gradient_of(
    seen: Seen, trace: RankTrace, at: StepTrace, name: str
) -> NDArray[np.floating]:
    """Return a rank's gradient, summed over the ranks on which it is partial.

    The ranks themselves do not sum: extra collectives would hang if the ranks disagree
    on whether to step.
    """
    ranks = at.partial.get(name)
    if not ranks:
        return at.gradients[name]
    places = trace.places(at, name)
    parts = [
        their_step.gradients[name].astype(np.float64)
        for other, their_step in seen
        if other.rank in ranks
        and name in their_step.gradients
        and np.array_equal(other.places(their_step, name), places)
    ]
    total: Doubles = np.sum(parts, axis=0)
    return total
