"""Tests and programs that once broke the harness do no harm any more."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradparity.multiprocess import (
    Cluster,
    RankState,
    WorldError,
    WorldSpec,
    current_world,
)
from gradparity.multiprocess.rank import flight_records
from gradparity.tests.fault_matrix import innocent
from gradparity.tests.multiprocess.test_pytest_plugin import Session, session

pytest_plugins = ["pytester"]
__all__ = ["session"]
RUN_S = 200.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as made:
        yield made


def rank() -> int:
    return current_world().rank


def program(
    text: str, python: Sequence[str] = (sys.executable,)
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python, "-c", text], capture_output=True, text=True, timeout=RUN_S
    )


def test_skips_may_be_as_far_apart_as_the_limit_allows(session: Session) -> None:
    done = session("""
@pytest.mark.world(world_size=2)
def test_far_apart(world):
    time.sleep(2 * world.rank)
    pytest.skip("both")
""")
    assert "1 skipped" in done.stdout, done.stdout


def test_a_skip_of_one_rank_is_reported_with_what_the_others_did(
    session: Session,
) -> None:
    done = session("""
@pytest.mark.world(world_size=3, timeout_s=60)
def test_divided(world):
    if world.rank == 1:
        pytest.skip("only me")
    if world.rank == 2:
        total(world)
""")
    assert "1 failed" in done.stdout
    assert "rank 0: ok" in done.stdout
    assert "rank 1: raised Skipped: only me" in done.stdout
    assert "rank 2: waiting in a collective" in done.stdout
    assert "has ended without issuing it" in done.stdout


@pytest.mark.parametrize("busy", [True, False])
def test_the_words_of_an_error_blame_no_other_rank(
    cluster: Cluster, busy: bool
) -> None:
    def body() -> None:
        if rank() == 0:
            raise RuntimeError("database: connection refused")
        if busy:
            time.sleep(30)

    with pytest.raises(WorldError) as caught:
        cluster.run(body)
    assert caught.value.root.rank == 0
    assert caught.value.root.state is RankState.RAISED


def test_a_slow_teardown_hides_not_that_its_rank_failed_first(
    session: Session, tmp_path: Path
) -> None:
    done = session(f"""
import pathlib

failed, torn_down = (pathlib.Path({str(tmp_path)!r}) / name for name in "ab")

def wait_for(file):
    while not file.exists():
        time.sleep(0.01)

@pytest.fixture
def slow(world):
    yield
    if world.rank == 1:
        failed.touch()
        wait_for(torn_down)
        time.sleep(0.2)
    else:
        torn_down.touch()

@pytest.mark.world(2)
def test_first(world, slow):
    if world.rank == 1:
        raise KeyError("the cause")
    wait_for(failed)
    raise ValueError("the effect")
""")
    assert "root cause: rank 1: raised KeyError: 'the cause'" in done.stdout
    assert "also failed: rank 0: raised ValueError: the effect" in done.stdout


@pytest.mark.parametrize("backward", [False, True])
def test_an_error_out_of_a_broken_collective_is_the_others(
    cluster: Cluster, backward: bool
) -> None:
    def body() -> None:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        dist.barrier()
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if backward:  # the reducer waits in C++, below no method of a group
            model(torch.ones(1, 2)).sum().backward()
        try:
            dist.all_reduce(torch.ones(2))
        except Exception as error:
            raise ValueError("made of it") from error

    with pytest.raises(WorldError) as caught:
        cluster.run(body)
    states = [outcome.state for outcome in caught.value.outcomes]
    assert states == [RankState.VICTIM, RankState.KILLED, RankState.VICTIM]


def test_a_collective_that_a_rank_ended_without_ends_long_before_the_limit(
    cluster: Cluster,
) -> None:
    def body() -> None:
        dist.barrier()
        if rank() == 2:
            time.sleep(1)
            dist.all_reduce(torch.ones(2))

    began = time.monotonic()
    with pytest.raises(WorldError, match="rank 0 has ended without issuing it"):
        cluster.with_options(timeout_s=100).run(body)
    assert time.monotonic() - began < 50


def test_who_could_not_make_a_group_is_not_the_cause(cluster: Cluster) -> None:
    def body() -> None:
        if rank() == 1:
            time.sleep(1)
            raise ValueError("the cause")
        dist.new_group(timeout=timedelta(seconds=0.1))

    with pytest.raises(WorldError) as failure:
        cluster.with_options(timeout_s=100).run(body)
    states = [outcome.state for outcome in failure.value.outcomes]
    assert states == [RankState.VICTIM, RankState.RAISED, RankState.VICTIM]


def test_a_rank_may_end_long_before_the_others(cluster: Cluster) -> None:
    def body() -> int:
        value = torch.ones(1)
        dist.all_reduce(value)
        pair = dist.new_group([1, 2])
        if rank() > 0:
            time.sleep(1.5)
            dist.all_reduce(value, group=pair)
        return int(value)

    assert cluster.run(body) == [3, 6, 6]


def test_close_in_a_fork_of_the_parent_leaves_its_ranks(cluster: Cluster) -> None:
    cluster.start()
    pids = cluster.pids
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert cluster.pids == pids
            cluster.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    time.sleep(0.2)
    assert cluster.run(os.getpid) == list(pids)


def test_lists_may_be_given_for_names() -> None:
    spec = WorldSpec(world_size=1, preload=["json"])  # type: ignore[arg-type]
    assert spec.preload == ("json",) and hash(spec)
    with pytest.raises(TypeError, match="preload must be a tuple of names"):
        WorldSpec(world_size=1, preload="json")  # type: ignore[arg-type]


def test_without_descriptors_a_start_says_so_and_leaks_none(
    warm_ranks: list[str],
) -> None:
    text = """
import os, resource
from gradparity.multiprocess import Cluster, HarnessError
Cluster(1).run(os.getpid)
def opened():
    return len(os.listdir("/proc/self/fd"))
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (48, hard))
before = opened()
for _ in range(4):
    try:
        Cluster(32).start()
    except HarnessError as error:
        print(error)
assert opened() == before, (opened(), before)
print(Cluster(2).run(lambda: 7))
"""
    done = program(text, warm_ranks)
    assert done.stdout.count("raise the limit (ulimit -n)") == 4, done.stderr
    assert done.stdout.endswith("[7, 7]\n"), done.stderr


def test_a_call_may_remove_its_own_folder(cluster: Cluster, tmp_path: Path) -> None:
    def body() -> None:
        folder = tmp_path / str(rank())
        folder.mkdir()
        os.chdir(folder)
        folder.rmdir()

    cluster.run(body)
    assert cluster.run(os.getcwd) == [os.getcwd()] * 3


def test_a_parent_in_a_removed_folder_gets_an_error_that_says_so() -> None:
    done = program("""
import os, tempfile
from gradparity.multiprocess import Cluster
folder = tempfile.mkdtemp()
os.chdir(folder); os.rmdir(folder)
Cluster(1).start()
""")
    assert "HarnessError: the current folder of this process has been removed" in (
        done.stderr
    )


def test_a_hang_ends_while_the_parents_clocks_stand_still(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)
    monkeypatch.setattr(time, "time", lambda: 1.0)
    with pytest.raises(WorldError, match="still running"):
        cluster.with_options(timeout_s=1).run(time.sleep, 100)


def test_a_rank_that_does_not_listen_delays_no_other(tmp_path: Path) -> None:
    # regression: M9, each rank that did not listen took the whole limit
    def body(argument: bytes) -> int:
        (tmp_path / str(rank())).touch()
        return len(argument)

    def wake() -> None:
        while not all((tmp_path / str(other)).exists() for other in (1, 2)):
            time.sleep(0.01)
        os.kill(pid, signal.SIGCONT)

    with Cluster(3, timeout_s=60) as cluster:
        pid = cluster.pids[0]
        os.kill(pid, signal.SIGSTOP)
        waker = threading.Thread(target=wake, daemon=True)
        waker.start()
        assert cluster.run(body, b"x" * (1 << 24)) == [1 << 24] * 3
        waker.join()


@pytest.mark.slow
def test_the_program_may_have_no_output(tmp_path: Path) -> None:
    # regression: M19, as in a daemon: sys.stdout is None
    script = tmp_path / "script.py"
    script.write_text("""
import pathlib, sys
from gradparity.multiprocess import Cluster
assert sys.stdout is None
with Cluster(1) as cluster:
    pathlib.Path(sys.argv[1]).write_text(str(cluster.run(lambda: 1)))
""")
    closed = 'exec "$@" >&- 2>&-'
    command = [sys.executable, str(script), str(tmp_path / "done")]
    subprocess.run(["sh", "-c", closed, "sh", *command], timeout=RUN_S, check=True)
    assert (tmp_path / "done").read_text() == "[1]"


@pytest.mark.slow
def test_the_import_path_and_the_environment_may_be_long() -> None:
    """The path may also hold entries that Python ignores."""
    # regression: M15, the kernel takes no argument above 128 KiB
    done = program("""
import os, pathlib, sys
sys.path.append(pathlib.Path("/nowhere"))
from gradparity.multiprocess import Cluster
sys.path += [f"/nowhere/{number}" + "x" * 1000 for number in range(300)]
os.environ["LONG"] = "x" * (1 << 18)
with Cluster(1, preload=("wave",)) as cluster:
    print(cluster.run(lambda: (len(sys.path) > 300, len(os.environ["LONG"]))))
""")
    assert done.stdout == "[(True, 262144)]\n", done.stderr


def test_a_child_that_returns_from_a_call_is_ended(cluster: Cluster) -> None:
    def body() -> int:
        if rank() == 1:
            os.fork()
        return os.getpid()

    outcomes = cluster.outcomes(body)
    assert [outcome.value for outcome in outcomes] == list(cluster.pids)
    for _ in range(3):
        assert cluster.run(innocent) == [3.0] * 3


class ExitsWhenUnpickled(Exception):
    def __reduce__(self) -> Any:
        return sys.exit, (7,)


def test_an_exception_that_exits_when_it_is_unpickled_is_shown(
    cluster: Cluster,
) -> None:
    def body() -> None:
        raise ExitsWhenUnpickled("boo")

    with pytest.raises(WorldError) as caught:
        cluster.run(body)
    assert caught.value.root.message == "boo"
    assert (caught.value.root.error_type or "").endswith("ExitsWhenUnpickled")


def test_a_rank_that_blocks_signals_is_not_blamed(cluster: Cluster) -> None:
    def body() -> None:
        if rank() == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            dist.barrier()
        if rank() == 1:
            time.sleep(100)
        dist.barrier()

    with pytest.raises(WorldError) as caught:
        cluster.with_options(timeout_s=2).run(body)
    assert caught.value.root.rank == 1
    assert "rank 0: waiting in a collective" in str(caught.value)


def test_a_program_without_standard_descriptors_has_ranks(tmp_path: Path) -> None:
    done = program(f"""
import os
os.closerange(0, 3)
from gradparity.multiprocess import Cluster, current_world
ranks = Cluster(2).run(lambda: (print("out"), current_world().rank)[1])
open({str(tmp_path / "found")!r}, "w").write(repr(ranks))
""")
    assert (tmp_path / "found").read_text() == "[0, 1]", done.stderr


def test_the_memory_of_the_flight_records_cannot_be_truncated() -> None:
    fd = flight_records.create(2)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 8)
    os.close(fd)
