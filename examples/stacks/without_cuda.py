"""Stand-ins for CUDA, for packages that ask for it on a CPU: leave out on GPUs.

Not a stack to run. docs/stacks.md has the reasons; scripts of docs/wild have a copy.
"""

from typing import Any

import torch
import torch.distributed as dist

# - The stand-in for CUDA, as in examples/stacks/without_cuda.py
# isort: split
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from unittest.mock import patch


class Ended:
    """A stream, event or collective in which nothing is left to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __getattr__(self, name: str) -> Any:
        return Ended


class Scaled(float):
    """NCCL's premultiplied sum: each rank's input times this factor, then the sum."""


def at_once(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Ended:
    """A collective that has ended when it returns."""
    if isinstance(factor := kwargs.get("op"), Scaled):
        kwargs["op"] = dist.ReduceOp.SUM
        if "input" not in kwargs:
            args[0].mul_(factor)
        else:  # NCCL does not write to it
            kwargs["input"] = kwargs["input"] * factor
    call(*args, **kwargs | {"async_op": False})
    return Ended()


@contextmanager
def without_cuda() -> Iterator[None]:
    """Import, lay out and train in it: there is one device, and it never waits."""
    names = "Stream", "Event", "current_stream", "synchronize", "empty_cache"
    device: dict[str, Any] = dict.fromkeys(names, Ended) | {"stream": nullcontext}
    calls = "all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"
    groups: dict[str, Any] = {n: partial(at_once, getattr(dist, n)) for n in calls}
    groups["_coalescing_manager"] = lambda *_, **__: nullcontext(Ended())
    with (
        patch.multiple(torch.cuda, current_device=lambda: 0, **device),
        patch.multiple(torch.Tensor, cuda=lambda tensor, *_, **__: tensor),
        patch.multiple(dist, _make_nccl_premul_sum=Scaled, **groups),
    ):
        yield


# - On a CPU
