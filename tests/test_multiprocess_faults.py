"""The fault matrix: each fault has its outcome, and an innocent call follows."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradparity.multiprocess import Cluster, RankState, WorldFailure, current_world
from gradparity.multiprocess.spec import Isolation

OK, RAISED, EXITED = RankState.OK, RankState.RAISED, RankState.EXITED
KILLED, HUNG, VICTIM = RankState.KILLED, RankState.HUNG, RankState.VICTIM

SLACK_S = 8.0
"""Added to each promised time: the machine may be busy with other things."""


class Unpicklable(Exception):
    """Pickles, but does not come back."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def wait() -> None:
    dist.all_reduce(torch.ones(3))


def raises() -> None:
    raise ValueError("boo")


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stops_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleeps() -> None:
    time.sleep(1000)


def raises_what_does_not_pickle() -> None:
    raise Unpicklable(1, 2)


def crashes_in_native_code() -> None:
    import ctypes

    ctypes.string_at(0)


def sticks_in_native_code() -> None:
    import ctypes

    ctypes.PyDLL(None).pause()  # holds the interpreter's lock


def forks_a_child_and_raises() -> None:
    if os.fork() == 0:
        time.sleep(1000)
    raise ValueError("boo")


def leaves_a_daemon_and_exits() -> None:
    subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True
    )
    os._exit(3)


def prints_much() -> None:
    line = "x" * 999 + "\n"
    for _ in range(100_000):
        sys.stdout.write(line)
    raise ValueError("boo")


def runs_out_of_memory() -> None:
    # What the kernel does to the one that it picks.
    os.kill(os.getpid(), signal.SIGKILL)


def exits(code: int) -> Callable[[], None]:
    return lambda: os._exit(code)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Rank 1 of 3 does ``bad``; the others do ``others``."""

    bad: Callable[[], Any]
    states: tuple[RankState, RankState, RankState]
    others: Callable[[], Any] = wait
    says: tuple[str, ...] = ()
    limit_s: float = 60.0
    within_s: float = 2.0
    has: dict[str, Any] = field(default_factory=dict)
    root: int = 1


def nothing() -> None:
    pass


def broadcasts() -> None:
    dist.broadcast(torch.ones(2), src=0)


MATRIX = {
    "raise": Fault(
        bad=raises,
        states=(VICTIM, RAISED, VICTIM),
        says=("ValueError: boo", "in raises", "victim: rank 0", "in wait"),
        has={"error_type": "ValueError"},
    ),
    "raise, nobody waits": Fault(
        bad=raises,
        others=nothing,
        states=(OK, RAISED, OK),
        says=("ValueError: boo", "returned normally: rank 0, 2"),
    ),
    "exit": Fault(
        bad=exits(3),
        states=(VICTIM, EXITED, VICTIM),
        says=("rank 1: exited with code 3",),
        within_s=0.5,
        has={"exit_code": 3},
    ),
    "exit, nobody waits": Fault(
        bad=exits(3), others=nothing, states=(OK, EXITED, OK), within_s=0.5
    ),
    "exit 0": Fault(
        bad=exits(0),
        others=nothing,
        states=(OK, EXITED, OK),
        within_s=0.5,
        has={"exit_code": 0},
    ),
    "SIGKILL": Fault(
        bad=kills_itself,
        states=(VICTIM, KILLED, VICTIM),
        says=("rank 1: killed by SIGKILL",),
        within_s=0.5,
        has={"signal": "SIGKILL"},
    ),
    "out of memory": Fault(
        bad=runs_out_of_memory,
        others=nothing,
        states=(OK, KILLED, OK),
        says=("when memory is short",),
        within_s=0.5,
    ),
    "crash in native code": Fault(
        bad=crashes_in_native_code,
        states=(VICTIM, KILLED, VICTIM),
        says=("SIGSEGV", "in crashes_in_native_code"),
        within_s=0.5,
    ),
    "SIGSTOP": Fault(
        bad=stops_itself,
        states=(VICTIM, HUNG, VICTIM),
        says=("rank 1: hung, stopped by a signal", "in stops_itself"),
        limit_s=1.5,
        within_s=2.5,
        has={"signal": "SIGSTOP"},
    ),
    "sleep for ever": Fault(
        bad=sleeps,
        states=(VICTIM, HUNG, VICTIM),
        says=("rank 1: hung, still running", "in sleeps"),
        limit_s=1.5,
        within_s=2.5,
    ),
    "deadlock in native code": Fault(
        bad=sticks_in_native_code,
        states=(VICTIM, HUNG, VICTIM),
        says=("in sticks_in_native_code",),
        limit_s=1.5,
        within_s=2.5,
    ),
    "one collective too many": Fault(
        bad=wait,
        others=nothing,
        states=(OK, HUNG, OK),
        says=("waiting in a collective", "in wait"),
        limit_s=1.5,
        within_s=2.5,
    ),
    "result that does not pickle": Fault(
        bad=threading.Lock,
        others=nothing,
        states=(OK, RAISED, OK),
        says=("that cannot be pickled",),
    ),
    "exception that does not pickle": Fault(
        bad=raises_what_does_not_pickle,
        others=nothing,
        states=(OK, RAISED, OK),
        says=("Unpicklable: 1 and 2", "in raises_what_does_not_pickle"),
        has={"exception": None},
    ),
    "child left behind": Fault(
        bad=forks_a_child_and_raises, others=nothing, states=(OK, RAISED, OK)
    ),
    "daemon left behind": Fault(
        bad=leaves_a_daemon_and_exits, others=nothing, states=(OK, EXITED, OK)
    ),
    "100 MB printed": Fault(
        bad=prints_much,
        others=nothing,
        states=(OK, RAISED, OK),
        says=("bytes left out",),
        within_s=10.0,
    ),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as made:
        yield made


def innocent() -> float:
    value = torch.ones(1) * current_world().rank
    dist.all_reduce(value)
    return value.item()


@pytest.mark.parametrize("name", MATRIX)
def test_a_fault_has_its_outcome_and_hurts_nobody_else(
    cluster: Cluster, name: str
) -> None:
    fault = MATRIX[name]

    def act(bad: Callable[[], Any], others: Callable[[], Any]) -> Any:
        return (bad if current_world().rank == 1 else others)()

    cluster.start()
    pids = cluster.pids
    began = time.monotonic()
    with pytest.raises(WorldFailure) as caught:
        cluster.run(act, fault.bad, fault.others, timeout_s=fault.limit_s)
    took_s = time.monotonic() - began

    failure = caught.value
    assert tuple(outcome.state for outcome in failure.outcomes) == fault.states
    assert failure.root is failure.outcomes[fault.root]
    text = str(failure)
    for words in fault.says:
        assert words in text
    assert text.startswith(f"world of 3: rank {fault.root}: ")
    for attribute, value in fault.has.items():
        assert getattr(failure.root, attribute) == value
    assert took_s < fault.within_s + SLACK_S
    assert cluster.run(innocent) == [3.0] * 3
    assert not set(pids) & set(cluster.pids)
    assert all(gone(pid) for pid in pids)


def gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def test_different_collectives_on_different_ranks_fail(cluster: Cluster) -> None:
    def act() -> None:
        if current_world().rank == 1:
            dist.broadcast(torch.ones(2), src=1)
            dist.all_reduce(torch.ones(2))
        else:
            dist.all_reduce(torch.ones(5))
            dist.barrier()

    with pytest.raises(WorldFailure):
        cluster.run(act, timeout_s=2)
    assert cluster.run(innocent) == [3.0] * 3


def test_the_earliest_of_several_faults_is_the_root(cluster: Cluster) -> None:
    def act() -> None:
        rank = current_world().rank
        time.sleep(0.05 + 0.15 * (2 - rank))
        raise ValueError(f"rank {rank}")

    with pytest.raises(WorldFailure) as caught:
        cluster.run(act)
    assert caught.value.root.rank == 2
    assert [o.state for o in caught.value.outcomes] == [RAISED] * 3
    assert str(caught.value.root.exception) == "rank 2"


def test_a_rank_that_returned_keeps_its_value(cluster: Cluster) -> None:
    def act() -> int:
        if current_world().rank == 1:
            time.sleep(0.2)
            raise ValueError
        return current_world().rank

    with pytest.raises(WorldFailure) as caught:
        cluster.run(act)
    assert [o.value for o in caught.value.outcomes] == [0, None, 2]


def test_output_is_one_block_for_each_rank(cluster: Cluster) -> None:
    def act() -> None:
        print("I am", current_world().rank)
        raise ValueError

    with pytest.raises(WorldFailure) as caught:
        cluster.run(act)
    for rank in range(3):
        assert f"--- output of rank {rank} ---\nI am {rank}\n" in f"{caught.value}\n"


def test_the_bytes_kept_of_an_output_are_limited() -> None:
    def act() -> None:
        print("head" + "x" * 5_000_000 + "tail")

    with Cluster(1, output_limit=1000) as cluster:
        (outcome,) = cluster.outcomes(act)
    assert outcome.output.startswith("head")
    assert outcome.output.endswith("tail\n")
    assert len(outcome.output) < 3000


def test_a_rank_lost_between_calls_is_replaced(cluster: Cluster) -> None:
    cluster.start()
    os.kill(cluster.pids[1], signal.SIGKILL)
    deadline = time.monotonic() + 30
    while not gone(cluster.pids[1]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cluster.run(innocent) == [3.0] * 3


def test_each_isolation_survives_a_fault(cluster: Cluster) -> None:
    isolations: tuple[Isolation, ...] = ("pool", "group", "process")
    for isolation in isolations:
        with pytest.raises(WorldFailure):
            cluster.run(raises, isolation=isolation)
        assert cluster.run(innocent, isolation=isolation) == [3.0] * 3
