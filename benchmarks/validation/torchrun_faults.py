"""Faults of a rank under torchrun: with agents, and with ranks in torchrun's processes.

    gradparity bench torchrun-faults [FAULT ...]

All faults together are recorded in results/torchrun_faults.json, and the table of
docs/decisions/harness.md is written from the record; chosen ones are printed only. In
each way two ranks run three cases, and rank 1 has its fault in the second case. With
agents all faults come in one run of torchrun. Without agents each fault has a run of
its own, with torchrun's own means: ``@record``, a limit on collectives, and one
restart, which runs the cases that had not begun.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record as recorded

from gradparity.benchmarks.tables import row, write_between

RESULTS = Path(__file__).parents[1] / "results" / "torchrun_faults.json"
PAGE = Path(__file__).resolve().parents[2] / "docs" / "decisions" / "harness.md"

LIMIT_S = 10.0
"""Time limit in seconds of a case with agents."""

GROUP_LIMIT_S = 40.0
"""Time limit in seconds of a collective without agents; starting ranks must meet in
it."""

END_S = 200.0
"""Seconds after which torchrun is ended from outside; ``END_ALL_S`` with all faults."""

END_ALL_S = 420.0

FLOOD = 50_000_000
WAYS = "agents", "without"
AT_ONCE = 2
"""Number of runs of torchrun at the same time."""


def total() -> None:
    """Run the collective that each case runs."""
    dist.all_reduce(torch.ones(1))


def raises() -> None:
    """Raise an exception."""
    raise ValueError("boo")


def sleeps() -> None:
    """Hang in Python code."""
    time.sleep(10_000)


def waits_alone() -> None:
    """Hang in a collective that no other rank calls."""
    total()
    total()


def hangs_at_the_end() -> None:
    """Hang after the last collective, when the other ranks no longer wait."""
    total()
    time.sleep(10_000)


def holds_the_lock() -> None:
    """Hang in native code that holds the interpreter's lock."""
    ctypes.PyDLL(None).sleep(10_000)


def exits_with_0() -> None:
    """Exit with 0, as if all were done."""
    os._exit(0)


def exits_with_3() -> None:
    """Exit with 3."""
    os._exit(3)


def crashes() -> None:
    """Crash by SIGSEGV."""
    ctypes.string_at(0)


def is_killed() -> None:
    """End by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)


def floods() -> None:
    """Print a lot, then do the same as the other ranks."""
    for _ in range(FLOOD // 100):
        print("x" * 99)
    total()


AT_THE_END = "hangs after the run's last collective"

FAULTS: dict[str, Callable[[], None]] = {
    "raises": raises,
    "hangs in Python": sleeps,
    "hangs in a collective": waits_alone,
    AT_THE_END: hangs_at_the_end,
    "hangs in native code, lock held": holds_the_lock,
    "`os._exit(0)`": exits_with_0,
    "`os._exit(3)`": exits_with_3,
    "SIGSEGV": crashes,
    "SIGKILL": is_killed,
    "prints 50 MB": floods,
}


def run_case(fault: str, rank: int) -> None:
    """Run a case on one rank; ``fault`` is empty if no rank has one."""
    FAULTS[fault]() if fault and rank == 1 else total()


def with_agents(folder: Path, faults: list[str]) -> None:
    """Run the cases of all faults, as a program that torchrun starts."""
    from gradparity.multiprocess import WorldError, WorldSpec
    from gradparity.multiprocess.elastic.agent import Agent, AgentCluster

    with Agent() as agent:
        if not agent.leads:
            agent.follow()
            return
        cluster = AgentCluster(agent, WorldSpec(world_size=2, timeout_s=LIMIT_S))

        def ran(fault: str) -> str:
            try:
                cluster.run(lambda: run_case(fault, dist.get_rank()))
            except WorldError as failure:
                return failure.root.headline
            return ""

        rows: dict[str, Any] = {}
        for fault in faults:
            ran("")
            began = time.monotonic()
            named = ran(fault)
            seconds = time.monotonic() - began
            rows[fault] = named or "nothing", not ran(""), seconds, 0
        (folder / "rows.json").write_text(json.dumps(rows))
        agent.finish(0)


@recorded
def without(folder: Path, fault: str) -> None:
    """Run the three cases, as a program that torchrun starts and restarts once."""
    limit = datetime.timedelta(seconds=GROUP_LIMIT_S)
    dist.init_process_group("gloo", timeout=limit)
    rank, journal = dist.get_rank(), folder / "journal"
    at = 2 if fault == AT_THE_END else 1
    begun = journal.read_text().split() if journal.exists() else []
    for number in range(len(begun) // 2, 3):
        total()
        if rank == 0:
            with journal.open("a") as file:
                file.write(f"{number} {time.monotonic()}\n")
        run_case(fault if number == at else "", rank)
        (folder / f"done-{number}-{rank}").write_text(f"{time.monotonic()}")
    dist.destroy_process_group()


def torchrun(folder: Path, limit_s: float, *program: str) -> tuple[str, bool]:
    """Run torchrun; return its messages, and True if it had to be ended."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", "2", "--max-restarts", "1", __file__]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        run = subprocess.Popen(
            [*launcher, *program],
            stdout=out,
            stderr=err,
            start_new_session=True,
            # Else ranks that were restarted find addresses of the attempt before in
            # torchrun's own store, and most restarts fail.
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )
        try:
            run.wait(limit_s)
            ended = False
        except subprocess.TimeoutExpired:
            ended = True
            run.send_signal(signal.SIGTERM)  # it ends its processes
            run.wait()
    return (folder / "err").read_text(errors="replace"), ended


def cause_of(said: str) -> str:
    """Return the failure that torchrun reports first, that of the first attempt."""
    found = re.search(r"failed \(exitcode: (-?\d+)\) local_rank: (\d)", said)
    return f"rank {found[2]}: exit code {found[1]}" if found else "nothing"


def row_without(fault: str) -> tuple[str, bool, float, int]:
    """Return cause, True if the last case ran, seconds lost, bytes on the terminal."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        said, ended = torchrun(folder, END_S, "without", name, fault)
        lines = (folder / "journal").read_text().split()
        began = dict(zip(lines[::2], map(float, lines[1::2]), strict=True))
        done = all((folder / f"done-2-{rank}").exists() for rank in range(2))
        seconds = began.get("2", math.inf) - began.get("1", math.inf)
        named = cause_of(said) + f", not over after {END_S:g} s" * ended
        return named, done, seconds, (folder / "out").stat().st_size


def measure(faults: list[str]) -> dict[str, Any]:
    """Return the results of each fault in both ways."""
    from gradparity.benchmarks.harness import provenance

    started = provenance()
    with tempfile.TemporaryDirectory() as name:
        said, _ = torchrun(Path(name), END_ALL_S, "agents", name, *faults)
        written = Path(name) / "rows.json"
        if not written.exists():
            sys.exit(f"the run with agents came to no end:\n{said}")
        agents = json.loads(written.read_text())
        printed = (Path(name) / "out").stat().st_size
    with ThreadPoolExecutor(AT_ONCE) as pool:
        plain = dict(zip(faults, pool.map(row_without, faults), strict=True))
    rows = {
        fault: {"agents": agents[fault], "without": plain[fault]} for fault in faults
    }
    return {"provenance": started, "rows": rows, "agents_printed_bytes": printed}


def table(record: dict[str, Any]) -> str:
    """Return the table of a record."""
    heads = ["fault of rank 1"]
    heads += [f"{way}: {what}" for way in WAYS for what in ("named", "next case")]
    lines = [row(*heads), "|---" * len(heads) + "|"]
    for fault, ways in record["rows"].items():
        cells = [fault]
        for way in WAYS:
            named, later, seconds, size = ways[way]
            flood = f", {size >> 20} MiB on the terminal" if size > 1 << 20 else ""
            cells.append(named + flood)
            cells.append(f"after {seconds:.1f} s" if later else "**none**")
        lines.append(row(*cells))
    made = record["provenance"]
    lines += [
        "",
        f"On the terminal with agents, all faults together: "
        f"{record['agents_printed_bytes']} bytes. torch {made['torch']}, Python "
        f"{made['python']}, {made['cores']} cores, load {made['load']} at the start, "
        f"commit {made['commit']}, {made['started'][:10]}.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] = ()) -> None:
    """Measure; record the results if all faults were measured, else print them."""
    chosen = list(argv)
    record = measure(chosen or list(FAULTS))
    if chosen:
        print(table(record))
        return
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    write_between(PAGE, {"torchrun": table(record)})


if __name__ == "__main__":
    match sys.argv[1:2]:
        case ["agents"]:
            with_agents(Path(sys.argv[2]), sys.argv[3:])
        case ["without"]:
            without(Path(sys.argv[2]), sys.argv[3])
        case _:
            main(sys.argv[1:])
