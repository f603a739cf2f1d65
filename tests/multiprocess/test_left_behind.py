"""Leftovers of a test do not reach the next test."""

# regression: M14
import faulthandler
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradparity.multiprocess import Cluster, WorldError, current_world
from gradparity.multiprocess.rank import flight_recorder, left_behind
from gradparity.multiprocess.rank.frames import line_outside
from gradparity.tests.multiprocess.test_pytest_plugin import Session, session

pytest_plugins = ["pytester"]
__all__ = ["session"]

PAIRS = """
import threading
from concurrent.futures import ThreadPoolExecutor

def later():
    time.sleep(0.2)
    dist.all_reduce(torch.full((1,), 100.0))

def thread():
    threading.Thread(target=later, daemon=True).start()

def timer():
    timer = threading.Timer(0.2, dist.all_reduce, [torch.full((1,), 100.0)])
    timer.daemon = True
    timer.start()

def pool():
    executor = ThreadPoolExecutor(1)
    executor.submit(time.sleep, 0.2)
    executor.submit(dist.all_reduce, torch.full((1,), 100.0))

def asynchronous():
    dist.all_reduce(torch.full((1,), 100.0), async_op=True)

LEFT = [thread, timer, pool, asynchronous]

@pytest.mark.parametrize("turn, left", [
    (turn, left) for left in LEFT for turn in ("leaves", "innocent")])
@pytest.mark.world(world_size=2)
def test_it(world, turn, left):
    if turn == "leaves":
        if world.rank == 1:
            left()
    else:
        time.sleep(0.4)
        assert total(world) == 1
"""


def test_what_a_test_leaves_running_does_not_reach_the_next(session: Session) -> None:
    done = session(PAIRS)
    assert "8 passed" in done.stdout, done.stdout
    left = [li for li in done.stdout.splitlines() if "gradparity: the test has" in li]
    assert len(left) == 4 and all("new ranks take over" in line for line in left)
    assert "a thread (Thread-1 (later), in test_it.py:" in left[0]
    assert "never waited for (allreduce, test_it.py:" in left[3]


def test_a_stream_that_a_test_closes_does_not_reach_the_next(session: Session) -> None:
    done = session("""
def close():
    os.close(1)
    os.close(2)

def replace():
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

@pytest.mark.parametrize("turn, leaves", [
    (turn, leaves) for leaves in (close, replace) for turn in ("leaves", "innocent")])
@pytest.mark.world(world_size=2)
def test_it(world, turn, leaves):
    print("printed", turn, leaves.__name__, flush=True)
    if turn == "leaves" and world.rank == 1:
        leaves()
""")
    assert "4 passed" in done.stdout, done.stdout
    told = "the test has left a standard output that it replaced: new ranks take over"
    assert told in done.stdout


def test_a_class_leaves_nothing_either(session: Session) -> None:
    pairs = PAIRS.split("@pytest.mark.parametrize")[0]
    done = session(f"""{pairs}
from gradparity.multiprocess import TestCase

class TestOurs(TestCase):
    def test_a_leaves(self):
        if self.rank == 1:
            thread()

    def test_b_innocent(self):
        time.sleep(0.4)
        assert total(self) == 1
""")
    assert "2 passed" in done.stdout, done.stdout


# regression: H2-B16
def test_a_process_group_of_a_test_does_not_reach_the_next(
    session: Session, tmp_path: Path
) -> None:
    done = session(f"""
import pathlib
from gradparity.multiprocess import TestCase, current_world

seen = pathlib.Path({str(tmp_path)!r})

def make_group():
    world = current_world()
    store = dist.PrefixStore("own", world.store)
    dist.init_process_group(
        "gloo", store=store, rank=world.rank, world_size=world.world_size
    )
    dist.barrier()

class TestOurs(TestCase):
    default_group = False

    def test_a(self):
        make_group()

    test_b = test_c = test_a

@pytest.fixture(scope="module")
def group():
    make_group()
    yield
    dist.destroy_process_group()

@pytest.mark.world(2, default_group=False, seed=1)
@pytest.mark.parametrize("turn", range(3))
def test_keeps_the_group_of_a_fixture(group, turn):
    (seen / str(os.getpid())).touch()
    dist.barrier()
""")
    assert "6 passed" in done.stdout, done.stdout
    assert done.stdout.count("has left a default process group") == 6
    assert len(list(tmp_path.iterdir())) == 2


def test_ranks_stay_where_nothing_can_reach_the_next_test(
    session: Session, tmp_path: Path
) -> None:
    done = session(f"""
import pathlib, threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Queue

seen = pathlib.Path({str(tmp_path)!r})

@pytest.mark.parametrize("turn", [1, 2, 3])
@pytest.mark.world(world_size=2)
def test_it(world, turn):
    (seen / str(os.getpid())).touch()
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    work = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    ThreadPoolExecutor(1).submit(time.sleep, 0).result()
    Queue().put(1)
""")
    assert "3 passed" in done.stdout, done.stdout
    assert len(list(tmp_path.iterdir())) == 2


def test_a_call_that_disables_crash_stacks_takes_them_from_no_other() -> None:
    def crash() -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    with Cluster(1) as cluster:
        cluster.run(faulthandler.disable)
        with pytest.raises(WorldError, match="in crash"):
            cluster.run(crash)


def test_a_thread_in_a_collective_is_named_by_the_code_that_calls_it() -> None:
    # A thread may be looked at while our record of its collective is made.
    source = "def recorded(call): return call()"
    names: dict[str, Any] = {}
    exec(compile(source, flight_recorder.__file__, "exec"), names)
    between = left_behind._BETWEEN
    place = names["recorded"](lambda: line_outside(sys._getframe(1), between))
    assert place.startswith("test_left_behind.py:")


def pretends_to_have_a_gpu(error: str, log: Path) -> None:
    """Record calls to a pretended GPU, on a rank that ends with this test."""
    gpu: Any = torch.cuda

    def synchronize() -> None:
        log.open("a").write("waited for, ")
        if error:
            raise RuntimeError(error)

    gpu.is_initialized = lambda: True
    gpu.current_device = lambda: 0
    gpu.synchronize = synchronize
    gpu.empty_cache = lambda: log.open("a").write("emptied, ")


def test_a_call_has_the_errors_of_its_gpu_and_leaves_no_memory(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with Cluster(1) as cluster:
        cluster.run(pretends_to_have_a_gpu, "", log)
        cluster.run(int)
        assert log.read_text().startswith("waited for, emptied, waited for, ")
        with pytest.raises(WorldError, match="device-side assert"):
            cluster.run(pretends_to_have_a_gpu, "device-side assert", log)


def test_a_call_does_not_wait_for_what_a_later_one_is_to_wait_for(
    tmp_path: Path,
) -> None:
    def leaves() -> None:
        pretends_to_have_a_gpu("it would hang", tmp_path / "log")
        dist.all_reduce(torch.ones(1), async_op=True)

    with Cluster(2) as cluster:
        cluster.run(leaves)


def test_a_wait_for_a_gpu_is_one_for_the_collective_before_it() -> None:
    def act() -> None:
        if current_world().rank == 0:
            gpu: Any = torch.cuda
            gpu.is_initialized = lambda: True
            gpu.synchronize = lambda: time.sleep(1000)
            dist.broadcast(torch.ones(1), src=0)  # returns at once, as with NCCL

    with Cluster(2) as cluster, pytest.raises(WorldError) as caught:
        cluster.with_options(timeout_s=100).run(act)
    assert caught.value.root.rank == 0
    assert "rank 1 has ended without issuing it" in str(caught.value)


def test_a_call_does_not_leave_another_gpu_to_the_next() -> None:
    def pretends_to_have_two() -> None:
        gpu: Any = torch.cuda
        gpu.current = 0
        gpu.is_initialized = lambda: True
        gpu.current_device = lambda: gpu.current
        gpu.set_device = lambda number: setattr(gpu, "current", number)
        gpu.synchronize = gpu.empty_cache = lambda: None

    with Cluster(1) as cluster:
        cluster.run(pretends_to_have_two)
        cluster.run(lambda: torch.cuda.set_device(1))
        assert cluster.run(lambda: torch.cuda.current_device()) == [0]
