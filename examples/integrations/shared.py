"""Layouts for the trainers' fp16 steps, and the object that stands for a scaler.

Not a workload to run. Each module beside it has a package's own step as a workload: its
scaler calls, clipping, skip, schedule and checkpoint. The tested scaler replaces the
package's own. So ``--scaler torch.amp:GradScaler`` runs the package's step; without
``--scaler`` the step has our scaler.
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
    """Stands for the scaler in a trainer; forwards to the tested scaler, if any."""

    def __init__(self) -> None:
        self.use(None)

    def use(self, scaler: Any) -> None:
        """Forward to ``scaler`` from now on; None stands for a disabled scaler."""
        # gradparity also runs the step without a scaler, as the control: the trainer
        # then gets one that does nothing.
        off = GradScaler("cpu", enabled=False)
        self.scaler = off if scaler is None else scaler

    def __getattr__(self, name: str) -> Any:
        if name == "scaler" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.scaler, name)


def lay_out(model: nn.Module, mesh: DeviceMesh, whole_tp: bool = True) -> nn.Module:
    """Lay out a model by DDP, FSDP2 or HSDP, by tensor parallelism, or by both.

    Args:
        model: model of :class:`Regression`.
        mesh: the names of its axes select the layout.
        whole_tp: true to split the last layer as well; else its parameters stay plain
            tensors.
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
    """Regression whose schedule counts the steps that a trainer reports as taken."""

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
        """Return a schedule that counts steps and keeps the learning rate."""
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
    """FSDP2 and HSDP, as in the engines of reinforcement learning packages."""

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
        """Run forward and backward of each micro-batch; return the loss."""
        total = torch.zeros(())
        for inputs, targets, share in weighted(micro_batches):
            loss = self.loss(stack.module(inputs), targets) * share
            scale(loss).backward()
            total += loss.detach()
        return total
