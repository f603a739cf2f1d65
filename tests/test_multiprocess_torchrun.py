"""The same tests on the ranks that torchrun made."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

STANDALONE = ("--standalone", "--nproc-per-node", "2")

TESTS = """
import time
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

@pytest.mark.world(size=2)
def test_raise(world):
    if world.rank == 1:
        raise ValueError("boo")
    total(world)

@pytest.mark.world(size=2)
def test_innocent(world, doubled):
    assert total(world) == 1
    assert doubled == 2 * world.rank

@pytest.mark.world(size=2, timeout_s=1)
def test_hang(world):
    if world.rank == 1:
        time.sleep(1000)
    total(world)

@pytest.mark.world(size=2, timeout_s=1)
def test_one_too_many(world):
    if world.rank == 1:
        total(world)

@pytest.mark.world(size=2, isolation="group")
def test_innocent_again(world):
    assert total(world) == 1

@pytest.mark.world(size=2)
@settings(max_examples=20)
@given(n=st.integers(0, 1000))
def test_examples_are_the_same_on_all_ranks(world, n):
    value = torch.tensor([n])
    dist.all_reduce(value)
    assert value.item() == 2 * n

@pytest.mark.world(size=3)
def test_three(world):
    pass

@pytest.mark.world(size=2)
def test_skip(world):
    pytest.skip("not today")
"""

PROGRAM = """
from gradparity.multiprocess import WorldFailure, current_world
from gradparity.multiprocess.torchrun import TorchrunCluster

def fail():
    if current_world().rank == 1:
        raise ValueError("boo")

with TorchrunCluster() as cluster:
    ranks = cluster.run(lambda: current_world().rank)
    try:
        cluster.run(fail)
    except WorldFailure as failure:
        found = failure.root.headline
    if cluster.rank == 0:
        print(ranks, found)
"""


def torchrun(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *STANDALONE, *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_a_session_on_torchruns_ranks(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    arguments = ("-m", "pytest", "-p", "no:cacheprovider", "-q", "--junitxml=j.xml")
    done = torchrun(tmp_path, *arguments, "test_it.py")
    assert done.returncode != 0
    assert done.stdout.count("3 failed, 4 passed, 2 skipped") == 1, done.stdout
    assert "root cause: rank 1: raised ValueError: boo" in done.stdout
    assert "root cause: rank 1: hung, still running" in done.stdout
    assert "root cause: rank 1: hung, waiting in a collective" in done.stdout
    found = {}
    for case in ElementTree.parse(tmp_path / "j.xml").iter("testcase"):
        found[case.get("name")] = [child.tag for child in case]
    assert {name for name, tags in found.items() if tags == ["failure"]} == {
        "test_raise",
        "test_hang",
        "test_one_too_many",
    }
    assert found["test_three"] == found["test_skip"] == ["skipped"]


def test_a_program_on_torchruns_ranks(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = torchrun(tmp_path, "program.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == "[0, 1] rank 1: raised ValueError: boo"
