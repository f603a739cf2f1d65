"""Policies of the scale beyond torch's rule, and their reports."""

import logging
import math
from typing import Any

import pytest
import torch

from gradparity.scaler import GradScaler, InvalidSettingError, Policy, TooManySkipsError
from gradparity.tests.stepping import exchanged

BAD, GOOD = math.inf, 1.0


def scales(steps: list[float], scaler: GradScaler, fused: bool = False) -> list[float]:
    p = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=0.1, fused=fused)
    scaler.scale(torch.ones(()))
    seen = []
    for gradient in steps:
        p.grad = torch.full_like(p, gradient)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen


def scaler_with(
    init_scale: float = 8.0, interval: int = 2, **policy: Any
) -> GradScaler:
    return GradScaler(
        "cpu", init_scale, growth_interval=interval, policy=Policy(**policy)
    )


def test_limits() -> None:
    scaler = scaler_with(min_scale=4.0, max_scale=16.0)
    assert scales([BAD] * 3 + [GOOD] * 8, scaler) == [4.0] * 4 + [8.0] * 2 + [16.0] * 5


def test_constant_scale_still_skips() -> None:
    scaler = scaler_with(constant=True)
    assert scales([BAD, GOOD, GOOD, BAD, GOOD, GOOD], scaler) == [8.0] * 6
    assert scaler.counters == (4, 2, 0, 0, 0)


# regression: T22
def test_torchs_class_grows_on_from_a_constant_scale() -> None:
    scaler = scaler_with(constant=True, interval=2)
    scales([GOOD] * 3, scaler)
    state = scaler.state_dict()
    scaler_with(interval=2).load_state_dict(state)
    torchs: Any = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(state)
    assert scales([GOOD], torchs) == [16.0]


# regression: T21
@pytest.mark.parametrize("refill", ["growth", "good_step"])
@pytest.mark.parametrize("interval", [1, 2])
def test_hysteresis_refills_at_the_highest_scale(refill: Any, interval: int) -> None:
    policy: Any = {"hysteresis": 2, "refill": refill, "max_scale": 8.0}
    scaler = scaler_with(interval=interval, **policy)
    assert scales([BAD, GOOD, GOOD, BAD, BAD], scaler) == [8.0] * 4 + [4.0]


@pytest.mark.parametrize(
    ("refill", "steps", "expected"),
    [
        # growth at the fourth step refills, a good_step alone does not
        (
            "growth",
            [BAD, BAD, GOOD, GOOD, BAD, BAD, GOOD, GOOD, BAD],
            [8.0, 8.0, 8.0, 16.0, 16.0, 16.0, 16.0, 32.0, 32.0],
        ),
        # the good_step in between makes it count anew
        (
            "good_step",
            [BAD, BAD, GOOD, BAD, BAD, BAD, GOOD, GOOD, BAD],
            [8.0, 8.0, 8.0, 8.0, 8.0, 4.0, 4.0, 8.0, 8.0],
        ),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_hysteresis(
    refill: Any, steps: list[float], expected: list[float], fused: bool
) -> None:
    scaler = scaler_with(hysteresis=3, refill=refill)
    assert scales(steps, scaler, fused) == expected


def test_hysteresis_backs_off_until_growth() -> None:
    scaler = scaler_with(hysteresis=2)
    steps = [BAD, GOOD, BAD, GOOD, BAD, GOOD, GOOD, BAD, BAD]
    expected = [8.0, 8.0, 4.0, 4.0, 2.0, 2.0, 4.0, 4.0, 2.0]
    assert scales(steps, scaler) == expected


def test_hysteresis_resumes_and_reads_torchs_state() -> None:
    first = scaler_with(hysteresis=3)
    scales([BAD, BAD], first)
    saved = first.state_dict()
    assert saved["_hysteresis_left"] == 1
    second = scaler_with(hysteresis=3)
    second.load_state_dict(saved)
    assert scales([BAD], second) == [4.0]
    del saved["_hysteresis_left"]
    second.load_state_dict(saved)
    assert scales([BAD, BAD, BAD], second) == [8.0, 8.0, 4.0]
    theirs: Any = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(second.state_dict())
    assert theirs.get_scale() == 4.0


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["cpu", "settled"])
def test_too_many_skips(fused: bool, how: str) -> None:
    with exchanged(how):
        scaler = scaler_with(max_consecutive_skips=3)
        assert len(scales([BAD, BAD, GOOD, BAD, BAD], scaler, fused)) == 5
        with pytest.raises(TooManySkipsError, match="3 iterations in a row") as caught:
            scales([BAD], scaler, fused)
    assert caught.value.skips == 3
    assert caught.value.scales == (8.0, 4.0, 2.0, 2.0, 1.0, 0.5)
    if how == "cpu":
        assert "inf in parameter 0 on rank 0" in str(caught.value)


@pytest.mark.parametrize(
    "bad",
    [
        {"min_scale": 0.0},
        {"max_scale": math.inf},
        {"min_scale": 8.0, "max_scale": 4.0},
        {"hysteresis": 0},
        {"refill": "never"},
        {"max_consecutive_skips": 0},
        {"min_scale": 16.0},
        {"max_scale": 4.0},
    ],
)
def test_policies_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettingError):
        scaler_with(**bad)


def test_counters_and_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="gradparity.scaler"):
        scaler = scaler_with()
        scales([BAD, BAD, GOOD, GOOD, GOOD], scaler)
    assert scaler.counters == (3, 2, 0, 1, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "inf in parameter 0 on rank 0: step skipped, scale 8 -> 4",
        "inf in parameter 0 on rank 0: step skipped, scale 4 -> 2",
        "scale grew: 2 -> 4",
    ]


# - A scale that the caller chooses


# regression: S8, T13, T24
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_chosen_scale_obeys_the_policy(as_tensor: bool) -> None:
    scaler = scaler_with(min_scale=1.0, max_scale=16.0)
    scales([GOOD], scaler)
    for value in (0.25, 32.0):
        with pytest.raises(InvalidSettingError, match="outside the policy's limits"):
            scaler.update(torch.tensor(value) if as_tensor else value)
    assert scaler.get_scale() == 8.0
    scaler.update(16.0)
    assert scaler.get_scale() == 16.0


def choose(scaler: GradScaler, gradient: float, scale: float) -> None:
    p = torch.ones(2, requires_grad=True)
    p.grad = torch.full_like(p, gradient)
    scaler.step(torch.optim.SGD([p], lr=0.1))
    scaler.update(scale)


def test_an_iteration_with_a_chosen_scale_counts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scaler = scaler_with()
    with caplog.at_level(logging.INFO, logger="gradparity.scaler"):
        scales([BAD], scaler)
        choose(scaler, GOOD, 8.0)
        assert scaler.counters == (1, 1, 0, 0, 1)
        choose(scaler, BAD, 2.0)
        assert scaler.counters == (1, 2, 1, 0, 1)
        scaler.update(8.0)  # no step: no iteration
        assert scaler.counters == (1, 2, 1, 0, 1)
    where = "inf in parameter 0 on rank 0: step skipped, scale"
    assert [record.getMessage() for record in caplog.records] == [
        f"{where} 8 -> 4",
        "scale was set: 4 -> 8",
        f"{where} 8 -> 2",
    ]


def test_skips_with_a_chosen_scale_reach_the_limit() -> None:
    scaler = scaler_with(max_consecutive_skips=3)
    scales([BAD], scaler)
    choose(scaler, GOOD, 8.0)  # a good step in between
    scales([BAD], scaler)
    choose(scaler, BAD, 8.0)
    with pytest.raises(TooManySkipsError, match="3 iterations in a row"):
        choose(scaler, BAD, 8.0)
    scaler.update(8.0)  # no step, no skip


# regression: T14
def test_policies_that_mean_the_same_are_equal() -> None:
    numpy = pytest.importorskip("numpy")
    floats = Policy(
        min_scale=1.0, max_scale=64.0, hysteresis=2, max_consecutive_skips=3
    )
    others = Policy(
        min_scale=1,
        max_scale=numpy.float32(64),
        hysteresis=numpy.int64(2),
        max_consecutive_skips=numpy.int32(3),
        constant=0,  # type: ignore[arg-type]  # callers without mypy may
    )
    assert floats == others
    assert floats.fields() == others.fields()
