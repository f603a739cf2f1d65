"""The speed of the harness, with torch's own test classes beside it in the same run.

1. The same trivial all_reduce tests through pytest: CPU seconds of the whole process
   tree for ours, ``MultiProcContinuousTest`` and ``MultiProcessTestCase``.
2. Milliseconds of one warm call above the function's own work, by isolation.
3. Seconds from each fault of the matrix to the error in the parent, world 4.
4. A collective after work, with and without preemption between a rank's threads.
5. Ten sessions at once on this machine.
6. A large world: start, all_reduce, stop, memory.
7. Cost: tests that train, beside the same bodies in plain processes; the start of a
   large world; the memory of a rank; tests on torch's classes, and the same tests on
   our ranks. ``--cost`` measures these alone.

``gradparity bench harness`` writes ``results/harness.json`` and, from it, the tables of
``docs/harness-inside.md``; ``--out FILE`` writes that file alone. The peers need the
package ``expecttest``; without it they are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradparity.benchmarks.harness_tables import write_tables
from gradparity.benchmarks.together import start_together
from gradparity.multiprocess import Cluster, WorldError
from gradparity.multiprocess.parent.forkserver_client import forkserver
from gradparity.multiprocess.spec import Isolation
from gradparity.tests.fault_matrix import MATRIX, Fault, act

OURS = """
import pytest, torch, torch.distributed as dist

@pytest.mark.world(world_size={size})
@pytest.mark.parametrize("number", range({tests}))
def test_it(world, number):
    value = torch.ones(1) * world.rank
    dist.all_reduce(value)
    assert value.item() == sum(range({size}))
"""

CONTINUOUS = """
import torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcContinuousTest

class Body(MultiProcContinuousTest):
    world_size = {size}

    @classmethod
    def backend_str(cls):
        return "gloo"

    @classmethod
    def device_type(cls):
        return "cpu"

    def _body(self):
        value = torch.ones(1) * self.rank
        dist.all_reduce(value)
        assert value.item() == sum(range({size}))
"""

CASE = """
import torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase

class Body(MultiProcessTestCase):
    world_size = {size}

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def _body(self):
        store = dist.FileStore(self.file_name, {size})
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size={size}
        )
        value = torch.ones(1) * self.rank
        dist.all_reduce(value)
        assert value.item() == sum(range({size}))
        dist.destroy_process_group()
"""

CLASSES = """
for group in range({classes}):
    tests = {{f"test_{{n}}": lambda self: self._body() for n in range({tests})}}
    tests["__module__"] = __name__
    globals()[f"Test{{group}}"] = type(f"Test{{group}}", (Body,), tests)
"""

NOTHING = """
import pytest, torch, torch.distributed as dist

@pytest.mark.parametrize("number", range({tests}))
def test_it(number):
    assert {size}
"""

BODY = """
import torch, torch.distributed as dist

def body(rank):
    torch.manual_seed(rank)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(4):
        model(torch.randn(64, 256)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
"""
"""Code that trains a step on each rank, like a small test."""

TRAINS = """
import pytest
from body import body

@pytest.mark.world(world_size={size})
@pytest.mark.parametrize("number", range({tests}))
def test_it(world, number):
    body(world.rank)
"""

PLAIN = """
import os, resource, sys, tempfile
import torch, torch.distributed as dist
from body import body

tests, size = map(int, sys.argv[1:])
torch.set_num_threads(1)
torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # runs torch's lazy imports
for number in range(tests):
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                # As our ranks: else gloo's threads would cost these far more.
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
                store = dist.FileStore(folder + "/store", size)
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=size
                )
                body(rank)
                dist.barrier()
                dist.destroy_process_group()
                os._exit(0)
            pids.append(pid)
        if any(os.waitpid(pid, 0)[1] for pid in pids):
            sys.exit("a rank failed")
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime)
"""
"""Program that forks a process for each rank of each test, after all imports."""

HARNESSES = {
    "gradparity": OURS,
    "MultiProcContinuousTest": CONTINUOUS + CLASSES,
    "MultiProcessTestCase": CASE + CLASSES,
}
PYTEST = ("-p", "no:cacheprovider")
ADOPT = "--gradparity-adopt"
ADOPTED = (
    ("MultiProcContinuousTest", 1),
    ("MultiProcContinuousTest", 10),
    ("MultiProcessTestCase", 1),
    ("MultiProcessTestCase", 2),
)
"""Torch's test class, and how many such classes run one after another."""
COMMON = "torch.testing._internal.common_distributed"
SLOW_S = 1.5e-3
"""Least seconds for which a collective of two ranks on one machine counts as slow."""
RESULTS = Path(__file__).parent / "results" / "harness.json"


def session(
    source: str, size: int, tests: int, *options: str, classes: int = 1
) -> dict[str, float]:
    """Run one generated test file; return wall and CPU seconds of the process tree.

    Bytecode is cached, as by default: otherwise pytest would compile its plugins in
    each session, which costs a second.
    """
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as folder:
        source = source.format(size=size, tests=tests, classes=classes)
        Path(folder, "test_it.py").write_text(source)
        Path(folder, "body.py").write_text(BODY)
        before = _cpu_s()
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *PYTEST, *options],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
        )
        wall_s = time.monotonic() - began
    if f"{classes * tests} passed" not in done.stdout:
        raise RuntimeError(done.stdout + done.stderr)
    return {"wall_s": round(wall_s, 3), "cpu_s": round(_cpu_s() - before, 3)}


def sessions(size: int, tests: int) -> dict[str, Any]:
    """Compare the harnesses on the same tests, one after the other."""
    names = list(HARNESSES)
    if importlib.util.find_spec("expecttest") is None:
        print("peers left out: they need the package expecttest")
        names = ["gradparity"]
    session(NOTHING, size, tests)  # fills the caches of bytecode
    found: dict[str, Any] = {n: session(HARNESSES[n], size, tests) for n in names}
    # What any session pays that imports torch: pytest, and that import.
    found["torch imported, no ranks"] = session(NOTHING, size, tests)
    for peer in names[1:]:
        ratio = found[peer]["cpu_s"] / found["gradparity"]["cpu_s"]
        found[peer]["cpu_ratio_to_ours"] = round(ratio, 1)
    return found


def calls(size: int, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of a warm call, minus those of its function."""
    found = {}
    with Cluster(size) as cluster:
        cluster.run(timed_all_reduce)
        isolations: tuple[Isolation, ...] = ("pool", "group", "process")
        for isolation in isolations:
            above = []
            for _ in range(repeats):
                began = time.perf_counter()
                # The slowest rank's own time: the parent waits for that one.
                own_s = max(
                    cluster.with_options(isolation=isolation).run(timed_all_reduce)
                )
                above.append(time.perf_counter() - began - own_s)
            found[f"{isolation}_ms"] = round(statistics.median(above) * 1e3, 2)
    return found


def timed_all_reduce() -> float:
    """Return the seconds that one all_reduce takes on this rank."""
    began = time.perf_counter()
    dist.all_reduce(torch.ones(1))
    return time.perf_counter() - began


def faults(size: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return fault -> promised and median seconds until its error is reported.

    For a fault that hangs, the seconds after its time limit count. The faults are those
    of the tests; here the world is larger, and the time is measured.
    """
    found = {}
    with Cluster(size) as cluster:
        for name, fault in MATRIX.items():
            took = [detection_s(cluster, fault) for _ in range(repeats)]
            median_s = round(statistics.median(took), 3)
            found[name] = {"promised_s": fault.within_s, "median_s": median_s}
    return found


def detection_s(cluster: Cluster, fault: Fault) -> float:
    """Trigger the fault once on rank 1; return the seconds until its error."""
    cluster.start()
    began = time.perf_counter()
    try:
        cluster.with_options(timeout_s=fault.limit_s).run(act, fault.bad, fault.others)
    except WorldError as failure:
        took_s = time.perf_counter() - began
        if failure.root.rank != 1:
            raise RuntimeError(f"not rank 1 is blamed: {failure}") from failure
    else:
        raise RuntimeError("the fault was not seen")
    return took_s - (fault.limit_s if fault.hangs else 0.0)


def turns(repeats: int) -> dict[str, float]:
    """Return milliseconds of a collective after work, for each wake-up setting."""
    found: dict[str, float] = {"slow_above_ms": SLOW_S * 1e3}
    policies = {"preempt": os.SCHED_OTHER, "wait": os.SCHED_BATCH}
    with Cluster(2) as cluster:
        for name, policy in policies.items():
            ranks = cluster.with_options(isolation="process").run(
                after_work, policy, repeats
            )
            # The rank that comes last does not wait for the other.
            seconds = [min(both) for both in zip(*ranks, strict=True)]
            found[f"{name}_ms"] = round(statistics.median(seconds) * 1e3, 2)
            slow = sum(took_s > SLOW_S for took_s in seconds)
            found[f"{name}_slow"] = round(slow / repeats, 2)
    return found


def after_work(policy: int, repeats: int) -> list[float]:
    """Return the seconds of collectives, each after reading 262 MB of memory."""
    # gloo's threads already exist, and each thread has its own policy: set all of them.
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), policy, os.sched_param(0))
    torch.set_num_threads(1)
    # More than any cache holds, as gradients are: the cores are busy with memory when
    # the answer of a peer wakes a thread.
    gradients = [torch.ones(256, 256) for _ in range(1000)]
    took = []
    for _ in range(repeats):
        start_together()
        torch._foreach_norm(gradients)
        took.append(timed_all_reduce())
    return took


def large(size: int) -> dict[str, float]:
    """Start, use and stop one large world."""
    began = time.perf_counter()
    with Cluster(size, start_timeout_s=600) as cluster:
        started = time.perf_counter()
        assert cluster.with_options(timeout_s=600).run(timed_all_reduce)
        used = time.perf_counter()
        memory = sum(_pss_mib(pid) for pid in cluster.pids)
    return {
        "ranks": size,
        "start_s": round(started - began, 2),
        "all_reduce_s": round(used - started, 3),
        "stop_s": round(time.perf_counter() - used, 2),
        "memory_mib": round(memory),
    }


def trains(size: int, tests: int, repeats: int) -> dict[str, float]:
    """Measure CPU seconds of tests that train, and of their bodies in plain processes.

    Imports are left out: the CPU seconds of as many empty tests, in a session that
    imports torch, are subtracted from ours.
    """
    session(NOTHING, size, tests)  # fills the caches of bytecode
    ours, empty, plain = [], [], []
    for _ in range(repeats):  # in turns, because the load of the machine changes
        # The smallest of each is taken: other programs only ever add to CPU time, by
        # colder caches.
        empty.append(session(NOTHING, size, tests)["cpu_s"])
        ours.append(session(TRAINS, size, tests)["cpu_s"])
        plain.append(_plain_processes_s(size, tests))
    above_s, plain_s = min(ours) - min(empty), min(plain)
    return {
        "tests": tests,
        "size": size,
        "repeats": repeats,
        "session_cpu_s": min(ours),
        "empty_session_cpu_s": min(empty),
        "plain_processes_cpu_s": round(plain_s, 2),
        "ratio": round(above_s / plain_s, 2),
    }


def _plain_processes_s(size: int, tests: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "body.py").write_text(BODY)
        Path(folder, "plain.py").write_text(PLAIN)
        done = subprocess.run(
            [sys.executable, "plain.py", str(tests), str(size)],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    return float(done.stdout)


def adopted(size: int, tests: int) -> list[dict[str, Any]]:
    """Measure CPU seconds of tests on torch's classes, and of the same tests adopted.

    ``above_cpu_s`` excludes a session that imports torch's module and runs as many
    empty tests. A class of ``MultiProcContinuousTest`` starts its ranks once; one of
    ``MultiProcessTestCase`` starts them for each test.
    """
    nothing = f"{NOTHING}import {COMMON}\n"
    session(nothing, size, tests)  # fills the caches of bytecode
    found = []
    for name, classes in ADOPTED:
        run = partial(session, HARNESSES[name], size, tests, classes=classes)
        empty_s = min(
            session(nothing, size, classes * tests)["cpu_s"] for _ in range(3)
        )
        ours_s = min(run(ADOPT)["cpu_s"] for _ in range(3))
        theirs_s = run()["cpu_s"]
        found.append(
            {
                "name": name,
                "classes": classes,
                "tests": classes * tests,
                "empty_cpu_s": empty_s,
                "cpu_s": theirs_s,
                "adopted_cpu_s": ours_s,
                "above_cpu_s": round(theirs_s - empty_s, 2),
                "adopted_above_cpu_s": round(ours_s - empty_s, 2),
                "ratio": round(theirs_s / ours_s, 1),
            }
        )
    return found


def memory(size: int) -> dict[str, float]:
    """Measure each rank's unshared memory in MiB: at start, and after an all-reduce."""
    with Cluster(size, start_timeout_s=600) as cluster:
        started = [_private_mib(pid) for pid in cluster.pids]
        cluster.with_options(timeout_s=600).run(timed_all_reduce)
        used = [_private_mib(pid) for pid in cluster.pids]
    return {
        "ranks": size,
        "started_mib": round(max(started), 1),
        "after_all_reduce_mib": round(max(used), 1),
    }


def start(size: int, repeats: int) -> dict[str, float]:
    """Return the seconds until a world is ready: the least of several measurements."""
    with Cluster(2):
        pass  # the forkserver is there
    took, used = [], []
    for _ in range(repeats):
        before, began = _tree_cpu_s(), time.perf_counter()
        with Cluster(size, start_timeout_s=600) as cluster:
            took.append(time.perf_counter() - began)
            used.append(_tree_cpu_s() - before + sum(map(_cpu_of_s, cluster.pids)))
    return {
        "ranks": size,
        "start_s": round(min(took), 2),
        "cpu_s": round(min(used), 2),
        "repeats": repeats,
    }


def cost(tests: int, large_size: int) -> dict[str, Any]:
    """Measure the cost of the harness, and the savings for adopted tests."""
    return {
        "provenance": provenance(),
        "memory": memory(large_size),
        "start": start(large_size, 5),
        "trains": trains(2, tests, 3),
        "adopted": adopted(2, tests // 5),
    }


def concurrent(runs: int, size: int, tests: int) -> dict[str, float]:
    """Run several copies of a generated test file at once; all must pass."""
    before, began = _cpu_s(), time.monotonic()
    with ThreadPoolExecutor(runs) as pool:
        list(pool.map(lambda _: session(OURS, size, tests), range(runs)))
    return {
        "runs": runs,
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(_cpu_s() - before, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, and write the record with its provenance."""
    parser = argparse.ArgumentParser(prog="gradparity bench harness")
    parser.add_argument("--tests", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--large", type=int, default=64, help="0 leaves it out")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--cost", action="store_true", help="measure the cost alone")
    options = parser.parse_args(argv)
    if options.cost:
        found = json.loads(RESULTS.read_text())
        found["cost"] = cost(5 * options.tests, options.large)
        return _record(found, options.out)
    found = {
        "provenance": provenance(),
        "sessions": {
            "tests": options.tests,
            "size": 2,
            **sessions(2, options.tests),
        },
        "calls": {f"size_{n}": calls(n, options.repeats) for n in (2, 4)},
        "faults_size_4": faults(4, 5),
        "turns": turns(200),
        "concurrent_runs": concurrent(10, 2, options.tests),
    }
    if options.large:
        found["large"] = large(options.large)
        found["cost"] = cost(5 * options.tests, options.large)
    return _record(found, options.out)


def _record(found: dict[str, Any], file: Path) -> int:
    _print(found)
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".new")
    unfinished.write_text(json.dumps(found, indent=1) + "\n")
    unfinished.replace(file)
    if file == RESULTS:
        write_tables(found)
    return 0


def provenance() -> dict[str, Any]:
    """Return the versions and the machine of the measurement."""
    root = Path(__file__).parent.parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=root,
        capture_output=True,
        text=True,
    )
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": f"{platform.system()}-{platform.machine()}".lower(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "commit": commit.stdout.strip(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _print(found: dict[str, Any]) -> None:
    for part, figures in found.items():
        print(part)
        for name, value in figures.items():
            print(f"  {name:<26} {value}")


# Of children that have been waited for. A session waits for its forkserver, and that
# for its ranks, so the whole tree counts.
def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _tree_cpu_s() -> float:
    """Return CPU seconds of this process and the forkserver, which forks the ranks."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime + _cpu_of_s(forkserver().pid)


def _cpu_of_s(pid: int) -> float:
    # utime and stime, fields 14 and 15 of proc(5): the name before them may hold
    # spaces.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _private_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    lines = (line.split() for line in text.splitlines() if line.startswith("Private"))
    return sum(int(line[1]) for line in lines) / 1024


def _pss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    sys.exit(main())
