"""Concurrent runs of a suite on one machine do not disturb each other."""

import json
import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest

RUNS = 3
SLOTS = 4
CHECK = Path(__file__).parents[1].joinpath("nothing_left.py")

SUITE = """
import json, os, time
import pytest, torch, torch.distributed as dist

@pytest.mark.world(world_size=[1, 2, 4])
def test_sum(world):
    began = time.monotonic()
    mine = torch.ones(1) * (int(os.environ["RUN"]) + world.rank)
    world.store.set(f"run{world.rank}", os.environ["RUN"])
    dist.all_reduce(mine)
    expected = int(os.environ["RUN"]) * world.world_size + sum(range(world.world_size))
    assert mine.item() == expected
    time.sleep(world.world_size / 2)  # runs that do not wait for slots overlap
    runs = {world.store.get(f"run{rank}").decode() for rank in range(world.world_size)}
    assert runs == {os.environ["RUN"]}
    dist.barrier()
    if world.rank == 0:
        took = {"began": began, "ended": time.monotonic(), "size": world.world_size}
        with open(os.environ["LOG"], "a") as log:
            log.write(json.dumps(took) + "\\n")

@pytest.mark.world(world_size=2, isolation="process")
def test_fresh_ranks(world):
    assert dist.get_world_size() == 2

@pytest.mark.world(world_size=2)
def test_that_fails(world):
    if world.rank == 1:
        os._exit(3)
    dist.barrier()
"""

# torch is imported once, by a server that nothing_left.py watches as it does the runs
DRIVER = """
import os, subprocess, sys
from gradparity.tests import warm_python
server = [sys.executable, "-P", warm_python.__file__, "serve", "warm"]
subprocess.run([*server, str(os.getpid())], check=True)
command = [*warm_python.command("warm", ranks=True), "-m", "pytest", "-q"]
command += ["-p", "no:cacheprovider"]
command += ["-p", "no:hypothesispytest"]  # half a second for nothing, in each run
runs = []
for number in range(int(sys.argv[1])):
    env = {**os.environ, "RUN": str(number)}
    run = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    runs.append(run)
for run in runs:
    said = run.communicate()[0]
    assert "1 failed, 4 passed" in said, said
"""


@pytest.mark.slow
def test_runs_at_once_all_pass_and_share_the_slots(tmp_path: Path) -> None:
    folder, log = tmp_path / "suite", tmp_path / "log"
    folder.mkdir()
    (folder / "test_suite.py").write_text(SUITE)
    env = {
        **os.environ,
        "GRADPARITY_CPU_SLOTS": str(SLOTS),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "LOG": str(log),
    }
    env.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, str(CHECK), sys.executable, "-c", DRIVER, str(RUNS)]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(calls) == 3 * RUNS
    assert most_ranks_at_once(calls) <= SLOTS


def most_ranks_at_once(calls: list[dict[str, float]]) -> float:
    changes = [(call["began"], call["size"]) for call in calls]
    changes += [(call["ended"], -call["size"]) for call in calls]
    return max(accumulate(size for _, size in sorted(changes)))
