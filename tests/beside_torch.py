"""Helpers to run one test on torch's two scalers and on ours."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp.sharded_grad_scaler import (
    ShardedGradScaler as TorchShardedGradScaler,
)

from gradparity.scaler import GradScaler, ShardedGradScaler

NAN = float("nan")
Make = Callable[..., Any]


class Done:
    """Handle of a finished collective."""

    def wait(self) -> None:
        """Return at once."""


class GroupOfOne(dist.ProcessGroup):
    """A process group of this rank alone, which needs no store.

    torch's ShardedGradScaler reduces in ``unscale_`` even on a single rank.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # the stubs lack this one

    def allreduce(self, *args: Any, **kwargs: Any) -> Any:
        """Leave the tensors unchanged, like a sum over a single rank."""
        return Done()


def torch_plain(**settings: Any) -> Any:
    return torch.amp.GradScaler("cpu", **settings)


def ours_plain(**settings: Any) -> Any:
    return GradScaler("cpu", **settings)


def torch_sharded(**settings: Any) -> Any:
    group = GroupOfOne()
    return TorchShardedGradScaler("cpu", process_group=group, **settings)


def ours_sharded(**settings: Any) -> Any:
    return ShardedGradScaler("cpu", process_group=GroupOfOne(), **settings)


class Pair(NamedTuple):
    """Makers of torch's scaler and of ours, with the same settings."""

    theirs: Make
    ours: Make


CLASSES = pytest.mark.parametrize(
    "make", [torch_plain, ours_plain, torch_sharded, ours_sharded]
)
PLAIN = pytest.mark.parametrize("make", [torch_plain, ours_plain])
SHARDED = pytest.mark.parametrize("make", [torch_sharded, ours_sharded])
PAIRS = pytest.mark.parametrize(
    "pair",
    [Pair(torch_plain, ours_plain), Pair(torch_sharded, ours_sharded)],
    ids=["plain", "sharded"],
)


def bits(value: Any) -> Any:
    """Return a result as values to compare: dtype, shape, layout and every bit."""
    if isinstance(value, Tensor):
        if value.is_sparse:
            indices, values = value._indices(), value._values()
            return "sparse", value.is_coalesced(), bits(indices), bits(values)
        raw = value.detach().clone().reshape(-1)
        if raw.is_floating_point() or raw.is_complex():
            raw[raw != raw] = NAN  # one nan is as good as another
        raw = raw.view(torch.uint8)
        return str(value.dtype), tuple(value.shape), value.device.type, raw.tolist()
    if isinstance(value, dict):
        return {str(key): bits(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [bits(each) for each in value]
    if isinstance(value, Iterable) and not isinstance(value, str):
        return "iterable", [bits(each) for each in value]
    return value


_KINDS: tuple[type[Exception], ...] = (
    AssertionError,
    ValueError,
    NotImplementedError,
    TypeError,
    AttributeError,
    RuntimeError,
)


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of ``call``, in bits, or the type of its exception."""
    try:
        return bits(call(*args, **kwargs))
    except Exception as error:
        return next((k.__name__ for k in _KINDS if isinstance(error, k)), repr(error))


def filled(value: float, *shape: int, dtype: Any = torch.float32) -> Tensor:
    """Return a leaf tensor filled with ``value``, with ``requires_grad``."""
    return torch.full(shape or (2,), value, dtype=dtype, requires_grad=True)


def scaled_once(scaler: Any) -> Any:
    """Return the scaler after one call of ``scale``, which creates its scale tensor."""
    scaler.scale(torch.ones(()))
    return scaler
