"""Start measurements at the same time on all ranks of one machine."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

_LEAD_S = 2e-3


def start_together() -> None:
    """Return at the same time on every rank.

    After a barrier, ranks continue up to a millisecond apart. The first rank would
    count this wait as time of its next collective. All ranks read the machine's clock.
    """
    moment = torch.tensor(time.perf_counter() + _LEAD_S, dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX)
    while time.perf_counter() < moment:
        pass
