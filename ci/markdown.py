"""Markdown: the job summary on GitHub, causes first, under its limit of 1 MiB.

In texts of models, tests and exceptions, characters that are markup in Markdown or HTML
are written as character references. Other characters are unchanged, so that the text is
readable without rendering.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..conformance.report.records import CaseRecord, Report
from ..conformance.report.table import escape, row
from ..conformance.report.terminal import cell, facts, headings
from ..conformance.status import RANKING, RESULTS, Verdict
from .reasons import BEGINS, at, causes_of, reason_of

__all__ = ["LIMIT_BYTES", "escape", "render"]

LIMIT_BYTES = 1_000_000
"""Limit of this summary. GitHub drops a summary of a job above 1 MiB, and other steps
also write to it."""
_KINDS = {"error": "invalid", "fail": "failing", "inconclusive": "undecided"}
"""Status of a verdict -> kind of its reason."""


def render(report: Report) -> str:
    """Return the report as Markdown: result, causes, matrix, environment."""
    head = "\n".join([*_headline(report), ""])
    tail = "\n".join(["", *_matrix(report), "", *_provenance(report), ""])
    room = LIMIT_BYTES - len(head.encode()) - len(tail.encode())
    if room < 0:  # thousands of topologies: the matrix is what can be left out
        tail, room = "\n", LIMIT_BYTES - len(head.encode()) - 1
    return head + _fitting(list(_stories(report)), room) + tail


def _headline(report: Report) -> Iterator[str]:
    counts = {s: sum(c.status == s for c in report.cases) for s in RANKING}
    words = ", ".join(f"{n} {status}" for status, n in counts.items() if n)
    result = "incomplete" if report.incomplete else RESULTS[report.status]
    yield f"## gradparity: {result}"
    yield ""
    yield f"{len(report.cases)} of {report.header.planned} cases: {words or 'none'}"
    if report.incomplete:
        yield ""
        yield f"**Incomplete:** {escape(report.incomplete)}"


def _stories(report: Report) -> Iterator[str]:
    """Yield one paragraph for each cause, the worst first."""
    verdict_by_key = {
        (case.scaler, case.scenario, verdict.law): (case, verdict)
        for case in report.cases
        for verdict in _open(case)
    }
    reasons = [reason_of(_KINDS[v.status], c, v) for c, v in verdict_by_key.values()]
    for cause in causes_of(reasons, report.header.laws):
        reason = cause.reason
        case, verdict = verdict_by_key[reason.scaler, reason.scenario, reason.law]
        yield "\n".join(_story(case, verdict, cause.counts, cause.where))


def _open(case: CaseRecord) -> list[Verdict]:
    """Return the failed or inconclusive verdicts of a case."""
    verdicts = [v for v in case.findings if v.status in _KINDS]
    if not verdicts and case.status == "inconclusive":
        why = case.verdicts[0].message if case.verdicts else "it has no verdicts"
        verdicts = [
            Verdict(law="", status="inconclusive", message=f"no check passed: {why}")
        ]
    return verdicts


def _story(
    case: CaseRecord, verdict: Verdict, counts: str, where: str
) -> Iterator[str]:
    more = f" ({counts})" if counts else ""
    yield f"\n### {verdict.status}{more}: {escape(at(case))}\n"
    facts_text = "; ".join(facts(verdict))
    extra = f" ({escape(facts_text)})" if facts_text else ""
    law = f"**{escape(verdict.law)}** " if verdict.law else ""
    yield f"- {law}{escape(verdict.message)}{extra}"
    if where:
        yield f"- {BEGINS}: {escape(where)}"
    if case.replay:
        yield f"\n<pre>{escape(case.replay)}</pre>"


def _fitting(stories: Sequence[str], room: int) -> str:
    """Return as many paragraphs as fit, and a line that counts the others."""
    shown: list[str] = []
    # Reserve this first: the line that counts the rest must always fit.
    spare = room - len(_left_out(len(stories)))
    for story in stories:
        spare -= len(story.encode()) + 1
        if spare < 0:
            break
        shown.append(story)
    missing = len(stories) - len(shown)
    return "\n".join([*shown, _left_out(missing) if missing else ""])


def _left_out(count: int) -> str:
    return f"\n{count} more causes are in report.jsonl; this summary is full.\n"


def _matrix(report: Report) -> Iterator[str]:
    if not report.cases:
        return
    yield row(["topology", *map(escape, headings(report).values())])
    yield row(["---"] * (1 + len(report.scalers)))
    for topology in report.topologies:
        cells = [cell(report.of(topology, scaler)) for scaler in report.scalers]
        yield row([escape(topology), *map(escape, cells)])


def _provenance(report: Report) -> Iterator[str]:
    header = report.header
    facts = (
        f"gradparity {header.gradparity}",
        f"torch {header.torch}",
        f"Python {header.python}",
        header.platform,
        f"{header.backend} on {header.device}",
        *([f"commit {header.commit}"] if header.commit else []),
    )
    yield escape(", ".join(facts))
    yield f"\n<pre>{escape(header.command)}</pre>"
