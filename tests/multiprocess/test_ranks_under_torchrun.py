"""Sessions of pytest, and programs, on the ranks of torchrun."""

import socket
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

STANDALONE = ("--standalone", "--nproc-per-node", "2")

TESTS = """
import os, signal, subprocess, sys, time
import pytest, torch, torch.distributed as dist
from hypothesis import given, settings, strategies as st

def total(world):
    value = torch.ones(1) * world.rank
    dist.all_reduce(value)
    return value.item()

@pytest.fixture
def doubled(world):
    return 2 * world.rank

def test_ordinary(tmp_path):
    print("once")

@pytest.mark.world(world_size=2)
def test_raise(world):
    if world.rank == 1:
        raise ValueError("boo")
    total(world)

@pytest.mark.world(world_size=2)
def test_innocent(world, doubled):
    assert total(world) == 1
    assert doubled == 2 * world.rank
    assert world.store.timeout.total_seconds() > 3600

@pytest.mark.world(world_size=2, timeout_s=1)
def test_hang(world):
    if world.rank == 1:
        time.sleep(1000)
    total(world)

@pytest.mark.world(world_size=2, timeout_s=1)
def test_one_too_many(world):
    if world.rank == 1:
        total(world)

@pytest.mark.world(world_size=2, isolation="group")
def test_innocent_again(world):
    assert total(world) == 1

@pytest.mark.world(world_size=2)
@settings(max_examples=20)
@given(n=st.integers(0, 1000))
def test_examples_are_the_same_on_all_ranks(world, n):
    value = torch.tensor([n])
    dist.all_reduce(value)
    assert value.item() == 2 * n

@pytest.mark.world(world_size=3)
def test_three(world):
    pass

@pytest.mark.world(world_size=1)
def test_one(world):
    assert dist.get_world_size() == 1

@pytest.mark.world(world_size=2)
def test_killed(world):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    total(world)

@pytest.mark.world(world_size=2)
def test_assert(world):
    assert [world.rank, 5] == [0, 5]

def test_changes_the_environment_of_the_session(tmp_path):
    os.environ["OMP_BEFORE"] = os.getcwd()
    os.chdir(tmp_path)
    os.environ["OMP_CHANGED"] = os.environ["SECRET_CHANGED"] = str(tmp_path)

@pytest.fixture(scope="session")
def token():
    return os.urandom(8)

@pytest.mark.world(world_size=2)
def test_changes_of_the_environment_reach_ranks(world, token):
    assert os.environ["OMP_CHANGED"] == os.getcwd()
    assert "SECRET_CHANGED" not in os.environ  # on no rank: it would be in the store
    found = [None, None]
    dist.all_gather_object(found, world.once(lambda: token))
    assert found[0] == found[1]

def test_changes_back():
    os.chdir(os.environ["OMP_BEFORE"])
    del os.environ["OMP_CHANGED"], os.environ["SECRET_CHANGED"]

@pytest.mark.world(world_size=2)
def test_changes_of_the_environment_are_undone(world):
    assert "OMP_CHANGED" not in os.environ

INNER = '''
import os, pytest
@pytest.mark.world(world_size=2)
def test_inner(world):
    assert os.environ["LOCAL_WORLD_SIZE"] == "2"
'''

def test_a_session_in_a_test_has_ranks_of_its_own(tmp_path):
    (tmp_path / "test_inner.py").write_text(INNER)
    command = [sys.executable, "-m", "pytest", "-q", "test_inner.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert "1 passed" in done.stdout, done.stdout + done.stderr

@pytest.mark.world(world_size=2)
def test_skip(world):
    pytest.skip("not today")
"""

AGENTS = """
import time
from gradparity.multiprocess import WorldError, WorldSpec, current_world
from gradparity.multiprocess.elastic.agent import Agent, AgentCluster

def slow():
    if current_world().rank == 1:
        time.sleep(3)

def fail():
    if current_world().rank == 1:
        raise ValueError("boo")

with Agent() as agent:
    if agent.leads:
        cluster = AgentCluster(agent, WorldSpec(world_size=2, timeout_s=1))
        cluster.with_options(timeout_s=30).run(slow)
        cluster.with_options(timeout_s=30).run(lambda data: data, b"x" * (9 << 20))
        ranks = cluster.run(lambda: current_world().rank)
        try:
            cluster.run(fail)
        except WorldError as failure:
            print(ranks, failure.root.headline)
        # Every process has read all of the calls before the last.
        ends = "", "/0", "/1", "/2", "/readers"
        kept = "message", "go", "start/1", "fact/1"
        keys = [f"{what}/{n}{end}" for what in kept
                for n in range(1, agent._calls) for end in ends]
        print(agent._calls, [key for key in keys if agent._meeting.raw.check([key])])
        agent.finish(0)
    else:
        agent.follow()
"""


Torchrun = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def torchrun(tmp_path: Path, warm_python: list[str]) -> Torchrun:
    """Return a function that runs a program by torchrun, on two ranks."""
    launcher = [*warm_python, "-m", "torch.distributed.run", *STANDALONE]

    def run(*program: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*launcher, "--no-python", *warm_python, *program],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )

    return run


@pytest.mark.slow
def test_a_session_on_torchruns_ranks(torchrun: Torchrun, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    arguments = ("-m", "pytest", "-p", "no:cacheprovider", "-q", "--junitxml=j.xml")
    done = torchrun(*arguments, "test_it.py")
    assert done.returncode != 0
    assert done.stdout.count("5 failed, 10 passed, 2 skipped") == 1, done.stdout
    assert "root cause: rank 1: raised ValueError: boo" in done.stdout
    assert "root cause: rank 1: hung, still running" in done.stdout
    assert "root cause: rank 1: hung, waiting in a collective" in done.stdout
    assert "root cause: rank 1: killed by SIGKILL" in done.stdout
    assert "assert [1, 5] == [0, 5]" in done.stdout  # pytest's assert, on a rank
    found = {}
    for case in ElementTree.parse(tmp_path / "j.xml").iter("testcase"):
        found[case.get("name")] = [child.tag for child in case]
    assert {name for name, tags in found.items() if tags == ["failure"]} == {
        "test_raise",
        "test_hang",
        "test_one_too_many",
        "test_killed",
        "test_assert",
    }
    assert found["test_three"] == found["test_skip"] == ["skipped"]


SPMD = """
import pytest, torch, torch.distributed as dist

@pytest.fixture(scope="session", autouse=True)
def group():
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()

def test_sum():
    value = torch.ones(1) * dist.get_rank()
    dist.all_reduce(value)
    assert value.item() == 1
"""


@pytest.mark.slow
def test_a_session_without_tests_for_ranks_is_left_alone(
    torchrun: Torchrun, tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text(SPMD)
    done = torchrun("-m", "pytest", "-p", "no:cacheprovider", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 passed") == 2  # each process has its own, as before


# Neither text is how one would search for the other kind.
CLASSES = """
import gradparity.multiprocess as ranks
from gradparity.multiprocess import Cluster, TestCase

class TestIt(TestCase):
    world_size = 2

    def test_it(self):
        assert ranks.current_world().world_size == 2
"""

SPMD_WITH_WORDS = (
    SPMD
    + """
# Once @pytest.mark.world(size=2), before: from multiprocess import TestCase
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(("text", "sessions"), [(CLASSES, 1), (SPMD_WITH_WORDS, 2)])
def test_what_was_collected_says_who_runs_it(
    torchrun: Torchrun, tmp_path: Path, text: str, sessions: int
) -> None:
    (tmp_path / "test_it.py").write_text(text)
    arguments = ("-m", "pytest", "-p", "no:cacheprovider", "-q", "--junitxml=j.xml")
    done = torchrun(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 passed") == sessions, done.stdout
    assert len(list(ElementTree.parse(tmp_path / "j.xml").iter("testcase"))) == 1


@pytest.mark.slow
def test_workers_of_xdist_are_refused(torchrun: Torchrun, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(CLASSES)
    done = torchrun("-m", "pytest", "-q", "-n", "2")
    assert done.returncode != 0
    assert "under torchrun leave out -n" in done.stderr, done.stdout + done.stderr


ON_HOSTS = """
import os
import torch, torch.distributed as dist
import torch.testing._internal.common_distributed as common
from gradparity.multiprocess import TestCase, current_world

class TestOurs(TestCase):
    world_size = 2
    default_group = False

    def test_group(self):
        dist.init_process_group("gloo", store=current_world().store,
                                rank=self.rank, world_size=self.world_size)
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 2
        dist.destroy_process_group()

class TestTorchs(common.MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_it(self):
        raise AssertionError
"""


@pytest.mark.slow
def test_ranks_of_several_hosts_are_not_sent_to_one_file(tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="torch's classes need it")
    (tmp_path / "test_it.py").write_text(ON_HOSTS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    session = ["-m", "pytest", "-p", "no:cacheprovider", "-q", "--gradparity-adopt"]
    agents = [
        subprocess.Popen(
            [*launcher, *meeting, "--rdzv-id", "hosts", *session, "-rs"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(2)
    ]
    said = "".join(agent.communicate()[0] for agent in agents)
    assert said.count("1 passed, 1 skipped") == 1, said
    assert "on 2 hosts: run it on one" in said


AGENT_KILLED = """
import os, signal
import pytest

def parent_of(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])

@pytest.mark.world(world_size=2)
def test_the_agent_of_rank_1_is_killed(world):
    if world.rank == 1:
        os.kill(parent_of(os.getppid()), signal.SIGKILL)
    import torch.distributed as dist
    dist.barrier()

def test_never_reached():
    pass
"""


@pytest.mark.slow
def test_a_session_ends_when_another_process_is_gone(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_it.py").write_text(AGENT_KILLED)
    arguments = ("-m", "pytest", "-p", "no:cacheprovider", "-q", "test_it.py")
    # torchrun waits for the end of a process that it has started itself
    launcher = [sys.executable, "-m", "torch.distributed.run", *STANDALONE]
    done = subprocess.run(
        [*launcher, *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "Exit: rank 1: its process is gone" in done.stdout, done.stdout + done.stderr
    assert "passed" not in done.stdout


def test_a_program_whose_rank_0_decides(torchrun: Torchrun, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(AGENTS)
    done = torchrun("program.py")
    assert done.returncode == 0, done.stderr
    said, kept, *_ = done.stdout.split("\n")
    assert said == "[0, 1] rank 1: raised ValueError: boo"
    assert kept == "4 []"  # a finished call leaves nothing in torchrun's store
