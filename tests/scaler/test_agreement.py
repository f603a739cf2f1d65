"""Ranks agree on one mesh: one collective, one decision, one scale."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from gradparity.multiprocess import Cluster
from gradparity.scaler import ShardedGradScaler
from gradparity.tests.agreeing import (
    NAN,
    Make,
    Seen,
    agreed,
    give_gradient,
    iterate,
    parameter,
    sgd,
)
from gradparity.tests.stepping import (
    BOTH,
    INF,
    device_type,
    scaled,
)


def ordered(make: Make, order: list[str], bad: dict[int, str]) -> Seen:
    mesh = init_device_mesh(device_type(), (dist.get_world_size(),))
    placements = {"replicated": [Replicate()], "sharded": [Shard(0)]}
    named = {
        name: parameter(torch.ones(2), mesh, placements.get(name)) for name in order
    }
    if "plain" in named:
        named["plain"] = parameter(torch.ones(2))
    for name, p in named.items():
        give_gradient(p, INF if bad.get(dist.get_rank()) == name else 4.0)
    return iterate(scaled(make), sgd(list(named.values())))


@BOTH
@pytest.mark.parametrize("order", ["replicated sharded", "sharded replicated"])
@pytest.mark.parametrize("bad_rank", [0, 1])
def test_b01a_order_of_placements(
    two: Cluster, make: Make, order: str, bad_rank: int
) -> None:
    bad = {bad_rank: "sharded"}
    assert agreed(two.run(ordered, make, order.split(), bad), skipped=True)
    assert agreed(two.run(ordered, make, order.split(), {}), skipped=False)


@BOTH
@pytest.mark.parametrize("order", ["plain sharded", "sharded plain"])
@pytest.mark.parametrize("bad", ["plain", "sharded"])
def test_b03a_plain_beside_dtensor(
    two: Cluster, make: Make, order: str, bad: str
) -> None:
    assert agreed(two.run(ordered, make, order.split(), {1: bad}), skipped=True)
    assert agreed(two.run(ordered, make, order.split(), {}), skipped=False)


@BOTH
@pytest.mark.parametrize("bad_rank", [0, 1, None])
def test_b01b_partial_before_sharded(
    two: Cluster, make: Make, bad_rank: int | None
) -> None:
    # As the norms of sequence parallelism: torch is right there, and so are we.
    def step() -> Seen:
        mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
        norm = parameter(torch.ones(2), mesh, [Replicate()])
        weight = parameter(torch.ones(2), mesh, [Shard(0)])
        give_gradient(norm, 4.0, [Partial()])
        give_gradient(weight, INF if dist.get_rank() == bad_rank else 4.0)
        return iterate(scaled(make), sgd([norm, weight]))

    assert agreed(two.run(step), skipped=bad_rank is not None)


@BOTH
def test_b06b_empty_local_shard(two: Cluster, make: Make) -> None:
    def step(bad: bool, fused: bool) -> Seen:
        mesh = init_device_mesh(device_type(), (2,))
        rows = 1 if dist.get_rank() == 0 else 0
        p = nn.Parameter(
            DTensor.from_local(
                torch.ones(rows, 2),
                mesh,
                [Shard(0)],
                run_check=False,
                shape=torch.Size([1, 2]),
                stride=(2, 1),
            )
        )
        p.grad = DTensor.from_local(
            torch.full((rows, 2), INF if bad else 4.0),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=p.shape,
            stride=p.stride(),
        )
        optimizer = torch.optim.Adam([p], fused=fused)
        return iterate(scaled(make), optimizer)._replace(skipped=bad)

    for fused in (False, True):
        assert agreed(two.run(step, True, fused), skipped=True)
        assert agreed(two.run(step, False, fused), skipped=False)


@BOTH
@pytest.mark.parametrize("value", [4.0, INF])
def test_b07_partial_gradients(two: Cluster, make: Make, value: float) -> None:
    def step() -> Seen:
        mesh = init_device_mesh(device_type(), (2,))
        p = parameter(torch.ones(2), mesh, [Replicate()])
        here = value if dist.get_rank() == 1 else 3e38
        give_gradient(p, here, [Partial()])
        seen = iterate(scaled(make), sgd([p]))
        return seen

    assert agreed(two.run(step), skipped=value == INF)


@BOTH
@pytest.mark.parametrize("bad_ranks", [[0], [1], [0, 1]])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw", "adagrad"])
def test_b02_b09_b13_fused(
    two: Cluster, device: str, make: Make, bad_ranks: list[int], clip: bool, kind: str
) -> None:
    if (kind, device) == ("adagrad", "cuda"):
        pytest.skip("torch has no fused Adagrad there")
    kinds = {
        "sgd": torch.optim.SGD,
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
    }

    def step() -> list[Any]:
        p = parameter(torch.ones(3))
        optimizer: Any = kinds[kind]([p], lr=0.25, fused=True)
        scaler = scaled(make)
        seen: list[Any] = []
        for bad in (False, True, False):
            nan_here = bad and dist.get_rank() in bad_ranks
            give_gradient(p, NAN if nan_here else 4.0)
            seen.append((iterate(scaler, optimizer, clip=clip), p.detach().clone()))
            steps = optimizer.state[p].get("step")
            seen.append(None if steps is None else float(steps))
        return seen

    first, second = two.run(step)
    assert str(first) == str(second)
    good, skipped, again = first[0][0], first[2][0], first[4][0]
    assert (good.skipped, skipped.skipped, again.skipped) == (False, True, False)
    assert skipped.finite and skipped.scale == 2.0 and again.tracker == 1
    if kind != "sgd":
        assert (first[1], first[3], first[5]) == (1.0, 1.0, 2.0)


def test_b09_found_inf_is_a_scalar(two: Cluster) -> None:
    def found(bad: bool) -> Any:
        p = parameter(torch.ones(3))
        give_gradient(p, INF if bad else 4.0)
        scaler, optimizer = scaled(ShardedGradScaler), sgd([p])
        scaler.unscale_(optimizer)
        (value,) = scaler._found_inf_per_device(optimizer).values()
        return value

    for bad in (True, False):  # on both ranks at once: a sum would be 2
        for value in two.run(found, bad):
            assert value.shape == () and value.dtype is torch.float32
            assert value.item() == float(bad)
