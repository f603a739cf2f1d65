"""Terminal output of a run: live progress, then one table and the evidence.

Text from models, tests and exceptions is never read as markup. Control characters are
replaced, so that no report can control a terminal.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from ..status import (
    VERBS,
    Number,
    Verdict,
    clipped,
    counted,
    plain,
    rank_list,
    worst_of,
)
from .records import CaseRecord, Report

__all__ = [
    "CELL",
    "LONGEST",
    "PLACES",
    "cell",
    "coverage",
    "facts",
    "headings",
    "not_tried_lines",
    "places",
    "plain",
    "print_report",
    "progress",
    "verdict_of",
    "worst_status",
]

CELL = 240
"""Largest number of characters of all causes in a cell; the first cause is always
shown."""
LONGEST = 1000
"""Largest number of characters of a message: an exception may print a whole tensor."""
EVERY_S = 10.0
"""Least number of seconds between two lines of progress."""
PLACES = 3
"""Number of locations that are shown; most runs have one cause."""
STYLES = {
    "pass": "green",
    "fail": "bold red",
    "error": "bold magenta",
    "inconclusive": "yellow",
    "skipped": "dim",
}


class Ticker(Protocol):
    """Receives the begin and the end of every case."""

    def begin(self, scaler: str, scenario: str) -> None:
        """Report that a case begins."""

    def end(self, record: CaseRecord) -> None:
        """Report that a case has been checked."""


@contextmanager
def progress(
    console: Console,
    planned: int,
    *,
    quiet: bool,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Ticker]:
    """Show a live bar on a terminal; otherwise print failures and lines of progress.

    Args:
        console: console to print on.
        planned: number of cases to come.
        quiet: true to print nothing.
        clock: returns seconds; used for the interval between lines.
    """
    # A bar needs a terminal.
    if quiet or not console.is_terminal:
        yield _LogTicker(console, planned, quiet=quiet, clock=clock)
        return
    bar = Progress(
        TextColumn("{task.percentage:>3.0f}%"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
    )
    with bar:
        yield _LiveTicker(bar, planned)


class _LogTicker:
    def __init__(
        self,
        console: Console,
        planned: int,
        *,
        quiet: bool,
        clock: Callable[[], float],
    ) -> None:
        self.console = console
        self.planned = planned
        self.quiet = quiet
        self.clock = clock
        self.start = self.told = clock()
        self.ended = self.failing = 0
        self.reasons: set[str] = set()
        """Reasons of skipped cases that were printed."""

    def begin(self, scaler: str, scenario: str) -> None:
        pass

    def end(self, record: CaseRecord) -> None:
        self.ended += 1
        self.failing += record.status == "fail"
        if record.status != "pass":
            scaler = "" if record.scaler == "none" else f" {record.scaler}"
            line = f"{record.status:<12} {plain(record.scenario + scaler)}"
            # the matrix at the end has the causes of all but the skipped cases
            if record.status == "skipped":
                why = _cause(record)[2]
                line += "" if why in self.reasons else f": {clipped(why, LONGEST)}"
                self.reasons.add(why)
            self._say(line)
        now = self.clock()
        if now - self.told >= EVERY_S and self.ended < self.planned:
            self.told = now
            far = f"{self.ended} of {self.planned} cases, {now - self.start:.0f} s"
            self._say(f"{far}, failing: {self.failing}")

    def _say(self, line: str) -> None:
        if not self.quiet:
            self.console.print(Text(line), soft_wrap=True)


class _LiveTicker:
    def __init__(self, bar: Progress, planned: int) -> None:
        self.bar = bar
        self.task = bar.add_task("", total=planned)

    def begin(self, scaler: str, scenario: str) -> None:
        short = plain(f"{scenario}  {scaler}")
        self.bar.update(self.task, description=short[:70])

    def end(self, record: CaseRecord) -> None:
        self.bar.advance(self.task)


def worst_status(records: Sequence[CaseRecord]) -> str:
    """Return the worst status of the records; ``skipped`` if there are none."""
    return worst_of(r.status for r in records)


def headings(report: Report) -> dict[str, str]:
    """Return each scaler's column heading: "verdict" if ``none`` is the only one.

    The heading says if ``--require`` does not name the scaler.
    """
    without = "no scaler" if len(report.scalers) > 1 else "verdict"
    return {
        spec: (without if spec == "none" else spec)
        + ("" if report.decides(spec) else " (not required)")
        for spec in report.scalers
    }


def cell(records: Sequence[CaseRecord]) -> str:
    """Return the text of a cell of the matrix: verdict, and causes with counts."""
    status = worst_status(records)
    if status == "skipped":
        return "not run"
    word = status.upper()
    shown = [r for r in records if r.status == status]
    causes: dict[tuple[str, str], list[tuple[CaseRecord, str]]] = {}
    for record in shown if status != "pass" else ():
        kind, cause, text = _cause(record)
        text = text.removeprefix(f"workload {record.model}: ")
        causes.setdefault((kind, cause), []).append((record, text))
    n_runs = _n_runs(records)
    if not causes:
        return f"{word} ({counted(n_runs, 'run')})"
    of = f"of {n_runs} runs"
    words = [
        f"({kind + ', ' if kind else ''}{len(records_of)} {of}) "
        f"{records_of[0][0].model}: {clipped(records_of[0][1], LONGEST)}"
        for (kind, _), records_of in causes.items()
    ]
    # Show whole causes: the end of a message often explains it.
    fitting = words[:1]
    for each in words[1:]:
        if len("; ".join([*fitting, each])) > CELL:
            left = counted(len(words) - len(fitting), "more cause")
            fitting.append(f"{left} in the report")
            break
        fitting.append(each)
    return f"{word} " + "; ".join(fitting)


def _n_runs(records: Sequence[CaseRecord]) -> int:
    """Return the number of cases that ran, without those that were skipped."""
    return sum(record.status != "skipped" for record in records)


def _cause(record: CaseRecord) -> tuple[str, str, str]:
    """Return (chapter, key, message) of a run's failure.

    Runs with the same chapter and key have one cause. If the run did not fail, the
    chapter is "", and key and message are those of a check that did not pass.
    """
    if record.failures:
        first = record.failures[0]
        chapter = first.law.partition(".")[0]
        return chapter, first.cause or first.law, first.message
    order = ("inconclusive", "skipped")
    open_ = [v for s in order for v in record.verdicts if v.status == s]
    if not open_:
        return "", "", "it has no verdicts"
    return "", open_[0].law, open_[0].message


def facts(verdict: Verdict) -> list[str]:
    """Return step, ranks, parameter and numbers of a verdict as text."""
    words = [] if verdict.step is None else [f"step {verdict.step}"]
    words += [rank_list(verdict.ranks)] if verdict.ranks else []
    words += [verdict.parameter] if verdict.parameter else []
    return words + [f"{name} = {_number(x)}" for name, x in verdict.numbers.items()]


def _number(value: Number) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def coverage(report: Report) -> dict[str, str]:
    """Return check -> text with the numbers of made and of expected comparisons.

    Checks that compare tensors with the reference count elements. Checks that applied
    to no run are left out.
    """
    n_compared, due = Counter[str](), Counter[str]()
    for verdict in (v for case in report.cases for v in case.verdicts):
        if verdict.status != "skipped":
            n_compared[verdict.law] += verdict.compared
            due[verdict.law] += verdict.compared + verdict.not_compared
    return {law: f"{n_compared[law]:,} of {count:,}" for law, count in due.items()}


def _left_out(report: Report) -> str:
    """Return one line on the checks that could not compare everything."""
    shares = coverage(report)
    part = {law: text for law, text in shares.items() if len({*text.split(" of ")}) > 1}
    words = [f"{law} {text}" for law, text in part.items()]
    if part:
        words[-1] += " (why: on the page)"
    if len(part) < len(shares):
        words.append(f"everything in {'all other' if part else 'all'} checks")
    return f"compared: {', '.join(words)}" if words else ""


def print_report(console: Console, report: Report) -> None:
    """Print the matrix, how much was compared, and where runs first differ."""
    console.print(_matrix(report))
    if report.header.reference:
        console.print(Text(f"reference: {plain(report.header.reference)}"))
    if text := _left_out(report):
        console.print(Text(plain(text), style="dim"), soft_wrap=True)
    all_places = places(report)
    for first, *others in all_places[:PLACES]:
        assert first.location is not None
        scaler = f" {first.scaler}" if len(report.scalers) > 1 else ""
        where = Text(f"where {plain(first.scenario + scaler)}: ", style="bold")
        text = plain(first.location.text)
        text += f" (and in {counted(len(others), 'more run')})" if others else ""
        console.print(where.append(text, style="not bold"), soft_wrap=True)
    if (more := len(all_places) - PLACES) > 0:
        console.print(f"where: {more} more {'is' if more == 1 else 'are'} on the page")
    if report.incomplete:
        line = f"INCOMPLETE: {plain(report.incomplete)}"
        console.print(Text(line, style="bold magenta"), soft_wrap=True)


def not_tried_lines(report: Report) -> list[str]:
    """Return lines on the cases that were skipped or left out.

    Skipped cases with one reason share a line: it names the first, and the number of
    others. Cases left out have the lines of the report's header.
    """
    cases_by_cause: dict[str, list[CaseRecord]] = {}
    for case in report.cases:
        if case.status == "skipped":
            why = _why_skipped(case)
            # One exception of the user's code can come from many ranks, calls and
            # meshes.
            cause = why.partition(": raised ")[2] or why
            cases_by_cause.setdefault(cause, []).append(case)
    skipped = [
        f"{first.scenario}{f' and {len(others)} more' if others else ''}: "
        f"{_why_skipped(first)}"
        for first, *others in cases_by_cause.values()
    ]
    return [*skipped, *report.header.not_tried]


def _why_skipped(case: CaseRecord) -> str:
    return case.verdicts[0].message if case.verdicts else "it has no verdicts"


def verdict_of(report: Report, scaler: str) -> str:
    """Return the result of a scaler, or of the workload without one, as a sentence."""
    cases = [case for case in report.cases if case.scaler == scaler]
    models = dict.fromkeys(case.model for case in cases)
    subject = scaler if scaler != "none" else " and ".join(models)
    status = worst_status(cases)
    runs = counted(_n_runs(cases), "run")
    if status == "pass":
        ratios = [worst.ratio for case in cases for worst in case.worst]
        margin = f" (largest error {max(ratios):.2g} of its bound)" if ratios else ""
        return f"{subject} passes all {runs}{margin}."
    if status == "skipped":
        return f"{subject} was not run."
    worst = [case for case in cases if case.status == status]
    where = ", ".join(dict.fromkeys(case.topology for case in worst))
    return f"{subject} {VERBS[status]} on {where}: {len(worst)} of {runs}."


def places(report: Report) -> list[list[CaseRecord]]:
    """Return the localised cases, grouped by where and by which factor they differ.

    Halved gradients and doubled gradients have different causes.
    """
    grouped: dict[tuple[str, ...], list[CaseRecord]] = {}
    for case in report.cases:
        if case.is_located and (location := case.location) is not None:
            factor = "" if location.factor is None else f"{float(location.factor):.3g}"
            place = (
                case.scaler,
                location.where,
                location.module,
                location.inside,
                factor,
            )
            grouped.setdefault(place, []).append(case)
    return list(grouped.values())


def _matrix(report: Report) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    table.add_column("topology", no_wrap=True)
    for heading in headings(report).values():
        table.add_column(Text(plain(heading)), overflow="fold", ratio=1)
    for topology in report.topologies:
        cells = [report.of(topology, scaler) for scaler in report.scalers]
        table.add_row(
            Text(plain(topology)),
            *(Text(plain(cell(c)), style=STYLES[worst_status(c)]) for c in cells),
        )
    return table
