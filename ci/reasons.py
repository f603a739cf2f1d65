"""Reason: why the gate fails, in one line and as data; outcome: the exit code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from ..conformance.report.records import CaseRecord
from ..conformance.status import EXIT_CODES, counted, plain

__all__ = [
    "BEGINS",
    "KINDS",
    "Cause",
    "Outcome",
    "Reason",
    "at",
    "causes_of",
    "folded",
    "outcome_of",
]


class Outcome(Enum):
    """The result of the gate as exit code. 2, bad usage, is no outcome."""

    PASS = EXIT_CODES["pass"]
    """Every check holds, and so does the baseline."""
    FAIL = EXIT_CODES["fail"]
    """A check or a part of the baseline is broken."""
    INVALID = EXIT_CODES["error"]
    """The report contradicts itself or is incomplete."""
    INCONCLUSIVE = EXIT_CODES["inconclusive"]
    """No known violation, but too little was compared for a pass."""

    @property
    def word(self) -> str:
        """The outcome in lower case."""
        return self.name.lower()


BEGINS = "where it begins"
"""Words before the place of a fault, in every format."""

# The order is that of importance: reasons are sorted by it, and of the reasons of one
# case the first kind is taken for the cause.
KINDS = {
    "invalid": Outcome.INVALID,
    "worse": Outcome.FAIL,
    "failing": Outcome.FAIL,
    "vanished": Outcome.FAIL,
    "too-few": Outcome.FAIL,
    "sequence": Outcome.FAIL,
    "ratio": Outcome.FAIL,
    "expectation": Outcome.FAIL,
    "undecided": Outcome.INCONCLUSIVE,
    "nothing": Outcome.INCONCLUSIVE,
    "environment": Outcome.INCONCLUSIVE,
}
"""Kind of reason -> outcome of the gate."""

# A report that contradicts itself shows neither a violation nor a pass, so invalid
# comes first; a violation that was seen is one whatever else was not compared.
_FIRST = (Outcome.INVALID, Outcome.FAIL, Outcome.INCONCLUSIVE)


class Reason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One reason for which the gate fails."""

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
    """If a law has several kinds of violations: the kind of this one."""
    replay: str = ""
    """The command that shows it again."""
    where: str = ""
    """Where the run first differs and what explains it, in words, if it was found."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"a reason of kind {self.kind!r}"

    @property
    def line(self) -> str:
        """Kind and words on one line, without control characters."""
        return plain(f"{self.kind}: {self.text}")


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of failures, in one case or in many."""

    reason: Reason
    """The first reason of its kind."""
    cases: int
    """Cases, or other things, in which it is the cause."""
    consequences: int
    """Further reasons in the same cases."""
    where: str = ""
    """Where one of the cases first differs, with the case if it is not the reason's."""

    @property
    def line(self) -> str:
        """The first reason on one line, with the counts."""
        if not self.counts:
            return self.reason.line
        return plain(f"{self.reason.kind} ({self.counts}): {self.reason.text}")

    @property
    def lines(self) -> list[str]:
        """The line, and below it where the fault begins, if that was found."""
        below = [f"  {BEGINS}: {plain(self.where)}"] if self.where else []
        return [self.line, *below]

    @property
    def counts(self) -> str:
        """How many cases and consequences it has; empty for one case with none."""
        if self.cases == 1 and not self.consequences:
            return ""
        counts = counted(self.cases, "case")
        if self.consequences:
            counts += f", {counted(self.consequences, 'consequence')}"
        return counts


def causes_of(reasons: Sequence[Reason], laws: Iterable[str] = ()) -> tuple[Cause, ...]:
    """``reasons`` folded: one cause a case, and equal causes of many cases into one.

    Args:
        reasons: all of a report.
        laws: ids in the order of ``Header.laws``: of two that break at one step, the
            first is the cause.
    """
    places = {law: place for place, law in enumerate(laws)}

    def precedence(reason: Reason) -> tuple[object, ...]:
        place = places.get(reason.law, len(places))
        # without a step (counts, ratios) it is the consequence of one with a step
        step = float("inf") if reason.step is None else reason.step
        return list(KINDS).index(reason.kind), step, place, reason.law, reason.line

    cases: dict[tuple[object, ...], list[Reason]] = {}
    for number, reason in enumerate(reasons):
        # a reason without a case is its own group
        key = (reason.scaler, reason.scenario) if reason.scenario else (number,)
        cases.setdefault(key, []).append(reason)
    alike: dict[tuple[str, ...], list[tuple[Reason, int]]] = {}
    for group in cases.values():
        root = min(group, key=precedence)
        what = (root.kind, root.scaler, root.law, root.before, root.now, root.cause)
        # reasons without a case have only their text to distinguish them
        same = what if root.scenario else (*what, root.text)
        alike.setdefault(same, []).append((root, len(group) - 1))
    causes = [_cause(reasons_of_one) for reasons_of_one in alike.values()]
    return tuple(sorted(causes, key=lambda cause: _order(cause.reason)))


def _cause(found: Sequence[tuple[Reason, int]]) -> Cause:
    first, *others = sorted((root for root, _ in found), key=_order)
    where = first.where or next(
        (f"(in {r.scenario}) {r.where}" for r in others if r.where), ""
    )
    return Cause(
        reason=first,
        cases=len(found),
        consequences=sum(more for _, more in found),
        where=where,
    )


def _order(reason: Reason) -> tuple[int, str]:
    """Sort key of the output: worst kind first."""
    return list(KINDS).index(reason.kind), reason.line


def folded(lines: Iterable[tuple[object, str]]) -> list[str]:
    """One line for each kind of line: its first one, and how many more there are.

    Args:
        lines: (key of equal lines, the line), in the order of the result.
    """
    alike: dict[object, list[str]] = {}
    for what, line in lines:
        alike.setdefault(what, []).append(line)
    return [
        first + (f" (and {len(more)} more)" if more else "")
        for first, *more in alike.values()
    ]


def at(case: CaseRecord) -> str:
    """A case in words that begin with its topology."""
    return f"{case.scenario}  {case.scaler}"


def outcome_of(reasons: Iterable[Reason]) -> Outcome:
    """The outcome of ``reasons``: invalid before fail before inconclusive."""
    outcomes = {KINDS[reason.kind] for reason in reasons}
    return next((each for each in _FIRST if each in outcomes), Outcome.PASS)
