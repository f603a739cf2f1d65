"""Ranks in one process do what real ranks do, or say that they cannot."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from gradparity.multiprocess import (
    Cluster,
    NotSimulatedError,
    RankState,
    WorldError,
    WorldSpec,
    current_world,
    linux,
)
from gradparity.multiprocess.simulated import SimulatedCluster, first_difference
from gradparity.multiprocess.spec import Backend

pytest_plugins = ["pytester"]
HUNG, VICTIM, RAISED, OK = (
    *(RankState.HUNG, RankState.VICTIM),
    *(RankState.RAISED, RankState.OK),
)


def simulated(
    size: int, backend: Backend = "simulated", timeout_s: float = 60
) -> closing[SimulatedCluster]:
    spec = WorldSpec(world_size=size, backend=backend, timeout_s=timeout_s)
    return closing(SimulatedCluster(spec))


@pytest.fixture(scope="module")
def threads() -> Iterator[SimulatedCluster]:
    with simulated(4) as made:
        yield made


def rank() -> int:
    return current_world().rank


def sums() -> list[Any]:
    """What both kinds can do: the same operations on every rank."""
    world = current_world()
    mine = torch.arange(3.0) * (world.rank + 1)
    dist.all_reduce(mine)
    mesh = world.mesh((2, 2), ("rows", "columns"))
    rows = torch.ones(2) * (world.rank + 1)
    dist.all_reduce(rows, group=mesh.get_group("rows"))
    whole = torch.arange(8.0).view(4, 2)
    sharded: Any = distribute_tensor(whole, mesh, [Shard(0)] * 2) * 2
    gathered = [torch.empty(1) for _ in range(world.world_size)]
    dist.all_gather(gathered, torch.ones(1) * world.rank)
    return [mine, rows, sharded.full_tensor(), torch.cat(gathered)]


def settings() -> list[Any]:
    """What a rank has for itself, also where others run in between."""
    world = current_world()
    torch.manual_seed(world.rank)
    random.seed(world.rank)
    torch.set_default_dtype((torch.float32, torch.float64)[world.rank % 2])
    os.environ["MINE"] = str(world.rank)
    first = torch.rand(2)
    dist.barrier()
    print("I am", world.rank)
    found = [os.environ["MINE"], os.environ["RANK"], str(torch.ones(1).dtype)]
    world.store.set(f"at/{world.rank}", str(world.rank))
    after = int(world.store.get(f"at/{(world.rank + 1) % world.world_size}"))
    return [first, torch.rand(2), random.random(), found, after, dist.get_rank()]


def train() -> list[torch.Tensor]:
    """Two steps of a sharded model."""
    world = current_world()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    fully_shard(model, mesh=world.mesh((world.world_size,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    for step in range(2):
        torch.manual_seed(100 * step + world.rank)
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.full_tensor() for p in model.parameters()]  # type: ignore[attr-defined]


def numbers(value: list[Any]) -> list[Any]:
    return [v for v in value if isinstance(v, int | float | torch.Tensor)]


@pytest.mark.parametrize("body", [sums, settings], ids=lambda body: body.__name__)
def test_threads_return_what_processes_return(
    threads: SimulatedCluster, body: Callable[[], list[Any]]
) -> None:
    with Cluster(4) as cluster:
        real = cluster.outcomes(body)
    for mine, other in zip(real, threads.outcomes(body), strict=True):
        # Whole numbers: every order of summation is exact.
        torch.testing.assert_close(
            *(numbers(each.value) for each in (mine, other)), rtol=0, atol=0
        )
        assert first_difference(mine.value, other.value) is None
        if body is settings:
            assert other.output == mine.output == f"I am {mine.rank}\n"


def test_two_ranks_train_to_the_same_bits_as_real_ones() -> None:
    with simulated(2, "both") as cluster:
        cluster.run(train)


def extra() -> None:
    dist.barrier()
    if rank() == 2:
        dist.all_reduce(torch.ones(2))


def boom() -> None:
    if rank() == 1:
        raise ValueError("boo")
    dist.all_reduce(torch.ones(2))


def other_operation() -> None:
    if rank() == 0:
        dist.all_reduce(torch.ones(2))
    else:
        dist.broadcast(torch.ones(2), src=0)


def other_shape() -> None:
    dist.all_reduce(torch.ones(3 if rank() == 3 else 2))


def sleeps() -> None:
    if rank() == 1:
        time.sleep(30)
    dist.barrier()


@pytest.mark.parametrize(
    ("body", "root", "states", "says"),
    [
        (extra, 2, [OK, OK, HUNG, OK], "rank 0 has ended without issuing it"),
        (boom, 1, [VICTIM, RAISED, VICTIM, VICTIM], "ValueError: boo"),
        (other_operation, 0, None, "the ranks disagree on a collective"),
        (other_shape, 0, None, "rank 3 of its group has [('torch.float32'"),
        (sleeps, 1, [VICTIM, HUNG, VICTIM, VICTIM], "in sleeps"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_fault_is_reported_as_for_processes(
    threads: SimulatedCluster,
    body: Callable[[], None],
    root: int,
    states: list[RankState] | None,
    says: str,
) -> None:
    began = time.monotonic()
    with pytest.raises(WorldError) as caught:
        # Only a rank that is busy needs the limit.
        threads.with_options(timeout_s=1 if body is sleeps else 60).run(body)
    assert time.monotonic() - began < 50
    if states is not None:  # else whoever comes second finds that the two differ
        assert caught.value.root.rank == root
        assert [o.state for o in caught.value.outcomes] == states
    assert says in str(caught.value)
    assert threads.run(rank) == [0, 1, 2, 3]


def test_the_end_of_the_process_is_reported(threads: SimulatedCluster) -> None:
    def crash() -> None:
        import ctypes

        ctypes.string_at(0)

    with pytest.raises(WorldError, match="SIGSEGV"):
        threads.run(crash)
    assert threads.run(rank) == [0, 1, 2, 3]


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "fork": (lambda: os.fork(), "os.fork"),
    "exit": (lambda: os._exit(0), "os._exit"),
    "signal": (lambda: signal.alarm(1), "signal.alarm"),
    "send": (lambda: dist.send(torch.ones(1), (rank() + 1) % 4), "send"),
    "reduce": (lambda: dist.reduce(torch.ones(1), 0), "reduce"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_threads_refuse_in_one_line(threads: SimulatedCluster, name: str) -> None:
    body, says = REFUSED[name]
    with pytest.raises(NotSimulatedError) as caught:
        threads.run(body)
    assert says in str(caught.value) and 'backend="gloo"' in str(caught.value)
    assert "\n" not in str(caught.value)


def threaded() -> bool:
    return current_world().backend == "simulated"


def disagree() -> dict[str, list[Any]]:
    value = torch.ones(2, 2)
    if threaded() and rank() == 1:
        value[1, 0] = 1.5
    return {"loss": [0.5, value]}


def test_a_disagreement_names_rank_path_and_both_values() -> None:
    with simulated(2, "both") as cluster:
        with pytest.raises(WorldError) as caught:
            cluster.run(disagree)
        assert caught.value.root.rank == 1
        assert "returned value['loss'][1]: gloo tensor" in str(caught.value)
        assert "0.5 at index (1, 0)" in str(caught.value)

        def raise_there() -> None:
            assert not threaded()

        with pytest.raises(WorldError) as caught:
            cluster.run(raise_there)
        assert caught.value.__notes__ == [
            "gloo ranks return; simulated ones fail as shown"
        ]


def test_a_sum_over_more_ranks_may_differ_by_its_rounding() -> None:
    def body(offset: float = 0.0) -> torch.Tensor:
        torch.manual_seed(rank())
        value = torch.randn(1000)
        dist.all_reduce(value)
        return value + (offset if threaded() else 0.0)

    with simulated(3, "both") as cluster:
        cluster.run(body)
        with pytest.raises(WorldError, match="Tensor-likes are not close"):
            cluster.run(body, 1e-3)


@pytest.mark.parametrize(
    ("real", "simulated", "path"),
    [
        ({"a": [1, 2]}, {"a": [1, 3]}, "returned value['a'][1]"),
        ((1, 2), (1,), "gloo (1, 2), simulated (1,)"),
        (1, 1.0, "gloo 1, simulated 1.0"),
        (0.5, 0.6, "gloo 0.5, simulated 0.6"),
        (torch.ones(2), torch.ones(3), "attribute 'shape'"),
        (torch.ones(2), torch.ones(2).double(), "attribute 'dtype'"),
        (torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [3, 5]]), "(1, 1)"),
        (torch.tensor([nan]), torch.tensor([1.0]), "not close"),
        (torch.tensor([nan]), nan, "gloo tensor([nan]), simulated nan"),
    ],
)
def test_the_path_of_the_first_difference_is_named(
    real: Any, simulated: Any, path: str
) -> None:
    assert path in str(first_difference(real, simulated))
    assert first_difference(real, real) is None


@pytest.mark.slow
def test_the_marker_runs_the_same_body_on_all_kinds(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # it orders by size
    pytester.makepyfile(
        """
        import os, pytest, torch, torch.distributed as dist

        @pytest.fixture
        def place(world):
            yield world.rank
            dist.barrier()

        @pytest.mark.parametrize("number", [1.0, 2.0])
        @pytest.mark.world(world_size=64, backend="simulated")
        def test_threads(world, place, number):
            value = torch.ones(1) * world.rank * number
            dist.all_reduce(value)
            assert value.item() == number * sum(range(64))
            assert place == dist.get_rank()

        @pytest.mark.world(world_size=2, backend="both")
        def test_both(world):
            value = torch.rand(3) * world.rank
            dist.all_reduce(value)
            return {"sum": value}

        @pytest.mark.world(world_size=2, backend="both")
        def test_both_differ(world):
            return [1, world.backend == "simulated"]

        @pytest.mark.world(world_size=4, backend="simulated")
        def test_skips(world):
            pytest.skip("all of them")

        @pytest.mark.world(world_size=4, backend="simulated")
        def test_forks(world):
            os.fork()

        """
    )
    result = pytester.runpytest_subprocess("-rfE")
    result.stdout.fnmatch_lines(
        [
            "*returned value[[]1[]]: gloo False, simulated True*",
            "*simulated ranks cannot do os.fork*",
        ]
    )
    result.stdout.no_fnmatch_line("*multi_threaded_pg.py*")
    result.assert_outcomes(passed=3, failed=2, skipped=1)


def test_simulated_ranks_have_no_gpu() -> None:
    with pytest.raises(ValueError, match='needs device="cpu"'):
        WorldSpec(world_size=2, backend="simulated", device="cuda")
    with pytest.raises(ValueError, match="have simulated ranks by"):
        Cluster(2, backend="simulated")


@pytest.mark.slow
def test_256_threads_train_to_what_16_do_not_disturb() -> None:
    with simulated(256, timeout_s=300) as cluster:
        found = cluster.run(train)
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[255], strict=True))


def slow_look() -> None:
    """The thread that watches loses the interpreter in the middle of a look."""
    now_s = linux.now_s

    def later() -> float:
        time.sleep(0.05)
        return now_s()

    linux.now_s = later


def test_the_last_rank_may_end_during_a_look_at_all() -> None:
    with simulated(2) as cluster:
        assert cluster.run(slow_look) == [None, None]


LOCAL = """
import torch, torch.distributed as dist
from torch.distributed._local_tensor import LocalTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=256, store=FakeStore())
with LocalTensorMode(256):
    value = torch.ones(4)
    dist.all_reduce(value)  # 256 on every rank
"""


@pytest.mark.slow
def test_torchs_local_tensors_as_the_page_shows_them() -> None:
    page = Path(__file__).parents[2] / "docs" / "harness.md"
    assert LOCAL in page.read_text()
    shows = "print(value.reconcile().tolist())"
    done = subprocess.run(
        [sys.executable, "-c", f"{LOCAL}\n{shows}"], capture_output=True, text=True
    )
    assert done.stdout == "[256.0, 256.0, 256.0, 256.0]\n", done.stderr
