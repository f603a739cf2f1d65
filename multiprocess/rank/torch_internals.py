"""Every private name of torch that the code on the ranks uses.

Private names of torch's test classes are in :mod:`.unittests` and in the pytest
plugin's ``adopt``.
"""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

import torch
from torch.autograd.graph import _engine_run_backward
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d

__all__ = [
    "BACKWARD",
    "CONNECTS",
    "NEW_GROUP",
    "default_device",
    "forget_meshes",
    "functional",
    "process_groups",
]

BACKWARD: CodeType = _engine_run_backward.__code__
"""Function in which a backward pass waits; DDP waits below it, in C++."""

NEW_GROUP: tuple[Any, str] = distributed_c10d, "_new_process_group_helper"
"""Function that creates every kind of process group."""

CONNECTS: tuple[CodeType, ...] = tuple(
    function.__code__
    for backend in ("gloo", "nccl", "nccl2", "nccl_lazy", "ucc", "xccl")
    if (function := getattr(distributed_c10d, f"_create_{backend}_process_group", None))
)
"""Functions that connect the ranks of a new group, since torch 2.14. Before 2.14,
``NEW_GROUP`` connected the ranks."""


def process_groups() -> int:
    """Return the number of process groups of this process."""
    return len(distributed_c10d._world.pg_map)


def default_device() -> torch.device | None:
    """Return the device that ``torch.set_default_device`` has set, or None.

    ``torch.get_default_device`` returns the CPU in place of None.
    """
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def forget_meshes() -> None:
    """Empty torch's caches whose keys are meshes.

    A later mesh of the same shape and names equals an earlier one, and would get the
    earlier one's process groups, which are gone.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _random, debug

    debug._clear_sharding_prop_cache()
    _random._rng_tracker = None
