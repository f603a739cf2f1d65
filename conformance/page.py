"""The page of a report: one self-contained HTML file, readable without JavaScript."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from . import laws as laws
from .law import LAWS, worst_of
from .plots import error_bars, loss_chart, scale_chart, skip_strip
from .report import CaseRecord, Report
from .scenario import Scenario
from .terminal import cell, plain, worst_status

__all__ = ["render_page", "write_page"]


def write_page(report: Report, folder: Path) -> Path:
    """Write ``index.html`` into ``folder``, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "index.html"
    draft = folder / ".index.html.draft"
    draft.write_text(render_page(report), encoding="utf-8")
    os.replace(draft, path)
    return path


def render_page(report: Report) -> str:
    """The page as text; everything from models and exceptions is escaped."""
    environment = Environment(
        loader=PackageLoader("gradparity.conformance"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        report=report,
        laws=LAWS,
        chapters=list(dict.fromkeys(law.chapter for law in LAWS.values())),
        cell=cell,
        worst=worst_status,
        anchor=_anchor,
        rows=_rows(report),
        groups=_groups(report),
    )


def _printable(value: object) -> object:
    """Text without control characters; markup that we made stays as it is."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return plain(value)
    return value


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One chapter of laws in one row of the matrix."""

    status: str
    link: str
    """Anchor of the run that shows it."""
    words: str
    """What a reader who does not see the colour is told."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One scaler on one topology in one precision."""

    topology: str
    precision: str
    scaler: str
    marks: Sequence[Mark]


def _rows(report: Report) -> list[Row]:
    cells: dict[tuple[str, str, str], list[CaseRecord]] = {}
    for case in report.cases:
        cells.setdefault((case.topology, case.precision, case.scaler), []).append(case)
    chapters = dict.fromkeys(law.chapter for law in LAWS.values())
    return [
        Row(
            topology=topology,
            precision=precision,
            scaler=scaler,
            marks=[_mark(chapter, records) for chapter in chapters],
        )
        for (topology, precision, scaler), records in cells.items()
    ]


def _mark(chapter: str, records: Sequence[CaseRecord]) -> Mark:
    found = [
        (v.status, record)
        for record in records
        for v in record.verdicts
        if v.law.partition(".")[0] == chapter
    ]
    status = worst_of(s for s, _ in found)
    if status == "skipped":
        return Mark(status=status, link=_anchor(records[0]), words="does not apply")
    hits = [record for s, record in found if s == status]
    words = f"{status}: {len(hits)} of {len(found)} verdicts"
    return Mark(status=status, link=_anchor(hits[0]), words=words)


def _groups(report: Report) -> dict[str, list[dict[str, object]]]:
    """Topology -> the stories of its scenarios."""
    groups: dict[str, list[dict[str, object]]] = {}
    stories: dict[str, list[CaseRecord]] = {}
    for case in report.cases:
        stories.setdefault(case.scenario, []).append(case)
    for records in stories.values():
        groups.setdefault(records[0].topology, []).append(_story(records))
    return groups


def _story(records: Sequence[CaseRecord]) -> dict[str, object]:
    return {
        "id": records[0].scenario,
        "anchor": _anchor(records[0]),
        "status": worst_status(records),
        "records": records,
        "plots": _plots(records),
    }


def _plots(records: Sequence[CaseRecord]) -> list[Markup]:
    plots = [loss_chart(records)]
    for record in records:
        if record.curves is None:
            continue
        plots.append(scale_chart(record, record.curves))
        if record.failures:
            plots.append(skip_strip(record, record.curves))
            plots.append(error_bars(record, record.curves))
    return [plot for plot in plots if plot]


def _anchor(record: CaseRecord) -> str:
    return f"s-{Scenario.parse(record.scenario).hash}"
