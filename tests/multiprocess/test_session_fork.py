"""The forkserver that is a fork of the pytest session: when, and what it resets."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
ALONE = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:cov", "-q", "-rP")

CONFTEST = """
import atexit, gc, logging, os, signal, tempfile, warnings, weakref

class Holder: pass

folder = tempfile.TemporaryDirectory()
holder = Holder()
weakref.finalize(holder, os.rmdir, os.environ["KEPT"])
atexit.register(print, "exit handler")
signal.signal(signal.SIGUSR1, lambda *_: print("the session's"))
signal.signal(signal.SIGTERM, lambda *_: print("the session's"))
logging.basicConfig()  # to what is stderr now: pytest's capture
gc.disable()  # as some do while tests are collected
"""

TEST = """
import gc, importlib, logging, os, signal, sys, threading, warnings, weakref
import pytest, torch, torch.distributed as dist

RANK = os.environ.get("RANK")
JOINED = dist.is_initialized()

def server():
    return open(f"/proc/{os.getppid()}/cmdline").read()

@pytest.mark.world(size=2)
def test_a_fork_of_the_session(world):
    assert "-m\\0pytest" in server()
    value = torch.ones(1)
    dist.all_reduce(value)
    assert value.item() == 2

@pytest.mark.world(size=2)
def test_modules_are_imported_by_each_rank_after_it_joined(world):
    assert (RANK, JOINED) == (str(world.rank), True)

@pytest.mark.world(size=2)
def test_signals_hooks_and_modules_of_the_session_are_reset(world, tmp_path):
    for number in (signal.SIGUSR1, signal.SIGTERM):
        assert signal.getsignal(number) is signal.SIG_DFL
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert sys.breakpointhook.__module__ == "gradparity.multiprocess.rank.worker"
    assert sys.unraisablehook is sys.__unraisablehook__
    assert "conftest" not in sys.modules
    assert gc.isenabled()
    assert not hasattr(sys.modules["__main__"], "__file__")
    kinds = {type(finder).__module__ for finder in sys.meta_path}
    assert not any(kind.startswith("_pytest.") for kind in kinds)
    usable = [
        fd for fd in os.listdir("/proc/self/fd")
        if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")
        and "(deleted)" in os.readlink(f"/proc/self/fd/{fd}")
        and "memfd" not in os.readlink(f"/proc/self/fd/{fd}")
    ]
    assert usable == []  # none of pytest's captured files

@pytest.mark.world(size=2)
def test_other_threads_import_what_was_being_imported(world):
    del sys.modules[__name__]  # as of a rank that is not the main thread
    thread = threading.Thread(
        target=importlib.import_module, args=(__name__,), daemon=True
    )
    thread.start()
    thread.join(20)
    assert not thread.is_alive()

@pytest.mark.world(size=2)
def test_the_server_has_no_finalizers_of_the_session(world):
    found = [info.func for info in weakref.finalize._registry.values()]
    assert os.rmdir not in found

@pytest.mark.world(size=2)
def test_logs_go_to_the_output_of_the_rank(world):
    logging.getLogger("mine").warning("said by %s", world.rank)

@pytest.mark.world(size=2)
def test_warnings_are_shown(world):
    warnings.simplefilter("always")
    warnings.warn("warned on a rank")

def test_the_session_is_unharmed():
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    assert os.path.isdir(os.environ["KEPT"])
    assert (RANK, JOINED) == (None, False)
"""

SESSION_SERVER = """
import os, pytest, torch

@pytest.mark.world(size=2)
def test_a_fork_of_the_session(world):
    assert ("-m\\0pytest" in open(f"/proc/{os.getppid()}/cmdline").read()) is %s
"""

ADOPTED = """
import os, sys
import torch
from torch.testing._internal.common_distributed import MultiProcContinuousTest

MODULE = sys.modules["torch.testing._internal.common_distributed"]
os.environ.setdefault("ADDRESS", str(id(MODULE)))  # the session's: ranks get its values

class TestAdopted(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_it(self):
        assert os.environ["ADDRESS"] == str(id(MODULE))
"""

THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
"""

OBSTACLES = """
import contextlib, ctypes, mmap, os, subprocess, sys, tempfile, threading
from gradparity.multiprocess.pytest_plugin.session_fork import (
    Snapshot, obstacles, open_targets,
)
before = Snapshot(opened=open_targets())
import torch, torch.distributed as dist

def found(words):
    text = "; ".join(obstacles(before))
    assert (words in text) if words else not text, (words, text)

@contextlib.contextmanager
def thread():
    done = threading.Event()
    one = threading.Thread(target=done.wait)
    one.start()
    try:
        yield
    finally:
        done.set()
        one.join()
    for _ in range(1000):
        if len(os.listdir("/proc/self/task")) == 1:
            break

@contextlib.contextmanager
def child():
    process = subprocess.Popen(["sleep", "1000"])
    try:
        yield
    finally:
        process.kill()
        process.wait()

@contextlib.contextmanager
def trace():
    sys.settrace(lambda *_: None)
    yield
    sys.settrace(None)

@contextlib.contextmanager
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()

@contextlib.contextmanager
def in_progress():
    tempfile.__spec__._initializing = True
    yield
    tempfile.__spec__._initializing = False

found("")
for obstacle, words in (
    (thread, "2 native threads"),
    (child, "child processes"),
    (trace, "traced"),
    (lambda: open(__file__), "has opened " + __file__),
    (lambda: mmap.mmap(-1, 4096), "shares memory"),
    (group, "process group"),
    (in_progress, "tempfile is being imported"),
):
    with obstacle():
        found(words)
    found("")
print("all found")
"""


def session(
    folder: Path, *paths: Path | str, mode: str = "fork"
) -> subprocess.CompletedProcess[str]:
    kept = folder / "kept"
    kept.mkdir()
    env = {**os.environ, "GRADPARITY_FORKSERVER": mode, "KEPT": str(kept)}
    env.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(
        [sys.executable, "-m", "pytest", *ALONE, *map(str, paths)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
    )


def test_a_fork_of_the_session_resets_what_is_the_sessions(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TEST)
    done = session(tmp_path, "test_it.py")
    assert "8 passed" in done.stdout, done.stdout + done.stderr
    for rank in range(2):
        assert f"WARNING:mine:said by {rank}" in done.stdout
    assert "UserWarning: warned on a rank" in done.stdout
    assert done.stdout.count("exit handler") == 1


def test_each_obstacle_is_found(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(OBSTACLES)
    command = [sys.executable, str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "all found\n", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "before", "forked"),
    [
        ("auto", "", True),
        ("fresh", "", False),
        ("auto", THREAD, False),
        ("auto", "import torch", False),  # in the conftest: before any test is known
    ],
)
def test_an_unsafe_session_gets_a_fresh_server(
    tmp_path: Path, mode: str, before: str, forked: bool
) -> None:
    (tmp_path / "conftest.py").write_text(before)
    (tmp_path / "test_it.py").write_text(SESSION_SERVER % forked)
    done = session(tmp_path, "test_it.py", mode=mode)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_the_fork_has_torchs_test_classes_where_tests_are_adopted(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_it.py").write_text(ADOPTED)
    done = session(tmp_path, "test_it.py", "--gradparity-adopt")
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("mode", "before", "says"),
    [
        ("fork", "import torch", "torch was there before any world test"),
        ("fork", "opened = open(__file__)", "may not be forked: it has opened"),
        ("fresco", "", "must be one of auto, fresh, fork; got 'fresco'"),
    ],
)
def test_a_required_fork_that_fails_says_why(
    tmp_path: Path, mode: str, before: str, says: str
) -> None:
    (tmp_path / "conftest.py").write_text(before)
    (tmp_path / "test_it.py").write_text(SESSION_SERVER % True)
    done = session(tmp_path, "test_it.py", mode=mode)
    assert done.returncode != 0
    assert says in done.stdout + done.stderr


def test_a_session_whose_worlds_are_deselected_keeps_no_server(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        SESSION_SERVER % True
        + """
def test_no_child():
    assert not open(f"/proc/self/task/{os.getpid()}/children").read()
"""
    )
    done = session(tmp_path, "test_it.py", "-k", "no_child")
    assert "1 passed" in done.stdout, done.stdout + done.stderr


FEATURES = (
    SESSION_SERVER % True
    + """
import threading, torch.distributed as dist
from hypothesis import given, settings, strategies as st
from gradparity.multiprocess import Cluster, SimulatedCluster, TestCase, current_world

def total(world):
    value = torch.ones(1) * world.rank
    dist.all_reduce(value)
    return value.item()

@pytest.fixture(scope="module")
def parent():
    return os.getpid()

@pytest.fixture
def scaled(world, parent):
    yield 2 * world.rank
    print("closed on", world.rank)

@pytest.mark.world(size=[1, 3])
def test_fixtures(world, scaled, parent, capsys, monkeypatch):
    print("said")
    assert capsys.readouterr().out == "said\\n"
    assert scaled == 2 * world.rank and parent != os.getpid()
    assert total(world) == sum(range(world.size))

@pytest.mark.parametrize("isolation", ["group", "process"])
def test_isolation(isolation):
    with Cluster(2, isolation=isolation) as cluster:
        assert cluster.run(lambda: total(current_world())) == [1, 1]

@pytest.mark.world(size=2)
def test_sharded(world):
    from torch.distributed.fsdp import fully_shard
    model = fully_shard(torch.nn.Linear(4, 4), mesh=world.mesh((2,), ("data",)))
    step = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)
    model(step(torch.randn(2, 4))).sum().backward()

@pytest.mark.world(size=2)
@settings(max_examples=5)
@given(n=st.integers(0, 100))
def test_drawn(world, n):
    assert dist.get_world_size() == 2

@pytest.mark.world(size=2)
def test_skipped(world):
    pytest.skip("all")

@pytest.mark.world(size=4, backend="simulated")
def test_threads(world, scaled):
    assert total(world) == 6

@pytest.mark.world(size=4, backend="local")
def test_parts(world):
    from torch.distributed.tensor import Shard, distribute_tensor
    whole = torch.arange(4.0)
    tensor = distribute_tensor(whole, world.mesh((4,), ("model",)), [Shard(0)])
    assert tensor.full_tensor().sum() == 6

@pytest.mark.world(size=2, backend="both")
def test_both(world):
    return total(world)

def test_a_simulated_cluster():
    with SimulatedCluster(8) as cluster:
        assert cluster.run(lambda: total(current_world())) == [28] * 8

class TestOurs(TestCase):
    def test_method(self):
        assert total(current_world()) == 1

@pytest.mark.world(size=2)
def test_wrong(world):
    assert [world.rank, 5] == [0, 5]

@pytest.mark.world(size=2, timeout_s=8)
def test_hangs(world):
    if world.rank == 1:
        threading.Event().wait()
    dist.barrier()
"""
)


@pytest.mark.slow
def test_the_features_of_the_marker_hold_in_forks_of_the_session(
    tmp_path: Path,
) -> None:
    # The tests of each run in a process that has torch already: from a fresh server.
    (tmp_path / "test_it.py").write_text(FEATURES)
    done = session(tmp_path, "test_it.py")
    assert "2 failed, 12 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    for said in ("assert [1, 5] == [0, 5]", "rank 1: hung, still running", "closed on"):
        assert said in done.stdout, said


@pytest.mark.slow
def test_the_fault_matrix_holds_in_forks_of_the_session(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SESSION_SERVER % True)
    matrix = Path(__file__).with_name("test_faults.py")
    found = session(tmp_path, "--noconftest", tmp_path / "test_it.py", matrix)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "failed" not in found.stdout
