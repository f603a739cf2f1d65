"""Update a baseline: show differences to the old one, ask, write the new one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

from ..conformance.report.records import Report
from ..conformance.status import EXIT_CODES, counted, plain
from .baseline import make_baseline, read_baseline, write_baseline
from .checks import FAILURES, check_whole
from .decision import Terms, decide
from .expectations import Expectation
from .integrity import contradictions
from .reasons import KINDS, Outcome

__all__ = ["Refused", "update"]

Ask = Callable[[str], bool]


class Refused(ValueError):
    """Raised if no baseline can be made of a report.

    Attributes:
        code: exit code of the gate.
    """

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def update(
    path: Path,
    reports: Sequence[Report],
    ask: Ask,
    show: Callable[[str], None],
    expectations: Sequence[Expectation] = (),
    *,
    accept_failures: bool = False,
) -> bool:
    """Write a baseline of ``reports`` to ``path`` if ``ask`` agrees.

    Args:
        path: file of the baseline; need not exist.
        reports: repeated runs of the same code; the first one has the required values.
        ask: called with the question; returns True to write.
        show: called with each line that the gate would print for the first report,
            checked against the old baseline. The last call has the number of these
            lines.
        expectations: known violations, which are not written into the baseline: a later
            gate needs the same expectations.
        accept_failures: true to write failures into the baseline.

    Returns:
        True if ``path`` is now the baseline of ``reports``.

    Raises:
        Refused: if a report is incomplete, contradicts itself, compared nothing or,
            unless ``accept_failures``, has failures that are not expected.
        UsageError: if ``path`` is not a baseline, or the reports do not agree.
    """
    reports = [report.decided() for report in reports]
    # Check before showing or asking: such a baseline would pass runs that it never
    # contained.
    for report in reports:
        _check(report)
    if not accept_failures:
        _refuse_failures(reports[0], expectations)
    new = make_baseline(reports, without=() if accept_failures else FAILURES)
    # Read the old file, although it will be replaced: a file that is no baseline is
    # kept.
    old = read_baseline(path) if path.exists() else None
    terms = Terms(today=date.today(), baseline=old, expectations=expectations)
    decision = decide(reports[0], terms)
    lines = [
        *(c.line for c in decision.causes),
        *(f"note: {n}" for n in decision.notes),
    ]
    for line in lines:
        show(plain(line))
    show(counted(len(lines), "difference") if old else "this is the first baseline")
    if not ask(f"write {len(new.cases)} cases to {path}?"):
        return False
    write_baseline(path, new)
    return True


def _refuse_failures(report: Report, expectations: Sequence[Expectation]) -> None:
    """Raise for a report with unexpected failures.

    Otherwise the gate would pass with failures that no one has read.
    """
    decision = decide(report, Terms(today=date.today(), expectations=expectations))
    causes = [c for c in decision.causes if KINDS[c.reason.kind] is Outcome.FAIL]
    if causes:
        first, *others = causes
        more = f" (and {counted(len(others), 'more cause')})" if others else ""
        raise Refused(
            f"a failing report cannot be a baseline: {first.line}{more}. List known "
            "failures in expectations.toml and give --expect, or accept them in later "
            "gates: --accept-failures",
            Outcome.FAIL.value,
        )


def _check(report: Report) -> None:
    broken = contradictions(report)
    if broken:
        raise Refused(
            f"this report cannot be a baseline: {broken[0]}", EXIT_CODES["error"]
        )
    empty = list(check_whole(report, None, 0))
    if empty:
        text = f"this report cannot be a baseline: {empty[0].text}"
        raise Refused(text, EXIT_CODES["inconclusive"])
