"""Markdown: the job summary on GitHub, failures first, under its limit of 1 MiB.

In texts of models, tests and exceptions, what Markdown or HTML would read as markup is
written as character references. The rest stays as it is: pages are readable raw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..conformance.report.records import CaseRecord, Report
from ..conformance.report.table import escape, row
from ..conformance.report.terminal import cell, facts, scaler_name
from ..conformance.status import RANKING, Verdict, case_status
from .reasons import at

__all__ = ["LIMIT_BYTES", "escape", "render"]

LIMIT_BYTES = 1_000_000
"""GitHub drops a whole summary above 1 MiB; this leaves room for other steps' text."""
_CELL_LENGTH = 240
_BAD = ("error", "fail", "inconclusive")


def render(report: Report) -> str:
    """The report as Markdown: the result, the failures, the matrix, where it ran."""
    head = "\n".join([*_headline(report), ""])
    tail = "\n".join(["", *_matrix(report), "", *_provenance(report), ""])
    room = LIMIT_BYTES - len(head.encode()) - len(tail.encode())
    if room < 0:  # thousands of topologies: the matrix is what can be left out
        tail, room = "\n", LIMIT_BYTES - len(head.encode()) - 1
    return head + _fitting(list(_stories(report)), room) + tail


def _headline(report: Report) -> Iterator[str]:
    counts = {s: sum(c.status == s for c in report.cases) for s in RANKING}
    words = ", ".join(f"{n} {status}" for status, n in counts.items() if n)
    result = "incomplete" if report.incomplete else _result(report.cases)
    yield f"## gradparity: {result}"
    yield ""
    yield f"{len(report.cases)} of {report.header.planned} cases: {words or 'none'}"
    if report.incomplete:
        yield ""
        yield f"**Incomplete:** {escape(report.incomplete)}"


def _result(cases: Sequence[CaseRecord]) -> str:
    words = {"pass": "conformant", "fail": "violations", "error": "the harness broke"}
    status = case_status(c.status for c in cases)
    return words.get(status, "inconclusive")


def _stories(report: Report) -> Iterator[str]:
    """One paragraph a case that is not conformant, the worst first."""
    bad = [c for c in report.cases if c.status in _BAD]
    for case in sorted(bad, key=lambda c: _BAD.index(c.status)):
        yield "\n".join(_story(case))


def _story(case: CaseRecord) -> Iterator[str]:
    yield f"\n### {case.status}: {escape(at(case))}\n"
    undecided = [v.law for v in case.findings if v.status == "inconclusive"]
    for verdict in case.failures:
        yield f"- {_finding(verdict)}"
    if undecided:
        yield f"- inconclusive: {escape(', '.join(undecided))}"
    if case.replay:
        yield f"\n<pre>{escape(case.replay)}</pre>"


def _finding(verdict: Verdict) -> str:
    found = "; ".join(facts(verdict))
    extra = f" ({escape(found)})" if found else ""
    return f"**{escape(verdict.law)}** {escape(verdict.message)}{extra}"


def _fitting(stories: Sequence[str], room: int) -> str:
    """As many stories as there is room for, and how many are left out."""
    kept: list[str] = []
    # reserved first: the line that counts what is left out must always fit
    spare = room - len(_left_out(len(stories)))
    for story in stories:
        spare -= len(story.encode()) + 1
        if spare < 0:
            break
        kept.append(story)
    missing = len(stories) - len(kept)
    return "\n".join([*kept, _left_out(missing) if missing else ""])


def _left_out(count: int) -> str:
    return f"\n{count} more cases are in report.jsonl; this summary is full.\n"


def _matrix(report: Report) -> Iterator[str]:
    if not report.cases:
        return
    yield row(["topology", *(escape(scaler_name(s)) for s in report.scalers)])
    yield row(["---"] * (1 + len(report.scalers)))
    for topology in report.topologies:
        cells = [cell(report.of(topology, scaler)) for scaler in report.scalers]
        yield row([escape(topology), *(escape(_short(text)) for text in cells)])


def _short(text: str) -> str:
    return text if len(text) <= _CELL_LENGTH else text[: _CELL_LENGTH - 3] + "..."


def _provenance(report: Report) -> Iterator[str]:
    header = report.header
    facts = (
        f"gradparity {header.gradparity}",
        f"torch {header.torch}",
        f"Python {header.python}",
        header.platform,
        f"{header.backend} on {header.device}",
        f"commit {header.commit}",
    )
    yield escape(", ".join(facts))
    yield f"\n<pre>{escape(header.command)}</pre>"
