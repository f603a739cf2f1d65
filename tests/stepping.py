"""What tests of the scaler share: settings to try, and one step of two elements."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gradparity.scaler import GradScaler, ShardedGradScaler

BOTH = pytest.mark.parametrize("make", [GradScaler, ShardedGradScaler])
FUSED = pytest.mark.parametrize("fused", [False, True])
INF = float("inf")


def parameter(value: float = 1.0, dtype: Any = torch.float32) -> Tensor:
    return torch.full((2,), value, dtype=dtype, requires_grad=True)


def scaled(make: Any = GradScaler, scale: float = 4.0, **settings: Any) -> Any:
    scaler = make(device="cpu", init_scale=scale, **settings)
    scaler.scale(torch.ones(()))
    return scaler


def one_step(scaler: Any, optimizer: Any, gradient: float) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, gradient)
    scaler.step(optimizer)
    scaler.update()


def sgd(*params: Tensor, fused: bool = False, lr: float = 1.0) -> Any:
    return torch.optim.SGD(list(params), lr=lr, fused=fused)


def with_grad() -> Tensor:
    p = parameter()
    p.grad = torch.ones_like(p)
    return p
