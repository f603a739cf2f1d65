"""Settings that tests of the scaler share, and one step of two elements."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gradparity.scaler import GradScaler, ShardedGradScaler
from gradparity.scaler.grads import Host
from gradparity.scaler.sync import OverflowSync

BOTH = pytest.mark.parametrize("make", [GradScaler, ShardedGradScaler])
FUSED = pytest.mark.parametrize("fused", [False, True])
INF = float("inf")


def parameter(value: float = 1.0, dtype: Any = torch.float32) -> Tensor:
    return torch.full((2,), value, dtype=dtype, requires_grad=True)


def scalar_weight(
    value: float = 1.0, gradient: float | None = None, dtype: Any = torch.float32
) -> nn.Parameter:
    p = nn.Parameter(torch.tensor([value], dtype=dtype))
    p.grad = None if gradient is None else torch.tensor([gradient], dtype=dtype)
    return p


class Kernels(TorchDispatchMode):
    """Records each kernel that is called, and the value of ``non_blocking``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.called: list[tuple[str, bool]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.called.append((func.name(), kwargs.get("non_blocking", False)))
        return func(*args, **kwargs)


def device_type() -> str:
    """Return the type of device on which tensors are made: a test's own, or the CPU."""
    return torch.get_default_device().type


def scaled(make: Any = GradScaler, scale: float = 4.0, **settings: Any) -> Any:
    scaler = make(device=device_type(), init_scale=scale, **settings)
    scaler.scale(torch.ones(()))
    return scaler


def one_step(scaler: Any, optimizer: Any, gradient: float) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, gradient)
    scaler.step(optimizer)
    scaler.update()


def sgd(*params: Any, lr: float = 1.0, **settings: Any) -> Any:
    return torch.optim.SGD(list(params), lr=lr, **settings)


def with_grad() -> Tensor:
    p = parameter()
    p.grad = torch.ones_like(p)
    return p


# - The ways to take one step; the bound matters to those that clip


def step(scaler: Any, optimizer: Any, max_norm: float = 1e9) -> None:
    scaler.step(optimizer)


def unscale(scaler: Any, optimizer: Any, max_norm: float = 1e9) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def clip(scaler: Any, optimizer: Any, max_norm: float = 1e9) -> None:
    scaler.clip_grad_norm_(optimizer, max_norm)
    scaler.step(optimizer)


def clip_and_step(scaler: Any, optimizer: Any, max_norm: float = 1e9) -> None:
    scaler.clip_and_step(optimizer, max_norm)


WAYS = [step, unscale, clip, clip_and_step]


@contextmanager
def exchanged(how: str) -> Iterator[None]:
    """Act as on an accelerator, on a CPU.

    Args:
        how: ``"cpu"``: the host reads everything at once. ``"settling"``: first
            iterations on an accelerator, whose rows the host reads at once.
            ``"settled"``: later iterations, whose rows it reads at the next sync.
    """
    reads, settles = Host.reads_cpu, OverflowSync.settles
    Host.reads_cpu = how == "cpu"
    OverflowSync.settles = 0 if how == "settled" else settles
    try:
        yield
    finally:
        Host.reads_cpu, OverflowSync.settles = reads, settles


HOW = pytest.mark.parametrize("how", ["cpu", "settling"])
"""Mark of tests of errors that are raised at once: runs them as on a CPU, and as in the
first iterations on an accelerator."""


def acting(how: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``run`` for a rank that acts as on an accelerator; see `exchanged`."""

    def on_rank(*args: Any) -> Any:
        with exchanged(how):
            return run(*args)

    return on_rank
