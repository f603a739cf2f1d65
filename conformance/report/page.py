"""The page of a report: one self-contained HTML file, readable without JavaScript."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from markupsafe import Markup, escape

from .. import templates
from ..status import RANKING, Verdict, counted, worst_of
from .plots import distance_chart, error_bars, scale_chart, skip_strip
from .records import CaseRecord, Report
from .table import render as render_table
from .terminal import (
    cell,
    coverage,
    facts,
    headings,
    not_tried_lines,
    places,
    plain,
    verdict_of,
    worst_status,
)

__all__ = ["render_page", "write_page"]

MAX_PLOT_BYTES = 900_000
"""Limit of all plots on a page, failing cases first: with the text of 500 cases the
page stays below 3 MB."""
MAX_SCRIPT_BYTES = 200_000
"""Limit of all standalone scripts on a page: about the first 25."""


def write_page(report: Report, folder: Path) -> Path:
    """Write ``index.html`` into ``folder`` atomically."""
    return templates.write_page(folder, render_page(report))


def render_page(report: Report) -> str:
    """Return the page as text; texts from models and exceptions are escaped."""
    stories = _stories(report)
    chapters = _chapters(report)
    idle = _idle_chapters(report, chapters)
    chapters = [chapter for chapter in chapters if chapter not in idle]
    return templates.page(
        Path(__file__).parent / "templates" / "report.html.j2",
        {"lines": _lines},
        report=report,
        laws=report.header.laws,
        chapters=chapters,
        idle=idle,
        cell=cell,
        coverage=coverage(report),
        missed=_missed(report),
        facts=_more_facts,
        worst=worst_status,
        anchor=_anchor,
        rows=_rows(report, chapters),
        subject=_subject(report),
        places=places(report),
        not_tried=not_tried_lines(report),
        counted=counted,
        table=render_table(report),
        widest=max((len(plain(t)) for t in report.topologies), default=0),
        tallies=_tallies(report),
        verdict={scaler: verdict_of(report, scaler) for scaler in report.scalers},
        filters=_filters(stories),
        undrawn=sum(story.undrawn for story in stories),
        headings=headings(report),
        groups=_groups(stories),
    )


def _missed(report: Report) -> dict[str, tuple[str, str]]:
    """Return the scenario with most missing comparisons, and its message, by check."""
    most: dict[str, tuple[int, str, str]] = {}
    for case in report.cases:
        for verdict in case.verdicts:
            missed = 0 if verdict.status == "skipped" else verdict.not_compared
            if missed > most.get(verdict.law, (0,))[0]:
                most[verdict.law] = missed, case.scenario, verdict.message
    return {law: (scenario, message) for law, (_, scenario, message) in most.items()}


def _chapters(report: Report) -> list[str]:
    """Return the chapters of the report's checks, in order: prefixes of their ids."""
    seen = (v.law for case in report.cases for v in case.verdicts)
    laws = report.header.laws or dict.fromkeys(seen)  # a report of an earlier version
    return list(dict.fromkeys(law.partition(".")[0] for law in laws))


def _idle_chapters(report: Report, chapters: Sequence[str]) -> list[str]:
    """Return chapters whose checks applied to no run; they get no column."""
    used = {
        v.law.partition(".")[0]
        for case in report.cases
        for v in case.verdicts
        if v.status != "skipped"
    }
    return [chapter for chapter in chapters if chapter not in used] if used else []


def _lines(text: str) -> Markup:
    """Escape a text but keep its lines and indentation: a script, a table."""
    printable = (c if c.isprintable() or c == "\n" else " " for c in text)
    return escape("".join(printable))


def _subject(report: Report) -> str:
    """Return what was trained: the workload, or models of the catalogue."""
    first, *others = [*dict.fromkeys(case.model for case in report.cases)] or [""]
    return f"{first} and {counted(len(others), 'more model')}" if others else first


def _more_facts(verdict: Verdict) -> list[str]:
    """Return the facts of a verdict that its message does not contain."""
    return [
        fact
        for fact in facts(verdict)
        if not _states(verdict.message, fact.rpartition("= ")[2])
    ]


def _states(message: str, fact: str) -> bool:
    """Return True if a message contains a fact as a whole word."""
    forms = [fact]
    with suppress(ValueError):  # of a name, ranks or a step
        forms.append(f"{float(fact):.3g}")  # messages round to fewer digits
    return any(
        re.search(rf"(?<![\w.]){re.escape(form)}(?!\w|\.\w)", message) for form in forms
    )


def _anchor(record: CaseRecord) -> str:
    """Return the id of a run in the page, from the text of its scenario.

    The scenario is not parsed: a report of a newer version may have an id that this
    version cannot parse.
    """
    digest = hashlib.blake2b(record.scenario.encode(), digest_size=5)
    return f"s-{digest.hexdigest()}"


def _tallies(report: Report) -> dict[str, dict[str, int]]:
    """Return the number of cases by scaler and status, the worst status first."""
    tallies = {}
    for scaler in report.scalers:
        counts = Counter(c.status for c in report.cases if c.scaler == scaler)
        tallies[scaler] = {s: counts[s] for s in reversed(RANKING) if counts[s]}
    return tallies


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Result of one chapter of checks in one row of the matrix."""

    status: str
    link: str
    """Anchor of the run that shows the result."""
    words: str
    """Text for readers who cannot see the colour."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """Row of the matrix: one scaler on one topology in one precision."""

    topology: str
    precision: str
    scaler: str
    marks: Sequence[Mark]


def _rows(report: Report, chapters: Sequence[str]) -> list[Row]:
    cells: dict[tuple[str, str, str], list[CaseRecord]] = {}
    for case in report.cases:
        cells.setdefault((case.topology, case.precision, case.scaler), []).append(case)
    # Keep the rows of a topology together, in whatever order its cases ran.
    order = report.topologies
    return [
        Row(
            topology=topology,
            precision=precision,
            scaler=scaler,
            marks=[_mark(chapter, records) for chapter in chapters],
        )
        for (topology, precision, scaler), records in sorted(
            cells.items(), key=lambda cell: order.index(cell[0][0])
        )
    ]


def _mark(chapter: str, records: Sequence[CaseRecord]) -> Mark:
    findings = [
        (v.status, record)
        for record in records
        for v in record.findings
        # A case that broke has no verdicts: mark every group of checks.
        if record.problem or v.law.partition(".")[0] == chapter
    ]
    status = worst_of(s for s, _ in findings)
    if status == "skipped":
        return Mark(
            status=status, link=_anchor(records[0]), words=f"{chapter} does not apply"
        )
    hits = [record for s, record in findings if s == status]
    words = f"{chapter} {status}: {len(hits)} of {len(findings)} verdicts"
    return Mark(status=status, link=_anchor(hits[0]), words=words)


@dataclass(frozen=True, kw_only=True)
class Story:
    """One scenario with the results of all scalers."""

    id: str
    anchor: str
    topology: str
    status: str
    """Worst status of its records."""
    plots: Sequence[Markup]
    """Plots that contain all scalers."""
    records: Sequence[tuple[CaseRecord, Sequence[Markup]]]
    """(record, plots of this record) for each scaler."""
    traits: dict[str, str]
    """Trait -> value, for the filters of the page."""
    scripts: dict[str, str] = field(default_factory=dict)
    """Scripts that need only torch, by failed scaler."""
    undrawn: bool = False
    """True if plots were left out because of the size limit."""


def _stories(report: Report) -> list[Story]:
    scenarios: dict[str, list[CaseRecord]] = {}
    for case in report.cases:
        scenarios.setdefault(case.scenario, []).append(case)
    return _capped([_story(records) for records in scenarios.values()])


def _capped(stories: Sequence[Story]) -> list[Story]:
    """Remove plots and scripts beyond the size limits; keep the order of stories."""
    plot_bytes, script_bytes, story_by_id = MAX_PLOT_BYTES, MAX_SCRIPT_BYTES, {}
    # Failing stories come first, so that they keep their plots when the limit is
    # reached.
    for story in sorted(stories, key=lambda s: s.status == "pass"):
        own = [plot for _, plots in story.records for plot in plots]
        plot_bytes -= sum(map(len, [*story.plots, *own]))
        script_bytes -= sum(map(len, story.scripts.values()))
        if script_bytes < 0:
            story = replace(story, scripts={})
        story_by_id[story.id] = story if plot_bytes > 0 else _without_plots(story)
    return [story_by_id[story.id] for story in stories]


def _groups(stories: Sequence[Story]) -> dict[str, list[Story]]:
    """Return the stories by topology, the worst topology first."""
    order = sorted(stories, key=lambda story: -RANKING.index(story.status))
    worst = dict.fromkeys(story.topology for story in order)
    return {name: [s for s in order if s.topology == name] for name in worst}


def _story(records: Sequence[CaseRecord]) -> Story:
    first, status = records[0], worst_status(records)
    return Story(
        id=first.scenario,
        anchor=_anchor(first),
        topology=first.topology,
        status=status,
        plots=_drawn(distance_chart(records)) if _broken(records) & _VALUES else [],
        records=[(record, _plots(record)) for record in records],
        traits={
            "verdict": status,
            "topology": first.topology,
            "precision": first.precision,
            "model": first.model,
        },
        scripts={r.scaler: r.script for r in records if r.script},
    )


_DECISIONS = {"agreement", "skip", "scale"}
"""Chapters of checks whose violations show in each rank's scale and decisions."""
_VALUES = {"parity", "transparency"}
"""Chapters of checks whose violations show in errors of gradients and losses."""


def _broken(records: Sequence[CaseRecord]) -> set[str]:
    """Return the chapters (ids before the dot) of checks that fail in the records."""
    return {v.law.partition(".")[0] for record in records for v in record.failures}


def _plots(record: CaseRecord) -> list[Markup]:
    """Return the plots of a failed record; empty if it passed."""
    curves, broken = record.curves, _broken([record])
    if curves is None:
        return []
    plots = []
    if broken & _DECISIONS:
        plots += [scale_chart(record, curves), skip_strip(record, curves)]
    if broken & _VALUES:
        plots.append(error_bars(record, curves))
    return _drawn(*plots)


def _drawn(*plots: Markup) -> list[Markup]:
    return [plot for plot in plots if plot]


def _without_plots(story: Story) -> Story:
    records = [(record, ()) for record, _ in story.records]
    return replace(story, plots=(), records=records, undrawn=True)


@dataclass(frozen=True, kw_only=True)
class Filter:
    """Link that shows only runs with one trait."""

    key: str
    """CSS class of the runs; the link is ``#only-KEY``."""
    value: str
    count: int


def _filters(stories: Sequence[Story]) -> dict[str, list[Filter]]:
    """Return the filters by trait; a trait that all runs share has none."""
    filters = {
        trait: list(_values(trait, stories))
        for trait in ("verdict", "topology", "precision", "model")
    }
    return {trait: values for trait, values in filters.items() if len(values) > 1}


def _values(trait: str, stories: Sequence[Story]) -> Iterator[Filter]:
    counts = Counter(story.traits[trait] for story in stories)
    for number, (value, count) in enumerate(counts.items()):
        yield Filter(key=f"{trait}-{number}", value=value, count=count)
