"""The run command: choose scenarios, check every scaler in them, write the report."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from ...fixtures import WorkloadError
from ...multiprocess import HarnessError
from ...multiprocess.elastic.agent import Agent, Ended
from ..output import say
from ..rank.devices import Devices
from ..rank.scaler_spec import NO_SCALER, load_scaler, refuse_mixed, refuse_unfit
from ..report.page import write_page
from ..report.records import (
    CaseRecord,
    ReportWriter,
    read_report,
)
from ..report.terminal import not_tried_lines, plain, print_report, progress
from ..space.catalogue import Selection, not_tried, select
from ..space.recipes import CONTROL_RECIPES
from ..space.scenario import Scenario
from ..space.workload_checks import check_workloads
from ..status import (
    EXIT_CODES,
    INTERRUPTED,
    UsageError,
    WriteError,
    as_usage,
    counted,
)
from .launcher import AloneError, Place, place_of
from .recorder import Recorder, make_header
from .runner import Case, Runner

__all__ = ["MAX_LOCALISED", "RunSettings", "run"]

CHECKS = 4
"""Time limit of all checks before a run, as a multiple of a scenario's limit."""
MAX_LOCALISED = 16
"""Largest number of parity failures that a run localises; each needs a second run."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of one ``gradparity run``."""

    scalers: Sequence[str]
    """Names ``module:attribute`` of the tested scalers."""
    selection: Selection
    preset: str = "default"
    scenarios: Sequence[str] = ()
    """Ids of scenarios to run instead of a preset."""
    require: Sequence[str] = ()
    """Names in ``scalers`` that decide the exit code; empty means all."""
    out: Path | None = None
    """Folder for ``report.jsonl`` and ``index.html``."""
    report: Path | None = None
    """File of the report, which is then written without a page. None: ``report.jsonl``
    and a page in ``out``."""
    fail_fast: bool = False
    """True to stop at the first violation."""
    timeout_s: float = 120.0
    """Time limit of one scenario."""
    devices: Devices = field(default_factory=Devices)
    """Devices of the ranks."""
    refuse_unfit: bool = True
    """True to stop before the first case if a scaler lacks a required method."""
    quiet: bool = False
    arguments: Sequence[str] = ()
    """Command line, for the header."""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise UsageError(f"the timeout must be positive, got {self.timeout_s}")
        refuse_mixed(self.scalers)

    @property
    def path(self) -> Path:
        """File of the report."""
        return self.report or (self.out or Path("parity-report")) / "report.jsonl"

    def chosen(self, place: Place) -> list[Scenario]:
        """Return the scenarios to run.

        Args:
            place: its separate rank checks the workloads, within ``CHECKS`` times the
                time limit of a scenario.

        Raises:
            UsageError: for unknown names or ids, a combination that cannot be trained,
                or a workload that breaks its protocol.
        """
        with as_usage(AloneError):
            return place.alone(RunSettings._chosen, self, trainings=CHECKS)

    def _chosen(self) -> list[Scenario]:
        asked = self.scenarios
        chosen = self._asked() if asked else select(self.preset, self.selection)
        with as_usage(WorkloadError):
            check_workloads(chosen)
        return list(dict.fromkeys(chosen))

    def _asked(self) -> list[Scenario]:
        chosen = [Scenario.parse(text) for text in self.scenarios]
        lost = [s for s in chosen if not s.trains_alone]
        if NO_SCALER in self.scalers and lost:
            raise UsageError(
                f"{lost[0].id} cannot be trained without a scaler: choose no faults "
                f"and one of the recipes {', '.join(CONTROL_RECIPES)}"
            )
        return chosen


def run(settings: RunSettings, console: Console, agent: Agent | None = None) -> int:
    """Run the selected cases, write the report and return the exit code.

    Args:
        settings: settings of the run, with its scenarios and scalers.
        console: console to print on.
        agent: agent of this process, which leads a run under torchrun; else None.

    Raises:
        UsageError: for bad usage, before the first case.
    """
    scalers = list(dict.fromkeys(settings.scalers))
    folder, path = os.getcwd(), settings.path
    with place_of(settings.devices, settings.timeout_s, agent) as place:
        scenarios = settings.chosen(place)
        for spec in scalers:
            # before any world starts, because a wrong name is bad usage, exit code 2
            load_scaler(spec, folder)
        pairs = [(spec, scenario) for scenario in scenarios for spec in scalers]
        # Place.not_runnable skips a scenario whose first phase needs a larger world
        most = max(scenario.world_size for scenario in scenarios)
        place.check([most])
        if agent is None and most > CROWD * (cores := os.cpu_count() or 1):
            where = f"{most} ranks on {counted(cores, 'core')}"
            say(f"gradparity: {where} take long: see --world-size", error=True)
        # before the report is opened, since a refused scaler must not replace an older
        # report
        for spec in scalers if settings.refuse_unfit else ():
            refuse_unfit(place.ranks(1), spec, folder, settings.devices.device)
        # the agent ends the report if this process dies
        if agent is not None:
            agent.note(str(path.absolute()))
        header = make_header(
            planned=len(pairs),
            preset="ids" if settings.scenarios else settings.preset,
            seed=settings.selection.seed,
            arguments=settings.arguments,
            place=place,
            data=[scenario.dataset for scenario in scenarios],
            require=settings.require,
            not_tried=[]
            if settings.scenarios
            else place.alone(not_tried, settings.selection),
        )
        with ReportWriter(path, header) as writer:
            runner = Runner(folder=folder, place=place, localises=MAX_LOCALISED)
            code = _run_cases(settings, pairs, writer, console, runner)
            _show(settings, console)
    return code


def _run_cases(
    settings: RunSettings,
    pairs: Sequence[tuple[str, Scenario]],
    writer: ReportWriter,
    console: Console,
    runner: Runner,
) -> int:
    start = time.monotonic()
    records: list[CaseRecord] = []
    broken, code = "", None
    recorder, raised = Recorder(runner.place), _Raised()
    with progress(console, len(pairs), quiet=settings.quiet) as ticker:

        def end(case: Case) -> bool:
            record = recorder.record(case)
            writer.case(record)
            ticker.end(record)
            records.append(record)
            if raised.again(case):
                return True
            return settings.fail_fast and record.status in ("fail", "error")

        try:
            runner.run_all(pairs, ticker.begin, end)
        except (HarnessError, Ended) as error:
            broken = f"stopped after {len(records)} of {len(pairs)} cases: {error}"
            code = EXIT_CODES["error"]
        except KeyboardInterrupt:  # as in any run, report the finished cases
            broken = f"interrupted after {len(records)} of {len(pairs)} cases"
            code = INTERRUPTED
    if raised.twice and not broken and len(records) < len(pairs):
        broken = raised.reason(len(records), len(pairs))
        code = EXIT_CODES["error"]
    deciding = settings.require or settings.scalers
    reason = broken or _incomplete(records, len(pairs), deciding)
    writer.close(time.monotonic() - start, reason)
    return EXIT_CODES[read_report(settings.path).status] if code is None else code


class _Raised:
    """Errors of a workload without a scaler; the second equal error ends the run.

    A third case would show nothing new, and a hang takes the whole time limit.
    """

    def __init__(self) -> None:
        self.first: dict[tuple[str, str, str], str] = {}
        self.twice = ""

    def again(self, case: Case) -> bool:
        """Return True if a case of another scenario has ended with the same error."""
        error, model = case.own_error, case.scenario.model
        if case.hangs:
            alike, what = (model, "", ""), "your workload hung"
        elif error is not None and error.raised:
            # Sizes in a message differ between meshes.
            alike = model, error.call, _NUMBER.sub("0", error.text)
            what = f"your {error.call} raised the same {error.raised}"
        else:
            return False
        # several scalers share the error of one scenario
        if self.first.setdefault(alike, case.scenario.id) != case.scenario.id:
            self.twice = what
        return bool(self.twice)

    def reason(self, ran: int, planned: int) -> str:
        """Return why the report is incomplete."""
        return (
            f"{self.twice} in two cases: {ran} of {planned} cases ran, the other "
            f"{planned - ran} did not"
        )


CROWD = 16
"""Number of ranks for each core above which a run says that it takes long."""
_NUMBER = re.compile(r"\d+")


def _incomplete(
    records: Sequence[CaseRecord], planned: int, deciding: Sequence[str]
) -> str:
    broken = [r for r in records if r.status == "error" and r.scaler in deciding]
    if broken:
        first = broken[0]
        return (
            f"{len(broken)} of {planned} cases have no verdict; first "
            f"{first.scenario}: {first.problem}"
        )
    if len(records) < planned:
        return (
            f"stopped at the first failed check: {len(records)} of {planned} cases ran"
        )
    return ""


def _show(settings: RunSettings, console: Console) -> None:
    path, report = settings.path, read_report(settings.path)
    if not settings.quiet:
        print_report(console, report)
    lines = []
    has_page = settings.report is None or settings.out is not None
    # a pass of all that was tried must not look like a pass of everything
    match not_tried_lines(report):
        case [reason]:
            lines.append(plain(f"not tried: {reason}"))
        case [_, *_] as reasons:
            where = f"gradparity report {path} --html DIR"
            where = "on the page" if has_page else where
            lines.append(f"not tried: {len(reasons)} kinds of run (reasons: {where})")
    failed = [case for case in report.cases if case.status in ("fail", "error")]
    if failed and len(report.cases) > 1:
        lines.append(f"again:  {plain(failed[0].replay)}")
    lines.append(f"report: {path}")
    if has_page:
        try:
            page = write_page(report, settings.out or path.parent)
        except UsageError as error:  # not of bad usage: the cases have run
            raise WriteError(f"the page was not written: {error}") from error
        lines.append(f"page:   {page}")
    if not settings.quiet:
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
