"""Ranks agree over several meshes, or over the one mesh that is passed."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler
from gradparity.tests.agreeing import (
    Make,
    Seen,
    agreed,
    give_gradient,
    iterate,
    local,
    parameter,
    sgd,
)
from gradparity.tests.stepping import (
    BOTH,
    INF,
    device_type,
    scaled,
)


@BOTH
@pytest.mark.parametrize("where", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.few(6)
def test_b01c_two_axes(
    four: Cluster, make: Make, where: tuple[int, int], fused: bool
) -> None:
    def step(bad: bool) -> Seen:
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
        norm = parameter(torch.ones(2), mesh, [Shard(0), Replicate()])
        weight = parameter(torch.ones(2, 2), mesh, [Shard(0), Shard(1)])
        give_gradient(norm, 4.0)
        bad_here = bad and tuple(mesh.get_coordinate() or ()) == where
        give_gradient(weight, INF if bad_here else 4.0)
        kind = torch.optim.Adam([norm, weight], fused=True) if fused else None
        return iterate(scaled(make), kind or sgd([norm, weight]))

    assert agreed(four.run(step, True), skipped=True)
    assert agreed(four.run(step, False), skipped=False)


@BOTH
@pytest.mark.parametrize("order", [("dp", "tp"), ("tp", "dp")])
@pytest.mark.parametrize("bad_rank", range(4))
def test_b03b_parameters_on_submeshes(
    four: Cluster, make: Make, order: tuple[str, str], bad_rank: int
) -> None:
    def step() -> Seen:
        mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
        params = [parameter(torch.ones(2), mesh[axis], [Shard(0)]) for axis in order]
        for p in params:
            give_gradient(p, 4.0)
        if dist.get_rank() == bad_rank:
            give_gradient(params[1], INF)
        return iterate(scaled(make), sgd(params))

    assert agreed(four.run(step), skipped=True)


def experts(make: Make, bad_rank: int) -> list[bool]:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("ep", "dp"))
    dense = parameter(torch.ones(2), mesh, [Shard(0), Replicate()])
    expert = parameter(torch.ones(2), mesh["dp"], [Shard(0)])
    give_gradient(dense, 4.0)
    give_gradient(expert, INF if dist.get_rank() == bad_rank else 4.0)
    scaler, optimizers = scaled(make), [sgd([dense]), sgd([expert])]
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    stepped = [bool((local(p) != 1).all()) for p in (dense, expert)]
    return [*stepped, scaler.get_scale() == 2.0, scaler._get_growth_tracker() == 0]


@BOTH
@pytest.mark.parametrize("bad_rank", [0, 3])
def test_b03c_b03d_experts_in_their_own_optimizer(
    four: Cluster, make: Make, bad_rank: int
) -> None:
    results = four.run(experts, make, bad_rank)
    assert results == [[True, False, True, True]] * 4


@BOTH
def test_b14c_parameters_on_a_mesh_that_others_are_not_in(
    four: Cluster, make: Make
) -> None:
    def step(bad_rank: int) -> Seen:
        first, second = [
            dist.new_group([0, 1]),
            dist.new_group([2, 3]),
        ]
        mesh = DeviceMesh.from_group(
            first if dist.get_rank() < 2 else second, device_type()
        )
        p = parameter(torch.ones(2), mesh, [Shard(0)])
        give_gradient(p, INF if dist.get_rank() == bad_rank else 4.0)
        return iterate(scaled(make), sgd([p]))

    assert agreed(four.run(step, 0), skipped=True)
    assert agreed(four.run(step, 3), skipped=True)


def test_independent_models_need_not_agree(four: Cluster) -> None:
    def step(how: str) -> tuple[float, int]:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = dist.get_rank() // 2
        mesh = DeviceMesh.from_group(groups[mine], device_type())
        scaler = scaled(GradScaler, sync_over=mesh if how == "mesh" else groups[mine])
        p = parameter(torch.ones(2), mesh, [Shard(0)])
        for _ in range(3 + mine):  # not even the same number of iterations
            give_gradient(p, INF if dist.get_rank() == 0 else 4.0)
            scaler.step(sgd([p]))
            scaler.update()
        return scaler.get_scale(), scaler._get_growth_tracker()

    for how in ("mesh", "group"):
        assert four.run(step, how) == [(0.5, 0)] * 2 + [(4.0, 4)] * 2


def test_a_mesh_of_two_axes_that_is_not_the_world(four: Cluster) -> None:
    def step() -> tuple[float, bool]:
        mesh = DeviceMesh(device_type(), [[0], [2]])
        scaler = scaled(GradScaler, sync_over=mesh)
        p = parameter(torch.ones(2))
        give_gradient(p, INF if dist.get_rank() == 2 else 4.0)
        scaler.step(sgd([p]))
        scaler.update()
        return scaler.get_scale(), dist.get_rank() % 2 == 0

    assert four.run(step) == [(2.0, True), (4.0, False)] * 2


def test_a_world_bound_to_a_device_is_not_split_for_some_of_its_ranks(
    four: Cluster,
) -> None:
    def step() -> tuple[float, str]:
        mesh = DeviceMesh(device_type(), [[0], [2]])
        scaler = scaled(GradScaler, sync_over=mesh)
        world = dist.group.WORLD
        assert world is not None
        device = torch.device("cpu", 0) if device_type() == "cpu" else None
        world.bound_device_id = world.bound_device_id or device
        p = parameter(torch.ones(2))
        give_gradient(p, INF if dist.get_rank() == 2 else 4.0)
        if dist.get_rank() in (0, 2):  # the others are busy
            scaler.step(sgd([p]))
            scaler.update()
        after, world.bound_device_id = world.bound_device_id, None
        return scaler.get_scale(), str(after)

    scales, bound = zip(*four.run(step), strict=True)
    assert scales == (2.0, 4.0, 2.0, 4.0)
    assert len({*bound}) == 1 and bound[0] != "None"


@BOTH
def test_b11d_copies_and_pickles_with_a_process_group(
    four: Cluster, make: Make
) -> None:
    def step() -> list[float]:
        import copy
        import pickle

        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        group = groups[dist.get_rank() % 2]
        name = "sync_over" if make is GradScaler else "process_group"
        original = scaled(make, **{name: group})
        scales = []
        for scaler in (
            original,
            copy.deepcopy(original),
            pickle.loads(pickle.dumps(original)),
        ):
            scaler.scale(torch.ones(()))
            p = parameter(torch.ones(2))
            give_gradient(p, INF if dist.get_rank() == 2 else 4.0)
            scaler.step(sgd([p]))
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    assert four.run(step) == [[2.0] * 3, [4.0] * 3] * 2


def test_a_group_that_a_scaler_makes_is_not_named_by_other_groups(
    four: Cluster,
) -> None:
    def step() -> tuple[float, float]:
        import pickle

        # regression: torch up to 2.13 names by the number of a rank's other groups, and
        # 2.14 counts the group on its members alone, so that later ones mix
        dist.new_group([0])
        pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        rank = dist.get_rank()
        original = scaled(GradScaler, sync_over=pairs[rank % 2])
        scaler = pickle.loads(pickle.dumps(original))
        if rank in (0, 2):  # the others are busy
            scaler.scale(torch.ones(()))
            p = parameter(torch.ones(2))
            give_gradient(p, INF if rank == 2 else 4.0)
            scaler.step(sgd([p]))
            scaler.update()
        later = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        total = torch.tensor(float(rank))
        dist.all_reduce(total, group=later[rank // 2])
        return scaler.get_scale(), total.item()

    assert four.run(step) == [(2.0, 1.0), (4.0, 1.0), (2.0, 5.0), (4.0, 5.0)]
