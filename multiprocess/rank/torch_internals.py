"""Every private name of torch that the code on the ranks uses.

Those of torch's test classes, which tests of theirs are made of, are in
:mod:`.unittests` and in the pytest plugin's ``adopt``.
"""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

from torch.autograd.graph import _engine_run_backward
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d

__all__ = [
    "BACKWARD",
    "NEW_GROUP",
    "forget_meshes",
    "functional",
    "process_groups",
]

BACKWARD: CodeType = _engine_run_backward.__code__
"""Where a backward pass waits: DDP does so below it, in C++."""

NEW_GROUP: tuple[Any, str] = distributed_c10d, "_new_process_group_helper"
"""The one function that makes each kind of process group."""


def process_groups() -> int:
    """Return how many process groups this process has."""
    return len(distributed_c10d._world.pg_map)


def forget_meshes() -> None:
    """Empty torch's caches whose entries name meshes, and so groups that are gone.

    A later mesh of the same shape and names is equal to the one that an entry was made
    for, and would be handed the groups of that one.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _random, debug

    debug._clear_sharding_prop_cache()
    _random._rng_tracker = None
