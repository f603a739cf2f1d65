"""``step`` and its contracts with optimizers, as torch's public tests ask for them.

Each test runs on torch's class and on ours: on torch's it shows that the test is right.
"""

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from gradparity.scaler import GradScaler
from gradparity.tests.beside_torch import (
    CLASSES,
    PLAIN,
    bits,
    filled,
    scaled_once,
    torch_sharded,
)

INF = float("inf")


@CLASSES
@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_the_step_and_returns_none(make: Any, fused: bool) -> None:
    p = filled(1.0)
    p.grad = torch.full((2,), INF)
    scaler = scaled_once(make(init_scale=2.0))
    assert scaler.step(torch.optim.SGD([p], lr=1.0, fused=fused)) is None
    assert p.tolist() == [1.0, 1.0]


@CLASSES
@pytest.mark.parametrize("enabled", [True, False])
def test_what_step_hands_over_and_returns(make: Any, enabled: bool) -> None:
    class Optimizer(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            return args, kwargs

    p = filled(1.0)
    p.grad = torch.ones(2)
    scaler = scaled_once(make(enabled=enabled))
    assert scaler.step(Optimizer([p], lr=1.0), 3, four=5) == ((3,), {"four": 5})


@CLASSES
@pytest.mark.parametrize("fused", [False, True])
def test_calls_in_a_wrong_order(make: Any, fused: bool) -> None:
    p = filled(1.0)
    p.grad = torch.ones(2)
    scaler, optimizer = make(init_scale=2.0), torch.optim.SGD([p], lr=1.0, fused=fused)
    scaled_once(scaler)
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, closure=lambda: 1.0)
    if not (fused and make is torch_sharded):
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="has already been called on this"):
            scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already been called since the last"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="is being called after step"):
        scaler.unscale_(optimizer)
    scaler.update()


class Asks(torch.optim.Optimizer):
    """Fused optimizer of the older contract: ``step`` takes the scaler."""

    _step_supports_amp_scaling = True
    seen: Any = None

    def step(self, closure: Any = None, *, grad_scaler: Any = None) -> Any:
        self.seen = grad_scaler, hasattr(self, "grad_scale"), hasattr(self, "found_inf")


class IsTold(torch.optim.Optimizer):
    """Fused optimizer, which reads ``grad_scale`` and ``found_inf`` in its step."""

    _step_supports_amp_scaling = True
    grad_scale: Any
    found_inf: Any
    seen: Any = None

    def step(self, closure: Any = None) -> Any:
        self.seen = self.grad_scale, self.found_inf


@pytest.mark.filterwarnings("ignore:Two optimizers")
@CLASSES
@pytest.mark.parametrize("order", ["asks first", "is told first"])
def test_optimizers_of_both_contracts_share_parameters(make: Any, order: str) -> None:
    model = nn.Linear(4, 1)
    asks, told = Asks(model.parameters(), {}), IsTold(model.parameters(), {})
    scaler = make(init_scale=2.0)
    scaler.scale(model(torch.ones(4, 4)).mean()).backward()
    both = [asks, told] if order == "asks first" else [told, asks]
    for optimizer in both:
        if optimizer is asks:
            with pytest.warns(FutureWarning, match="stop passing itself"):
                scaler.step(asks)
        else:
            scaler.step(told)
    scaler.update()
    given, *attributes = asks.seen
    assert given is scaler
    assert isinstance(given, torch.amp.GradScaler)
    assert attributes == [False, False]
    assert bits(told.seen) == bits((torch.tensor(2.0), torch.tensor(0.0)))
    assert not hasattr(told, "grad_scale")
    assert not hasattr(told, "found_inf")


@CLASSES
def test_two_fused_optimizers_share_parameters(make: Any) -> None:
    model = nn.Linear(4, 1)
    optimizers = [IsTold(model.parameters(), {}) for _ in range(3)]
    scaler = make(init_scale=8.0)
    scaler.scale(model(torch.ones(4, 4)).mean()).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    for optimizer in optimizers:
        assert bits(optimizer.seen) == bits((torch.tensor(8.0), torch.tensor(0.0)))


@PLAIN
def test_a_fused_optimizer_after_unscale_gets_no_scale(make: Any) -> None:
    model = nn.Linear(4, 1)
    optimizer, scaler = IsTold(model.parameters(), {}), make(init_scale=8.0)
    scaler.scale(model(torch.ones(4, 4)).mean()).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert bits(optimizer.seen) == bits((None, torch.tensor(0.0)))


# - Names


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_deprecated_names_warn_and_are_no_parents_of_ours(name: str) -> None:
    kind = getattr(torch, name).amp.GradScaler
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # there is no CUDA here
        with pytest.warns(FutureWarning, match=f"torch.{name}.amp.GradScaler"):
            old = kind(enabled=False)
    assert isinstance(old, torch.amp.GradScaler)
    assert issubclass(GradScaler, torch.amp.GradScaler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradScaler("cpu")
        copy.copy(functools.partial(GradScaler, "cpu")())
