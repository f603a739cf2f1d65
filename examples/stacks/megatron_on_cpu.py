"""Stand-ins that megatron_gpt.py needs on a CPU: leave all of it out on GPUs.

Not a stack to run. docs/stacks.md has the reasons.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker


class Alone:
    """Stand-in for a group of one process without ``torch.distributed``."""

    size, rank = (lambda _: 1), (lambda _: 0)


def replace_cuda() -> None:
    """Let Megatron run without CUDA's random states, and keep ``Alone`` as a group."""
    parallel_state._set_global_memory_buffer()
    name = "get_tensor_model_parallel_group_if_none"
    for module in [m for n, m in sys.modules.items() if n.startswith("megatron.core")]:
        if hasattr(module, name):  # it drops a group where nothing is distributed
            setattr(module, name, lambda group, *_, **__: group)
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()


def device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context in which CUDA's current device is that of ``tensor``."""
    return patch.object(torch.cuda, "current_device", lambda: tensor.device)
