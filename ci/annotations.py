"""Annotations: GitHub workflow commands, one for each failed check of a scaler.

GitHub shows ten errors of a step and drops the others. So violations of one check share
a line, and the last line counts the violations that are not shown.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..conformance.output import harmless
from ..conformance.report.records import CaseRecord, Report
from ..conformance.status import Verdict, plain
from .reasons import BEGINS, at, place

__all__ = ["SHOWN", "render"]

SHOWN = 10
"""Number of errors that GitHub shows for one step."""

Violation = tuple[CaseRecord, Verdict]


def render(report: Report) -> str:
    """Return the report as ``::error`` lines; empty without violations."""
    lines = [_whole(report.incomplete)] if report.incomplete else []
    lines += map(_violation, _groups(report))
    if len(lines) > SHOWN:
        # GitHub shows a limited number of lines, and this line is one of them.
        more = len(lines) - SHOWN + 1
        lines[SHOWN - 1 :] = [_whole(f"{more} more failed checks are in the report")]
    return "".join(f"{line}\n" for line in lines)


def _groups(report: Report) -> Iterator[list[Violation]]:
    groups: dict[tuple[str, str], list[Violation]] = {}
    for case in report.cases:
        for verdict in case.failures:
            # A check often fails in many cases: one line a case would fill the ten at
            # once.
            groups.setdefault((case.scaler, verdict.law), []).append((case, verdict))
    yield from groups.values()


def _violation(found: list[Violation]) -> str:
    case, verdict = found[0]
    more = f" (and in {len(found) - 1} more cases)" if len(found) > 1 else ""
    lines = [f"{at(case)}: {verdict.message}{more}"]
    located = next((c for c, _ in found if place(c)), None)
    if located is not None:
        of = "" if located is case else f"(in {located.scenario}) "
        lines.append(f"{BEGINS}: {of}{place(located)}")
    lines += [case.replay] if case.replay else []
    text = "\n".join(map(plain, lines))
    return _command(f"{verdict.law}: {case.scaler}", text)


def _whole(text: str) -> str:
    return _command("gradparity", plain(text))


def _command(title: str, text: str) -> str:
    return f"::error title={_property(plain(title))}::{_data(text)}"


def _data(text: str) -> str:
    """Return a workflow command's text, escaped so that it starts no other command."""
    # Other runners look for their commands anywhere in a line.
    return harmless(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
