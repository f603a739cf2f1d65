"""Repeats of verdicts: one run made N times, in processes of their own.

Every run must have the same statuses, and the same errors and bounds to the bit: a
bound that depends on chance lets a fault pass by chance. A third of the runs have busy
loops beside them, because what races shows under load. The arguments after the options
are those of ``gradparity run``. The record is ``results/repeats.json``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gradparity.conformance.files import write_whole
from gradparity.conformance.rank.devices import Devices
from gradparity.conformance.report.records import CaseRecord, read_report
from gradparity.conformance.run.launcher import Pool
from gradparity.conformance.run.recorder import make_header

RESULTS = Path(__file__).parents[1] / "results" / "repeats.json"
LOOPS = 4
"""Number of busy loops beside every third run."""
BUSY_EVERY = 3


@contextmanager
def busy(loops: int) -> Iterator[None]:
    """Run processes that keep the cores busy inside this context."""
    command = [sys.executable, "-c", "while True: pass"]
    started = [subprocess.Popen(command) for _ in range(loops)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def seen(case: CaseRecord) -> dict[str, Any]:
    """Return the values that must repeat: verdicts, and unrounded errors and bounds."""
    return {
        "status": case.status,
        "problem": case.problem,
        "verdicts": {v.law: str(v.status) for v in case.verdicts},
        "worst": [
            [r.kind, r.parameter, repr(r.error), repr(r.bound)] for r in case.worst
        ],
        # error over bound, of each step and of each parameter
        "ratios": repr(case.curves and (case.curves.parity, case.curves.parameters)),
    }


def one_run(arguments: Sequence[str], folder: str) -> dict[str, dict[str, Any]]:
    """Run once; return scaler and scenario -> the values that must repeat."""
    report = Path(folder) / "report.jsonl"
    command = [sys.executable, "-m", "gradparity.conformance", "run", "--quiet"]
    done = subprocess.run(
        [*command, *arguments, "--report", str(report)], capture_output=True, text=True
    )
    if not report.exists():
        raise SystemExit(f"no report: {done.stderr.strip()}")
    cases = {f"{c.scaler} {c.scenario}": seen(c) for c in read_report(report).cases}
    report.unlink()
    return cases


def differences(first: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the cases in which two runs differ, and in what."""
    found = []
    for name in first.keys() | other.keys():
        one, two = first.get(name), other.get(name)
        if one != two:
            keys = [k for k in one if one[k] != two[k]] if one and two else ["missing"]
            found.append(f"{name}: {', '.join(keys)}")
    return sorted(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and record; return 1 if a run differs from the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--record", action="store_true", help="add to the results")
    options, arguments = parser.parse_known_args(argv)
    differing: dict[int, list[str]] = {}
    first: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.runs):
            loops = LOOPS if number % BUSY_EVERY == BUSY_EVERY - 1 else 0
            with busy(loops):
                cases = one_run(arguments, folder)
            first = first or cases
            if found := differences(first, cases):
                differing[number] = found
            text = "; ".join(differing.get(number, ["as the first"]))
            print(f"{number + 1}/{options.runs} ({loops} loops): {text}", flush=True)
    command = f"gradparity run {shlex.join(arguments)}"
    if options.record:
        _record(command, options.runs, len(first), differing)
    print(f"{command}: {len(differing)} of {options.runs} runs differ from the first")
    return int(bool(differing))


def _record(
    command: str, runs: int, cases: int, differing: dict[int, list[str]]
) -> None:
    header = make_header(
        planned=0,
        preset="",
        seed=0,
        arguments=["bench", "repeats"],
        place=Pool(Devices(), timeout_s=60.0),
    )
    records = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    records[command] = {
        "torch": header.torch,
        "platform": header.platform,
        "commit": header.commit,
        "started": header.started,
        "runs": runs,
        "cases": cases,
        "busy_loops_in_every_third": LOOPS,
        "differing": differing,
    }
    write_whole(RESULTS, json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
