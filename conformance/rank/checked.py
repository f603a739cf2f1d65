"""The checked collective after each step: a stray one would pair with it."""

from __future__ import annotations

import math
from datetime import timedelta

import torch
import torch.distributed as dist

from ...multiprocess import current_world
from .trace import StepTrace

__all__ = ["all_say_right", "checked_collective"]

CHECK_TIMEOUT = timedelta(seconds=10)
"""How long the checked collective may take before it counts as lost."""


def checked_collective(
    rank: int, step: int, device: torch.device
) -> tuple[float, float]:
    """All-reduce with a known sum; a stray collective would pair with it."""
    ranks = dist.get_world_size()
    value = torch.tensor([(rank + 1.0) * (step + 1.0)], device=device)
    want = (step + 1.0) * ranks * (ranks + 1) / 2
    work = dist.all_reduce(value, async_op=True)
    try:
        assert work is not None  # None only for ranks outside of the group
        work.wait(CHECK_TIMEOUT)
    except RuntimeError:  # lost: recorded as nan, which no expectation equals
        return math.nan, want
    return value.item(), want


def all_say_right(seen: StepTrace) -> bool:
    """Whether the checked sum is right on every rank.

    Ranks exchange this through the store, because the process group may be broken; so
    no rank continues alone and hangs.
    """
    assert seen.checked_sum is not None
    world = current_world()
    right = seen.checked_sum[0] == seen.checked_sum[1]
    world.store.set(f"checked/{seen.step}/{world.rank}", "right" if right else "wrong")
    keys = [f"checked/{seen.step}/{rank}" for rank in range(world.size)]
    world.store.wait(keys, 2 * CHECK_TIMEOUT)
    answers = [world.store.get(key) for key in keys]
    return all(answer == b"right" for answer in answers)
