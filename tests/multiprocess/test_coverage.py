"""Coverage of ranks is measured if the parent's is, by coverage's own patches."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

MODULE = """
def by_rank(rank):
    if rank == 0:
        found = "zero"
    elif rank == 1:
        found = "one"
    else:
        found = "never"
    return found

def before_a_failure():
    return "one that a mark expects, say"
"""
LINES, NEVER = [2, 3, 4, 5, 6, 9, 11, 12], [8]

SETTINGS = """
[run]
branch = true
parallel = true
source = .
omit = test_*.py, program.py
patch = subprocess, fork, _exit
disable_warnings = no-data-collected, module-not-measured
"""

TESTS = """
import pytest

def by(rank):
    from measured import by_rank
    assert by_rank(rank) == ("zero", "one")[rank]

@pytest.mark.world(world_size=2)
@pytest.mark.parametrize("number", range(2))
def test_in_a_pool(world, number):
    from measured import before_a_failure
    before_a_failure()

@pytest.mark.xfail
@pytest.mark.world(world_size=2)
def test_fails(world):
    assert world.rank == 0

@pytest.mark.world(world_size=2, isolation="process")
def test_in_processes(world):
    by(world.rank)
"""

PROGRAM = """
from gradparity.multiprocess import Cluster, current_world

def body():
    from measured import before_a_failure, by_rank
    before_a_failure()
    return by_rank(current_world().rank)

with Cluster(2) as cluster:
    print(cluster.run(body))
"""


def run(folder: Path, python: Sequence[str], *command: str) -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("COV", "PYTEST_"))}
    done = subprocess.run(
        [*python, "-m", *command],
        cwd=folder,
        env={**env, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def check(folder: Path) -> None:
    """Check that the report has the lines of both ranks, in one combined file."""
    report = json.loads((folder / "coverage.json").read_text())
    (measured,) = (
        found for name, found in report["files"].items() if name == "measured.py"
    )
    assert measured["executed_lines"] == LINES
    assert measured["missing_lines"] == NEVER
    assert measured["executed_branches"] == [[3, 4], [3, 5], [5, 6]]
    assert list(folder.glob(".coverage.*")) == []


@pytest.mark.parametrize(
    "options",
    # three sessions import torch
    [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)],
)
def test_pytest_cov_measures_the_ranks(
    tmp_path: Path, warm_python: list[str], options: tuple[str, ...]
) -> None:
    (tmp_path / "measured.py").write_text(MODULE)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / ".coveragerc").write_text(SETTINGS)
    cov = ("--cov", "--cov-report=json")
    run(tmp_path, warm_python, "pytest", "-q", "-p", "no:cacheprovider", *cov, *options)
    check(tmp_path)


@pytest.mark.slow
def test_coverage_run_measures_the_ranks_of_a_program(tmp_path: Path) -> None:
    (tmp_path / "measured.py").write_text(MODULE)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / ".coveragerc").write_text(SETTINGS)
    run(tmp_path, [sys.executable], "coverage", "run", "program.py")
    run(tmp_path, [sys.executable], "coverage", "combine")
    run(tmp_path, [sys.executable], "coverage", "json")
    check(tmp_path)
