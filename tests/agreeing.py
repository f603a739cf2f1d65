"""Iterations of a scaler on one rank and their results, for tests of agreement."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradparity.scaler import GradScaler

Make = Callable[..., GradScaler]
NAN = float("nan")


class Seen(NamedTuple):
    """Result of one iteration on one rank."""

    skipped: bool
    scale: float
    tracker: int
    finite: bool
    checked: float  # a collective after the step: cross-talk would change it


def parameter(local: Tensor, mesh: Any = None, placements: Any = None) -> nn.Parameter:
    if mesh is None:
        return nn.Parameter(local)
    return nn.Parameter(DTensor.from_local(local, mesh, placements, run_check=False))


def give_gradient(p: nn.Parameter, value: float, placements: Any = None) -> None:
    if isinstance(p, DTensor):
        local = torch.full_like(p.to_local(), value)
        p.grad = DTensor.from_local(
            local, p.device_mesh, placements or p.placements, run_check=False
        )
    else:
        p.grad = torch.full_like(p, value)


def local(p: Tensor) -> Tensor:
    return (p.to_local() if isinstance(p, DTensor) else p).detach()


def iterate(scaler: GradScaler, *optimizers: Any, clip: bool = False) -> Seen:
    held = [p for o in optimizers for g in o.param_groups for p in g["params"]]
    before = [local(p).clone() for p in held]
    for optimizer in optimizers:
        if clip:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    scaler.update()
    after = [local(p) for p in held]
    check = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(check)
    return Seen(
        all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        scaler.get_scale(),
        scaler._get_growth_tracker(),
        all(bool(p.isfinite().all()) for p in after),
        check.item(),
    )


def agreed(results: list[Seen], *, skipped: bool) -> bool:
    first = results[0]
    right = sum(range(len(results)))
    return (
        all(result == first for result in results)
        and first.skipped == skipped
        and first.finite
        and first.checked == right
        and first.scale == (2.0 if skipped else 4.0)
        and first.tracker == (0 if skipped else 1)
    )


def sgd(params: list[nn.Parameter], fused: bool = False) -> Any:
    return torch.optim.SGD(params, lr=0.25, fused=fused)
