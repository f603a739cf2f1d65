"""The report of a desync names the collective, the ranks and the lines."""

import multiprocessing
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import Shard, distribute_tensor

from gradparity.multiprocess import Cluster, WorldError, current_world
from gradparity.multiprocess.outcomes import Collective
from gradparity.multiprocess.rank import flight_recorder
from gradparity.multiprocess.rank.flight_records import (
    SLOTS,
    RecordWriter,
    create,
    read,
)
from gradparity.multiprocess.report import find_desync, find_missing


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(2) as made:
        yield made


def line() -> int:
    return sys._getframe(1).f_lineno


def call(number: int, op: str = "allreduce", shape: str = "float32[2]") -> Collective:
    return Collective("the default group", number, op, shape, "a.py:1", (0, 1))


def test_a_missing_collective_is_named(cluster: Cluster) -> None:
    def act() -> None:
        dist.all_reduce(torch.ones(2, dtype=torch.float64))
        if current_world().rank == 0:
            dist.broadcast(torch.ones(4), src=1)

    with pytest.raises(WorldError) as caught:
        cluster.with_options(timeout_s=1).run(act)
    text = str(caught.value)
    assert "different numbers of collectives in the default group" in text
    assert "rank 0: 2, the last #2 broadcast float32[4]" in text
    assert "rank 1: 1, the last #1 allreduce float64[2]" in text
    assert "test_flight_recorder.py:" in text


def test_different_collectives_are_named(cluster: Cluster) -> None:
    def act() -> int:
        if current_world().rank == 0:
            dist.all_reduce(torch.ones(2))
        else:
            dist.all_reduce(torch.ones(3))
        dist.barrier()
        raise ValueError

    with pytest.raises(WorldError) as caught:
        cluster.with_options(timeout_s=2).run(act)
    text = str(caught.value)
    assert "the ranks disagree on collective #1 of the default group:" in text
    here = "test_flight_recorder.py:"
    assert f"  rank 0: allreduce float32[2], {here}" in text
    assert f"  rank 1: allreduce float32[3], {here}" in text


def test_a_record_names_the_line_of_the_caller(cluster: Cluster) -> None:
    def act() -> int:
        dist.barrier()
        return line() - 1

    outcome = cluster.outcomes(act)[0]
    name = __file__.rpartition("/")[2]
    assert outcome.collectives[-1].where == f"{name}:{outcome.value}"


def in_a_smaller_group(count: int) -> None:
    """Make collectives in a default group of ranks 1 and 2; rank 1 makes ``count``."""
    world = current_world()
    dist.destroy_process_group()
    if world.rank == 0:
        return
    store = dist.PrefixStore("smaller", world.store)
    dist.init_process_group("gloo", store=store, rank=world.rank - 1, world_size=2)
    if world.rank == 1:
        time.sleep(0.5)
    for _ in range(count if world.rank == 1 else 2):
        dist.all_reduce(torch.ones(1))


def test_a_rank_outside_of_a_default_group_is_not_missing_there() -> None:
    with Cluster(3, grace_s=0.1) as cluster:
        cluster.run(in_a_smaller_group, 2)


def test_a_collective_that_a_smaller_default_group_lacks_is_named() -> None:
    with Cluster(3, grace_s=0.1) as cluster, pytest.raises(WorldError) as caught:
        cluster.run(in_a_smaller_group, 1)
    text = str(caught.value)
    assert "rank 1 has ended without issuing it" in text
    assert "numbers of collectives in the default group of 2 ranks:" in text
    assert "rank 0: none" not in text


def sends(count: int) -> None:
    """Send ``count`` tensors to rank 3 of the world, which receives two later."""
    group = dist.new_group([1, 3])
    if dist.get_rank() == 1:
        for _ in range(count):
            dist.send(torch.ones(1), 3, group=group)
    if dist.get_rank() == 3:
        time.sleep(0.5)
        first, second = (torch.zeros(1) for _ in range(2))
        dist.recv(first, 1, group=group)
        pending = dist.irecv(second, 1, group=group)
        assert pending is not None
        pending.wait()
        assert first == second == 1


def test_a_rank_that_ended_after_its_sends_is_not_missing() -> None:
    with Cluster(4, grace_s=0.1) as cluster:
        cluster.run(sends, 2)


def test_a_rank_that_ended_without_a_send_is_named() -> None:
    """The rank that receives waited until the limit."""
    with Cluster(4, grace_s=0.1) as cluster, pytest.raises(WorldError) as caught:
        cluster.run(sends, 1)
    text = str(caught.value)
    assert "rank 1 has ended without sending it" in text
    assert "rank 3: #2 recv float32[1] in group 1," in text


def test_a_group_is_named_by_the_axis_of_its_mesh_alone() -> None:
    """Each rank may describe its groups in other words."""

    def act() -> None:
        mesh = current_world().mesh((2, 2), ("data", "model"))
        dist.all_reduce(torch.ones(1), group=mesh.get_group("model"))
        rank = dist.get_rank()
        group = dist.new_group(group_desc=f"of rank {rank}")
        dist.all_reduce(torch.ones(1), group=group)

    with Cluster(4) as four:
        groups = [
            [call.group for call in outcome.collectives if call.op == "allreduce"]
            for outcome in four.outcomes(act)
        ]
    assert all(name.endswith("(mesh_model)") for name, _ in groups)
    assert len({described for _, described in groups}) == 1


def test_an_uninstalled_flight_recorder_records_nothing(cluster: Cluster) -> None:
    def act() -> Any:
        dist.all_reduce(torch.ones(1))
        flight_recorder.uninstall()
        mesh = current_world().mesh((2,), ("data",))
        value = torch.ones(1)
        dist.all_reduce(value)
        value = functional.all_reduce(value, "sum", mesh)
        return value.tolist()

    for outcome in cluster.with_options(isolation="process").outcomes(act):
        assert outcome.value == [4.0]
        assert [call.number for call in outcome.collectives] == [1]


def test_functional_collectives_are_noted(cluster: Cluster) -> None:
    def act() -> None:
        mesh = current_world().mesh((2,), ("data",))
        distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).full_tensor()

    outcome = cluster.outcomes(act)[0]
    assert any("gather" in c.op for c in outcome.collectives)


def test_records_of_earlier_calls_are_forgotten(cluster: Cluster) -> None:
    cluster.run(dist.barrier)
    assert cluster.outcomes(dist.get_rank)[0].collectives == ()


def test_a_forked_child_of_a_rank_records_nothing(tmp_path: Path) -> None:
    def train(rank: int) -> None:
        file = f"file://{tmp_path / 'meet'}"
        dist.init_process_group("gloo", init_method=file, rank=rank, world_size=2)
        dist.all_reduce(torch.ones(1))
        if rank == 1:
            time.sleep(0.5)  # rank 0 of the world ends long before
        dist.all_reduce(torch.ones(1))

    def act() -> None:
        dist.barrier()
        dist.destroy_process_group()
        if current_world().rank == 0:
            return
        fork = multiprocessing.get_context("fork")
        children = [fork.Process(target=train, args=(rank,)) for rank in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [0, 0]

    with Cluster(2, grace_s=0.1) as cluster:
        for outcome in cluster.outcomes(act):
            assert [call.op for call in outcome.collectives] == ["barrier"]


def test_the_ring_keeps_the_last_records() -> None:
    fd = create(2)
    writer = RecordWriter(fd, 1, 2)
    for index in range(SLOTS + 5):
        writer.record("g", f"op{index}", "-", "here" * 100)
    assert [c.op for c in read(fd, 1)] == [f"op{i}" for i in range(5, SLOTS + 5)]
    assert read(fd, 0) == ()


def test_a_file_with_a_long_name_in_any_script_is_recorded() -> None:
    fd = create(1)
    writer = RecordWriter(fd, 0, 1)
    where = "\u6d4b" * 80 + ".py:7"
    writer.record("the default group", "allreduce", "float32[2]", where)
    (call,) = read(fd, 0)
    assert call.op == "allreduce" and call.where.endswith("\u6d4b.py:7")


@pytest.mark.parametrize(
    ("records", "finds"),
    [
        ({0: [call(1)], 1: [call(1)]}, False),
        ({0: [call(1)], 1: [call(1, "broadcast")]}, True),
        ({0: [call(1)], 1: [call(1, shape="float32[3]")]}, True),
        ({0: [call(1, "gather")], 1: [call(1, "gather", "-")]}, False),
        ({0: [call(1, "send")], 1: [call(1, "recv")]}, False),
        ({0: [call(1), call(2)], 1: [call(1)]}, False),
    ],
)
def test_only_a_real_difference_is_a_desync(records: Any, finds: bool) -> None:
    assert (find_desync(records) is not None) is finds


def test_groups_of_one_name_are_compared_by_their_members() -> None:
    def issued(*ranks: int, count: int = 1, op: str = "barrier") -> list[Collective]:
        return [replace(call(n, op), ranks=ranks) for n in range(1, count + 1)]

    pairs = {0: issued(0, 2), 1: issued(1, 3, count=2, op="gather")}
    assert find_desync(pairs | {2: pairs[0], 3: pairs[1]}) is None
    assert find_missing(pairs | {2: pairs[0], 3: pairs[1]}) is None
    assert "rank 3: broadcast" in str(find_desync(pairs | {3: issued(op="broadcast")}))
    assert "rank 2: 2, the" in str(find_missing(pairs | {2: issued(0, 2, count=2)}))
    unknown = {0: issued(), 1: issued(op="gather")}
    assert find_desync(unknown) is not None


def test_a_rank_without_collectives_is_missing() -> None:
    assert "rank 1: none" in str(find_missing({0: [call(1)], 1: []}))
    assert find_missing({0: [call(1)], 1: [call(1)]}) is None


def test_a_rank_without_collectives_of_its_group_is_missing() -> None:
    def of(group: str, *ranks: int, position: int = 0) -> Collective:
        return replace(call(1), group=group, ranks=ranks, position=position)

    barrier = of("the default group", 0, 1, 2)
    text = find_missing({0: [barrier], 1: [of("a", 1, 2)], 2: [barrier]})
    assert str(text).endswith("rank 2: none") and "collectives in a:" in str(text)
    # its first records are gone
    late = replace(barrier, position=9)
    assert find_missing({1: [of("a", 1, 2), barrier], 2: [late]}) is None
