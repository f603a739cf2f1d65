"""Situations of a rank in a large world: its gradients, optimizers and calls.

A situation is two iterations of training on one rank, whose tensors differ from those
of its neighbours. Most use only features of torch's scaler; those in ``OURS`` use
features that our scaler adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

SCALE = 1024.0


class Idle(torch.optim.SGD):
    """Optimizer with an empty step: only the scaler is measured."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""


@dataclass(frozen=True)
class Rank:
    """One rank of a world with a mesh."""

    number: int
    world: int
    mesh: DeviceMesh

    def parameter(self, rows: int = 4, *, sharded: bool = True) -> torch.nn.Parameter:
        """Return an fp32 DTensor with local shape (rows, 2) and a gradient of SCALE."""
        axes = range(self.mesh.ndim)
        if sharded:  # over the first axis and, tensor parallel, the last
            placements = [
                Shard(0) if i == 0 else Shard(1) if i == axes[-1] else Replicate()
                for i in axes
            ]
        else:
            placements = [Replicate() for _ in axes]

        def placed(part: torch.Tensor) -> DTensor:
            return DTensor.from_local(part, self.mesh, placements, run_check=False)

        parameter = torch.nn.Parameter(placed(torch.zeros(rows, 2)))
        parameter.grad = placed(torch.full((rows, 2), SCALE))
        return parameter

    def plain(self) -> torch.nn.Parameter:
        """Return a plain fp32 tensor of shape (2,) with a gradient of SCALE."""
        parameter = torch.nn.Parameter(torch.zeros(2))
        parameter.grad = torch.full((2,), SCALE)
        return parameter


def optimizer(*parameters: torch.nn.Parameter) -> Idle:
    """Return one optimizer over ``parameters``."""
    return Idle(list(parameters), lr=0.0)


def alike(rank: Rank, scaler: Any) -> None:
    """Situation in which all ranks have the same kinds of gradients."""
    held = optimizer(rank.parameter(), rank.parameter(sharded=False))
    for _ in range(2):  # the first iteration of a scaler sends a message more
        scaler.step(held)
        scaler.update()


def without_gradients(rank: Rank, scaler: Any) -> None:
    """Situation in which two ranks of three have no gradient."""
    parameter = rank.parameter()
    if rank.number % 3:
        parameter.grad = None
    held = optimizer(parameter)
    for _ in range(2):
        scaler.step(held)
        scaler.update()


def empty_shards(rank: Rank, scaler: Any) -> None:
    """Situation in which half of the ranks have shards without rows."""
    rows = 4 if 2 * rank.number < rank.world else 0
    held = optimizer(rank.parameter(rows), rank.parameter(sharded=False))
    for _ in range(2):
        scaler.unscale_(held)
        scaler.step(held)
        scaler.update()


def overflow(rank: Rank, scaler: Any) -> None:
    """Situation in which only rank 0 has an inf."""
    parameter = rank.plain()
    assert parameter.grad is not None
    if rank.number == 0:
        parameter.grad.fill_(torch.inf)
    held = optimizer(parameter, rank.parameter())
    for _ in range(2):
        scaler.step(held)
        scaler.update()


def several_optimizers(rank: Rank, scaler: Any) -> None:
    """Situation with three optimizers, whose kinds of tensors differ between ranks."""
    bare, bias = rank.parameter(), rank.parameter(sharded=False)
    if rank.number % 2:
        bare.grad = None
    mixed = (
        (rank.plain(), rank.parameter()) if rank.number % 4 == 1 else (rank.plain(),)
    )
    all_of_them = [optimizer(bare), optimizer(bias), optimizer(*mixed)]
    for _ in range(2):
        for held in all_of_them:
            scaler.step(held)
        scaler.update()


def clipped(rank: Rank, scaler: Any) -> None:
    """Situation with clipping; every fourth rank also has plain tensors."""
    extra = [] if rank.number % 4 else [rank.plain()]
    held = optimizer(rank.parameter(), *extra)
    for _ in range(2):
        scaler.clip_and_step(held, 1.0)
        scaler.update()


def without_optimizer(rank: Rank, scaler: Any) -> None:
    """Situation in which one rank of five has no parameters."""
    held = optimizer(rank.parameter())
    for _ in range(2):
        if rank.number % 5 != 4:
            scaler.step(held)
        else:
            scaler.step(None)
        scaler.update()


Situation = Callable[[Rank, Any], None]
COMMON: tuple[Situation, ...] = (
    alike,
    without_gradients,
    empty_shards,
    overflow,
    several_optimizers,
)
OURS: tuple[Situation, ...] = (clipped, without_optimizer)
