"""Run the specimens: bugs that people met, each beside its fixed version.

    gradparity bench specimens

Broken workloads run as with ``run --quick --scaler none --fail-fast``, fixed ones in
all scenarios of ``--quick`` and over several seeds. The checks that people use today
(``specimen_peers.py``) run on the same workloads. The record goes to
``benchmarks/results/specimens.json`` and its tables to ``docs/specimens.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console

from gradparity.benchmarks.validation.specimen_peers import STEPS, peers_of
from gradparity.benchmarks.validation.specimens_tables import lines, write_tables
from gradparity.conformance import Case, Runner
from gradparity.conformance.files import write_whole
from gradparity.conformance.rank.devices import Devices
from gradparity.conformance.rank.scaler_spec import NO_SCALER
from gradparity.conformance.report.records import CaseRecord, read_report
from gradparity.conformance.run.launcher import Pool
from gradparity.conformance.run.recorder import make_header
from gradparity.conformance.run.session import RunSettings, run
from gradparity.conformance.space.catalogue import Selection, select
from gradparity.conformance.status import UsageError
from gradparity.fixtures.specimens import ONE_RANK, SPECIMENS, Pair
from gradparity.multiprocess import Cluster

RESULTS = Path(__file__).parents[1] / "results" / "specimens.json"
SEEDS = 20
TIMEOUT_S = 120.0
"""Time limit of one scenario in seconds."""
ALL = SPECIMENS | ONE_RANK


# - Checking


def checked(spec: str) -> dict[str, Any]:
    """Return the first violation that gradparity finds in a workload, if any.

    Args:
        spec: the workload.

    Returns:
        ``scenario``, ``laws``, ``parameter``, ``problem``, ``ratio`` (largest error /
        bound) and ``location`` of the case that ended the run; ``cases``: their number.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = RunSettings(
            scalers=[NO_SCALER],
            selection=_selection(spec, 0),
            preset="quick",
            report=Path(folder) / "report.jsonl",
            fail_fast=True,
            timeout_s=TIMEOUT_S,
            quiet=True,
        )
        try:
            run(settings, Console(quiet=True))
        except UsageError as error:
            return _NOTHING | {"problem": str(error)}
        cases = read_report(settings.path).cases
    bad = [case for case in cases if case.status in ("fail", "error")]
    found = _shown(bad[0]) if bad else dict(_NOTHING)
    return found | {"cases": len(cases)}


_NOTHING: dict[str, Any] = {
    "scenario": "",
    "laws": [],
    "parameter": "",
    "problem": "",
    "ratio": None,
    "location": {},
}


def _shown(case: CaseRecord) -> dict[str, Any]:
    failed = [v for v in case.verdicts if v.status == "fail"]
    at = getattr(case, "location", None)  # of parity alone; random laws say it so:
    drew = next((v.cause for v in failed if v.law.startswith("random.")), "")
    # "Dropout mlp.dropout: ..."
    module = drew.partition(":")[0].rpartition(" ")[2]
    located = {"where": "draw", "module": module} if drew else {}
    return {
        "scenario": case.scenario,
        "laws": [v.law for v in failed],
        "parameter": next((v.parameter for v in failed if v.parameter), ""),
        "problem": case.problem,
        "ratio": max((row.ratio for row in case.worst), default=None),
        "location": located if at is None else {"where": at.where, "module": at.module},
    }


def _selection(spec: str, seed: int) -> Selection:
    return Selection(workload=spec, no_scaler=True, seed=seed)


def checked_right(
    runner: Runner, spec: str, seed: int, not_tried: tuple[str, ...] = ()
) -> Iterator[Case]:
    """Run a right workload in all scenarios of ``--quick``; yield each checked case.

    Args:
        runner: runner of the cases.
        spec: the workload.
        seed: seed of weights and batches.
        not_tried: topologies, or beginnings of recipes, that are left out.
    """
    for scenario in select("quick", _selection(spec, seed)):
        if scenario.recipe.startswith(not_tried) or scenario.topology in not_tried:
            continue
        yield runner.run(NO_SCALER, scenario)


@dataclass
class Right:
    """Verdicts on a right workload."""

    failed: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    """Inconclusive cases: scenario, and the first check with its message."""
    largest: float = 0.0
    """Largest error / bound of parity in all cases that passed. Differences under a
    doubt have no verdict and do not count."""

    def add(self, case: Case) -> None:
        """Add the verdicts of one case."""
        if case.status.value in ("fail", "error"):
            laws = [v.law for v in case.verdicts if v.status == "fail"]
            self.failed.append(f"{case.scenario.id}: {', '.join(laws) or case.problem}")
        if case.status.value == "inconclusive":
            first = next(v for v in case.verdicts if v.status == "inconclusive")
            text = f"{case.scenario.id}: {first.law}: {first.message}"
            self.undecided.append(text[:300])
        parity = None if case.evidence is None else case.evidence.parity
        if case.status.value == "pass" and parity is not None:
            worst = parity.worst.values()
            self.largest = max([self.largest, *(row.ratio for row in worst)])


# - What came of it


def caught(pair: Pair, found: dict[str, Any]) -> bool:
    """Return True if a check that fits the fault found a broken workload.

    A workload that raises has no verdict; then the report names its call.
    """
    if pair.laws == ("liveness.completes",) and ", train_step: " in found["problem"]:
        return True
    return bool({*pair.laws} & {*found["laws"]})


def placed(pair: Pair, found: dict[str, Any]) -> bool:
    """Return True if the report names the faulty module, or none if all are right."""
    if not caught(pair, found) or not found["location"]:
        return False
    module: str = found["location"]["module"]
    if not pair.modules:
        return module == ""
    return any(f"{module}.".startswith(f"{right}.") for right in pair.modules)


def measure(names: Sequence[str], seeds: int, jobs: int, peers: bool) -> dict[str, Any]:
    """Run all specimens; return the record.

    Args:
        names: names of the specimens.
        seeds: number of seeds for the fixed versions.
        jobs: number of pairs that run at the same time.
        peers: true to also run the other ways of checking.
    """
    header = make_header(
        planned=0,
        preset="quick",
        seed=0,
        arguments=["bench", "specimens"],
        place=Pool(Devices(), TIMEOUT_S),
    )
    load, start = os.getloadavg()[0], time.monotonic()
    # while one process trains references, the ranks of another have the cores
    with ProcessPoolExecutor(jobs, get_context("spawn")) as workers:
        found = {name: workers.submit(_row, name, seeds) for name in names}
        rows = {}
        for name, future in found.items():
            rows[name] = future.result()
            print(name, json.dumps(rows[name]), flush=True)
    seconds = time.monotonic() - start
    if peers:
        _add_peers({name: row for name, row in rows.items() if name in SPECIMENS})
    return {
        "provenance": {
            "torch": header.torch,
            "python": header.python,
            "platform": header.platform,
            "commit": header.commit,
            "started": header.started,
            "cores": os.cpu_count(),
            "load_average_at_start": round(load, 2),
        },
        "seeds": seeds,
        "steps": STEPS,
        "seconds": round(seconds, 1),
        "specimens": {n: row for n, row in rows.items() if n in SPECIMENS},
        "one_rank": {n: row for n, row in rows.items() if n in ONE_RANK},
    }


def _row(name: str, seeds: int) -> dict[str, Any]:
    pair = ALL[name]
    found = checked(pair.broken)
    right = Right()
    with Runner(folder=".", timeout_s=TIMEOUT_S) as runner:
        for seed in range(seeds):
            for case in checked_right(runner, pair.fixed, seed):
                right.add(case)
    return {
        "fault": pair.fault,
        "source": pair.source,
        "is_fault": bool(pair.laws),
        "broken": found,
        "caught": caught(pair, found),
        # most faults of ONE_RANK are in no module
        "placed": name in SPECIMENS and placed(pair, found),
        "fixed_failed": right.failed,
        "fixed_largest": round(right.largest, 3),
    }


def _add_peers(rows: dict[str, dict[str, Any]]) -> None:
    worlds: dict[int, Cluster] = {}
    with ExitStack() as stack:

        def cluster(size: int) -> Cluster:
            if size not in worlds:
                worlds[size] = stack.enter_context(Cluster(size))
            return worlds[size]

        for name, row in rows.items():
            pair = SPECIMENS[name]
            row["peers"] = {
                "broken": peers_of(cluster, pair.broken),
                "fixed": peers_of(cluster, pair.fixed),
            }
            print(name, json.dumps(row["peers"]), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write the record and the page, print the tables."""
    parser = argparse.ArgumentParser(prog="specimens", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=ALL, default=None)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2, help="pairs run at once")
    parser.add_argument("--no-peers", action="store_true", help="gradparity alone")
    parser.add_argument("--page", type=Path, metavar="JSON", help="only write the page")
    given = parser.parse_args(argv)
    if given.page is not None:
        write_tables(json.loads(given.page.read_text()))
        return 0
    names = given.only or list(ALL)
    record = measure(names, given.seeds, given.jobs, not given.no_peers)
    if given.no_peers:  # what was found is printed
        return 0
    if given.only is None:
        write_whole(RESULTS, json.dumps(record, indent=1) + "\n")
        write_tables(record)
    print(*lines(record), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
