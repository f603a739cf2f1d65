"""Resume: cases that a run restarted by torchrun keeps from the earlier attempt.

A case with evidence is kept, pass or not; a case without evidence (the harness broke,
or there were too few ranks) runs again. The header says how often and why the run was
restarted, so that nobody takes the report for one of an uninterrupted run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..report.records import CaseRecord, Launcher, Report, ReportError, read_report

__all__ = ["Earlier", "earlier_attempt"]


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """The cases of an earlier attempt that are kept."""

    kept: tuple[CaseRecord, ...] = ()
    restarts: tuple[str, ...] = ()
    """One line a restart, for the header."""


def earlier_attempt(path: Path, launcher: Launcher, command: str) -> Earlier:
    """The cases of the report at ``path`` that a run by ``launcher`` keeps.

    Args:
        path: the report of the earlier attempt.
        launcher: of the run that begins now.
        command: its command line; cases of another command are not kept.
    """
    if launcher.attempt == 0:
        return Earlier()
    this = f"restart {launcher.attempt}"
    try:
        report = read_report(path)
    except ReportError as error:
        return Earlier(restarts=(f"{this}: nothing taken over: {error}",))
    before = report.header.launcher
    if (before.run, report.header.command) != (launcher.run, command):
        text = f"{this}: nothing taken over: {path} is the report of another run"
        return Earlier(restarts=(text,))
    kept = tuple(case for case in report.cases if case.curves is not None)
    return Earlier(kept=kept, restarts=(*before.restarts, _text(this, report, kept)))


def _text(this: str, report: Report, kept: tuple[CaseRecord, ...]) -> str:
    again = [case.scenario for case in report.cases if case.curves is None]
    text = (
        f"{this}: {len(kept)} of {report.header.planned} cases kept from the attempt "
        f"before, which ended: {report.incomplete or 'complete'}"
    )
    return f"{text}; run again: {', '.join(again)}" if again else text
