"""A mistake of one rank: training goes on together, or all ranks raise until a load."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler
from gradparity.tests.scaler.test_after_exceptions import (
    ERRORS,
    NO_OPTIMIZERS,
    Training,
    trained,
)
from gradparity.tests.stepping import HOW, acting


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


@pytest.mark.parametrize("other", ["closure", "unreadable"])
def test_update_after_errors_of_all_ranks_does_the_same_on_each(
    two: Cluster, other: str
) -> None:
    """After a closure on every rank it raises, as on one process."""

    def run() -> list[str]:
        train, raised = Training(), []
        train.backward()
        is_closure = dist.get_rank() == 1 or other == "closure"
        if not is_closure:
            train.scaler._unscale_grads_ = None
        for call in (
            lambda: train.scaler.step(train.first, *([print] if is_closure else [])),
            train.scaler.update,
        ):
            try:
                call()
            except (*ERRORS, TypeError) as error:
                raised.append(type(error).__name__)
        return raised

    after = ["AssertionError"] if other == "closure" else []
    first, second = trained(two, run)
    assert first[1:] == second[1:] == after
    assert second[0] == "RuntimeError"


def test_update_after_a_closure_raises_on_one_process_as_in_torch() -> None:
    for make in (torch.amp.GradScaler, GradScaler):
        train = Training(make)
        train.backward()
        with pytest.raises(RuntimeError, match="Closure"):
            train.scaler.step(train.first, closure=lambda: None)
        with pytest.raises(AssertionError, match="No inf checks"):
            train.scaler.update()


# - A mistake after the last sync of an iteration: the others are in the next batch


def stepped_twice(train: Training) -> None:
    train.scaler.step(train.first)
    train.scaler.step(train.first)


def unscaled_late(train: Training) -> None:
    train.scaler.step(train.first)
    train.scaler.unscale_(train.first)


def wrong_scale(train: Training) -> None:
    train.scaler.step(train.first)
    train.scaler.update(-1.0)


def updated_twice(train: Training) -> None:
    train.scaler.step(train.first)
    train.scaler.update()
    train.scaler.update()


def stepped_one_too_many(train: Training) -> None:
    train.scaler.step(train.first)
    train.scaler.step(None)


LATE = [stepped_twice, unscaled_late, wrong_scale, updated_twice, stepped_one_too_many]


# regression: ranks trained on different batches from then on, without an error
@pytest.mark.parametrize("mistake", LATE)
@pytest.mark.parametrize("updates", [False, True])
@HOW
def test_ranks_at_different_batches_raise_until_they_load(
    two: Cluster, mistake: Any, updates: bool, how: str
) -> None:
    def run() -> tuple[list[int], Any]:
        train, rank, raised = Training(), dist.get_rank(), []
        for batch in range(7 - rank):  # rank 1 makes one sync more
            train.backward()
            is_wrong = (batch, rank) == (3, 1)
            try:
                (mistake if is_wrong else right)(train)
                train.scaler.update()
            except ERRORS as error:
                raised.append(batch)
                told = [str(error), *getattr(error, "__notes__", ())]
                assert "different batches" in told[-1], told
                if updates and train.scaler._sync.is_void:
                    train.scaler.update()
        steps = train.steps()[0]
        if not updates:  # the page says so of a call that came twice
            train.scaler.update()
        state = train.scaler.state_dict() | {"_growth_tracker": 0}
        train.scaler.load_state_dict(state)
        for _ in range(2):
            train.backward()
            right(train)
            train.scaler.update()
        return raised, (steps, *train.state())

    first, second = trained(two, acting(how, run))
    assert first[0] == [4, 5, 6] and second[0] == [3, 4, 5]
    assert first[1] == second[1] == (4.0, [6.0, 0.0], 1024.0, 2)


def right(train: Training) -> None:
    train.scaler.step(train.first)


@HOW
def test_a_load_that_fails_leaves_the_ranks_apart(two: Cluster, how: str) -> None:
    def run() -> list[str]:
        train, rank, raised = Training(), dist.get_rank(), []
        state = train.scaler.state_dict()
        for batch in range(6 - rank):
            train.backward()
            try:
                (wrong_scale if (batch, rank) == (2, 1) else right)(train)
                train.scaler.update()
            except ERRORS as error:
                raised.append(type(error).__name__)
                if len(raised) == 1:
                    with pytest.raises(ERRORS):
                        train.scaler.load_state_dict({} if rank else state)
        return raised

    first, second = trained(two, acting(how, run))
    assert first == ["PeerFailedError", *["RanksDisagreeError"] * 2]
    assert second == ["InvalidSettingError", *["RanksDisagreeError"] * 2]


@pytest.mark.parametrize("scales", [1, 2])
@HOW
def test_ranks_stay_together_after_a_forgotten_update(
    two: Cluster, scales: int, how: str
) -> None:
    """The error comes in the next batch of this rank, which is that of the others."""

    def run() -> tuple[list[int], Any]:
        train, raised = Training(), []
        for batch in range(6):
            for _ in range(scales):
                train.backward()
            try:
                right(train)
                if (batch, dist.get_rank()) != (2, 1):
                    train.scaler.update()
            except RuntimeError:
                raised.append(batch)
                train.scaler.update()
        return raised, train.state()

    expected = ([3], ([5.0, 0.0], 1024.0, 5))
    assert trained(two, acting(how, run)) == [expected] * 2


# regression: only ranks that had scaled were taken for one batch ahead
@pytest.mark.parametrize("how_wrong", ["forgets update", "updates twice"])
@HOW
def test_a_mistake_of_all_ranks_leaves_them_together(
    two: Cluster, how_wrong: str, how: str
) -> None:
    """Only the last stage of a pipeline scales."""

    def run() -> tuple[int, Any]:
        train, raised = Training(), 0
        for batch in range(6):
            train.backward()
            if dist.get_rank() == 0:
                train.scaler._sync.has_scaled = False
            try:
                right(train)
                if how_wrong == "updates twice" or batch != 2:
                    train.scaler.update()
                if how_wrong == "updates twice" and batch == 2:
                    train.scaler.update(-1.0)
            except ERRORS:
                raised += 1
                if how_wrong == "forgets update":
                    train.scaler.update()
        return raised, train.steps()[0]

    first, second = trained(two, acting(how, run))
    assert first == second == (1, 5.0 if how_wrong == "forgets update" else 6.0)


@pytest.mark.parametrize("mistake", [stepped_twice, unscaled_late, wrong_scale])
def test_a_late_mistake_in_the_first_batch_drops_it_on_all_ranks(
    two: Cluster, mistake: Any
) -> None:
    """The first iteration ends with a sync, so all ranks are in the same batch."""

    def run() -> tuple[list[int], Any]:
        train, raised = Training(), []
        for batch in range(4):
            train.backward()
            try:
                (mistake if (batch, dist.get_rank()) == (0, 1) else right)(train)
                train.scaler.update()
            except ERRORS:
                raised.append(batch)
                train.scaler.update()
        return raised, train.state()

    expected = ([0], ([4.0, 0.0], 1024.0, 4))
    assert trained(two, run) == [expected] * 2
