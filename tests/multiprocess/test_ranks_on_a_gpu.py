"""Ranks on GPUs: two ranks share one, so that a machine with one GPU suffices."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradparity.multiprocess import (
    Cluster,
    RankState,
    WorldError,
    current_world,
)
from gradparity.multiprocess.spec import Isolation

pytestmark = pytest.mark.gpu
SLACK_S = 8.0
"""Seconds added to each promised time, because the machine may be busy."""
MIB = 1 << 20


def on_gpu(**settings: Any) -> Cluster:
    return Cluster(2, backend="nccl", device="cuda", share_devices=True, **settings)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with on_gpu() as made:
        yield made


def total() -> float:
    world = current_world()
    value = torch.full((4,), float(world.rank + 1), device=world.device)
    dist.all_reduce(value)
    return value.sum().item()


def test_collectives_give_the_right_numbers(cluster: Cluster) -> None:
    def collectives() -> Any:
        world = current_world()
        rank, device = world.rank, world.device
        gathered = torch.zeros(4, device=device)
        dist.all_gather_into_tensor(gathered, torch.full((2,), rank + 1.0).to(device))
        scattered = torch.zeros(1, device=device)
        dist.reduce_scatter_tensor(scattered, torch.tensor([1.0, 2.0], device=device))
        sent = torch.tensor([float(10 * rank)], device=device)
        dist.broadcast(sent, src=1)
        pieces = torch.zeros(2, device=device)
        dist.all_to_all_single(pieces, torch.tensor([rank, rank + 10.0]).to(device))
        seen: list[Any] = [None] * 2
        dist.all_gather_object(seen, rank)
        dist.barrier()
        return (
            gathered.tolist(),
            scattered.item(),
            sent.item(),
            pieces.tolist(),
            seen,
        )

    gathered, seen = [1.0, 1.0, 2.0, 2.0], [0, 1]
    assert cluster.run(collectives) == [
        (gathered, 2.0, 10.0, [0.0, 1.0], seen),
        (gathered, 4.0, 10.0, [10.0, 11.0], seen),
    ]


def test_a_world_has_its_device(cluster: Cluster) -> None:
    def look() -> Any:
        world = current_world()
        made = torch.ones(1, device="cuda").device
        return world.backend, world.device.type, made == world.device

    assert cluster.run(look) == [("nccl", "cuda", True)] * 2


def test_a_mesh_on_a_gpu(cluster: Cluster) -> None:
    def reduce() -> Any:
        mesh = current_world().mesh((2,), ("data",))
        value = torch.ones(1, device=current_world().device)
        dist.all_reduce(value, group=mesh.get_group("data"))
        return mesh.device_type, value.item()

    assert cluster.run(reduce) == [("cuda", 2.0)] * 2


@pytest.mark.parametrize("isolation", ["pool", "group", "process"])
def test_each_isolation(cluster: Cluster, isolation: Isolation) -> None:
    def look() -> Any:
        return os.getpid(), total(), id(dist.group.WORLD)

    cluster.run(total)
    pids = cluster.pids
    calls = cluster.with_options(isolation=isolation)
    for _ in range(2):
        found = calls.run(look)
        assert [numbers for _, numbers, _ in found] == [12.0, 12.0]
        same = [pid for pid, _, _ in found] == list(pids)
        assert same == (isolation != "process")
    assert cluster.pids == pids


def raises() -> None:
    raise ValueError("on purpose")


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("fault", "state", "says"),
    [
        (raises, RankState.RAISED, "ValueError: on purpose"),
        (is_killed, RankState.KILLED, "killed by SIGKILL"),
    ],
)
def test_a_fault_beside_a_collective_is_the_root(
    cluster: Cluster, fault: Any, state: RankState, says: str
) -> None:
    def act() -> float:
        if current_world().rank == 1:
            time.sleep(0.5)  # the other waits on the device by now
            fault()
        return total()

    cluster.run(total)
    pids = cluster.pids
    began = time.monotonic()
    with pytest.raises(WorldError) as caught:
        cluster.run(act)
    took_s = time.monotonic() - began
    root = caught.value.root
    assert (root.rank, root.state) == (1, state) and says in root.headline
    assert caught.value.outcomes[0].state is RankState.VICTIM
    assert took_s < 0.5 + 2 * cluster.spec.grace_s + SLACK_S
    assert cluster.run(total) == [12.0, 12.0]
    assert not set(pids) & set(cluster.pids)


def test_an_error_after_a_collective_was_issued_is_the_root(cluster: Cluster) -> None:
    def act() -> None:
        world = current_world()
        if world.rank == 1:  # its kernel waits on the device for that of rank 0
            value = torch.ones(1, device=world.device)
            dist.all_reduce(value, async_op=True)
            raise ValueError("on purpose")
        time.sleep(60)

    with pytest.raises(WorldError) as caught:
        cluster.with_options(timeout_s=20).run(act)
    root = caught.value.root
    assert (root.rank, root.state) == (1, RankState.RAISED)
    assert "ValueError: on purpose" in root.headline
    assert cluster.run(total) == [12.0, 12.0]


def test_a_hang_in_a_collective_ends_at_the_limit_with_its_place(
    cluster: Cluster,
) -> None:
    def act() -> None:
        if current_world().rank == 1:
            time.sleep(60)
        total()

    cluster.run(total)
    began = time.monotonic()
    with pytest.raises(WorldError) as caught:
        cluster.with_options(timeout_s=2).run(act)
    assert time.monotonic() - began < 2 + 2 * cluster.spec.grace_s + SLACK_S
    failure = caught.value
    assert (failure.root.rank, failure.root.state) == (1, RankState.HUNG)
    waiting = failure.outcomes[0]
    assert waiting.state is RankState.VICTIM
    # NCCL's call returns when its kernel is queued; the wait is in ``.item()``
    last = waiting.collectives[-1]
    assert last.op == "allreduce" and last.tensors == "float32[4]"
    assert Path(__file__).name in last.where
    assert "in total" in waiting.stacks
    assert "in act" in failure.root.stacks
    assert cluster.run(total) == [12.0, 12.0]


def test_a_collective_that_one_rank_never_issues_is_reported(cluster: Cluster) -> None:
    def act() -> None:
        if current_world().rank == 0:
            total()

    with pytest.raises(WorldError) as caught:
        cluster.with_options(timeout_s=2).run(act)
    root = caught.value.root
    assert (root.rank, root.state) == (0, RankState.HUNG)
    assert "allreduce" in str(caught.value)
    assert cluster.run(total) == [12.0, 12.0]


def test_a_collective_alone_that_nothing_waits_for_is_reported(
    cluster: Cluster,
) -> None:
    def act() -> None:
        world = current_world()
        if world.rank == 0:
            dist.all_reduce(torch.ones(1, device=world.device))

    cluster.run(total)
    with pytest.raises(WorldError) as caught:
        cluster.with_options(timeout_s=60).run(act)
    root = caught.value.root
    assert (root.rank, root.state) == (0, RankState.HUNG)
    assert "rank 1 has ended without issuing it" in root.headline
    assert cluster.run(total) == [12.0, 12.0]


def test_an_error_of_the_device_is_of_the_call_that_caused_it(cluster: Cluster) -> None:
    def act() -> None:
        world = current_world()
        if world.rank == 1:
            place = torch.tensor([5], device=world.device)
            torch.zeros(2, device=world.device)[place]  # reports nothing by itself

    with pytest.raises(WorldError) as caught:
        cluster.run(act)
    root = caught.value.root
    assert (root.rank, root.state) == (1, RankState.RAISED)
    assert "CUDA error" in root.headline
    assert cluster.run(total) == [12.0, 12.0]


def test_each_type_of_device_has_its_backend() -> None:
    def both() -> list[float]:
        values = [torch.ones(1), torch.ones(1, device=current_world().device)]
        for value in values:
            dist.all_reduce(value)
        return [value.item() for value in values]

    mixed = "cpu:gloo,cuda:nccl"
    with Cluster(2, backend=mixed, device="cuda", share_devices=True) as cluster:
        assert cluster.run(both) == [[2.0, 2.0]] * 2


OPTIONS = """
import torch.distributed as dist

def urgent():
    return dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
"""


def test_a_process_group_has_the_options_of_its_function(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nccl_options.py").write_text(OPTIONS)
    monkeypatch.syspath_prepend(tmp_path)

    with on_gpu(pg_options="nccl_options:urgent") as cluster:
        assert cluster.run(total) == [12.0, 12.0]
        fresh = cluster.with_options(isolation="group")
        assert fresh.run(total) == [12.0, 12.0]


def in_use() -> tuple[int, int]:
    return torch.cuda.memory_allocated() // MIB, torch.cuda.memory_reserved() // MIB


def test_memory_is_given_back_between_calls() -> None:
    def uses_much() -> None:
        device = current_world().device
        kept: list[Any] = [torch.ones(256 * MIB // 4, device=device)]
        kept.append(kept)  # only the garbage collector frees it
        dist.all_reduce(kept[0])
        torch.cuda.synchronize()

    with on_gpu() as cluster:
        cluster.run(total)
        before = cluster.run(in_use)
        cluster.run(uses_much)
        pids = cluster.pids
        assert cluster.run(in_use) == before
        assert cluster.pids == pids
        assert all(reserved < 64 for _, reserved in before)


def test_a_warm_rank_holds_no_memory_while_it_waits() -> None:
    def uses_much() -> None:
        torch.ones(1024 * MIB // 4, device=current_world().device)
        torch.cuda.synchronize()

    def free() -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0] // MIB

    with on_gpu() as first, on_gpu() as other:
        first.run(total)
        before = min(other.run(free))
        first.run(uses_much)
        deadline = time.monotonic() + SLACK_S
        while (now := min(other.run(free))) < before - 512:
            assert time.monotonic() < deadline, (before, now)


def test_the_generator_of_the_gpu_is_seeded_in_each_call() -> None:
    def draw() -> list[float]:
        return torch.rand(3, device=current_world().device).tolist()

    with on_gpu() as cluster:
        first, second = cluster.run(draw), cluster.run(draw)
    assert first == second
    assert first[0] == first[1]
    with on_gpu(seed=1) as cluster:
        assert cluster.run(draw) != first


NO_DRIVER = """
import sys, torch, torch.distributed as dist
import torch.testing._internal.common_distributed  # asks for GPUs when imported
from gradparity.multiprocess import Cluster, current_world

def total():
    value = torch.ones(1, device=current_world().device)
    dist.all_reduce(value)
    return value.item()

with Cluster(2, backend="nccl", device="cuda", share_devices=True) as cluster:
    print(cluster.run(total), torch.cuda.is_initialized())
"""


def test_ranks_use_the_gpu_where_torchs_test_classes_are_imported(
    tmp_path: Path,
) -> None:
    (tmp_path / "script.py").write_text(NO_DRIVER)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("[2.0, 2.0] False\n", 0), done.stderr


DRIVER = "nvidia-uvm"
"""Part of the name of a file that the driver opens when it is initialised."""


def test_neither_parent_nor_forkserver_initialises_the_driver() -> None:
    script = (
        "import os\n"
        "from gradparity.multiprocess import Cluster\n"
        "from gradparity.multiprocess.parent.forkserver_client import forkserver\n"
        "with Cluster(2, backend='nccl', device='cuda', share_devices=True) as ranks:\n"
        "    ranks.run(int)\n"
        "    for pid in (os.getpid(), forkserver().pid, ranks.pids[0]):\n"
        "        fds = f'/proc/{pid}/fd'\n"
        "        files = [os.readlink(f'{fds}/{fd}') for fd in os.listdir(fds)\n"
        "                 if os.path.lexists(f'{fds}/{fd}')]\n"
        f"        print(any('{DRIVER}' in file for file in files))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", "False", "True"], done.stderr


WORLD_TESTS = """
import os, pytest, torch, torch.distributed as dist

ON_GPU = dict(backend="nccl", device="cuda", share_devices=True)

def total(world):
    value = torch.ones(1, device=world.device) * (world.rank + 1)
    dist.all_reduce(value)
    return value.item()

@pytest.mark.world(2, **ON_GPU)
def test_first(world):
    assert total(world) == 3.0
    torch.ones(1 << 26, device=world.device)

@pytest.mark.world(2, **ON_GPU)
def test_second(world):
    assert torch.cuda.memory_reserved() < 64 << 20
    assert total(world) == 3.0

@pytest.mark.world(2, timeout_s=20, **ON_GPU)
def test_raises(world):
    if world.rank == 1:
        raise ValueError("on purpose")
    total(world)

@pytest.mark.world(2, isolation="group", **ON_GPU)
def test_after_it(world):
    assert total(world) == 3.0

@pytest.mark.world(2, isolation="process", **ON_GPU)
def test_alone(world):
    assert total(world) == 3.0
"""


def test_world_tests_run_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(WORLD_TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "4 passed" in done.stdout and "1 failed" in done.stdout, done.stdout
    assert "root cause: rank 1: raised ValueError: on purpose" in done.stdout
