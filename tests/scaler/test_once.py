"""B10: which gradients are unscaled, and how often."""

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch

from gradparity.tests.scaler.optimizers import Follower, Wrapper
from gradparity.tests.stepping import (
    BOTH,
    FUSED,
    INF,
    one_step,
    parameter,
    scaled,
    sgd,
)


@BOTH
def test_b10a_wrapped_optimizer_is_unscaled_once(make: Any) -> None:
    p = parameter(0.0)
    scaler, inner = scaled(make), sgd(p)
    p.grad = torch.full_like(p, 4.0)
    scaler.unscale_(inner)
    scaler.step(Follower(Follower(inner)))
    assert p.tolist() == [-1.0, -1.0]
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(inner)


@BOTH
@pytest.mark.parametrize("fused", [(0, 0), (0, 1)])
def test_b10b_shared_parameter_is_divided_as_by_torch(
    make: Any, fused: tuple[int, int]
) -> None:
    """Both classes divide the gradient once for each optimizer; ours warns once."""
    found, kinds = [], (torch.amp.GradScaler, make)
    for kind in kinds:
        shared, first, second = parameter(0.0), parameter(0.0), parameter(0.0)
        optimizers = [
            sgd(first, shared, fused=bool(fused[0])),
            sgd(shared, second, fused=bool(fused[1])),
        ]
        scaler = scaled(kind)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(2):
                for p in (shared, first, second):
                    p.grad = torch.full_like(p, 4.0)
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
        assert len(warned) == (kind is make)
        found.append([p.tolist() for p in (shared, first, second)])
    assert found[0] == found[1]


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
        with pytest.raises(RuntimeError, match="Closure use is not") as caught:
            scaler.step(optimizer, *args, **kwargs)
        assert not hasattr(caught.value, "__notes__")  # there is no rank to be told
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


# - Where torch's behaviour is kept: what cannot be made exact is not tracked


def beside_torch(program: Any, **settings: Any) -> tuple[Any, Any]:
    """Return a program's results in one process, with torch's class and with ours."""
    return program(scaled(torch.amp.GradScaler)), program(scaled(**settings))


@FUSED
@pytest.mark.parametrize("how", ["step", "unscale_"])
def test_b10e_accumulation_across_an_update(fused: bool, how: str) -> None:
    def program(scaler: Any) -> list[float]:
        p = parameter(0.0)
        optimizer = sgd(p, fused=fused)
        scaler.scale(p.sum()).backward()
        scaler.update(16.0)
        scaler.scale(p.sum()).backward()
        if how == "unscale_":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        return list(p.tolist())

    theirs, ours = beside_torch(program)
    assert ours == theirs


@FUSED
def test_b10e_backward_after_unscale(fused: bool) -> None:
    def program(scaler: Any) -> list[float]:
        p = parameter(0.0)
        optimizer = sgd(p, fused=fused)
        for _ in range(2):
            scaler.scale(p.sum()).backward()
            if scaler._per_optimizer_states[id(optimizer)]["stage"].name == "READY":
                scaler.unscale_(optimizer)
        scaler.step(optimizer)
        return list(p.tolist())

    theirs, ours = beside_torch(program)
    assert ours == theirs == [-5.0, -5.0]


@FUSED
@pytest.mark.parametrize(("made", "to"), [(4.0, INF), (INF, 1.0)])
def test_b10f_gradients_changed_after_unscale(
    fused: bool, made: float, to: float
) -> None:
    def program(scaler: Any) -> tuple[list[float], float]:
        p = parameter(0.0)
        optimizer = sgd(p, fused=fused)
        p.grad = torch.full_like(p, made)
        scaler.unscale_(optimizer)
        p.grad.fill_(to)
        scaler.step(optimizer)
        scaler.update()
        return p.tolist(), scaler.get_scale()

    theirs, ours = beside_torch(program)
    assert ours == theirs


# regression: T18
@BOTH
@pytest.mark.parametrize("wrap", [Follower, Wrapper])
@pytest.mark.parametrize("seen", ["none", "inner", "outer", "both"])
def test_a_wrapper_counts_as_one_after_a_load(make: Any, wrap: Any, seen: str) -> None:
    """``load_state_dict`` creates new groups; the wrapper is still recognised."""
    p = parameter(0.0)
    scaler, inner = scaled(make), sgd(p)
    outer = wrap(inner)
    for optimizer in {"inner": [inner], "outer": [outer], "both": [inner, outer]}.get(
        seen, []
    ):
        one_step(scaler, optimizer, 0.0)
    inner.load_state_dict(inner.state_dict())
    p.grad = torch.full_like(p, 4.0)
    scaler.unscale_(inner)
    scaler.step(outer)
    assert p.tolist() == [-1.0, -1.0]


def test_optimizers_built_from_one_dictionary_are_two() -> None:
    group: dict[str, Any] = {"params": [parameter(0.0)]}
    scaler = scaled()
    first, second = (torch.optim.SGD([group], lr=1.0) for _ in range(2))
    for _ in range(2):
        one_step(scaler, first, 4.0)
        group["params"][0].grad = torch.full((2,), 4.0)
        scaler.step(first)
        group["params"][0].grad = torch.full((2,), 4.0)
        scaler.step(second)  # not "already called"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they share a parameter
            scaler.update()
    assert group["params"][0].tolist() == [-6.0, -6.0]


# regression: S12, T26
@pytest.mark.parametrize("frozen", [False, True])
def test_the_warning_on_shared_parameters_names_the_line_of_update(
    frozen: bool,
) -> None:
    shared, own = parameter(), parameter()
    shared.requires_grad_(not frozen)
    scaler = scaled()
    for params in ([own, shared], [shared]):
        p = params[0]
        p.grad = torch.full_like(p, 4.0)
        scaler.step(torch.optim.SGD(params, lr=1.0))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        scaler.update()
    assert [w.filename for w in warned] == [__file__] * (not frozen)


def test_a_warning_that_is_an_error_ends_the_iteration_first() -> None:
    shared, own = parameter(), parameter()
    first, second = sgd(shared, own), sgd(shared)
    scaler = scaled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for turn in range(3):
            for optimizer, p in ((first, own), (second, shared)):
                p.grad = torch.full_like(p, 4.0)
                scaler.step(optimizer)
            if turn == 0:
                with pytest.raises(UserWarning, match="share a parameter"):
                    scaler.update()
            else:
                scaler.update()
            assert scaler.counters.steps == turn + 1


# regression: T25
def test_parameters_that_an_optimizer_drops_are_freed() -> None:
    p, scaler = parameter(), scaled()
    optimizer = torch.optim.SGD([p], lr=1.0)
    one_step(scaler, optimizer, 4.0)
    gone = weakref.ref(p)
    optimizer.param_groups, optimizer.state = [], {}  # type: ignore[assignment]  # as some trainers do
    del p
    gc.collect()
    assert gone() is None


def test_an_optimizer_that_nobody_else_holds_is_freed() -> None:
    scaler = scaled()
    one_step(scaler, optimizer := torch.optim.SGD([parameter()], lr=1.0), 4.0)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
