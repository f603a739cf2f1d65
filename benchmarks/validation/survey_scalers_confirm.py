"""Confirm violations of a report by their standalone scripts: no harness, only torch.

For each scaler and each check that it fails, the smallest failing scenarios are written
as scripts and run, until one script shows the failure by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from gradparity.conformance.comparison import laws as laws  # enters them into LAWS
from gradparity.conformance.comparison.law import LAWS
from gradparity.conformance.report.records import CaseRecord, Report
from gradparity.conformance.script.standalone import standalone_script
from gradparity.conformance.space.scenario import Scenario
from gradparity.conformance.status import UsageError

__all__ = ["Confirmation", "broken_laws", "confirm", "examples"]

TRIES = 3
"""Number of scripts to run for a check; scripts compare less finely, so the first ones
may not show the violation."""
TIMEOUT_S = 300.0


class Confirmation(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the scripts for one check that a scaler fails."""

    scaler: str
    law: str
    scenario: str
    """Id of the scenario of the script; empty if no script could be made."""
    confirmed: bool
    told: str
    """First violation that the script printed, or the reason why there is none."""


def broken_laws(cases: Iterable[CaseRecord]) -> list[str]:
    """Return the checks that any of the cases fails, in the order of their chapters."""
    failed = {verdict.law for case in cases for verdict in case.failures}
    return [law for law in LAWS if law in failed]


def examples(cases: Iterable[CaseRecord], law: str) -> list[CaseRecord]:
    """Return the cases that fail ``law``: few ranks first, then short ids."""
    found = [c for c in cases if any(v.law == law for v in c.failures)]
    # a short id has few settings that differ from their defaults
    return sorted(found, key=lambda c: (c.world_size, len(c.scenario), c.scenario))


def confirm(report: Report, scalers: Iterable[str], folder: Path) -> list[Confirmation]:
    """Run scripts for every failed check of ``scalers``, and keep them in ``folder``.

    Args:
        report: report with the violations.
        scalers: scalers with violations to confirm.
        folder: folder of the scripts, which is created if needed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    runs = _Scripts(folder)
    return [
        _confirm(runs, spec, law, examples(cases, law))
        for spec in scalers
        if (cases := [c for c in report.cases if c.scaler == spec])
        for law in broken_laws(cases)
    ]


def _confirm(
    runs: _Scripts, spec: str, law: str, cases: list[CaseRecord]
) -> Confirmation:
    last = ("", False, "no script for any of its scenarios")
    for scenario, (shown, told) in runs.some(spec, cases):
        last = (scenario, shown, told)
        if shown:
            break
    return Confirmation(
        scaler=spec, law=law, scenario=last[0], confirmed=last[1], told=last[2]
    )


class _Scripts:
    """Scripts by scaler and scenario; a script that several checks share runs once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: dict[tuple[str, str], tuple[bool, str]] = {}

    def some(
        self, spec: str, cases: list[CaseRecord]
    ) -> Iterator[tuple[str, tuple[bool, str]]]:
        """Run the first few scenarios that scripts support; yield their results."""
        tried = 0
        for case in cases:
            try:
                text = standalone_script(Scenario.parse(case.scenario), spec)
            except UsageError:
                continue
            yield case.scenario, self._run(case, text)
            tried += 1
            if tried == TRIES:
                return

    def _run(self, case: CaseRecord, text: str) -> tuple[bool, str]:
        if case.key not in self.done:
            name = f"{case.scaler.rpartition('.')[2].replace(':', '-')}"
            path = self.folder / f"{name}-{Scenario.parse(case.scenario).hash}.py"
            path.write_text(text, encoding="utf-8")
            self.done[case.key] = _outcome(path)
        return self.done[case.key]


def _outcome(path: Path) -> tuple[bool, str]:
    try:
        done = subprocess.run(
            [sys.executable, str(path)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return False, f"no end after {TIMEOUT_S:g} s"
    # a script that ends by an exception of its own has told nothing
    if done.returncode == 1 and (lines := done.stdout.splitlines()):
        return True, lines[0]
    return False, (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]
