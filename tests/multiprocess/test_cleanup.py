"""Ranks, sockets and files are gone, however the parent ends."""

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import pytest

from gradparity.multiprocess import Cluster
from gradparity.multiprocess.parent import rank_processes

LIMIT_S = 20.0
"""Seconds until all leftovers must be gone."""

RUN_S = 200.0
"""Seconds for a whole program, on any machine: longer is a hang."""

Parent = subprocess.Popen[str]

PROGRAM = """
import os, subprocess, sys, time
from gradparity.multiprocess import Cluster, current_world
from gradparity.multiprocess.parent.forkserver_client import forkserver

def child():
    return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid

def stay():
    time.sleep(1000)

cluster = Cluster(2)
children = cluster.run(child)
print(os.getpid(), forkserver().pid, *cluster.pids, *children, flush=True)
{then}
"""


@pytest.fixture(
    params=[
        pytest.param(True, id="forked"),
        pytest.param(False, id="fresh", marks=pytest.mark.slow),
    ]
)
def python(request: pytest.FixtureRequest, warm_ranks: list[str]) -> list[str]:
    """Return the start of a program's command line, in a warm Python or in a new one.

    In a warm Python the program's forkserver is a fork; in a new one it imports torch.
    """
    return warm_ranks if request.param else [sys.executable]


@contextmanager
def program(
    then: str, folder: Path, python: list[str]
) -> Iterator[tuple[Parent, int, set[int]]]:
    """Start a program; yield it, its pid, and the pids of its other processes."""
    env = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        [*python, "-c", PROGRAM.format(then=then)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    ) as parent:
        own, *others = (int(word) for word in first_line(parent).split())
        pids = set(others)
        assert len(pids) == 5
        try:
            yield parent, own, pids
        finally:
            parent.kill()
            parent.wait()
            for pid in wait_until_gone(pids, 2.0):
                os.kill(pid, signal.SIGKILL)


def first_line(parent: subprocess.Popen[str]) -> bytes:
    # Byte by byte: communicate() does not know what a buffered reader took ahead.
    assert parent.stdout is not None
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(parent.stdout.fileno(), 1)):
        line += byte
    return line


def alive(pids: set[int]) -> set[int]:
    """Return the processes that still run; zombies count as gone."""
    found = set()
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        if stat.rpartition(")")[2].split()[0] != "Z":
            found.add(pid)
    return found


def wait_until_gone(pids: set[int], limit_s: float = LIMIT_S, but: int = 0) -> set[int]:
    """Wait until at most ``but`` processes still run; return those that do."""
    deadline = time.monotonic() + limit_s
    while len(alive(pids)) > but and time.monotonic() < deadline:
        time.sleep(0.02)
    return alive(pids)


def left_in(folder: Path) -> list[str]:
    # torch makes its compiler's cache folder when it is imported.
    return [p.name for p in folder.iterdir() if "torchinductor" not in p.name]


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "gradparity" in name}


@pytest.mark.parametrize("then", ["time.sleep(1000)", "cluster.run(stay)"])
def test_sigkill_of_the_parent_leaves_nothing(
    then: str, tmp_path: Path, python: list[str]
) -> None:
    with program(then, tmp_path, python) as (parent, own, pids):
        assert alive(pids) == pids
        os.kill(own, signal.SIGKILL)
        parent.wait()
        assert wait_until_gone(pids) == set()
    assert left_in(tmp_path) == []
    assert shared_memory() == set()


def test_ctrl_c_ends_the_call_and_the_ranks(tmp_path: Path, python: list[str]) -> None:
    with program("cluster.run(stay)", tmp_path, python) as (parent, own, pids):
        time.sleep(0.3)
        os.kill(own, signal.SIGINT)
        _, errors = parent.communicate(timeout=RUN_S)
        assert "KeyboardInterrupt" in errors
        assert parent.returncode != 0
        assert wait_until_gone(pids) == set()
    assert left_in(tmp_path) == []


def test_daemons_of_ranks_end_with_the_last_rank(
    tmp_path: Path, python: list[str]
) -> None:
    then = "cluster.close(); time.sleep(1000)"
    with program(then, tmp_path, python) as (parent, _, pids):
        assert len(wait_until_gone(pids, but=1)) == 1  # the forkserver
        assert parent.poll() is None


def test_a_parent_that_forgets_to_close_leaves_nothing(
    tmp_path: Path, python: list[str]
) -> None:
    with program("", tmp_path, python) as (parent, _, pids):
        parent.communicate(timeout=RUN_S)
        assert parent.returncode == 0
        assert wait_until_gone(pids) == set()
    assert left_in(tmp_path) == []


def test_ranks_die_with_their_forkserver(tmp_path: Path, python: list[str]) -> None:
    then = "os.kill(forkserver().pid, 9); time.sleep(1); print(cluster.run(child))"
    with program(then, tmp_path, python) as (parent, _, pids):
        output, errors = parent.communicate(timeout=RUN_S)
        ranks = pids - {max(pids)}
        assert "[" in output, errors  # a new server and new ranks took over
        assert len(alive(ranks)) <= 1  # a daemon of a rank has nobody left to end it


def test_ranks_that_are_lost_with_their_forkserver_say_so(
    tmp_path: Path, warm_ranks: list[str]
) -> None:
    then = "cluster.run(lambda: (os.kill(os.getppid(), 9), time.sleep(1000)))"
    with program(then, tmp_path, warm_ranks) as (parent, *_):
        _, errors = parent.communicate(timeout=RUN_S)
    assert "lost, because its forkserver has ended" in errors


def test_a_closed_cluster_leaves_no_process_and_no_descriptor() -> None:
    with Cluster(2) as cluster:
        cluster.run(os.getpid)
    before = set(os.listdir("/proc/self/fd"))
    with Cluster(2) as cluster:
        pids = set(cluster.pids)
        cluster.run(os.getpid)
    assert alive(pids) == set()
    assert set(os.listdir("/proc/self/fd")) == before


HANDLES = """
import atexit, pathlib, tempfile
atexit.register(pathlib.Path({handled!r}).touch)
folder = tempfile.TemporaryDirectory(dir={folder!r})
"""


def test_exit_handlers_of_a_rank_run_and_not_those_of_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("handles_preloaded", "handles_imported"):
        (tmp_path / f"{name}.d").mkdir()
        text = HANDLES.format(
            handled=str(tmp_path / f"{name}.end"), folder=str(tmp_path / f"{name}.d")
        )
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    def act() -> None:
        import_module("handles_preloaded")
        import_module("handles_imported")

    with Cluster(1, preload=("handles_preloaded",)) as cluster:
        cluster.run(act)
        assert len(list((tmp_path / "handles_imported.d").iterdir())) == 1
    assert (tmp_path / "handles_imported.end").exists()
    assert list((tmp_path / "handles_imported.d").iterdir()) == []
    assert not (tmp_path / "handles_preloaded.end").exists()
    assert len(list((tmp_path / "handles_preloaded.d").iterdir())) == 1


def test_an_exit_handler_without_an_end_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank_processes, "_STOP_S", 0.2)

    def act() -> None:
        atexit.register(time.sleep, 1000)

    with Cluster(1) as cluster:
        pids = set(cluster.pids)
        cluster.run(act)
    assert alive(pids) == set()


def test_output_needs_no_disk(tmp_path: Path, warm_ranks: list[str]) -> None:
    # There is no file: a full disk, or no temporary folder at all, changes nothing.
    missing = tmp_path / "missing"
    then = "print(cluster.outcomes(lambda: print('kept'))[1].output)"
    with program(then, missing, warm_ranks) as (parent, *_):
        output, _ = parent.communicate(timeout=RUN_S)
    assert "kept" in output


@pytest.mark.slow
def test_an_interrupted_start_does_not_confuse_the_next(tmp_path: Path) -> None:
    program = """
import signal
from gradparity.multiprocess import Cluster

def interrupt(number, frame):
    raise TimeoutError

signal.signal(signal.SIGALRM, interrupt)
signal.setitimer(signal.ITIMER_REAL, 0.2)  # torch takes longer
try:
    Cluster(2).start()
except TimeoutError:
    print("interrupted")
with Cluster(2) as cluster:
    print(cluster.run(lambda: 1))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
    assert done.stdout == "interrupted\n[1, 1]\n", done.stderr
