"""Reason: why the gate closes, in one line and as data; outcome: the exit code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from ..conformance.report.records import CaseRecord
from ..conformance.report.terminal import plain

__all__ = [
    "KINDS",
    "PRECEDENCE",
    "Cause",
    "Outcome",
    "Reason",
    "at",
    "causes_of",
    "folded",
    "outcome_of",
]


class Outcome(Enum):
    """What the gate says, with its exit code. 2, bad usage, is no outcome."""

    PASS = 0
    """Nothing that was promised is broken."""
    REGRESSION = 1
    """Something that was promised is broken."""
    INVALID = 3
    """The report cannot be believed or does not speak for the whole run."""
    INCONCLUSIVE = 4
    """Nothing is known to be broken, and what was promised is not known to hold."""

    @property
    def word(self) -> str:
        """The outcome in lower case."""
        return self.name.lower()


KINDS = {
    "invalid": Outcome.INVALID,
    "worse": Outcome.REGRESSION,
    "failing": Outcome.REGRESSION,
    "vanished": Outcome.REGRESSION,
    "too-few": Outcome.REGRESSION,
    "sequence": Outcome.REGRESSION,
    "ratio": Outcome.REGRESSION,
    "expectation": Outcome.REGRESSION,
    "undecided": Outcome.INCONCLUSIVE,
    "nothing": Outcome.INCONCLUSIVE,
    "environment": Outcome.INCONCLUSIVE,
}
"""Kind of reason -> what it makes of the whole."""

_FIRST = (Outcome.INVALID, Outcome.REGRESSION, Outcome.INCONCLUSIVE)


class Reason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One cause for which the gate closes."""

    kind: str
    """A key of :data:`KINDS`."""
    text: str
    """One line in words."""
    scaler: str = ""
    scenario: str = ""
    law: str = ""
    before: str = ""
    """Status in the baseline."""
    now: str = ""
    """Status in the report."""
    step: int | None = None
    ranks: tuple[int, ...] = ()
    cause: str = ""
    """Where not all violations of a law are alike: what kind this one is."""
    replay: str = ""
    """The command that shows it again."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"a reason of kind {self.kind!r}"

    @property
    def line(self) -> str:
        """Kind and words on one line, without control characters."""
        return plain(f"{self.kind}: {self.text}")


PRECEDENCE = (
    "liveness.completes",
    "collectives.same-sequence",
    "collectives.no-crosstalk",
    "random.data",
    "random.replicas",
    "random.recompute",
    "agreement.scale",
    "agreement.growth",
    "agreement.skip",
    "agreement.replicas",
    "skip.all-ranks-skip",
    "skip.all-ranks-step",
    "skip.no-side-effects",
    "trainer.skips",
    "trainer.schedule",
    "trainer.average",
    "trainer.checkpoint",
    "scale.rule",
    "scale.positive",
    "scale.continuity",
    "transparency.gradient",
    "transparency.bitwise",
    "dtype.reduction",
    "norm.reported",
    "norm.factor",
    "parity.gradient",
    "parity.update",
    "parity.loss",
    "misuse.refused",
)
"""Of two laws that break at one step, the one that stands first here is the cause:
ranks that disagree take other steps, and other steps make other weights."""


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong, in one case or in many."""

    reason: Reason
    """The first reason of its kind."""
    cases: int
    """Cases, or other things, in which it is the cause."""
    consequences: int
    """Further reasons in the same cases."""

    @property
    def line(self) -> str:
        """The first reason on one line, with the counts."""
        if self.cases == 1 and not self.consequences:
            return self.reason.line
        counts = f"{self.cases} cases"
        if self.consequences:
            counts += f", {self.consequences} consequences"
        return plain(f"{self.reason.kind} ({counts}): {self.reason.text}")


def causes_of(reasons: Sequence[Reason]) -> tuple[Cause, ...]:
    """``reasons`` folded: one cause a case, and equal causes of many cases into one."""
    cases: dict[tuple[object, ...], list[Reason]] = {}
    for number, reason in enumerate(reasons):
        # what concerns no case stands for itself
        key = (reason.scaler, reason.scenario) if reason.scenario else (number,)
        cases.setdefault(key, []).append(reason)
    alike: dict[tuple[str, ...], list[tuple[Reason, int]]] = {}
    for group in cases.values():
        root = min(group, key=_precedence)
        what = (root.kind, root.scaler, root.law, root.before, root.now, root.cause)
        same = what if root.scenario else (*what, root.text)
        alike.setdefault(same, []).append((root, len(group) - 1))
    causes = [
        Cause(
            reason=min((root for root, _ in found), key=_order),
            cases=len(found),
            consequences=sum(more for _, more in found),
        )
        for found in alike.values()
    ]
    return tuple(sorted(causes, key=lambda cause: _order(cause.reason)))


def _precedence(reason: Reason) -> tuple[object, ...]:
    """Sorts the reasons of one case: what comes first is the cause of the others."""
    known = reason.law in PRECEDENCE
    place = PRECEDENCE.index(reason.law) if known else len(PRECEDENCE)
    step = float("inf") if reason.step is None else reason.step
    return list(KINDS).index(reason.kind), step, place, reason.law, reason.line


def _order(reason: Reason) -> tuple[int, str]:
    """Sorts what is shown: worst kind first."""
    return list(KINDS).index(reason.kind), reason.line


def folded(lines: Iterable[tuple[object, str]]) -> list[str]:
    """One line for each kind of line: its first one, and how many more there are.

    Args:
        lines: (what makes lines alike, the line), in the order to be kept.
    """
    alike: dict[object, list[str]] = {}
    for what, line in lines:
        alike.setdefault(what, []).append(line)
    return [
        first + (f" (and {len(more)} more)" if more else "")
        for first, *more in alike.values()
    ]


def at(case: CaseRecord) -> str:
    """Where a case is, in words that begin with its topology."""
    return f"{case.scenario}  {case.scaler}"


def outcome_of(reasons: Iterable[Reason]) -> Outcome:
    """What ``reasons`` come to: invalid before regression before inconclusive."""
    found = {KINDS[reason.kind] for reason in reasons}
    return next((each for each in _FIRST if each in found), Outcome.PASS)
