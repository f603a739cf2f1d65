"""Attacks over torchrun's port: readable and forged values."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

# In a process of torchrun: all that its agent stores is also written to a file.
RECORD = """
import os, pickle
from torch.distributed import PrefixStore

store_set = PrefixStore.set

def recorded_set(self, key, value):
    data = value if isinstance(value, bytes) else value.encode()
    with open(f"recorded-{os.environ['RANK']}", "ab") as file:
        pickle.dump((key, data), file)
    return store_set(self, key, value)

PrefixStore.set = recorded_set
"""

TESTS = """
import os, unittest
import pytest, torch
import torch.distributed as dist
import torch.testing._internal.common_distributed as common
from gradparity.multiprocess import TestCase

def test_changes_the_environment_of_the_session():
    os.environ["PASSWORD_OF_THE_TEST"] = os.environ["PASSWORD"][::-1]
    os.environ["OMP_SCHEDULE"] = "static,7"

@pytest.mark.world(world_size=2)
def test_marked(world):
    assert os.environ["OMP_SCHEDULE"] == "static,7"
    assert "GRADPARITY_SECRET" not in os.environ
    assert os.environ["PASSWORD"]  # torchrun's own, on every host

class TestOurs(TestCase):
    world_size = 2

    def test_sum(self):
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 2

class TestTorchs(common.MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_sum(self):
        assert "RANK" not in os.environ  # as a process of torch's class
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group(
            "gloo", store=store, rank=self.rank, world_size=self.world_size)
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 2
"""

# Called with "record", or with "replay" and a folder in which it was recorded.
PROGRAM = """
import os, pickle, sys, time
from record import store_set

def ran(marker):
    with open(marker, "a") as file:
        file.write("ran\\n")

def mine(marker):
    return "mine"

mode, marker, folder = sys.argv[1:4]
rank, replays = os.environ["RANK"], mode == "replay"

if replays and rank == "1":
    from datetime import timedelta
    from torch.distributed import PrefixStore, TCPStore
    port = int(os.environ["MASTER_PORT"])
    raw = TCPStore(os.environ["MASTER_ADDR"], port, timeout=timedelta(seconds=60))
    attacker = PrefixStore("gradparity/0/2/agent0", raw)
    for other in "01":
        with open(f"{folder}/recorded-{other}", "rb") as file:
            while file.peek(1):
                key, value = pickle.load(file)
                if not key.startswith(("here", "bye", "reported", "fault")):
                    store_set(attacker, key, value)
elif replays:
    time.sleep(10)  # rank 1 is to find yesterday's messages before today's

from gradparity.multiprocess import WorldSpec
from gradparity.multiprocess.elastic.agent import Agent, AgentCluster

with Agent() as agent:
    if agent.leads:
        cluster = AgentCluster(agent, WorldSpec(world_size=2))
        cluster.run(mine if replays else ran, marker)
        agent.finish(0)
    else:
        agent.follow()
"""


SECRET = secrets.token_hex(16)
PASSWORD = secrets.token_hex(16)


def torchrun(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    # As --standalone, but for the id of the run: torchrun's default, in every run.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--rdzv-id", "none"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return subprocess.run(
        [*launcher, "--nproc-per-node", "2", *args],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "GRADPARITY_SECRET": SECRET, "PASSWORD": PASSWORD},
    )


@pytest.mark.slow
def test_no_secret_can_be_read_in_the_store(tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="torch's classes need it")
    (tmp_path / "conftest.py").write_text(RECORD)
    (tmp_path / "test_it.py").write_text(TESTS)
    session = ("-m", "pytest", "-p", "no:cacheprovider", "-q", "--gradparity-adopt")
    done = torchrun(tmp_path, *session, "test_it.py")
    assert done.stdout.count("4 passed") == 1, done.stdout + done.stderr
    read = b"".join(file.read_bytes() for file in tmp_path.glob("recorded-?"))
    assert b"test_sum" in read and b"static,7" in read  # all of it was recorded
    for hidden in (SECRET, PASSWORD, PASSWORD[::-1]):
        assert hidden.encode() not in read


@pytest.mark.slow
def test_a_recorded_call_runs_in_no_later_run(tmp_path: Path) -> None:
    marker, yesterday, today = (tmp_path / name for name in ("marker", "old", "new"))
    for folder in (yesterday, today):
        folder.mkdir()
        (folder / "record.py").write_text(RECORD)
        (folder / "program.py").write_text(PROGRAM)
    arguments = "program.py", "record", str(marker), str(yesterday)
    assert torchrun(yesterday, *arguments).returncode == 0
    assert marker.read_text() == "ran\n" * 2
    arguments = "program.py", "replay", str(marker), str(yesterday)
    done = torchrun(today, *arguments)
    assert done.returncode != 0
    assert "is not signed by rank 0 for this run" in done.stderr, done.stderr
    assert marker.read_text() == "ran\n" * 2
