"""Short versions of the models, data and layouts of the fixtures."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import (
    all_gather_tensor_autograd,
    reduce_scatter_tensor_autograd,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

from ....fixtures import local

__all__ = ["BATCHES", "LAYOUTS", "LIKENESS", "MODELS", "Kind", "cross_entropy"]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model of the same kind as the scenario's, on random data."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    """The mean."""
    return F.cross_entropy(output.float().flatten(0, -2), y.flatten())


# - Models


def digits() -> nn.Sequential:
    """A classifier."""
    return layers(48, nn.Linear(48, 48))


def digits_uneven() -> nn.Sequential:
    """Three rows over two ranks: shards of unequal size."""
    return layers(3, nn.Linear(3, 3))


def digits_experts() -> nn.Sequential:
    """A mixture of experts takes the place of a layer."""
    return layers(16, nn.Sequential(OrderedDict(experts=Experts())))


def layers(hidden: int, down: nn.Module) -> nn.Sequential:
    """Layers of a classifier, one after the other."""
    return nn.Sequential(
        OrderedDict(
            norm=nn.LayerNorm(64),
            up=nn.Linear(64, hidden),
            gelu=nn.GELU(),
            down=down,
            gelu2=nn.GELU(),
            head=nn.Linear(hidden, 10),
        )
    )


def text() -> nn.Sequential:
    """A language model."""
    return nn.Sequential(
        OrderedDict(
            embed=nn.Embedding(256, 32),
            norm=nn.LayerNorm(32),
            up=nn.Linear(32, 64),
            gelu=nn.GELU(),
            down=nn.Linear(64, 32),
            head=nn.Linear(32, 256, bias=False),
        )
    )


def text_tied() -> nn.Sequential:
    """Embedding and head share a weight."""
    model: Any = text()
    model.head.weight = model.embed.weight
    return model  # type: ignore[no-any-return]  # layers have names


class Experts(nn.Module):
    """Four linear layers; a hash of each row names the one it goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.bias = nn.Parameter(torch.randn(4, 16) / 4)
        self.mesh: DeviceMesh | None = None

    def spread(self, mesh: DeviceMesh) -> None:
        """Keep this rank's experts."""
        self.mesh = mesh
        for name, p in list(self.named_parameters()):
            part = distribute_tensor(p.detach(), mesh, [Shard(0)])
            self.register_parameter(name, nn.Parameter(part, p.requires_grad))

    def forward(self, x: Tensor) -> Tensor:
        """Rows are gathered from all ranks, and the sums scattered back."""
        weights, biases, first = local(self.weight), local(self.bias), 0
        if self.mesh is not None:
            x = all_gather_tensor_autograd(x, 0, self.mesh)
            first = self.mesh.get_local_rank() * len(weights)
        route, y = (x > 0).sum(-1, keepdim=True) % 4, torch.zeros(())
        for i, (weight, bias) in enumerate(zip(weights, biases, strict=True), first):
            y = y + torch.where(route == i, F.linear(x, weight, bias), 0)
        if self.mesh is None:
            return y
        found: Tensor = reduce_scatter_tensor_autograd(y, "sum", 0, self.mesh)
        return found


MODELS = {
    "digits": digits,
    "digits-uneven": digits_uneven,
    "digits-experts": digits_experts,
    "text": text,
    "text-tied": text_tied,
}
"""Model -> the one of the same kind."""
LIKENESS = {
    "experts": "down.experts",
    "token": "embed",
    "position": "embed",
    "query": "up",
    "key": "up",
    "value": "up",
    "out": "down",
    "attention_norm": "norm",
    "feed_forward_norm": "norm",
}
"""A layer of the scenario's model -> the layer of the script's model."""


# - Data


def digits_batch(step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random pixels and labels."""
    source = torch.Generator().manual_seed(1000 * seed + step)
    pixels = torch.randn(32, 64, generator=source)
    return pixels, torch.randint(10, (32,), generator=source)


def text_batch(step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random bytes."""
    source = torch.Generator().manual_seed(1000 * seed + step)
    x, y = torch.randint(256, (2, 16, 32), generator=source)
    return x, y


BATCHES = {"digits": digits_batch, "text": text_batch}
"""Data set -> random data of the same shape."""


# - Layouts

Policy = MixedPrecisionPolicy


def ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Replicas."""
    return nn.parallel.DistributedDataParallel(model)


def fsdp1(model: nn.Module, mesh: DeviceMesh, policy: Policy) -> nn.Module:
    """The wrapper class."""
    return FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        mixed_precision=MixedPrecision(policy.param_dtype, policy.reduce_dtype),
        use_orig_params=True,
    )


def fsdp(model: nn.Module, mesh: DeviceMesh, policy: Policy) -> nn.Module:
    """Two layers sharded one by one, then the rest."""
    for name, unit in model.named_children():
        if name in ("up", "down"):
            fully_shard(unit, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def fsdp_plain(model: Any, mesh: DeviceMesh, policy: Policy) -> nn.Module:
    """The norm stays plain, and a hook averages its gradient."""
    plain = {*model.norm.parameters()}
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=plain)
    for p in plain:
        p.register_hook(average)
    return model  # type: ignore[no-any-return]  # layers have names


def average(gradient: Tensor) -> Tensor:
    """Over all ranks."""
    total = gradient.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def tp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Two layers split."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(model, mesh["tp"], plan)


def tp_sp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Two layers split, and activations along the sequence between them."""
    plan: dict[str, ParallelStyle] = {
        "embed": PrepareModuleOutput(
            output_layouts=Replicate(), desired_output_layouts=Shard(1)
        ),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(model, mesh["tp"], plan)


def fsdp_tp(model: nn.Module, mesh: DeviceMesh, policy: Policy) -> nn.Module:
    """Split, then sharded."""
    return fsdp(tp(model, mesh), without_tp(mesh), policy)


def fsdp_tp_sp(model: nn.Module, mesh: DeviceMesh, policy: Policy) -> nn.Module:
    """Split, also along the sequence, then sharded."""
    return fsdp(tp_sp(model, mesh), without_tp(mesh), policy)


def without_tp(mesh: DeviceMesh) -> DeviceMesh:
    """The other axes."""
    return mesh[tuple(axis for axis in mesh.mesh_dim_names or () if axis != "tp")]


def pp(model: Any, mesh: DeviceMesh) -> nn.Module:
    """One of two stages."""
    stage: nn.Module = model[:3] if mesh["pp"].get_local_rank() == 0 else model[3:]
    return stage


def pp_fsdp(model: Any, mesh: DeviceMesh, policy: Policy) -> nn.Module:
    """One of two stages, sharded."""
    return fsdp(pp(model, mesh), mesh["dp"], policy)


def ep(model: Any, mesh: DeviceMesh) -> nn.Module:
    """Experts spread, all else averaged by hooks."""
    model.down.experts.spread(mesh["ep"])
    for name, p in model.named_parameters():
        if p.requires_grad:
            experts = "experts" in name  # all ranks' mean losses reach them
            p.register_hook(
                (lambda g: g / dist.get_world_size()) if experts else average
            )
    return model  # type: ignore[no-any-return]  # layers have names


def fsdp_ep(model: Any, mesh: DeviceMesh, policy: Policy) -> nn.Module:
    """Experts spread and sharded, all else sharded over all ranks."""
    model.down.experts.spread(mesh["ep"])
    return shard_experts(model, mesh, policy)


def fsdp_ep_local(model: Any, mesh: DeviceMesh, policy: Policy) -> nn.Module:
    """The same with each rank's experts as plain tensors of its own."""
    experts = model.down.experts
    experts.spread(mesh["ep"])
    for name, p in list(experts.named_parameters()):
        own = nn.Parameter(p.to_local().detach(), p.requires_grad)
        experts.register_parameter(name, own)
    return shard_experts(model, mesh, policy)


def shard_experts(model: Any, mesh: DeviceMesh, policy: Policy) -> nn.Module:
    """Experts over ``dp``, all else over all ranks."""
    world, experts = dist.get_world_size(), model.down.experts
    fully_shard(experts, mesh=mesh["dp"], mp_policy=policy)
    experts.set_gradient_divide_factor(world)
    experts.set_force_sum_reduction_for_comms(True)  # gloo cannot scale by itself
    everybody = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    fully_shard(model, mesh=everybody, mp_policy=policy)
    return model  # type: ignore[no-any-return]  # layers have names


LAYOUTS: dict[str, Callable[..., nn.Module] | None] = {
    "single": None,
    "ddp": ddp,
    "fsdp1": fsdp1,
    "fsdp": fsdp,
    "fsdp+plain": fsdp_plain,
    "hsdp": fsdp,
    "tp": tp,
    "tp+sp": tp_sp,
    "fsdp+tp": fsdp_tp,
    "hsdp+tp": fsdp_tp,
    "pp": pp,
    "pp+fsdp": pp_fsdp,
    "ep": ep,
    "fsdp+ep": fsdp_ep,
    "fsdp+ep-local": fsdp_ep_local,
}
"""Topology -> its layout of the models here; None where the model stays as it is."""
