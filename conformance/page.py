"""The page of a report: one self-contained HTML file, readable without JavaScript."""

from __future__ import annotations

import os
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from . import laws as laws
from .law import LAWS
from .plots import draw_scenario
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
    scenarios = list(dict.fromkeys(c.scenario for c in report.cases))
    return environment.get_template("report.html.j2").render(
        report=report,
        laws=LAWS,
        cell=cell,
        worst=worst_status,
        anchor=_anchor,
        scenarios=[_story(report, scenario) for scenario in scenarios],
    )


def _printable(value: object) -> object:
    """Text without control characters; markup that we made stays as it is."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return plain(value)
    return value


def _story(report: Report, scenario: str) -> dict[str, object]:
    records = [c for c in report.cases if c.scenario == scenario]
    return {
        "id": scenario,
        "anchor": _anchor(records[0]),
        "status": worst_status(records),
        "records": records,
        "plot": Markup(draw_scenario(records)),
    }


def _anchor(record: CaseRecord) -> str:
    return f"s-{Scenario.parse(record.scenario).hash}"
