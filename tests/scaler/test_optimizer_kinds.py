"""Optimizers that share parameters, are fused, wrapped or unusual."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gradparity.scaler import GradScaler
from gradparity.tests.beside_torch import (
    CLASSES,
    PAIRS,
    Pair,
    bits,
    ours_plain,
    ours_sharded,
    scaled_once,
    torch_sharded,
)
from gradparity.tests.scaler.optimizers import Fused, Slotted, Unhashable
from gradparity.tests.stepping import (
    FUSED,
    INF,
    Kernels,
    exchanged,
    one_step,
    parameter,
    scalar_weight,
    scaled,
    sgd,
    with_grad,
)

OURS = pytest.mark.parametrize("make", [ours_plain, ours_sharded])


def value(p: Any) -> float:
    return float(p.detach())


@CLASSES
def test_inv_scale_of_one_element_on_the_cpu(make: Any) -> None:
    p = scalar_weight()
    p.grad = torch.tensor([8.0])
    inv_scale, found_inf = torch.full((1,), 0.25), torch.zeros(1)
    scaler = scaled_once(make())
    found = scaler._unscale_grads_(sgd(p), inv_scale, found_inf, True)
    assert p.grad.tolist() == [2.0]
    assert bits(found) == {"cpu": bits(torch.zeros(1))}


# - Shared parameters


@CLASSES
@pytest.mark.filterwarnings("ignore:Two optimizers")
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("fused", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=str)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_shared_parameter_with_a_fresh_gradient(
    make: Any, explicit: bool, fused: tuple[int, int], set_to_none: bool
) -> None:
    if make is torch_sharded and any(fused):
        pytest.skip("torch's sharded class: findings of two shapes, which raise (B09)")
    e, a, b = scalar_weight(), scalar_weight(), scalar_weight()
    first, second = sgd(e, a, fused=bool(fused[0])), sgd(e, b, fused=bool(fused[1]))
    scaler = make(init_scale=1024.0)
    scaler.scale((e * a / 8).sum()).backward()
    scaler.step(first)
    second.zero_grad(set_to_none=set_to_none)
    scaler.scale(((e + b) / 8).sum()).backward()
    if explicit:
        scaler.unscale_(second)
    scaler.step(second)
    scaler.update()
    assert [value(p) for p in (e, a, b)] == [0.75, 0.875, 0.875]


@OURS
def test_clipping_after_an_overflow_divides_nothing(make: Any) -> None:
    e, a, b = scalar_weight(), scalar_weight(), scalar_weight()
    first, second = sgd(e, a), sgd(e, b)
    scaler = make(init_scale=1024.0)
    scaler.scale(((e + a + b) / 8).sum()).backward()
    assert a.grad is not None
    a.grad.fill_(INF)
    scaler.clip_grad_norm_(first, 1e9)
    scaler.step(first)
    assert [value(p) for p in (e, a)] == [1.0, 1.0]
    scaler.step(second)
    assert [value(p) for p in (e, a, b)] == [0.875, 1.0, 0.875]


@PAIRS
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("gradient", [1.0, INF])
def test_grad_scale_of_the_user_means_what_it_means_in_torch(
    pair: Pair, explicit: bool, gradient: float
) -> None:
    if explicit and pair.theirs is torch_sharded:
        pytest.skip("torch's sharded class: unscale_, then a fused step, raises (B09)")

    def run(make: Any) -> list[Any]:
        p = scalar_weight()
        optimizer, scaler = sgd(p, fused=True), make(init_scale=4.0)
        seen = []
        for own in (4.0, None, 2.0):
            optimizer.zero_grad()
            scaler.scale(p.sum()).backward()
            assert p.grad is not None
            if own == 4.0:
                p.grad.mul_(gradient)
            if own is not None:
                optimizer.grad_scale = torch.tensor(own)
            if explicit:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert not hasattr(optimizer, "grad_scale")
            seen.append((value(p), scaler.get_scale()))
        return seen

    theirs = run(pair.theirs)
    assert theirs[0] == ((0.75, 4.0) if gradient == 1.0 else (1.0, 2.0))
    assert run(pair.ours) == theirs


# regression: T3
@PAIRS
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("kind", ["one tensor", "the scale"])
def test_one_grad_scale_of_the_user_before_each_step(
    pair: Pair, explicit: bool, kind: str
) -> None:
    """A user's ``grad_scale`` is used in each step, even if it is the same object."""
    if explicit and pair.theirs is torch_sharded:
        pytest.skip("torch's sharded class: unscale_, then a fused step, raises (B09)")

    def run(make: Any) -> list[float]:
        p = scalar_weight()
        optimizer, scaler = sgd(p, fused=True), make(init_scale=4.0)
        seen, own = [], torch.tensor(2.0)
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(p.sum()).backward()
            optimizer.grad_scale = own
            if kind == "the scale":
                optimizer.grad_scale = scaler._get_scale_async()
            if explicit:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            seen.append(value(p))
        return seen

    theirs = run(pair.theirs)
    assert len(set(theirs)) == 4
    assert run(pair.ours) == theirs


@OURS
def test_grad_scale_of_the_user_after_a_clip(make: Any) -> None:
    p = scalar_weight()
    optimizer, scaler = sgd(p, fused=True), make(init_scale=4.0)
    scaler.scale(p.sum()).backward()
    optimizer.grad_scale = torch.tensor(4.0)
    scaler.clip_grad_norm_(optimizer, 1e9)
    scaler.step(optimizer)
    assert value(p) == 0.75
    assert not hasattr(optimizer, "grad_scale")


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_gradients_made_after_a_check_of_none(clips: bool, kind: Any) -> None:
    """A step raises, as in torch, because the new gradients were never divided."""
    p = scalar_weight()
    optimizer, scaler = kind([p], lr=1.0, fused=True), scaled_once(ours_plain())
    if clips:
        scaler.clip_grad_norm_(optimizer, 1e9)
    else:
        scaler.unscale_(optimizer)
    scaler.scale(p.sum()).backward()
    with pytest.raises((AttributeError, TypeError)):
        scaler.step(optimizer)
    assert value(p) == 1.0


# - Nothing is shared between scalers


def test_a_subclass_that_changes_inv_scale_changes_its_own() -> None:
    class Harsher(GradScaler):
        def _unscale_grads_(
            self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, *args: Any
        ) -> Any:
            inv_scale.mul_(0.125)
            found_inf.fill_(0.0)
            return super()._unscale_grads_(optimizer, inv_scale, found_inf, *args)

    results = []
    for kind in (Harsher, GradScaler, GradScaler):
        p = scalar_weight()
        scaler = kind("cpu", init_scale=4.0)
        scaler.scale((p / 2).sum()).backward()
        scaler.step(sgd(p))
        results.append(value(p))
    assert results == [0.9375, 0.5, 0.5]


@CLASSES
@FUSED
def test_a_first_step_under_another_default_device(make: Any, fused: bool) -> None:
    for scale in (2.0**9, 2.0**21):  # scales that no other test has
        p = scalar_weight()
        optimizer, scaler = sgd(p, fused=fused), make(init_scale=scale)
        scaler.scale((p / 2).sum()).backward()
        with torch.device("meta"):
            scaler.step(optimizer)
            scaler.update()
        assert value(p) == 0.5
        assert scaler.get_scale() == scale


# - Optimizers that are none of torch's


class OptimWrapper:
    """Shares the groups of the optimizer in ``optim``, as torch's PostLocalSGD does."""

    def __init__(self, inner: Any) -> None:
        self.optim = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.optim.step(closure)


class BaseWrapper:
    """Shares the groups of the optimizer that it keeps as ``_base_optimizer``."""

    def __init__(self, inner: Any) -> None:
        self._base_optimizer = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:
        self._base_optimizer.step(closure)


@OURS
@pytest.mark.parametrize("wrap", [OptimWrapper, BaseWrapper])
def test_a_wrapper_and_the_optimizer_inside_are_one(make: Any, wrap: Any) -> None:
    p = scalar_weight()
    inner, scaler = sgd(p), make(init_scale=4.0)
    wrapper = wrap(inner)
    for gradient, skipped in ((2.0, False), (INF, True)):
        p.grad = torch.tensor([gradient])
        scaled_once(scaler)
        scaler.unscale_(inner)
        scaler.step(wrapper)
        assert scaler.step_was_skipped(inner) is skipped
        assert scaler.step_was_skipped(wrapper) is skipped
        scaler.update()
    assert value(p) == 0.5


def stateless(*params: Any) -> Any:
    """Return a fused optimizer with momentum in its group, but without a state."""
    optimizer: Any = Fused(*params)
    optimizer.param_groups[0]["momentum"] = 0.5
    return optimizer


@CLASSES
@pytest.mark.parametrize("kind", [Unhashable, Slotted, stateless])
@pytest.mark.parametrize("explicit", [False, True])
def test_duck_typed_optimizers(make: Any, kind: Any, explicit: bool) -> None:
    p = scalar_weight()
    optimizer, scaler = kind(p), make(init_scale=4.0)
    expected = 1.0
    for factor in (0.25, INF, 0.25):
        p.grad = None
        scaler.scale((p * 0.25).sum()).backward()
        assert p.grad is not None
        p.grad.mul_(1.0 if factor == 0.25 else factor)
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        expected -= factor if factor == 0.25 else 0.0
        assert value(p) == expected


@OURS
@pytest.mark.parametrize("kind", [Unhashable, Slotted, stateless])
def test_duck_typed_optimizers_are_clipped(make: Any, kind: Any) -> None:
    p = scalar_weight()
    optimizer, scaler = kind(p), make(init_scale=4.0)
    scaler.scale((p * 0.25).sum()).backward()
    assert float(scaler.clip_grad_norm_(optimizer, 1e9)) == 0.25
    scaler.step(optimizer)
    scaler.update()
    assert value(p) == 0.75


@CLASSES
def test_a_skipped_step_calls_no_kernel_for_each_parameter(make: Any) -> None:
    def kernels(count: int) -> int:
        params = [scalar_weight() for _ in range(count)]
        for p in params:
            p.grad = torch.ones(1)
        assert params[-1].grad is not None
        params[-1].grad.fill_(INF)
        scaler, optimizer = scaled_once(make()), sgd(*params)
        with Kernels() as kernels_called:
            scaler.step(optimizer)
        assert value(params[0]) == 1.0
        return len(kernels_called.called)

    few, many = kernels(16), kernels(256)
    assert many - few <= 16


# - Kernels that step fused


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """Fill uninitialised memory with nan."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("how", ["cpu", "settled"])
def test_b21_fused_momentum_waits_for_a_good_step(how: str) -> None:
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.5, fused=True)
    scaler = scaled(scale=4.0)
    with exchanged(how):
        for gradient in (INF, INF, 2.0, 2.0):
            one_step(scaler, optimizer, gradient)
    # scales 4, 2, 1, 1: momentum 2 and then 3
    assert p.tolist() == [1.0 - 0.5 * 2.0 - 0.5 * 3.0] * 2


# regression: S6
@pytest.mark.usefixtures("nan_in_new_memory")
def test_fused_momentum_of_a_group_whose_gradient_comes_later() -> None:
    first, later = parameter(), parameter()
    groups: Any = [{"params": [first]}, {"params": [later]}]
    optimizer = torch.optim.SGD(groups, lr=0.5, momentum=0.5, fused=True)
    scaler = scaled(scale=4.0)
    first.grad = torch.full_like(first, 4.0)
    with exchanged("settled"):
        scaler.step(optimizer)
        scaler.update()
        for gradient in (INF, 2.0, 2.0):
            one_step(scaler, optimizer, gradient)
    assert later.tolist() == [1.0 - 0.5 * 1.0 - 0.5 * 1.5] * 2


@pytest.mark.usefixtures("nan_in_new_memory")
def test_torch_takes_momentum_that_nobody_wrote() -> None:
    """Shows why the scaler checks for this case; if it fails, torch has fixed it."""
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.5, fused=True)
    scaler = scaled(torch.amp.GradScaler)
    for gradient in (INF, 2.0):
        one_step(scaler, optimizer, gradient)
    assert all(map(math.isnan, p.tolist()))


def test_fused_attributes_are_removed() -> None:
    p = with_grad()
    optimizer = sgd(p, fused=True)

    def fail(*_: Any) -> None:
        raise KeyError("from a hook")

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        scaled().step(optimizer)
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")
