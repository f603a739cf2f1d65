"""Stand-ins for CUDA, for packages that ask for it on a CPU: leave out on GPUs.

Import these functions into a workload; this file is not a workload itself. See
docs/stacks.md for the reasons. Some scripts of docs/wild hold a copy.
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
    """Stand-in for a stream, event or collective that has already ended."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __getattr__(self, name: str) -> Any:
        return Ended


class Scaled(float):
    """Factor of NCCL's premultiplied sum: inputs are multiplied by it, then added."""


def at_once(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Ended:
    """Run a collective without CUDA's asynchrony; it has ended on return."""
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
    """Let packages that ask for CUDA import, lay out and train on the CPU."""
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
