"""Reason: why the gate fails, as one line and as data; Outcome: the exit code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from ..conformance.report.records import CaseRecord
from ..conformance.status import EXIT_CODES, Verdict, counted, plain

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
    "place",
    "reason_of",
]


class Outcome(Enum):
    """Result of the gate, with its exit code; 2, bad usage, is not an outcome."""

    PASS = EXIT_CODES["pass"]
    """All checks pass, and the report agrees with the baseline."""
    FAIL = EXIT_CODES["fail"]
    """A check fails, or the report is worse than the baseline."""
    INVALID = EXIT_CODES["error"]
    """The report contradicts itself or is incomplete."""
    INCONCLUSIVE = EXIT_CODES["inconclusive"]
    """No violation is known, but too little was compared for a pass."""

    @property
    def word(self) -> str:
        """Name of the outcome in lower case."""
        return self.name.lower()


BEGINS = "where it begins"
"""Words before the location of a fault, the same in every output format."""

# The order is by importance. Reasons are sorted by it, and the first kind of a case is
# its cause.
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

# A report that contradicts itself shows neither a failure nor a pass, so "invalid"
# comes first. A failure counts, whatever was not compared.
_FIRST = (Outcome.INVALID, Outcome.FAIL, Outcome.INCONCLUSIVE)


class Reason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One reason why the gate fails."""

    kind: str
    """Kind of the reason: a key of :data:`KINDS`."""
    text: str
    """Description in one line."""
    scaler: str = ""
    scenario: str = ""
    law: str = ""
    before: str = ""
    """Status in the baseline; empty if the baseline has no verdict of this check."""
    now: str = ""
    """Status in the report; empty if the reason is not about one verdict."""
    step: int | None = None
    ranks: tuple[int, ...] = ()
    cause: str = ""
    """Kind of the violation, if the check has several kinds."""
    replay: str = ""
    """Command that runs the case again; empty if there is none."""
    where: str = ""
    """Location at which the run first differs, with an explanation; empty if
    unknown."""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, f"a reason of kind {self.kind!r}"

    @property
    def line(self) -> str:
        """Kind and text on one line, without control characters."""
        return plain(f"{self.kind}: {self.text}")


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One cause of failures, in one case or in many."""

    reason: Reason
    """First reason with this cause."""
    cases: int
    """Number of cases with this cause. Reasons that belong to no case are counted one
    by one."""
    consequences: int
    """Number of further reasons in the same cases."""
    where: str = ""
    """Location at which one of the cases first differs. Names the case if it is not the
    case of ``reason``."""

    @property
    def line(self) -> str:
        """First reason on one line, with the numbers of cases and consequences."""
        if not self.counts:
            return self.reason.line
        return plain(f"{self.reason.kind} ({self.counts}): {self.reason.text}")

    @property
    def lines(self) -> list[str]:
        """:attr:`line`, and a second line with the location of the fault, if known."""
        below = [f"  {BEGINS}: {plain(self.where)}"] if self.where else []
        return [self.line, *below]

    @property
    def counts(self) -> str:
        """Numbers of cases and consequences; "" for one case without consequences."""
        if self.cases == 1 and not self.consequences:
            return ""
        counts = counted(self.cases, "case")
        if self.consequences:
            counts += f", {counted(self.consequences, 'consequence')}"
        return counts


def reason_of(
    kind: str, case: CaseRecord, verdict: Verdict, text: str = "", before: str = ""
) -> Reason:
    """Return the reason that one verdict gives.

    Args:
        kind: kind of the reason.
        case: case of the verdict.
        verdict: the verdict.
        text: description; empty for the verdict's message.
        before: status in the baseline; empty if it has none.
    """
    return Reason(
        kind=kind,
        text=text or f"{verdict.message} in {at(case)}",
        scaler=case.scaler,
        scenario=case.scenario,
        law=verdict.law,
        before=before,
        now=verdict.status,
        step=verdict.step,
        ranks=verdict.ranks,
        cause=verdict.cause,
        replay=case.replay,
        where=place(case),
    )


def place(case: CaseRecord) -> str:
    """Describe the location of a failure's cause; empty if it was not localised."""
    return case.location.text if case.is_located and case.location else ""


def causes_of(reasons: Sequence[Reason], laws: Iterable[str] = ()) -> tuple[Cause, ...]:
    """Group reasons by their cause.

    The most important reason of a case is its cause; the rest are consequences. Equal
    causes of several cases become one.

    Args:
        reasons: all reasons of a report.
        laws: ids in the order of ``Header.laws``; if two checks fail at one step, the
            cause is the check that is listed first.
    """
    places = {law: place for place, law in enumerate(laws)}

    def precedence(reason: Reason) -> tuple[object, ...]:
        place = places.get(reason.law, len(places))
        # A reason without a step (counts, ratios) follows from one with a step.
        step = float("inf") if reason.step is None else reason.step
        return list(KINDS).index(reason.kind), step, place, reason.law, reason.line

    cases: dict[tuple[object, ...], list[Reason]] = {}
    for number, reason in enumerate(reasons):
        # Each reason without a case forms its own group.
        key = (reason.scaler, reason.scenario) if reason.scenario else (number,)
        cases.setdefault(key, []).append(reason)
    alike: dict[tuple[str, ...], list[tuple[Reason, int]]] = {}
    for group in cases.values():
        root = min(group, key=precedence)
        what = (root.kind, root.scaler, root.law, root.before, root.now, root.cause)
        # Reasons without a case differ by their text only.
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
    """Return the sort key of the output: worst kind first."""
    return list(KINDS).index(reason.kind), reason.line


def folded(lines: Iterable[tuple[object, str]]) -> list[str]:
    """Merge lines with equal keys: keep the first, and append how many more follow.

    Args:
        lines: pairs (key, line). Keys keep the order in which they first occur.
    """
    alike: dict[object, list[str]] = {}
    for what, line in lines:
        alike.setdefault(what, []).append(line)
    return [
        first + (f" (and {len(more)} more)" if more else "")
        for first, *more in alike.values()
    ]


def at(case: CaseRecord) -> str:
    """Return the scenario id of a case, topology first, and its scaler."""
    return f"{case.scenario}  {case.scaler}"


def outcome_of(reasons: Iterable[Reason]) -> Outcome:
    """Return the outcome of the reasons: invalid before fail before inconclusive.

    Without reasons the gate passes.
    """
    outcomes = {KINDS[reason.kind] for reason in reasons}
    return next((each for each in _FIRST if each in outcomes), Outcome.PASS)
