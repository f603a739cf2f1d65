"""Memory of a long run: it must not grow with the number of scenarios.

    gradparity bench memory

Each scenario has new weights and batches, so nothing that an earlier one left behind is
of use. Measured are gradparity's process and all processes that it started: the ranks
and the process of the references. The record is ``results/memory.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

from gradparity.conformance import Case, Runner, Scenario
from gradparity.conformance.files import write_whole
from gradparity.conformance.rank.devices import Devices
from gradparity.conformance.run.launcher import Pool
from gradparity.conformance.run.recorder import make_header

RESULTS = Path(__file__).parent / "results" / "memory.json"
SCALER = "gradparity.fixtures.faulty:PlainScaler"
PLACES = (
    "single/1/fp32/sgd/none/steps=3",
    "ddp/2/fp32/adamw/none/steps=3",
    "fsdp/2/fp32/sgd/none/steps=3,recipe=accumulate",
    "fsdp1/2/fp16-autocast/adamw/none/steps=3",
    "ddp/2/fp32/sgd/inf@r1s1:up.weight/steps=3",
)
EVERY = 50
"""Number of scenarios between two measurements."""
GROWTH = 0.05
"""Largest permitted growth from the second measurement, with full caches, to the
last."""


def scenarios(count: int) -> Iterator[tuple[str, Scenario]]:
    """Return pairs of scaler and scenario, each with a new seed."""
    for seed, place in enumerate(islice(cycle(PLACES), count)):
        yield SCALER, replace(Scenario.parse(place), seed=seed)


def proportional_mib(pid: int | str) -> float:
    """Return a process's memory in MiB; shared pages are divided among processes."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return 0.0
    return sum(int(x.split()[1]) for x in lines if x.startswith("Pss:")) / 1024


def started_by(pid: int) -> Iterator[int]:
    """Return all descendants of a process."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    for child in {int(c) for path in children for c in path.read_text().split()}:
        yield child
        yield from started_by(child)


def measure(count: int) -> list[dict[str, float]]:
    """Run ``count`` scenarios, and measure after every :data:`EVERY` of them."""
    rows: list[dict[str, float]] = []
    done = 0

    def end(case: Case) -> bool:
        nonlocal done
        assert case.status == "pass", (case.scenario.id, case.status, case.problem)
        done += 1
        if done % EVERY == 0:
            others = sum(map(proportional_mib, started_by(os.getpid())))
            own = proportional_mib("self")
            rows.append({"scenarios": done, "own": round(own), "others": round(others)})
            print(json.dumps(rows[-1]), flush=True)
        return False

    with Runner(folder=".") as runner:
        runner.run_all(scenarios(count), lambda *_: None, end)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and record; return 1 if memory has grown."""
    parser = argparse.ArgumentParser(prog="memory", description=__doc__)
    parser.add_argument("--scenarios", type=int, default=500)
    given = parser.parse_args(argv)
    header = make_header(
        planned=given.scenarios,
        preset="",
        seed=0,
        arguments=["bench", "memory"],
        place=Pool(Devices(), timeout_s=120.0),
    )
    rows = measure(given.scenarios)
    total = [row["own"] + row["others"] for row in rows]
    growth = total[-1] / total[1] - 1
    record = {
        "torch": header.torch,
        "platform": header.platform,
        "commit": header.commit,
        "started": header.started,
        "unit": "MiB, proportional set size",
        "rows": rows,
        "growth": round(growth, 4),
    }
    write_whole(RESULTS, json.dumps(record, indent=1) + "\n")
    print(f"grown by {growth:.1%} from {2 * EVERY} to {given.scenarios} scenarios")
    return int(growth > GROWTH)


if __name__ == "__main__":
    sys.exit(main())
