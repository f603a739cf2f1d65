"""Resources of a world are released once, and no signal reaches other processes."""

import gc
import os
import signal
from pathlib import Path

import pytest

from gradparity.multiprocess import Cluster, WorldSpec
from gradparity.multiprocess.parent.rank_processes import RankProcesses
from gradparity.tests.multiprocess.test_cleanup import alive, wait_until_gone


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_a_second_kill_closes_nothing() -> None:
    processes = RankProcesses(WorldSpec(world_size=1))
    processes.kill()
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(16)]  # its numbers again
    try:
        processes.kill()
        for fd in others:
            os.fstat(fd)
    finally:
        for fd in others:
            os.close(fd)


def test_a_rank_that_is_gone_is_not_killed_by_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes = RankProcesses(WorldSpec(world_size=1))
    (pid,) = processes.pids
    os.kill(pid, signal.SIGKILL)
    wait_until_gone({pid})
    while Path(f"/proc/{pid}").exists():  # until the forkserver has waited for it
        pass
    hit: list[int] = []
    for name in ("kill", "killpg"):
        monkeypatch.setattr(os, name, lambda pid, number: hit.append(pid))
    processes.dump_stacks(processes.ranks, 0.1)
    processes.kill()
    assert hit == []


def test_a_cluster_that_is_forgotten_ends_its_ranks() -> None:
    with Cluster(1) as cluster:  # the forkserver is there
        cluster.run(os.getpid)
    before = descriptors()
    cluster = Cluster(2)
    cluster.start()
    pids = set(cluster.pids)
    assert alive(pids) == pids
    del cluster
    gc.collect()
    assert alive(pids) == set()
    assert descriptors() == before


def test_a_forked_copy_of_the_parent_ends_no_ranks() -> None:
    cluster = Cluster(1)
    before = cluster.run(os.getpid)
    copy = os.fork()
    if copy == 0:
        del cluster
        gc.collect()
        os._exit(0)
    os.waitpid(copy, 0)
    assert cluster.run(os.getpid) == before
    cluster.close()
