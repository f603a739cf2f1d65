"""Table of layouts, as Markdown that fits into a comment on a review.

Each layout and precision has one row: verdict, tensor with the largest error / bound,
its error, and the bound. Texts of models and exceptions are written as character
references, so that Markdown shows them unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ..status import RESULTS, Number, clipped, plain, worst_of
from .records import CaseRecord, Comparison, Report

__all__ = ["MAX_LINES", "escape", "legible", "render", "row"]

MAX_LINES = 40
"""Largest number of lines; code hosts fold longer comments."""
# Rows, failures and the other lines make at most MAX_LINES together.
_MAX_ROWS = 26
_MAX_STORIES = 5
# Unit: characters. Code hosts scroll a table with a wider cell.
_CELL = 90
_STORY = 1000  # list items wrap; an exception may print a whole tensor
_SPECIAL = re.compile(
    r"[^\w ,/=()+;.:'\"%?-]"
    # Emphasis starts at a word boundary, an emoji or an address after a colon.
    r"|(?<![^\W_])_|_(?![^\W_])|:(?!\s|$)|(?<=www)\."
)
_HEAD = (
    "layout",
    "ranks",
    "precision",
    "verdict",
    "worst tensor",
    "relative error",
    "absolute error",
    "bound",
)
_WORDS = {"fail": "**FAIL**", "error": "**ERROR**", "skipped": "not run"}


def escape(text: str) -> str:
    """Return the text on one line, escaped for Markdown, also inside a table."""
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", plain(text))


def legible(text: str) -> str:
    """Return the text like `escape`, but readable without rendering.

    Text that needs escaping becomes a code span.
    """
    text = plain(text)
    if escape(text) == text:
        return text
    if r"\|" in text:  # no table has both: the backslash escapes the one that follows
        return escape(text)
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return fence + space + text.replace("|", r"\|") + space + fence


def row(cells: Iterable[str]) -> str:
    """Return one line of a table from Markdown cells."""
    return f"| {' | '.join(cells)} |"


def render(report: Report) -> str:
    """Return the table of a report, with at most :data:`MAX_LINES` lines."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    groups = _groups(report)
    shown = _shown(list(groups.values()))
    several = len(report.scalers) > 1
    yield f"**gradparity: {_result(report)}**, {len(report.cases)} cases"
    yield ""
    head = ["scaler", *_HEAD] if several else _HEAD
    yield row(head)
    yield row("---" for _ in head)
    for cases in shown:
        scaler = [escape(_short(cases[0].scaler, _CELL))] if several else []
        yield row([*scaler, *_cells(cases)])
    yield ""
    if stories := list(_stories(shown)):
        yield from [*stories, ""]
    if left := len(groups) - len(shown):
        yield f"{left} more rows, none of them worse, are in the report."
    yield _provenance(report)


def _groups(report: Report) -> dict[tuple[str, ...], list[CaseRecord]]:
    """Return cases by scaler, layout, rank count and precision, in report order."""
    groups: dict[tuple[str, ...], list[CaseRecord]] = {}
    for case in report.cases:
        key = (case.scaler, case.topology, str(case.world_size), case.precision)
        groups.setdefault(key, []).append(case)
    return groups


def _shown(groups: Sequence[list[CaseRecord]]) -> list[list[CaseRecord]]:
    """Return the rows that fit; if not all do, those that did not pass come first."""
    if len(groups) <= _MAX_ROWS:
        return list(groups)
    # This is not RANKING: a pass is worth more here than a layout that did not run.
    order = ("error", "fail", "inconclusive", "pass", "skipped")
    ranked = sorted(groups, key=lambda cases: order.index(_status(cases)))
    # Compare by identity: rows stay in the order of the report.
    shown = [id(cases) for cases in ranked[:_MAX_ROWS]]
    return [cases for cases in groups if id(cases) in shown]


def _status(cases: Sequence[CaseRecord]) -> str:
    return worst_of(case.status for case in cases)


def _result(report: Report) -> str:
    if report.incomplete:
        return f"incomplete ({escape(clipped(report.incomplete, _STORY))})"
    return RESULTS[report.status]


def _cells(cases: Sequence[CaseRecord]) -> Iterator[str]:
    first = cases[0]
    yield escape(_short(first.topology, _CELL))
    yield str(first.world_size)
    yield escape(first.precision)
    yield _verdict(cases)
    comparisons = [comparison for case in cases for comparison in case.worst]
    if not comparisons:
        yield from ("-",) * 4
        return
    worst = max(comparisons, key=lambda comparison: comparison.ratio)
    yield escape(_short(_tensor(worst), _CELL))
    yield _number(worst.error)
    yield _number(worst.absolute)
    yield _number(worst.bound)


def _verdict(cases: Sequence[CaseRecord]) -> str:
    """Return the worst status, its number of cases, and the checks that failed."""
    status = _status(cases)
    word = _WORDS.get(status, status)
    of = [case for case in cases if case.status == status]
    cases = [case for case in cases if case.status != "skipped"] or cases
    if status not in ("fail", "error"):
        return word if len(of) == len(cases) else f"{word} ({len(of)} of {len(cases)})"
    laws = list(dict.fromkeys(v.law for case in of for v in case.failures))
    more = f" and {len(laws) - 2} more" if len(laws) > 2 else ""
    named = f"{escape(', '.join(laws[:2]))}{more}"
    return f"{word} ({len(of)} of {len(cases)}): {named}"


def _tensor(found: Comparison) -> str:
    if found.kind == "loss":
        return f"loss, step {found.step}"
    where = f"step {found.step}, rank {found.rank}, {found.measure}"
    return f"{found.kind} of {_short(found.parameter, _CELL - 40)}, {where}"


def _stories(shown: Sequence[list[CaseRecord]]) -> Iterator[str]:
    """Yield the findings of the first rows that did not pass, one line each."""
    count = 0
    for cases in shown:
        bad = next(
            (c for c in cases if c.status == _status(cases) and c.failures), None
        )
        if bad is None:
            continue
        count += 1
        if count > _MAX_STORIES:
            return
        place = bad.location if bad.is_located else None
        where = "" if place is None else f" Where: {place.text}"
        text = f"{bad.failures[0].message}{where}"
        yield f"- {escape(bad.topology)}: {escape(clipped(text, _STORY))}"


def _provenance(report: Report) -> str:
    header = report.header
    facts = (
        f"torch {header.torch}",
        f"{header.backend} on {header.device}",
        f"gradparity {header.gradparity}",
        *([f"commit {header.commit}"] if header.commit else []),
    )
    whose = f" ({header.reference})" if header.reference else ""
    return (
        f"Errors against one process in fp64{escape(whose)}; a bound is 8 times what "
        f"one process itself errs in that precision. {escape(', '.join(facts))}"
    )


def _short(text: str, length: int) -> str:
    text = plain(text)
    return text if len(text) <= length else text[: length - 3] + "..."


def _number(value: Number) -> str:
    return escape(value) if isinstance(value, str) else f"{value:.2g}"
