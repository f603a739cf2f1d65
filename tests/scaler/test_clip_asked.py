"""What clip_grad_norm_ is asked for: a bound and a norm, the same on all ranks."""

import math

import pytest
import torch

from gradparity.multiprocess import Cluster, current_world
from gradparity.scaler import GradScaler, PeerFailedError, RanksDisagreeError
from gradparity.tests.scaler.test_clip import SCALE, parameters_with, scaled


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("max_norm", "order", "name"),
    [
        (math.nan, 2.0, "max_norm"),
        (-1.0, 2.0, "max_norm"),
        (1.0, 0.0, "norm_type"),
        (1.0, -math.inf, "norm_type"),
        (1.0, math.nan, "norm_type"),
    ],
)
def test_what_is_no_bound_or_no_norm_is_refused(
    enabled: bool, max_norm: float, order: float, name: str
) -> None:
    gradients = [torch.ones(3)]
    params = parameters_with(gradients)
    scaler = GradScaler(device="cpu", enabled=enabled)
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match=name):
        scaler.clip_grad_norm_(torch.optim.SGD(params), max_norm, order)
    assert params[0].grad is not None
    assert torch.equal(params[0].grad, gradients[0])


@pytest.mark.parametrize("what", ["max_norm", "norm_type"])
def test_ranks_that_clip_differently_all_raise(four: Cluster, what: str) -> None:
    def clip() -> str:
        asked = {"max_norm": 1.0, what: 1.0 + current_world().rank % 2}
        params = parameters_with([torch.ones(3) * SCALE])
        with pytest.raises(RanksDisagreeError) as caught:
            scaled(GradScaler).clip_grad_norm_(torch.optim.SGD(params), **asked)
        return str(caught.value)

    for message in four.run(clip):
        assert "max_norm and norm_type" in message


def test_a_bad_bound_on_one_rank_leaves_no_rank_waiting(four: Cluster) -> None:
    def clip() -> str:
        max_norm = math.nan if current_world().rank == 1 else 1.0
        params = parameters_with([torch.ones(3) * SCALE])
        with pytest.raises((ValueError, PeerFailedError)) as caught:
            scaled(GradScaler).clip_grad_norm_(torch.optim.SGD(params), max_norm)
        return type(caught.value).__name__

    raised = four.with_options(timeout_s=30).run(clip)
    assert raised == [
        "PeerFailedError",
        "InvalidSettingError",
        "PeerFailedError",
        "PeerFailedError",
    ]
