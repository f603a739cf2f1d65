"""Ctrl-C shows where each rank is: in a program, and in a session of pytest."""

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

START_S = 100.0
"""Seconds for ranks to reach the point where they wait, on any machine."""

HEAD = """
import os, time
import pytest, torch, torch.distributed as dist
from gradparity.multiprocess import Cluster, TestCase, current_world

def stay():
    rank = current_world().rank
    print(f"stays on {rank}")
    open(f"rank{rank}", "w").close()
    if rank == 0:
        dist.all_reduce(torch.ones(2))
    time.sleep(1000)
"""

PROGRAM = """
with Cluster(2) as cluster:
    cluster.run(stay)
"""

MARKED = """
@pytest.mark.world(2)
def test_it(world):
    stay()
"""

CLASS = """
class TestIt(TestCase):
    def test_it(self):
        stay()
"""


@pytest.mark.parametrize(
    ("body", "command"),
    [
        pytest.param(PROGRAM, [], id="program"),
        pytest.param(MARKED, ["-m", "pytest"], id="marker"),
        # as the one before, and with the class of the next
        pytest.param(MARKED, ["-m", "pytest", "-s"], id="live", marks=pytest.mark.slow),
        pytest.param(CLASS, ["-m", "pytest"], id="class", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_shows_where_each_rank_is(
    tmp_path: Path, warm_ranks: list[str], body: str, command: list[str]
) -> None:
    (tmp_path / "test_it.py").write_text(HEAD + body)
    with subprocess.Popen(
        [*warm_ranks, *command, "test_it.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as parent:
        try:
            deadline = time.monotonic() + START_S
            while not all((tmp_path / f"rank{rank}").exists() for rank in (0, 1)):
                assert parent.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)
            time.sleep(0.2)  # the one is in its collective by now
            parent.send_signal(signal.SIGINT)
            said, _ = parent.communicate(timeout=START_S)
        finally:
            parent.kill()
    assert "KeyboardInterrupt" in said and parent.returncode != 0
    assert said.count("interrupted: rank") == 2
    assert said.count("stays on 0\n") == said.count("stays on 1\n") == 1
    assert "interrupted: rank 1: still running after" in said
    assert re.search(r"File .*test_it.py\", line \d+ in stay", said)
    assert "rank 0: #1 allreduce float32[2] in the default group, test_it.py:" in said
