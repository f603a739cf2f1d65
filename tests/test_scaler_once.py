"""B10: which gradients are unscaled, and how often."""

import math
from typing import Any

import pytest
import torch

from gradparity.tests.stepping import BOTH, FUSED, INF, one_step, parameter, scaled, sgd


class Wrapper:
    """Shares its parameter groups with the optimizer inside, as accelerate does."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


@BOTH
def test_b10a_wrapped_optimizer_is_unscaled_once(make: Any) -> None:
    p = parameter(0.0)
    scaler, inner = scaled(make), sgd(p)
    p.grad = torch.full_like(p, 4.0)
    scaler.unscale_(inner)
    scaler.step(Wrapper(Wrapper(inner)))
    assert p.tolist() == [-1.0, -1.0]
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(inner)


@BOTH
@pytest.mark.parametrize("fused", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_b10b_shared_parameter_is_unscaled_once(
    make: Any, fused: tuple[int, int]
) -> None:
    shared, first, second = parameter(0.0), parameter(0.0), parameter(0.0)
    optimizers = [
        sgd(first, shared, fused=bool(fused[0])),
        sgd(shared, second, fused=bool(fused[1])),
    ]
    scaler = scaled(make)
    for p in (shared, first, second):
        p.grad = torch.full_like(p, 4.0)
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert shared.tolist() == [-2.0, -2.0]
    assert first.tolist() == second.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("fused", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_b10b_shared_parameter_after_a_skip(fused: tuple[int, int]) -> None:
    shared, first = parameter(0.0), parameter(0.0)
    optimizers = [
        sgd(first, shared, fused=bool(fused[0])),
        sgd(shared, fused=bool(fused[1])),
    ]
    scaler = scaled()
    shared.grad, first.grad = torch.full((2,), 4.0), torch.full((2,), INF)
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert (first.tolist(), shared.tolist()) == ([0.0, 0.0], [-1.0, -1.0])


def test_b10c_ids_of_dead_optimizers() -> None:
    scaler = scaled()
    for _ in range(30):
        p = parameter()
        p.grad = torch.ones_like(p)
        scaler.unscale_(sgd(p))


@BOTH
def test_b10d_closure_is_refused_however_passed(make: Any) -> None:
    p = parameter(0.0)
    p.grad = torch.full_like(p, 4.0)
    scaler, optimizer = scaled(make), sgd(p)
    for args, kwargs in (((lambda: 1.0,), {}), ((), {"closure": lambda: 1.0})):
        with pytest.raises(RuntimeError, match="Closure use is not"):
            scaler.step(optimizer, *args, **kwargs)
    scaler.step(optimizer, None)
    assert p.tolist() == [-1.0, -1.0]


@BOTH
@pytest.mark.parametrize("fused", [False, True])
def test_b10g_skip_is_visible_and_runs_no_hook(make: Any, fused: bool) -> None:
    p = parameter()
    scaler, optimizer, calls = scaled(make), sgd(p, fused=fused), []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="not stepped yet"):
        scaler.step_was_skipped(optimizer)
    for gradient, skipped in ((1.0, False), (INF, True), (1.0, False)):
        one_step(scaler, optimizer, gradient)
        assert scaler.step_was_skipped(optimizer) is skipped
    assert len(calls) == 2
    assert scaler.counters == (2, 1, 0, 0, 1)


@FUSED
@pytest.mark.parametrize("how", ["unscale_", "clip"])
def test_b10f_gradients_changed_in_between(fused: bool, how: str) -> None:
    def changed(recheck: bool, to: float, made: float) -> list[float]:
        p = parameter(0.0)
        scaler, optimizer = scaled(recheck=recheck), sgd(p, fused=fused)
        p.grad = torch.full_like(p, made)
        if how == "unscale_":
            scaler.unscale_(optimizer)
        else:
            scaler.clip_grad_norm_(optimizer, 1e9)
        p.grad.fill_(to)
        scaler.step(optimizer)
        scaler.update()
        return list(p.tolist())

    kept, stepped = [0.0, 0.0], [-1.0, -1.0]
    folded = how == "clip" and fused  # the kernel still divides
    assert changed(True, INF, made=4.0) == kept
    assert changed(True, 4.0 if folded else 1.0, made=4.0) == stepped
    # Found while clipping, the gradients were never divided: no step whatever comes.
    assert changed(True, 1.0, made=INF) == (kept if how == "clip" else stepped)
    assert changed(False, 1.0, made=INF) == kept
    assert math.isinf(changed(False, INF, made=4.0)[0])  # as torch: by choice only


def test_b10f_only_when_asked_for() -> None:
    p = parameter(0.0)
    scaler, optimizer = scaled(recheck=True), sgd(p)
    p.grad = torch.full_like(p, INF)
    scaler.step(optimizer)  # nothing lies between: one look is enough
    assert scaler.step_was_skipped(optimizer)
