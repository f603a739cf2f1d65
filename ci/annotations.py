"""Annotations: GitHub workflow commands, one a broken law of a scaler.

GitHub shows ten errors per step and drops the others, so violations of one law share a
line and the last line says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..conformance.report.records import CaseRecord, Report
from ..conformance.report.terminal import plain
from ..conformance.status import Verdict
from .locate import locate
from .reasons import at

__all__ = ["SHOWN", "commands", "render"]

SHOWN = 10
"""Errors that GitHub shows of one step."""

Violation = tuple[CaseRecord, Verdict]


def render(report: Report) -> str:
    """The report as ``::error`` lines; empty where nothing is wrong."""
    return "".join(f"{line}\n" for line in commands(report, Path.cwd()))


def commands(report: Report, root: Path) -> list[str]:
    """One workflow command a scaler and law.

    Args:
        report: what to annotate.
        root: source tree in which scalers are looked up.
    """
    lines = [_whole(report.incomplete)] if report.incomplete else []
    lines += [_violation(found, root) for found in _groups(report)]
    if len(lines) <= SHOWN:
        return lines
    # one of the lines that GitHub shows is this one
    more = len(lines) - SHOWN + 1
    return [*lines[: SHOWN - 1], _whole(f"{more} more broken laws are in the report")]


def _groups(report: Report) -> Iterator[list[Violation]]:
    groups: dict[tuple[str, str], list[Violation]] = {}
    for case in report.cases:
        for verdict in case.failures:
            # A broken law fails in many cases: one line a case would fill the ten at
            # once.
            groups.setdefault((case.scaler, verdict.law), []).append((case, verdict))
    yield from groups.values()


def _violation(found: list[Violation], root: Path) -> str:
    case, verdict = found[0]
    place = locate(case.scaler, root)
    properties = {"title": f"{verdict.law}: {case.scaler}"}
    if place is not None:
        properties = {"file": place.file, "line": str(place.line), **properties}
    more = f" (and in {len(found) - 1} more cases)" if len(found) > 1 else ""
    again = f"\n{plain(case.replay)}" if case.replay else ""
    text = plain(f"{at(case)}: {verdict.message}{more}")
    return _command(properties, f"{text}{again}")


def _whole(text: str) -> str:
    return _command({"title": "gradparity"}, plain(text))


def _command(properties: dict[str, str], text: str) -> str:
    words = ",".join(f"{k}={_property(plain(v))}" for k, v in properties.items())
    return f"::error {words}::{_data(text)}"


def _data(text: str) -> str:
    """The text of a command; its line breaks are shown, and begin no new command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
