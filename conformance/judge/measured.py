"""Measured: the parity of one run, as laws read it; :mod:`.parity` measures it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ..rank.trace import RankTrace, StepTrace
from .compare import Doubles, Measure
from .settings import StackSchedule

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
"""One step of all ranks of a world."""
ORDER = ("loss", "gradient", "update", "average")
"""Results of a step, in order."""


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


@dataclass(frozen=True, kw_only=True)
class ParityRow(Measure):
    """One comparison: a tensor on a rank at a step against the fp64 truth."""

    kind: str
    """``gradient``, ``update`` (parameter minus its initial value), ``loss`` or
    ``average`` (of the weights, minus the initial values)."""
    step: int
    parameter: str
    rank: int


@dataclass(frozen=True, kw_only=True)
class ClipRow:
    """The factor by which a rank's gradient of a parameter was clipped."""

    step: int
    parameter: str
    rank: int
    factor: float
    """Multiple of the truth's gradient before it is clipped, by least squares."""
    due: float
    """The factor by which the truth clips."""
    bound: float
    """Allowed distance of the factor."""
    above_noise: bool
    """True if the gradient is the truth's times a factor, and not lost in noise."""


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """From this place on, a right run may differ from the reference."""

    since_step: int
    since: str = "loss"
    """The first kind of comparison in that step, by :data:`ORDER`."""
    parameters: frozenset[str] = frozenset()
    """Only the loss and these may differ in that step, later all; empty means all."""
    text: str
    """Why, and the way out, in words."""

    def covers(self, step: int, kind: str, parameter: str | None) -> bool:
        """True if a departure may come from the reference.

        Args:
            step: at which something departs.
            kind: kind of the comparison, one of :data:`ORDER`.
            parameter: its name; None for a value of all parameters.
        """
        if step != self.since_step:
            return step > self.since_step
        applies = kind == "loss" or parameter is None or parameter in self.parameters
        return ORDER.index(kind) >= ORDER.index(self.since) and (
            applies or not self.parameters
        )


@dataclass(kw_only=True)
class Parity:
    """The measured parity of one run."""

    compared: Counter[str] = field(default_factory=Counter)
    """kind -> number of elements that were compared, on all ranks at all steps."""
    lacking: dict[str, dict[Lack, tuple[int, int]]] = field(default_factory=dict)
    """kind -> why elements that were due could not be compared -> their number, and the
    first such step."""
    worst: dict[str, ParityRow] = field(default_factory=dict)
    """kind -> the row closest to, or furthest beyond, its bound."""
    first_bad: dict[str, ParityRow] = field(default_factory=dict)
    """kind -> the first row beyond its bound (the worst one of its step)."""
    departed: dict[str, list[ParityRow]] = field(default_factory=dict)
    """kind -> all rows of that first step that are beyond their bound."""
    per_step: list[float] = field(default_factory=list)
    """Largest ratio of each step."""
    per_parameter: dict[str, float] = field(default_factory=dict)
    """Largest ratio of each parameter."""
    reference_loss: list[float] = field(default_factory=list)
    """Loss of the fp64 truth at each step."""
    reference_norm: list[float] = field(default_factory=list)
    """Its norm of the whole unscaled gradient at each step, before it is clipped."""
    norm_bound: list[float] = field(default_factory=list)
    """Bound of the error of such a norm; infinite if not known."""
    clip_norm: float | None = None
    """The norm to which gradients are to be clipped, if they are."""
    doubts: Sequence[Doubt] = ()
    """Why the reference, and not the run, may be what departs."""
    still: frozenset[tuple[int, int, int]] = frozenset()
    """(step, rank, optimizer) of which the truth moves no parameter, either."""
    clipped: list[ClipRow] = field(default_factory=list)
    """A row for each gradient of steps in which none is bad, where they are clipped."""
    reference: str = ""
    """The reference in words, if it is not the plain one."""
    undecided: str = ""
    """Why nothing can be compared with it, in words; else empty."""
    narrow_loss: str = ""
    """Say in words that ranks returned the loss in less than ``loss`` gives."""
    stack_schedule: StackSchedule = field(default_factory=StackSchedule)
    """Settings that the stack's own schedules have moved; the reference follows."""

    @property
    def not_compared(self) -> Counter[str]:
        """Kind -> number of elements that were due and could not be compared."""
        return Counter(
            {
                kind: sum(count for count, _ in by_reason.values())
                for kind, by_reason in self.lacking.items()
            }
        )

    def add(self, kind: str, rows: Sequence[ParityRow], elements: int) -> bool:
        """Add the measures of one tensor on one rank at one step.

        Args:
            kind: see ``ParityRow``.
            rows: its measures; those that compare nothing are dropped.
            elements: number of elements compared, if any measure compares.

        Returns:
            True if one does.
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
        """Say which setting of an optimizer was another one up to a step, or ""."""
        differs = self.stack_schedule.differs
        return differs[1] if differs is not None and differs[0] <= step else ""

    def doubt(self, step: int, kind: str, parameter: str | None) -> Doubt | None:
        """The doubt that makes a departure inconclusive, if there is one.

        Such a doubt also covers other differences. A difference before the doubt began
        has another cause, which may also explain later differences.
        """
        rows = [*self.departed.get("gradient", ()), *self.departed.get("update", ())]
        places = [(step, kind, parameter)]
        places += [(row.step, row.kind, row.parameter) for row in rows]
        return next((d for d in self.doubts if all(d.covers(*p) for p in places)), None)


def gradient_of(
    seen: Seen, trace: RankTrace, at: StepTrace, name: str
) -> NDArray[np.floating]:
    """The gradient of ``trace``, summed over the ranks on which it is partial.

    Summed here and not on the ranks: an observer that sends collectives of its own
    would hang where ranks disagree whether to step.
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
