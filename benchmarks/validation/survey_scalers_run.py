"""Check the known scalers: first each adapter on easy scenarios, then the preset.

1. smoke: scenarios that every loss scaler gets right; a scaler that fails there, or is
   not installed, is not checked, with the reason.
2. run: the preset, for all that are left, in one run that shares its references.
3. confirm: each check that one of them fails, by a standalone script.

A folder holds both reports, the scripts with what they said, and the versions;
``survey_scalers.py`` makes the page of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
from rich.console import Console

from gradparity.benchmarks.validation.survey_scalers_confirm import (
    Confirmation,
    confirm,
)
from gradparity.conformance.files import write_whole
from gradparity.conformance.report.records import Report, read_report
from gradparity.conformance.run.session import RunSettings, run
from gradparity.conformance.space.catalogue import Selection
from gradparity.conformance.status import UsageError
from gradparity.fixtures.peers import PEERS

__all__ = [
    "OURS",
    "SMOKE",
    "Record",
    "check_peers",
    "confirm_peers",
    "not_checked",
    "read_record",
]

OURS = "gradparity.scaler:GradScaler"
SMOKE = (
    "single/1/fp32/sgd/none/steps=3,interval=100",
    "single/1/fp32/adamw/inf@r0s1:up.weight/steps=3,interval=100",
    "fsdp/2/fp32/sgd/none/steps=3,interval=100",
)
"""Scenarios without growth or disagreement: a scaler that fails here has a wrong
adapter or cannot run."""
TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Record:
    """Content of the folder of a survey."""

    versions: dict[str, str]
    """Distribution -> version; absent if it is not installed."""
    smoke: Report
    run: Report
    confirmed: tuple[Confirmation, ...] = ()
    """Results of the standalone scripts."""


def check_peers(
    folder: Path, names: Sequence[str], preset: str, console: Console
) -> Record:
    """Check the named peers and our scaler; keep all results in ``folder``.

    Args:
        folder: for the reports and the versions.
        names: keys of ``PEERS``.
        preset: preset of the second part.
        console: where progress is shown.

    Raises:
        UsageError: an unknown peer or preset, or none that could be checked.
    """
    for name in names:
        if name not in PEERS:
            raise UsageError(f"unknown peer {name!r}: expected {', '.join(PEERS)}")
    _write_versions(folder, dict(_versions(names)))
    found = _read_versions(folder)
    specs = [OURS, *(PEERS[n].spec for n in names if PEERS[n].package in found)]
    _run(folder / "smoke", specs, console, scenarios=SMOKE)
    smoke = read_report(folder / "smoke" / "report.jsonl")
    left = [spec for spec in specs if spec not in _fallen(smoke)]
    # then the harness or this machine is at fault, and no peer may fail for it
    if OURS not in left:
        raise UsageError(f"our own scaler fails the smoke level: {_fallen(smoke)}")
    _run(folder / "run", left, console, preset=preset)
    confirm_peers(folder)
    return read_record(folder)


def confirm_peers(folder: Path) -> None:
    """Confirm the violations of the run in ``folder`` by standalone scripts.

    Raises:
        ReportError: the report is missing or broken.
    """
    report = read_report(folder / "run" / "report.jsonl")
    peers = [spec for spec in report.scalers if spec != OURS]
    found = confirm(report, peers, folder / "scripts")
    write_whole(folder / "confirmed.json", msgspec.json.encode(found))


def read_record(folder: Path) -> Record:
    """Read the results of :func:`check_peers` from ``folder``.

    Raises:
        ReportError: a report is missing or broken.
        OSError: the versions are missing.
    """
    return Record(
        versions=_read_versions(folder),
        smoke=read_report(folder / "smoke" / "report.jsonl"),
        run=read_report(folder / "run" / "report.jsonl"),
        confirmed=_read_confirmed(folder / "confirmed.json"),
    )


def not_checked(record: Record) -> dict[str, str]:
    """Return name of a scaler that was not run -> reason."""
    fallen = _fallen(record.smoke)
    reasons: dict[str, str] = {}
    for name, peer in PEERS.items():
        if peer.package not in record.versions:
            reasons[name] = f"{peer.package} is not installed"
        elif peer.spec in fallen:
            reasons[name] = fallen[peer.spec]
        elif peer.spec not in record.run.scalers:
            reasons[name] = "not asked for"
    return reasons


def _fallen(smoke: Report) -> dict[str, str]:
    """Return scaler -> its first failure in the smoke scenarios."""
    reasons: dict[str, str] = {}
    for case in smoke.cases:
        if case.status != "pass":
            told = case.failures[0].message if case.failures else case.status
            reasons.setdefault(case.scaler, f"{case.scenario}: {told}")
    return reasons


def _run(
    folder: Path,
    specs: Sequence[str],
    console: Console,
    *,
    scenarios: Sequence[str] = (),
    preset: str = "quick",
) -> None:
    settings = RunSettings(
        scalers=specs,
        selection=Selection(),
        preset=preset,
        scenarios=scenarios,
        out=folder,
        timeout_s=TIMEOUT_S,
        refuse_unfit=False,  # the smoke level says of each why it cannot be checked
        arguments=["survey", "scalers", "--preset", preset],
    )
    run(settings, console)


def _versions(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    for name in names:
        package = PEERS[name].package
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def _write_versions(folder: Path, versions: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "versions.json", msgspec.json.encode(versions))


def _read_versions(folder: Path) -> dict[str, str]:
    raw = (folder / "versions.json").read_bytes()
    return msgspec.json.decode(raw, type=dict[str, str])


def _read_confirmed(path: Path) -> tuple[Confirmation, ...]:
    if not path.exists():
        return ()
    return msgspec.json.decode(path.read_bytes(), type=tuple[Confirmation, ...])
