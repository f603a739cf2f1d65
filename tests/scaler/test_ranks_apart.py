"""A mistake of one rank: training goes on together, or all ranks raise until a load."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler
from gradparity.tests.scaler.test_after_exceptions import (
    NO_OPTIMIZERS,
    Training,
    trained,
)


@NO_OPTIMIZERS
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("updates", [False, True])
def test_training_goes_on_after_one_rank_steps_no_optimizer(
    two: Cluster, wrong: Any, at: int, updates: bool
) -> None:
    def run() -> tuple[list[int], Any]:
        train, raised = Training(), []
        for iteration in range(at + 3):
            train.backward()
            is_wrong = (iteration, dist.get_rank()) == (at, 1)
            try:
                train.scaler.step(wrong(train) if is_wrong else train.first)
                train.scaler.update()
            except (AttributeError, RuntimeError):
                raised.append(iteration)
                if updates:
                    train.scaler.update()
        return raised, train.state()

    expected = ([at], ([at + 2.0, 0.0], 1024.0, at + 2))
    assert trained(two, run) == [expected] * 2


# regression: `update` raised on the rank of the closure alone
@pytest.mark.parametrize("at", [0, 2])
def test_update_after_a_closure_of_one_rank_raises_on_no_rank(
    two: Cluster, at: int
) -> None:
    def run() -> tuple[list[int], Any]:
        train, raised = Training(), []
        for iteration in range(at + 3):
            train.backward()
            is_wrong = (iteration, dist.get_rank()) == (at, 1)
            try:
                train.scaler.step(train.first, *([lambda: None] if is_wrong else []))
            except RuntimeError:
                raised.append(iteration)
                train.first.zero_grad()
            train.scaler.update()
        return raised, train.state()

    expected = ([at], ([at + 2.0, 0.0], 1024.0, at + 2))
    assert trained(two, run) == [expected] * 2


def test_update_after_a_closure_raises_on_one_process_as_in_torch() -> None:
    for make in (torch.amp.GradScaler, GradScaler):
        train = Training(make)
        train.backward()
        with pytest.raises(RuntimeError, match="Closure"):
            train.scaler.step(train.first, closure=lambda: None)
        with pytest.raises(AssertionError, match="No inf checks"):
            train.scaler.update()
