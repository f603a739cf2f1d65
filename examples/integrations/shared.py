"""Layouts of the trainers' fp16 steps, and the place where a scaler goes.

Not a workload to run. Each module beside it has a package's own step as a workload: its
scaler calls, clipping, skip, schedule and checkpoint. The judged scaler takes the place
of the package's own, so ``--scaler torch.amp:GradScaler`` is their step and without
``--scaler`` it is ours.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import parallel as tp
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from gradparity.scaler import GradScaler

from ..stacks.shared import Named, Pair, Regression, weighted
from .wait_for_steps import wait_for_steps

__all__ = ["Named", "Pair", "Place", "Sharded", "Stepped", "weighted"]


class Place:
    """Stands in a trainer for its scaler: the judged one, or none in a run without."""

    def __init__(self) -> None:
        self.use(None)

    def use(self, scaler: Any) -> None:
        """Take ``scaler`` from now on; None is one that does nothing."""
        # gradparity also runs the step without a scaler, as the control: the trainer
        # then gets one that does nothing.
        off = GradScaler("cpu", enabled=False)
        self.scaler = off if scaler is None else scaler

    def __getattr__(self, name: str) -> Any:
        if name == "scaler" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.scaler, name)


def lay_out(model: nn.Module, mesh: DeviceMesh, whole_tp: bool = True) -> nn.Module:
    """DDP, FSDP2, HSDP, tensor parallel, or the last with one of the others.

    Args:
        model: model of :class:`Regression`.
        mesh: its axes say which.
        whole_tp: split the last layer, too; else its parameters stay plain tensors.
    """
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        plan: dict[str, tp.ParallelStyle] = {
            "0": tp.ColwiseParallel(),
            "2": tp.RowwiseParallel(),
        }
        if whole_tp:
            plan["4"] = tp.ColwiseParallel(output_layouts=Replicate())
        here = {name for name, _ in model.named_children()}  # a stage has some of them
        mine = {name: style for name, style in plan.items() if name in here}
        tp.parallelize_module(model, mesh["tp"], mine)
    if "ddp" in names:
        return DistributedDataParallel(model, process_group=mesh.get_group("ddp"))
    data = tuple(n for n in names if n != "tp")
    if data:
        fully_shard(model, mesh=mesh[data])
    return model


class Stepped(Regression):
    """Counts what a trainer says of its steps."""

    clip_norm = 0.1
    fused = False
    waits = False
    """True if our integration holds back the schedule."""

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        mine = [p for _, p in parameters]
        if self.fused:
            return torch.optim.AdamW(mine, lr=1e-2, fused=True)
        return torch.optim.SGD(mine, lr=0.1)

    def scheduler(
        self, optimizer: torch.optim.Optimizer, place: Place | None = None
    ) -> LambdaLR:
        """Counts, and leaves the learning rate."""
        made = LambdaLR(optimizer, lambda _: 1.0)
        if self.waits:
            wait_for_steps(made, place)  # type: ignore[arg-type]  # it stands for a scaler
        return made

    def weights(self, stack: Any) -> dict[str, Any]:
        return dict(stack.module.named_parameters())

    def lr_schedule(self, stack: Any) -> int:
        epoch: int = stack.scheduler.state_dict()["last_epoch"]
        return epoch


class Sharded(Stepped):
    """FSDP2 and HSDP, as the engines of reinforcement learning have them."""

    meshes: tuple[dict[str, int], ...] = ({"fsdp": 2}, {"replicate": 2, "fsdp": 2})

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        module = lay_out(model, mesh)
        optimizer, place = self.optimizer([*module.named_parameters()]), Place()
        return SimpleNamespace(
            module=module,
            optimizer=optimizer,
            scheduler=self.scheduler(optimizer, place),
            place=place,
            mesh=mesh,
        )

    def passes(self, stack: Any, micro_batches: list[Pair], scale: Any) -> Tensor:
        """Forward and backward of each micro-batch; the loss."""
        total = torch.zeros(())
        for inputs, targets, share in weighted(micro_batches):
            loss = self.loss(stack.module(inputs), targets) * share
            scale(loss).backward()
            total += loss.detach()
        return total
