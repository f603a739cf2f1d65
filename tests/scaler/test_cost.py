"""Cost of agreement: collectives and host synchronisations of a step."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler, ShardedGradScaler
from gradparity.tests.agreeing import Make, give_gradient, parameter, sgd
from gradparity.tests.stepping import BOTH, INF, scaled


@BOTH
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_one_collective_a_step(
    four: Cluster, make: Make, fused: bool, clip: bool
) -> None:
    def step() -> tuple[int, int, int]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        norm = parameter(torch.ones(2), mesh, [Shard(0), Replicate()])
        weight = parameter(torch.ones(2, 2), mesh, [Shard(0), Shard(1)])
        narrow = parameter(torch.ones(2).bfloat16(), mesh, [Shard(0), Replicate()])
        params = [norm, weight, narrow]
        scaler, optimizer = scaled(make), torch.optim.Adam(params, fused=fused)
        counts = []
        for _ in range(3):
            for p in params:
                give_gradient(p, 4.0)
            with CommDebugMode() as mode:
                if clip:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            counts.append(mode.get_total_counts())
        return counts[0], counts[1], counts[2]

    # The first iteration closes with one more: nobody knows yet how many come.
    assert four.run(step) == [(2, 1, 1)] * 4


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layout", ["one mesh", "mixed"])
def test_collectives_of_a_clip(four: Cluster, fused: bool, layout: str) -> None:
    def step() -> list[int]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        params = [parameter(torch.ones(2, 2), mesh, [Shard(0), Shard(1)])]
        if layout == "mixed":
            params.append(parameter(torch.ones(2), mesh["tp"], [Shard(0)]))
        scaler, optimizer = scaled(GradScaler), torch.optim.Adam(params, fused=fused)
        counts = []
        for _ in range(3):
            for p in params:
                give_gradient(p, 4.0)
            with CommDebugMode() as mode:
                scaler.clip_and_step(optimizer, 1.0)
                scaler.update()
            counts.append(mode.get_total_counts())
        return counts

    assert [counts[1:] for counts in four.run(step)] == [[1, 1]] * 4


def test_local_agreement_is_no_collective(two: Cluster) -> None:
    def step() -> tuple[int, float]:
        scaler = scaled(GradScaler, sync_over="local")
        p = parameter(torch.ones(2))
        give_gradient(p, INF if dist.get_rank() else 4.0)
        with CommDebugMode() as mode:
            scaler.step(sgd([p]))
            scaler.update()
        return mode.get_total_counts(), scaler.get_scale()

    assert two.run(step) == [(0, 4.0), (0, 2.0)]


@pytest.mark.parametrize("make", [GradScaler, ShardedGradScaler])
@pytest.mark.parametrize(("fused", "syncs"), [(True, 0), (False, 1)])
def test_host_synchronisations(
    two: Cluster, make: Make, fused: bool, syncs: int
) -> None:
    def step() -> int:
        from torch.profiler import ProfilerActivity, profile

        scaler, p = scaled(make), parameter(torch.ones(2))
        optimizer = sgd([p], fused)
        for _ in range(2):
            give_gradient(p, 4.0)
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                scaler.step(optimizer)
                scaler.update()
        events = {e.key: e.count for e in seen.key_averages()}
        return int(events.get("aten::_local_scalar_dense", 0))

    assert all(count <= syncs for count in two.run(step))
