"""The catalogue as pytest items; ``plugin.py`` loads this if its option is set.

The scenarios are chosen as by ``gradparity run``. Each becomes one item, which runs
on warm clusters. Its record is sent with the test's report to the process that
writes ``report.jsonl`` (xdist's controller, or the only process).
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ...multiprocess.environment import on_torchrun
from ..chosen import Chosen
from ..output import harmless
from ..rank.devices import Devices
from ..rank.scaler_spec import load_scaler, refuse_unfit
from ..report.page import write_page
from ..report.records import CaseRecord, ReportWriter, read_report
from ..report.terminal import facts
from ..space.catalogue import Selection
from ..space.scenario import Scenario
from ..status import UsageError
from .launcher import Pool
from .recorder import Recorder, make_header
from .runner import Runner
from .session import MAX_LOCALISED, RunSettings

__all__ = ["Suite"]

_ROOT = "gradparity"
_RECORD = pytest.StashKey[CaseRecord]()


class NotConformantError(Exception):
    """Failure of an item: its scenario did not pass; carries the record."""

    def __init__(self, record: CaseRecord) -> None:
        super().__init__(record)
        self.record = record


class Suite:
    """Catalogue of one pytest session.

    Raises:
        UsageError: for bad options, before collection.
    """

    def __init__(self, config: pytest.Config, options: Mapping[str, Any]) -> None:
        if on_torchrun():
            raise UsageError(
                "under torchrun use: torchrun ... -m gradparity.conformance run"
            )
        self.config = config
        self.settings = _settings(options)
        self.place = Pool(self.settings.devices, self.settings.timeout_s)
        self.scenarios = self.settings.chosen(self.place)
        self.scalers = list(dict.fromkeys(self.settings.scalers))
        for spec in self.scalers:
            load_scaler(spec, os.getcwd())
        # under xdist only the controller writes; its workers have the attribute
        # workerinput
        self.writes = not hasattr(config, "workerinput")
        self.summary: list[str] = []
        self._runner = Runner(
            folder=os.getcwd(), place=self.place, localises=MAX_LOCALISED
        )
        self._writer: ReportWriter | None = None
        self._recorder = Recorder(self.place)
        self._seen: set[tuple[str, str]] = set()
        self._start = time.monotonic()
        if self.writes:  # once, and not in every worker of xdist
            self._refuse_unfit()

    def headline(self) -> str:
        """Return one line for the session's header."""
        return f"gradparity: {len(self.scenarios)} scenarios, {', '.join(self.scalers)}"

    def items(self, session: pytest.Session) -> list[pytest.Item]:
        """Return one item for each scenario and scaler, named by the scenario's id."""
        return [
            _Item.from_parent(
                session,
                name=_name(scenario, spec, alone=len(self.scalers) == 1),
                nodeid=f"{_ROOT}::"
                + _name(scenario, spec, alone=len(self.scalers) == 1),
                suite=self,
                scenario=scenario,
                scaler=spec,
            )
            for scenario in self.scenarios
            for spec in self.scalers
        ]

    def run_case(self, spec: str, scenario: Scenario) -> CaseRecord:
        """Run and check one case on the clusters that all items share."""
        return self._recorder.record(self._runner.run(spec, scenario))

    def plan(self, ids: Sequence[str]) -> None:
        """Begin the report, once the items to run are known."""
        # counted by id, since xdist's controller has no items, and -k leaves some out
        planned = sum(name.startswith(f"{_ROOT}::") for name in ids)
        if not self.writes or self._writer is not None or not planned:
            return
        header = make_header(
            planned=planned,
            preset="ids" if self.settings.scenarios else self.settings.preset,
            seed=self.settings.selection.seed,
            arguments=(),
            place=self.place,
            data=[scenario.dataset for scenario in self.scenarios],
        )
        words = ["pytest", *map(str, self.config.invocation_params.args)]
        header = msgspec.structs.replace(header, command=shlex.join(words))
        try:
            self._writer = ReportWriter(self._path(), header)
        except UsageError as error:
            # pytest shows its own type of error in one line, and ends with exit code 4
            raise pytest.UsageError(f"gradparity: {error}") from None

    def attach(self, item: pytest.Item, report: pytest.TestReport) -> None:
        """Attach the record to the test's report, as text that may cross processes."""
        record = item.stash.get(_RECORD, None)
        if record is not None:
            report.gradparity = msgspec.json.encode(record).decode()  # type: ignore[attr-defined]  # reports take any attribute

    def take(self, text: str) -> None:
        """Write a record; if a test runs again, its first record counts."""
        record = msgspec.json.decode(text, type=CaseRecord)
        if self._writer is not None and record.key not in self._seen:
            self._seen.add(record.key)
            self._writer.case(record)

    def finish(self, *, interrupted: bool) -> None:
        """End the report; if cases are missing, it is incomplete."""
        if self._writer is None:
            return
        reason = f"interrupted after {len(self._seen)} cases" if interrupted else ""
        with self._writer as writer:
            writer.close(time.monotonic() - self._start, reason)
            self.summary = ["", f"gradparity report: {self._path()}"]
            if self.settings.report is None:
                page = write_page(read_report(self._path()), self._path().parent)
                self.summary.append(f"gradparity page:   {page}")
        self._writer = None

    def close(self) -> None:
        """End all ranks."""
        self._runner.__exit__()

    def _refuse_unfit(self) -> None:
        """Raise for scalers that lack methods, on the ranks that the tests use."""
        device = self.settings.devices.device
        try:
            for spec in self.scalers:
                refuse_unfit(self.place.ranks(1), spec, os.getcwd(), device)
        except UsageError:
            self.close()
            raise

    def _path(self) -> Path:
        return self.settings.path


def _settings(options: Mapping[str, Any]) -> RunSettings:
    out, report = options["out"], options["report"]
    chosen = Chosen.of(options)
    return RunSettings(
        scalers=chosen.scalers,
        selection=Selection.of(chosen),
        preset=chosen.preset,
        scenarios=chosen.scenarios,
        out=Path(out) if out else None,
        report=Path(report) if report else None,
        timeout_s=chosen.timeout_s,
        devices=Devices(
            device=options["device"],
            share=options["share-gpus"],
            isolation=options["isolation"],
        ),
    )


def _name(scenario: Scenario, spec: str, *, alone: bool) -> str:
    return scenario.id if alone else f"{scenario.id}[{spec}]"


class _Item(pytest.Item):
    """Test item of one scenario with one scaler."""

    def __init__(
        self, *, suite: Suite, scenario: Scenario, scaler: str, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.suite = suite
        self.scenario = scenario
        self.scaler = scaler

    def runtest(self) -> None:
        record = self.suite.run_case(self.scaler, self.scenario)
        self.stash[_RECORD] = record
        if record.status == "skipped":
            pytest.skip(record.verdicts[0].message)
        if record.status != "pass":
            raise NotConformantError(record)

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        if isinstance(excinfo.value, NotConformantError):
            return harmless(_story(excinfo.value.record))
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, None, str]:
        return self.path, None, self.name


def _story(record: CaseRecord) -> str:
    lines = [f"{record.scaler}: {record.status}"]
    for verdict in record.failures:
        lines += [f"{verdict.law}: {verdict.message}", f"  {'; '.join(facts(verdict))}"]
    if not record.failures:
        lines.append("nothing could be compared")
    if record.location is not None:
        lines.append(f"where: {record.location.text}")
    return "\n".join([*lines, f"replay: {record.replay}"])
