"""Errors of ranks name the call of each rank, what follows, and the way out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler
from gradparity.tests.scaler.test_after_exceptions import ERRORS, Training, trained

Mistake = Callable[[Training, int], None]


def one_none_too_many(train: Training, rank: int) -> None:
    train.scaler.step(None if rank else train.first)
    if rank:
        train.scaler.step(None)
    train.scaler.update()


def bad_state(train: Training, rank: int) -> None:
    train.scaler.load_state_dict({} if rank else train.scaler.state_dict())


def late_step(train: Training, rank: int) -> None:
    train.scaler.step(train.first)
    if rank:
        train.scaler.step(train.first)
    train.scaler.update()


def bad_scale(train: Training, rank: int) -> None:
    train.scaler.step(train.first)
    train.scaler.update(-1.0 if rank else None)


def other_scales(train: Training, rank: int) -> None:
    train.scaler.step(train.first)
    train.scaler.update(4.0 if rank else 2.0)
    train.scaler.step(train.second)


def bad_gradients(train: Training, rank: int) -> None:
    if rank:
        train.scaler._unscale_grads_ = None
    train.scaler.step(train.first)


def bad_gradients_to_unscale(train: Training, rank: int) -> None:
    if rank:
        train.scaler._unscale_grads_ = None
    train.scaler.unscale_(train.first)


def bad_bound(train: Training, rank: int) -> None:
    train.scaler.clip_and_step(train.first, -1.0 if rank else 1.0)


TEXTS: dict[Mistake, str] = {
    one_none_too_many: "update on rank 0 of 2: call is update() on rank 0 and "
    "step(None) on rank 1.",
    bad_state: "load_state_dict on rank 0 of 2: rank 1 raised in load_state_dict(), "
    "so nothing is changed. The cause",
    late_step: "update on rank 0 of 2: rank 1 raised in unscale_() or step(), so the "
    "scale does not move. The cause",
    bad_scale: "update on rank 0 of 2: rank 1 raised in update(), so the scale does "
    "not move. The cause",
    other_scales: "step on rank 0 of 2: scale is 2 on rank 0 and 4 on rank 1. All "
    "ranks must hold the same. Build the scaler with the same arguments, pass the "
    "same new_scale to update() and load",
    bad_gradients: "step on rank 0 of 2: rank 1 raised in unscale_() or step(), so no "
    "rank steps. The cause",
    bad_gradients_to_unscale: "unscale_ on rank 0 of 2: rank 1 raised in unscale_() or "
    "step(), so no rank steps. The cause",
    bad_bound: "clip_and_step on rank 0 of 2: rank 1 raised in clip_grad_norm_() or "
    "clip_and_step(), so no rank steps. The cause",
}


@pytest.mark.parametrize("mistake", TEXTS)
def test_what_the_other_rank_reads(two: Cluster, mistake: Mistake) -> None:
    def run() -> str:
        train, rank = Training(), dist.get_rank()
        train.backward()
        try:
            mistake(train, rank)
        except (*ERRORS, TypeError) as error:
            return str(error)
        return "nothing"

    text, _ = trained(two, run)
    assert text.startswith(TEXTS[mistake])


def test_unscale_after_a_refused_step_names_itself(two: Cluster) -> None:
    """The name of one call does not stay for the next one."""

    def run() -> list[str]:
        train, texts = Training(), []
        for call in (train.scaler.step, train.scaler.unscale_):
            train.backward()
            if dist.get_rank():
                train.scaler._unscale_grads_ = None
            with pytest.raises((*ERRORS, TypeError)) as caught:
                call(train.first)
            texts.append(str(caught.value).split(" on ")[0])
        return texts

    assert trained(two, run)[0] == ["step", "unscale_"]


def test_a_device_object_is_named_where_a_tensor_is_refused() -> None:
    device: Any = torch.device("cpu")
    scaler = GradScaler(device)
    scaler.scale(torch.ones(1))
    with pytest.raises(AssertionError, match="new_scale should be") as told:
        scaler.update(torch.tensor(3.0))
    assert str(told.value).endswith(
        "The scaler was built with device(type='cpu'): build it with 'cpu'."
    )
