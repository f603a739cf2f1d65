"""Experts: which ranks their gradients tell, and that they are trained rightly."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from gradparity.conformance.standalone_parts import PARTS
from gradparity.fixtures import (
    DATASETS,
    MODELS,
    OPTIMIZERS,
    TOPOLOGIES,
    local,
    loss,
    split_names,
)
from gradparity.multiprocess import Cluster

EXPERTS = ["down.experts.weight", "down.experts.bias"]


def model() -> Any:
    torch.manual_seed(0)
    return MODELS["digits-experts"]().double()


def laid_out(name: str) -> nn.Module:
    shape = TOPOLOGIES[name].mesh_shape(dist.get_world_size())
    axes = tuple(shape)
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=axes)
    return TOPOLOGIES[name].apply(model(), mesh, MixedPrecisionPolicy())


def ranks_told(name: str) -> dict[str, list[int]]:
    """Parameter -> the ranks of its mesh, which is all that torch's scaler asks."""
    named = laid_out(name).named_parameters()
    meshes = {n: p.device_mesh for n, p in named if isinstance(p, DTensor)}
    return {n: mesh.mesh.flatten().tolist() for n, mesh in meshes.items()}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("fsdp+ep", [[0, 1, 2, 3]] * 4),
        ("fsdp+ep-local", [[0, 2], [1, 3], [0, 2], [1, 3]]),
    ],
)
def test_whom_the_mesh_of_an_expert_tells(
    four: Cluster, name: str, told: list[list[int]]
) -> None:
    results = four.run(ranks_told, name)
    for rank, ranks in enumerate(results):
        assert {n for n in ranks if ranks[n] != [0, 1, 2, 3]} <= {*EXPERTS}
        assert [ranks[n] for n in EXPERTS] == [told[rank]] * 2


def gradients(name: str) -> dict[str, Tensor]:
    """Local gradients of the experts, of this rank's share of a batch."""
    module, rank = laid_out(name), dist.get_rank()
    rows = DATASETS["digits"].batch(0, seed=0).shard(rank, dist.get_world_size())
    loss(module(rows.inputs.double()), rows.targets).backward()
    named = dict(module.named_parameters())
    return {n: local(p.grad) for n in EXPERTS if (p := named[n]).grad is not None}


@pytest.mark.parametrize("name", ["fsdp+ep", "fsdp+ep-local"])
def test_an_expert_learns_from_the_rows_of_all_ranks(four: Cluster, name: str) -> None:
    whole, rows = model(), DATASETS["digits"].batch(0, seed=0)
    loss(whole(rows.inputs.double()), rows.targets).backward()
    wanted = {n: p.grad for n, p in whole.named_parameters()}
    for rank, held in enumerate(four.run(gradients, name)):
        expert = 2 * (rank % 2) + rank // 2  # split over ep, then over dp
        for n in EXPERTS:
            # fp64 sums of less than a thousand terms below 1
            torch.testing.assert_close(
                held[n][0], wanted[n][expert], rtol=0, atol=1e3 * 2**-52
            )


# - Optimizers of models with experts


def test_experts_are_a_group_of_their_own_and_come_first() -> None:
    named = dict(model().named_parameters())
    optimizer = OPTIMIZERS["adamw-groups"](list(named.items()))
    groups = [{id(p) for p in group["params"]} for group in optimizer.param_groups]
    assert groups[0] == {id(named[n]) for n in EXPERTS}
    assert set.union(*groups) == {id(p) for p in named.values()}


def test_experts_or_else_biases_have_an_optimizer_of_their_own() -> None:
    names = [n for n, _ in model().named_parameters()]
    rest, apart = split_names(names)
    assert apart == EXPERTS
    assert sorted(rest + apart) == sorted(names)
    assert split_names(["up.weight", "up.bias"]) == (["up.weight"], ["up.bias"])
    # a name that only contains the word
    assert split_names(["experts_norm.weight"]) == (["experts_norm.weight"], [])


def test_scripts_are_made_for_every_layout() -> None:
    assert PARTS.keys() == TOPOLOGIES.keys()
