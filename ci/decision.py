"""Decision of the gate, a pure function of report, baseline and expectations.

1. A report that contradicts itself is rejected, without further reasons.
2. Every verdict, sequence and ratio is checked against the baseline.
3. Expectations excuse the verdicts that they name; those that match nothing give notes.
4. Missing cases, and reasons about the whole report, cannot be excused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date

import msgspec

from ..conformance.report.records import HARNESS, Report
from ..conformance.report.terminal import LONGEST
from ..conformance.status import VERBS, UsageError, clipped
from .baseline import Baseline
from .checks import FAILURES, Checked, check_cases, check_vanished, check_whole
from .expectations import Expectation
from .integrity import contradictions
from .reasons import (
    BEGINS,
    KINDS,
    Cause,
    Outcome,
    Reason,
    at,
    causes_of,
    folded,
    outcome_of,
)

__all__ = ["Decision", "Terms", "decide"]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Conditions that a report must meet."""

    today: date
    """Date by which the expiry of expectations is checked."""
    baseline: Baseline | None = None
    """Baseline; None means that every check must pass."""
    expectations: Sequence[Expectation] = ()
    strict: bool = False
    """True if an expectation without effect fails the gate."""
    min_cases: int = 0
    """Required number of cases in which at least one check passes or fails."""
    any_torch: bool = False
    """True if the baseline also holds for other minor versions of torch."""

    def __post_init__(self) -> None:
        if self.min_cases < 0:
            raise UsageError(f"--min-cases takes 0 or more, got {self.min_cases}")


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the gate for one report."""

    outcome: Outcome
    reasons: tuple[Reason, ...]
    """All reasons."""
    causes: tuple[Cause, ...]
    """Reasons grouped by cause, as they are printed."""
    notes: tuple[str, ...]
    """Lines about known or excused failures, improvements and unused expectations.

    Notes never fail the gate.
    """
    known_failures: int
    """Number of cases that fail as in the baseline."""
    cases: int
    """Number of cases in which something was checked."""
    checked: int
    """Number of verdicts, sequences and ratios that were checked, without those that
    were skipped."""


def decide(report: Report, terms: Terms) -> Decision:
    """Check a report against the terms.

    The order of the cases does not matter, nor do dates and timings in the report.
    """
    # If a report contradicts itself, no other reason counts.
    broken = [Reason(kind="invalid", text=text) for text in contradictions(report)]
    if broken:
        return _decision(report, broken, _so_far(report), [])
    others = [scaler for scaler in report.scalers if not report.decides(scaler)]
    report = report.decided()
    checked = list(check_cases(report, terms.baseline))
    live = [
        e
        for e in terms.expectations
        if e.applies(report.header) and not e.expired(terms.today)
    ]
    # Sort, because the first of several equal notes is printed.
    checked.sort(key=lambda c: (at(c.case), c.verdict.law))
    reasons, notes = _excuse(checked, live)
    notes += [f"not checked, as --require names others: {name}" for name in others]
    notes += folded(_better(c) for c in checked if c.better)
    expected_failures = [c for c in checked if c.known]
    notes += folded(_known(c) for c in expected_failures)
    left = [*_expired(terms, report), *_idle(live, checked)]
    if terms.strict:
        reasons += [Reason(kind="expectation", text=text) for text in left]
    else:
        notes += left
    notes += _unexpected(live, checked)
    if terms.baseline is not None:
        # This follows the expectations: a case that is missing in the report has no
        # verdict to excuse.
        reasons += check_vanished(report, terms.baseline)
        notes += _unknown(report, terms.baseline)
    reasons += check_whole(
        report, terms.baseline, terms.min_cases, any_torch=terms.any_torch
    )
    failures = len(
        {c.case.key for c in expected_failures if c.verdict.status in FAILURES}
    )
    decided = [c for c in checked if c.verdict.status != "skipped"]
    return _decision(report, reasons, notes, decided, failures)


def _decision(
    report: Report,
    reasons: Sequence[Reason],
    notes: Sequence[str],
    checked: Sequence[Checked],
    known_failures: int = 0,
) -> Decision:
    """Return the decision, sorted independently of the order of the cases."""
    order = list(KINDS)  # from worst to best
    ordered = sorted(reasons, key=lambda r: (order.index(r.kind), r.line))
    return Decision(
        outcome=outcome_of(reasons),
        reasons=tuple(ordered),
        causes=causes_of(ordered, report.header.laws),
        notes=tuple(sorted(set(notes))),
        known_failures=known_failures,
        cases=len({c.case.key for c in checked}),
        checked=len(checked),
    )


def _so_far(report: Report) -> list[str]:
    """Return the errors of an incomplete report, then its failed checks."""
    if not report.incomplete:
        return []
    ended, failed = [], []
    for case in sorted(report.cases, key=at):
        again = f"; again: {case.replay}" if case.replay else ""
        if case.problem:
            text = f"error: {at(case)}: {clipped(case.problem, LONGEST)}{again}"
            ended.append((case.whose or HARNESS, text))
        elif case.failures:
            first = case.failures[0]
            where = f"; {BEGINS}: {case.location.text}" if case.location else ""
            text = f"failing: {first.law} in {at(case)}: {first.message}{where}{again}"
            failed.append((first.cause or first.law, text))
    return [*folded(ended), *folded(failed)]


def _excuse(
    checked: Sequence[Checked], live: Sequence[Expectation]
) -> tuple[list[Reason], list[str]]:
    reasons: list[Reason] = []
    notes: list[tuple[object, str]] = []
    for each in checked:
        if each.reason is None:
            continue
        entry = next((e for e in live if e.expects(each.case, each.verdict)), None)
        if entry is None:
            reasons.append(each.reason)
        else:
            link = f" {entry.link}" if entry.link else ""
            text = f"expected, {entry.reason}{link}: {each.reason.text}"
            notes.append(((entry.name, each.verdict.law), text))
    return reasons, folded(notes)


def _better(checked: Checked) -> tuple[object, str]:
    case, law, status = checked.case, checked.verdict.law, checked.verdict.status
    return (case.scaler, law, status), (
        f"better: {law} {VERBS[status]} in {at(case)}: --update-baseline records it"
    )


def _known(checked: Checked) -> tuple[object, str]:
    case, law, status = checked.case, checked.verdict.law, checked.verdict.status
    return (case.scaler, law, status, checked.verdict.cause), (
        f"known to the baseline: {law} {VERBS[status]} in {at(case)}: "
        f"{checked.verdict.message}"
    )


def _expired(terms: Terms, report: Report) -> Iterator[str]:
    for entry in terms.expectations:
        if entry.applies(report.header) and entry.expired(terms.today):
            yield f"the expectation {entry.name} expired on {entry.expires}"


def _idle(live: Sequence[Expectation], checked: Sequence[Checked]) -> Iterator[str]:
    """Yield a line for each expectation that has no effect.

    Such an expectation matches no verdict, or only verdicts with another status.
    """
    for entry in live:
        matched = [c for c in checked if entry.matches(c.case, c.verdict)]
        if not matched:
            yield f"the expectation {entry.name} matches nothing"
        elif not any(entry.expects(c.case, c.verdict) for c in matched):
            yield (
                f"the expectation {entry.name} is stale: none of {len(matched)} "
                f"verdicts has the status {' or '.join(entry.statuses)}"
            )


def _unexpected(
    live: Sequence[Expectation], checked: Sequence[Checked]
) -> Iterator[str]:
    for entry in live:
        yield from folded(
            (
                each.verdict.law,
                f"unexpected pass: {each.verdict.law} in {at(each.case)}: expected "
                f"{' or '.join(entry.statuses)}, {entry.reason}",
            )
            for each in checked
            if each.verdict.status == "pass" and entry.matches(each.case, each.verdict)
        )


def _unknown(report: Report, baseline: Baseline) -> Iterator[str]:
    recorded = {c.key: c for c in baseline.cases}
    new: list[tuple[object, str]] = []
    for case in sorted(report.cases, key=at):
        old = recorded.get(case.key)
        if old is None:
            new.append(((), f"new: {at(case)} is not in the baseline"))
            continue
        for verdict in sorted(case.verdicts, key=lambda v: v.law):
            if verdict.law not in old.exact.laws:
                law, now = verdict.law, verdict.status
                text = f"new: check {law} is not in the baseline: it {VERBS[now]} in "
                text += f"{at(case)}: --update-baseline records it"
                new.append(((law, now), text))
    yield from folded(new)
