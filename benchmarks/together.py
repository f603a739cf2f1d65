"""Ranks of one machine that start to measure at the same moment."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

_LEAD_S = 2e-3


def start_together() -> None:
    """Return on every rank at once.

    A barrier lets ranks go up to a millisecond apart, and a rank that went first would
    count that as the time of its next collective. The clock is the machine's.
    """
    moment = torch.tensor(time.perf_counter() + _LEAD_S, dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX)
    while time.perf_counter() < moment:
        pass
