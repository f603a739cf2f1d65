"""The checked collective: it finds an extra collective, and waits for a late rank."""

import math
import time

import pytest
import torch
import torch.distributed as dist

from gradparity.conformance.rank.trace import StepTrace
from gradparity.conformance.rank.worker import all_say_right, checked_collective
from gradparity.multiprocess import Cluster, current_world

CPU = torch.device("cpu")


def checked(late_s: float = 0.0, *, strays: bool = False) -> tuple[float, bool]:
    """Return this rank's sum, and True if it is right.

    Rank 1 comes ``late_s`` seconds late. Rank 0 issues an extra collective if
    ``strays``.
    """
    rank = current_world().rank
    if rank == 1:
        time.sleep(late_s)
    if rank == 0 and strays:
        stray = torch.full((1,), 100.0)
        dist.all_reduce(stray, async_op=True)
    seen = StepTrace(step=0)
    seen.checked_sum = checked_collective(rank, 0, CPU)
    return seen.checked_sum[0], all_say_right(seen)


@pytest.mark.parametrize("late_s", [0.5, pytest.param(11.0, marks=pytest.mark.slow)])
def test_a_rank_that_is_late_is_waited_for(two: Cluster, late_s: float) -> None:
    assert two.run(checked, late_s) == [(3.0, True)] * 2


def checked_at(step: int) -> tuple[float, float]:
    return checked_collective(current_world().rank, step, CPU)


def test_the_sum_is_exact_at_any_step(two: Cluster) -> None:
    # regression: O14
    for got, want in two.run(checked_at, 2**23):
        assert got == want


def test_a_collective_without_a_partner_is_lost_and_all_know() -> None:
    with Cluster(2, timeout_s=60) as cluster:
        (first, one), (second, other) = cluster.run(checked, strays=True)
    assert math.isnan(first)
    assert second == 102.0
    assert (one, other) == (False, False)
