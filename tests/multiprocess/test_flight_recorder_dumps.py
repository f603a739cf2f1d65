"""torch's own analyser reads our flight records, and finds who is missing."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.flight_recorder.components import builder, loader
from torch.distributed.flight_recorder.components.config_manager import JobConfig
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from gradparity.multiprocess import Cluster, WorldError, current_world
from gradparity.multiprocess.cluster import _fresh_folder
from gradparity.multiprocess.flight_dumps import ANALYSER, write_flight_records
from gradparity.multiprocess.outcomes import Collective, RankOutcome, RankState

pytest_plugins = ["pytester"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(4) as made:
        yield made


def analysed(folder: Path) -> Any:
    """The analyser's data base."""
    options = JobConfig().parse_args([str(folder)])
    details, version = loader.read_dir(options)
    return builder.build_db(details, options, version)


def hang() -> None:
    dist.all_reduce(torch.ones(2, 3))
    if current_world().rank != 2:
        dist.broadcast(torch.ones(4), src=0)


def desync() -> None:
    if current_world().rank == 1:
        dist.all_reduce(torch.ones(2))
    else:
        dist.broadcast(torch.ones(2), src=0)
    dist.barrier()


def every_collective() -> None:
    """What ranks do that agree."""
    world = current_world()
    n, rank, one = world.world_size, world.rank, torch.ones(2, 3)
    dist.all_reduce(one.clone())
    dist.all_reduce(one.clone(), async_op=True).wait()
    dist.all_reduce_coalesced([one.clone(), torch.ones(4)])
    dist.broadcast(one.clone(), src=1)
    dist.reduce(one.clone(), dst=1)
    dist.all_gather([torch.empty(2, 3) for _ in range(n)], one)
    dist.all_gather_single(torch.empty(2 * n, 3), one)
    dist.reduce_scatter(torch.empty(2, 3), [one] * n)
    dist.reduce_scatter_single(torch.empty(2, 3), torch.ones(2 * n, 3))
    dist.all_to_all_single(torch.empty(n, 3), torch.ones(n, 3))
    # Rank r sends r + 1 rows to each: sizes that differ from rank to rank, rightly.
    mine, all_rows = [rank + 1] * n, [r + 1 for r in range(n)]
    dist.all_to_all_single(
        torch.empty(sum(all_rows), 3), torch.ones(sum(mine), 3), all_rows, mine
    )
    dist.gather(one, [torch.empty(2, 3) for _ in range(n)] if rank == 1 else None, 1)
    dist.scatter(torch.empty(2, 3), [one] * n if rank == 1 else None, 1)
    if rank < 2:  # as a pipeline does: two ranks of the group only
        (dist.send if rank == 0 else dist.recv)(one.clone(), 1 - rank)
    dist.barrier()
    mesh = world.mesh((2, n // 2), ("rows", "columns"))
    dist.all_reduce(one.clone(), group=mesh.get_group("columns"))
    sharded = distribute_tensor(torch.ones(n, 3), mesh, [Shard(0), Shard(1)])
    sharded.redistribute(placements=[Replicate(), Shard(0)]).full_tensor()
    functional.all_reduce(one, "sum", (mesh, 0)).wait()
    functional.reduce_scatter_tensor(torch.ones(4, 3), "sum", 0, (mesh, 0)).wait()
    gathered: Any = functional.all_gather_into_tensor_coalesced([one], (mesh, 1))
    gathered[0].wait()


def test_ranks_that_agree_are_not_mentioned(cluster: Cluster, tmp_path: Path) -> None:
    outcomes = cluster.outcomes(every_collective)
    assert write_flight_records(outcomes, tmp_path / "records")
    found = analysed(tmp_path / "records").collectives
    assert len(found) >= 20
    wrong = [c for c in found if not c.pass_check or c.missing_ranks]
    assert not wrong
    assert {c.collective_state for c in found} == {"completed"}
    assert {frozenset(c.expected_ranks) for c in found} >= {
        *({frozenset({0, 1, 2, 3}), frozenset({0, 1}), frozenset({1, 3})}),
    }


def test_a_hang_names_the_missing_rank(tmp_path: Path) -> None:
    with (
        Cluster(4, artifacts=str(tmp_path)) as cluster,
        pytest.raises(WorldError) as caught,
    ):
        cluster.with_options(timeout_s=1).run(hang)
    folder = tmp_path / "flight-records-1"
    assert f"{ANALYSER} {folder}" in str(caught.value)
    first, second = analysed(folder).collectives
    assert (first.collective_name, first.collective_state) == (
        *("gloo:all_reduce", "completed"),
    )
    assert (second.collective_name, second.missing_ranks) == ("gloo:broadcast", {2})


def test_clusters_that_fail_at_once_share_no_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: _fresh_folder(str(tmp_path)), range(64)))
    assert len(set(made)) == 64 and all(folder.is_dir() for folder in made)


def test_a_desync_names_the_rank_and_both_operations(
    cluster: Cluster, tmp_path: Path
) -> None:
    with pytest.raises(WorldError) as caught:
        cluster.with_options(timeout_s=2).run(desync)
    assert caught.value.write_flight_records(tmp_path / "records")
    first = analysed(tmp_path / "records").collectives[0]
    assert list(first.mismatch_collectives) == [1]
    other = first.mismatch_collectives[1]
    assert first.collective_name == "gloo:broadcast"
    assert other.collective_name == "gloo:all_reduce"
    assert "COLLECTIVE_TYPE_MISMATCH" in str(other.type_of_mismatch)


def test_records_that_a_rank_has_dropped_are_not_missing(tmp_path: Path) -> None:
    def records(first: int, last: int) -> tuple[Collective, ...]:
        return tuple(
            Collective("the default group", n, "barrier", "-", "?", position=n - 1)
            for n in range(first, last + 1)
        )

    outcomes = [
        RankOutcome(rank=0, state=RankState.HUNG, collectives=records(37, 100)),
        RankOutcome(rank=1, state=RankState.HUNG, collectives=records(27, 90)),
    ]
    assert write_flight_records(outcomes, tmp_path / "records")
    found = analysed(tmp_path / "records").collectives
    assert found[0].collective_seq_id == 37
    assert next(c.collective_seq_id for c in found if c.missing_ranks) == 91


def test_without_collectives_nothing_is_written(tmp_path: Path) -> None:
    nothing = [RankOutcome(rank=0, state=RankState.HUNG)]
    send = Collective("the default group", 1, "send", "-", "?")
    assert not write_flight_records(nothing, tmp_path / "records")
    only_sent = [replace(nothing[0], collectives=(send,))]
    assert not write_flight_records(only_sent, tmp_path / "records")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_of_a_hung_test_names_the_rank(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest, torch, torch.distributed as dist

        @pytest.mark.world(world_size=2, timeout_s=1)
        def test_hangs(world):
            dist.all_reduce(torch.ones(2))
            if world.rank == 0:
                dist.all_reduce(torch.ones(2))
        """
    )
    result = pytester.runpytest_subprocess("--gradparity-artifacts", "left")
    line = next(text for text in result.outlines if ANALYSER in text)
    folder = pytester.path / "left"
    assert str(folder) in line
    done = subprocess.run(
        [sys.executable, *line.split()[1:]], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "Not all ranks joining collective, sequence number: 2" in done.stderr
    assert "missing ranks: {1}" in done.stderr


def own_dump() -> bytes:
    """What torch writes itself of the same collective."""
    dist.all_reduce(torch.ones(2, 3))
    c10d: Any = torch._C._distributed_c10d
    return bytes(c10d._dump_fr_trace())


@pytest.mark.slow
def test_a_record_has_the_fields_of_torchs_own_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    with Cluster(2) as cluster:
        outcomes = cluster.with_options(isolation="process").outcomes(own_dump)
    theirs = pickle.loads(outcomes[0].value)
    write_flight_records(outcomes, tmp_path / "records")
    file = tmp_path / "records" / "flight_record_rank_0"
    ours = pickle.loads(file.read_bytes())
    assert ours["version"] == theirs["version"]
    # Of gloo's default group torch notes no name there, and fr_trace cannot find it.
    (group,), (named,) = theirs["pg_config"].values(), ours["pg_config"].values()
    assert named.keys() == group.keys()
    assert named["ranks"] == group["ranks"]
    (mine,), entry = ours["entries"], theirs["entries"][-1]
    assert mine.keys() >= entry.keys() - {"thread_id", "thread_name"}
    assert mine["frames"][0].keys() == entry["frames"][0].keys()
    same = (
        *("process_group", "profiling_name", "collective_seq_id", "is_p2p"),
        *("input_sizes", "output_sizes", "input_dtypes", "output_dtypes"),
    )
    assert {n: mine[n] for n in same} == {n: entry[n] for n in same}
