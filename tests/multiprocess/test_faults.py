"""The fault matrix: each fault is reported as promised, and the next call works."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from gradparity.multiprocess import Cluster, WorldError, current_world
from gradparity.multiprocess.spec import Isolation
from gradparity.tests.fault_matrix import (
    LEFT,
    MATRIX,
    RAISED,
    VICTIM,
    act,
    innocent,
    raises,
    sleeps,
    wait,
)

SLACK_S = 8.0
"""Seconds added to each promised time, because the machine may be busy."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(3) as made:
        yield made


@pytest.mark.parametrize("name", MATRIX)
def test_a_fault_has_its_outcome_and_affects_no_other_rank(
    cluster: Cluster, name: str
) -> None:
    fault = MATRIX[name]
    cluster.start()
    pids = cluster.pids
    began = time.monotonic()
    with pytest.raises(WorldError) as caught:
        cluster.with_options(timeout_s=fault.limit_s).run(act, fault.bad, fault.others)
    took_s = time.monotonic() - began

    failure = caught.value
    assert tuple(outcome.state for outcome in failure.outcomes) == fault.states
    assert failure.root is failure.outcomes[1]
    text = str(failure)
    for words in fault.says:
        assert words in text
    assert text.startswith("world of 3: rank 1: ")
    for attribute, value in fault.has.items():
        assert getattr(failure.root, attribute) == value
    limit_s = fault.within_s + (fault.limit_s if fault.hangs else 0.0)
    assert took_s < limit_s + SLACK_S
    assert cluster.run(innocent) == [3.0] * 3
    assert not set(pids) & set(cluster.pids)
    assert all(gone(pid) for pid in pids)
    left = [int(x) for x in re.findall(rf"{LEFT} (\d+)", failure.root.output)]
    assert len(left) == fault.leaves
    assert all(eventually_gone(pid) for pid in left)


def eventually_gone(pid: int) -> bool:
    deadline = time.monotonic() + SLACK_S
    while not gone(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return gone(pid)


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

    began = time.monotonic()
    with pytest.raises(WorldError):
        cluster.with_options(timeout_s=2).run(act)
    assert time.monotonic() - began < 2 + 1 + SLACK_S
    assert cluster.run(innocent) == [3.0] * 3


def test_the_earliest_of_several_faults_is_the_root() -> None:
    def act() -> None:
        rank = current_world().rank
        time.sleep(0.5 * (2 - rank))
        raise ValueError(f"rank {rank}")

    with Cluster(3, grace_s=30.0) as cluster, pytest.raises(WorldError) as caught:
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

    with pytest.raises(WorldError) as caught:
        cluster.run(act)
    assert [o.value for o in caught.value.outcomes] == [0, None, 2]


def test_output_is_one_block_for_each_rank(cluster: Cluster) -> None:
    def act() -> None:
        print("I am", current_world().rank)
        raise ValueError

    with pytest.raises(WorldError) as caught:
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
    assert eventually_gone(cluster.pids[1])
    assert cluster.run(innocent) == [3.0] * 3


def test_after_a_fault_each_isolation_works_again(cluster: Cluster) -> None:
    isolations: tuple[Isolation, ...] = ("pool", "group", "process")
    for isolation in isolations:
        with pytest.raises(WorldError):
            cluster.with_options(isolation=isolation).run(raises)
        assert cluster.with_options(isolation=isolation).run(innocent) == [3.0] * 3


# regression: M13
def sleeps_in_parts() -> None:
    while True:
        time.sleep(0.01)


def waits_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def waits_in_a_group_without_it() -> None:
    group = dist.new_group([0, 2], use_local_synchronization=True)
    if current_world().rank == 0:
        dist.all_reduce(torch.ones(1), group=group)
    sleeps_in_parts()


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("raise", wait),
        ("raise", sleeps),
        ("raise", sleeps_in_parts),
        ("raise", waits_for_a_lock),
        ("raise", waits_in_a_group_without_it),
        ("exit", wait),
        ("sleep for ever", wait),
    ],
)
def test_healthy_ranks_run_finally(
    cluster: Cluster, name: str, others: Callable[[], None]
) -> None:
    def healthy() -> None:
        try:
            others()
        except Exception:
            raise  # what ends a call is none of these
        finally:
            print("finally on", current_world().rank)

    fault = MATRIX[name]
    began = time.monotonic()
    with pytest.raises(WorldError) as caught:
        cluster.with_options(timeout_s=1).run(act, fault.bad, healthy)
    assert time.monotonic() - began < 1 + 2 + SLACK_S
    assert caught.value.root.rank == 1
    healthy_ranks = [caught.value.outcomes[r] for r in (0, 2)]
    assert [o.state for o in healthy_ranks] == [VICTIM] * 2
    assert [o.output for o in healthy_ranks] == ["finally on 0\n", "finally on 2\n"]


def test_a_teardown_without_an_end_is_killed(cluster: Cluster) -> None:
    def healthy() -> None:
        try:
            sleeps()
        finally:
            print("here", flush=True)
            sleeps()

    began = time.monotonic()
    with pytest.raises(WorldError, match="boo") as caught:
        cluster.run(act, raises, healthy)
    assert time.monotonic() - began < 2 + SLACK_S
    assert caught.value.outcomes[0].output == "here\n"
    assert cluster.run(innocent) == [3.0] * 3
