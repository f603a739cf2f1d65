"""Settings, copies and saved states of a scaler (B11, B04, B16)."""

import copy
import math
import pickle
import warnings
from typing import Any

import pytest
import torch

from gradparity.scaler import GradScaler, InvalidSettingError, ShardedGradScaler
from gradparity.tests.stepping import (
    BOTH,
    INF,
    one_step,
    parameter,
    scaled,
    sgd,
    with_grad,
)


@BOTH
@pytest.mark.parametrize(
    "bad",
    [
        {"init_scale": 0.0},
        {"init_scale": -1.0},
        {"init_scale": INF},
        {"init_scale": math.nan},
        {"init_scale": 1e-39},
        {"init_scale": "many"},
        {"backoff_factor": 0.0},
        {"backoff_factor": -1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": math.nan},
        {"growth_factor": 0.5},
        {"growth_factor": INF},
        {"growth_factor": math.nan},
        {"growth_interval": 0},
        {"growth_interval": 2.5},
        {"growth_interval": 2**63},
    ],
)
def test_b11a_settings_are_checked(make: Any, bad: dict[str, Any]) -> None:
    ((name, value),) = bad.items()
    with pytest.raises(InvalidSettingError):
        make(device="cpu", **bad)
    make(device="cpu", enabled=False, **bad)
    scaler = scaled(make)
    before = scaler.state_dict()
    key = {"init_scale": "scale"}.get(name, name)
    with pytest.raises(InvalidSettingError):
        scaler.load_state_dict(before | {key: value})
    setter = getattr(scaler, f"set_{name}", scaler.update)
    with pytest.raises(InvalidSettingError):
        setter(value)
    assert scaler.state_dict() == before


@BOTH
def test_b11b_update_takes_an_int_and_disabled_answers(make: Any) -> None:
    scaler = scaled(make)
    scaler.update(2)
    assert scaler.get_scale() == 2.0
    off = make(device="cpu", enabled=False)
    assert off.get_growth_factor() == 2.0 and off.get_growth_interval() == 2000
    assert off.get_scale() == 1.0 and off.state_dict() == {}
    with pytest.raises(RuntimeError, match="state dict is empty"):
        scaler.load_state_dict({})
    p = parameter(0.0)
    one_step(off, sgd(p), 1.0)
    assert p.tolist() == [-1.0, -1.0]


def test_b11c_positional_order_is_torchs() -> None:
    assert GradScaler("cpu", 4.0, 3.0, 0.25).get_growth_factor() == 3.0
    assert ShardedGradScaler("cpu", 4.0, 0.25, 3.0).get_growth_factor() == 3.0


@BOTH
def test_b11d_copies_and_pickles(make: Any) -> None:
    scaler = scaled(make, growth_interval=5)
    one_step(scaler, sgd(parameter()), 1.0)
    for twin in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert twin.state_dict() == scaler.state_dict()
        one_step(twin, sgd(parameter()), INF)
        assert (twin.get_scale(), scaler.get_scale()) == (2.0, 4.0)
    scaler.step(sgd(with_grad()))
    with pytest.raises(AssertionError, match="may only be pickled"):
        pickle.dumps(scaler)


@BOTH
def test_b04b_resume_then_unscale(make: Any) -> None:
    scaler = make(device="cpu")
    scaler.load_state_dict(scaled(make, 8.0).state_dict())
    p = parameter()
    p.grad = torch.full_like(p, 8.0)
    scaler.unscale_(sgd(p))
    assert p.grad.tolist() == [1.0, 1.0]


@BOTH
@pytest.mark.parametrize("fused", [False, True])
def test_b16a_scheduler_waits_for_the_optimizer(make: Any, fused: bool) -> None:
    optimizer = sgd(parameter(), fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = scaled(make)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for gradient, lr in ((INF, 1.0), (1.0, 0.5), (INF, 0.5), (1.0, 0.25)):
            one_step(scaler, optimizer, gradient)
            stepped = scaler.step_scheduler(scheduler)
            assert (stepped, scheduler.get_last_lr()) == (gradient == 1.0, [lr])


def test_b16c_saving_changes_nothing() -> None:
    scaler = GradScaler(device="cpu", init_scale=8.0)
    assert scaler.state_dict()["scale"] == 8.0  # before the first scale()
    scaler.scale(torch.ones(()))
    one_step(scaler, sgd(parameter()), 1.0)
    first, second = scaler.state_dict(), scaler.state_dict()
    assert first == second and first["_growth_tracker"] == 1


# regression: S11
def test_a_loss_that_cannot_be_scaled_is_no_scaled_loss() -> None:
    scaler = GradScaler("cpu", init_scale=4.0)
    with pytest.raises(ValueError, match="outputs must be"):
        scaler.scale(3)  # type: ignore[type-var]  # no tensor
    p = torch.ones(2, requires_grad=True)
    p.grad = torch.ones(2)
    with pytest.raises(AssertionError, match="_scale is None"):
        scaler.step(torch.optim.SGD([p], lr=1.0))
