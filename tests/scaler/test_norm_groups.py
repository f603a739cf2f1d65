"""The norm of a clip, where the ranks that sync are not those of the gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler, ShardedGradScaler
from gradparity.tests.agreeing import give_gradient, local, parameter, sgd
from gradparity.tests.stepping import scaled

CLIPS = ("clip_grad_norm_", "clip_and_step")
PLACEMENTS = {
    "replicated and sharded": [Replicate(), Shard(0)],
    "sharded twice": [Shard(0), Shard(0)],
}


# regression: S4, T1
def test_a_mesh_that_the_sync_does_not_cover_is_refused(four: Cluster) -> None:
    """Half of the ranks would clip by half of the norm; nothing is changed."""

    def run() -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        here: list[tuple[Any, dict[str, Any]]] = [
            (ShardedGradScaler, {"process_group": mesh.get_group("tp")}),
            (GradScaler, {"process_group": mesh.get_group("dp")}),
            (GradScaler, {"mesh": mesh["tp"]}),
            (GradScaler, {"agree_over": "local"}),
            (GradScaler, {"mesh": mesh["dp"], "enabled": False}),
        ]
        wrong = []
        for placements in PLACEMENTS.values():
            for make, settings in here:
                for call in CLIPS:
                    p = parameter(torch.ones(2), mesh, placements)
                    give_gradient(p, 4.0)
                    scaler = scaled(make, **settings)
                    case = f"{make.__name__}, {settings}, {call}"
                    try:
                        getattr(scaler, call)(sgd([p]), 1e-3)
                    except ValueError as error:
                        if "ranks [0, 1, 2, 3]" not in str(error):
                            wrong.append(f"{case}: {error}")
                    else:
                        wrong.append(f"{case}: not refused")
                    assert p.grad is not None
                    if (local(p) != 1.0).any() or (local(p.grad) != 4.0).any():
                        wrong.append(f"{case}: changed")
        return wrong

    assert four.run(run) == [[]] * 4


@pytest.mark.parametrize("placements", PLACEMENTS.values(), ids=PLACEMENTS)
def test_the_root_mesh_gives_the_whole_norm(four: Cluster, placements: Any) -> None:
    def run() -> list[float]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        norms = []
        for settings in ({}, {"mesh": mesh}, {"agree_over": "mesh"}):
            p = parameter(torch.ones(2), mesh, placements)
            give_gradient(p, 4.0)
            scaler = scaled(**settings)
            norms.append(scaler.clip_grad_norm_(sgd([p]), 1e9).item())
        return norms

    whole = 2.0 if placements[0].is_replicate() else 8**0.5
    for norms in four.run(run):
        assert norms == pytest.approx([whole] * 3)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_a_mesh_of_one_rank_beside_a_plain_parameter(
    two: Cluster, order: float
) -> None:
    def run() -> list[float]:
        mesh = [DeviceMesh("cpu", [rank]) for rank in range(2)][dist.get_rank()]
        norms = []
        for over in ("mesh", "local"):
            params = [parameter(torch.ones(1), mesh, [Shard(0)])]
            params.append(parameter(torch.ones(1)))
            for p, value in zip(params, (12.0, 16.0), strict=True):
                give_gradient(p, value)
            scaler = scaled(agree_over=over)
            norms.append(scaler.clip_grad_norm_(sgd(params), 1e9, order).item())
        return norms

    expected = torch.tensor([3.0, 4.0]).norm(order).item()
    for norms in two.run(run):
        assert norms == pytest.approx([expected] * 2)
