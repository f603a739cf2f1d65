"""Workloads whose train_step moves a schedule; one of them is wrong."""

import math
import os
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import lr_scheduler

from gradparity.tests.workloads.stacks import Named, rank
from gradparity.tests.workloads.steps import (
    Engine,
    FlatShards,
    MicroBatches,
    Pipeline,
    Trains,
    TrainsOnTwoAxes,
    TrainsSharded,
)


def warm_up(step: int) -> float:
    return min(step / 3, 1.0)


class Scheduled:
    """Moves the schedule after each taken step, and saves it in the checkpoint."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.LambdaLR(optimizer, warm_up)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine: Engine = super().parallelize(model, mesh)  # type: ignore[misc]  # of a stack
        engine.kept["scheduler"] = self.schedule(engine.optimizer)
        return engine

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        before = scaler and scaler.get_scale()
        found = super().train_step(stack, micro_batches, scaler)  # type: ignore[misc]  # of a stack
        if scaler is None or scaler.get_scale() >= before:
            self.move(stack)
        return found

    def move(self, stack: Engine) -> None:
        stack.kept["scheduler"].step()

    def save_checkpoint(self, stack: Engine, scaler: Any, folder: str) -> None:
        state = {
            "module": stack.module.state_dict(),
            "optimizer": stack.optimizer.state_dict(),
            "scheduler": stack.kept["scheduler"].state_dict(),
            "scaler": scaler and scaler.state_dict(),
        }
        torch.save(state, os.path.join(folder, f"{rank()}.pt"))

    def load_checkpoint(self, stack: Engine, scaler: Any, folder: str) -> None:
        state = torch.load(os.path.join(folder, f"{rank()}.pt"), weights_only=False)
        stack.module.load_state_dict(state["module"])
        stack.optimizer.load_state_dict(state["optimizer"])
        stack.kept["scheduler"].load_state_dict(state["scheduler"])
        if scaler is not None:
            scaler.load_state_dict(state["scaler"])


class WarmsUp(Scheduled, Trains):
    pass


class Cosine(Scheduled, TrainsSharded):
    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)


class OnTwoAxes(Scheduled, TrainsOnTwoAxes):
    pass


class Piped(Scheduled, Pipeline):
    pass


class OneCycle(Scheduled, Trains):
    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)


class CyclesMomentum(OneCycle):
    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in parameters], lr=0.1, momentum=0.9)


class CyclesBetas(OneCycle):
    pass


class TensorRate(Scheduled, Trains):
    rate = torch.tensor(0.01)
    """Learning rate: one tensor that all optimizers of the workload share."""

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        mine = [p for _, p in parameters]
        return torch.optim.AdamW(mine, lr=self.rate, foreach=False)


class TwoRates(Scheduled, Trains):
    """Weights and biases have groups with rates of their own, and decay rises."""

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        groups = [
            {"params": [p for n, p in parameters if part in n], "lr": rate}
            for part, rate in (("weight", 0.01), ("bias", 0.03))
        ]
        return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.01)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        factors = [warm_up, lambda step: math.cos(step / 5)]
        return lr_scheduler.LambdaLR(optimizer, factors)

    def move(self, stack: Engine) -> None:
        super().move(stack)
        for group in stack.optimizer.param_groups:
            group["weight_decay"] += 0.1


class MovesInEachPass(Scheduled, Trains):
    """Moves the schedule at each micro-batch, which gradparity trusts."""

    def backward(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> float:
        for _ in micro_batches[1:]:
            stack.kept["scheduler"].step()
        return super().backward(stack, micro_batches, scaler)


class BeganElsewhere(Scheduled, Trains):
    """The schedule halves the rate before the first step; then it is constant."""

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=100)


class OfCopies(Scheduled, FlatShards):
    """The optimizer steps flat shards; ``weights()`` returns views of them."""

    groups = 1

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = FlatShards.parallelize(self, model, mesh)
        shards = [*engine.kept["shards"].values()]
        made = [{"params": shards[n :: self.groups]} for n in range(self.groups)]
        engine.optimizer = torch.optim.AdamW(made, lr=1e-2)
        engine.kept["scheduler"] = self.schedule(engine.optimizer)
        return engine

    def weights(self, stack: Engine) -> Any:
        found = super().weights(stack)
        return {n: (shard.detach(), cut) for n, (shard, cut) in found.items()}


class OfCopiesInTwoGroups(OfCopies):
    """Two groups with rates of their own; the rate of each parameter is unknown."""

    groups = 2

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.LambdaLR(optimizer, [warm_up, lambda _: 1.0])
