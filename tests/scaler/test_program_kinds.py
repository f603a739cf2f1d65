"""Programs in one process, compared with torch's class or with expected numbers."""

import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
)
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from gradparity import scaler as ours
from gradparity.scaler import GradScaler
from gradparity.tests.beside_torch import (
    CLASSES,
    PAIRS,
    PLAIN,
    Pair,
    ours_plain,
    ours_sharded,
    scaled_once,
    torch_plain,
    torch_sharded,
)
from gradparity.tests.products import pairs
from gradparity.tests.scaler.optimizers import (
    Group,
    Refusing,
    TakesScaler,
    knows_its_wrapper,
)
from gradparity.tests.stepping import FUSED, INF, scalar_weight, sgd

OURS = pytest.mark.parametrize("make", [ours_plain, ours_sharded])


def gradient_of(p: nn.Parameter) -> torch.Tensor:
    assert p.grad is not None
    return p.grad


# - G01: a gradient that two optimizers share


def _write_data(p: nn.Parameter, value: float) -> None:
    gradient_of(p).data.copy_(torch.tensor([value]))


def _set_data(p: nn.Parameter, value: float) -> None:
    gradient_of(p).data = torch.tensor([value])


def _write_numpy(p: nn.Parameter, value: float) -> None:
    gradient_of(p).numpy()[:] = value


def _write_in_place(p: nn.Parameter, value: float) -> None:
    with torch.no_grad():
        gradient_of(p).copy_(torch.tensor([value]))


def _replace(p: nn.Parameter, value: float) -> None:
    p.grad = torch.tensor([value])


def _leave(p: nn.Parameter, value: float) -> None:
    """Leave gradients in place; torch divides them again (B10b)."""


WRITES: list[Callable[[nn.Parameter, float], None]] = [
    _write_data,
    _set_data,
    _write_numpy,
    _write_in_place,
    _replace,
    _leave,
]


@PAIRS
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_shared_gradient_is_divided_as_torch_divides_it(
    pair: Pair, write: Callable[[nn.Parameter, float], None], explicit: bool
) -> None:
    def run(make: Any) -> list[float]:
        shared, own = scalar_weight(), scalar_weight()
        first, second = sgd(shared), sgd(shared, own)
        scaler, seen = make(init_scale=1024.0), []
        for _ in range(3):
            first.zero_grad()
            second.zero_grad()
            scaler.scale(((shared + own) / 8).sum()).backward()
            for optimizer in (first, second):
                if explicit:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                seen += [float(gradient_of(shared)), shared.item(), own.item()]
                write(shared, 128.0)
            scaler.update()
        return seen

    assert run(pair.ours) == run(pair.theirs)


@OURS
@FUSED
def test_a_shared_parameter_is_warned_about_once(make: Any, fused: bool) -> None:
    def steps(*optimizers: Any) -> list[Any]:
        scaler = make(init_scale=4.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                for p in (shared, own, other):
                    p.grad = torch.ones(1)
                scaled_once(scaler)
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
        return [warning.category for warning in caught]

    shared, own, other = scalar_weight(), scalar_weight(), scalar_weight()
    kinds = {"fused": fused}
    assert steps(sgd(shared, **kinds), sgd(own, other, **kinds)) == []
    assert steps(sgd(shared, own, **kinds), sgd(other, shared, **kinds)) == [
        UserWarning
    ]


def test_a_new_optimizer_that_shares_with_a_known_one_is_warned_about() -> None:
    p = scalar_weight()
    known, new = sgd(p), sgd(p)
    scaler = scaled_once(GradScaler("cpu"))
    for optimizers in ([known], [new, known]):
        for optimizer in optimizers:
            p.grad = torch.ones(1)
            scaler.step(optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scaler.update()
    assert [warning.category for warning in caught] == [UserWarning]


def test_a_skip_for_another_reason_than_a_gradient_names_none() -> None:
    class Cautious(GradScaler):
        def _unscale_grads_(self, *_: Any) -> Any:
            return {torch.device("cpu"): torch.ones(())}

    p, scaler = scalar_weight(), scaled_once(Cautious("cpu"))
    p.grad = torch.ones(1)
    scaler.step(sgd(p))
    scaler.update()
    assert p.item() == 1.0 and scaler.last_overflow is None


# - G02: found_inf of shape (1,)


class OneElement(GradScaler):
    """Checks gradients itself; found_inf has shape (1,), as in the sharded class."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, *_: Any) -> Any:
        return one_element(optimizer, inv_scale)


class TorchOneElement(torch.amp.GradScaler):
    """torch's class with the override of `OneElement`."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, *_: Any) -> Any:
        return one_element(optimizer, inv_scale)


def one_element(optimizer: Any, inv_scale: Any) -> Any:
    bad = 0.0
    for group in optimizer.param_groups:
        for p in group["params"]:
            bad = max(bad, float(not p.grad.isfinite().all()))
            p.grad.mul_(inv_scale)
    return {torch.device("cpu"): torch.tensor([bad])}


def test_found_inf_of_one_element_is_no_skip() -> None:
    weights: list[list[float]] = []
    for kind in (TorchOneElement, OneElement):
        scaler: Any = kind("cpu", init_scale=4.0)
        p, seen = scalar_weight(), []
        optimizer = sgd(p)
        for gradient in (1.0, INF, 2.0):
            p.grad = torch.tensor([gradient])
            scaled_once(scaler)
            scaler.step(optimizer)
            if kind is OneElement:
                assert scaler.step_was_skipped(optimizer) is (gradient == INF)
            scaler.update()
            seen += [p.item(), scaler.get_scale()]
        weights.append(seen)
        if kind is OneElement:
            assert scaler.counters[:3] == (2, 1, 0)
    assert weights[0] == weights[1] == [0.75, 4.0, 0.75, 2.0, -0.25, 2.0]


# - G03: wrappers


@CLASSES
@pytest.mark.parametrize("outer", [False, True])
def test_an_inner_optimizer_that_knows_its_wrapper(make: Any, outer: bool) -> None:
    p = scalar_weight(gradient=2.0)
    inner, scaler = sgd(p), scaled_once(make(init_scale=4.0))
    wrapper = knows_its_wrapper(inner)
    optimizer: Any = wrapper if outer else inner
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert p.item() == 0.5


@CLASSES
def test_an_attribute_that_raises_is_no_inner_optimizer(make: Any) -> None:
    p = scalar_weight(gradient=2.0)
    optimizer, scaler = sgd(p), scaled_once(make(init_scale=4.0))
    optimizer.other = Refusing(RuntimeError("not yet"))
    scaler.step(optimizer)
    scaler.update()
    assert p.item() == 0.5


# - G04: torch's dictionary of states


class TheirStates(GradScaler):
    """Creates the dictionary of states as torch's constructor and ``update`` do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)


@FUSED
@pytest.mark.parametrize("explicit", [False, True])
def test_a_subclass_that_assigns_torch_s_states(fused: bool, explicit: bool) -> None:
    p = scalar_weight()
    optimizer, scaler = sgd(p, fused=fused), TheirStates("cpu", init_scale=4.0)
    for gradient in (2.0, INF, 2.0):
        p.grad = torch.tensor([gradient])
        scaled_once(scaler)
        if explicit:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert (p.item(), scaler.get_scale()) == (-0.5, 2.0)


@CLASSES
def test_the_state_of_a_wrapper_lies_under_its_own_id(make: Any) -> None:
    p = scalar_weight(gradient=INF)
    wrapper, scaler = knows_its_wrapper(sgd(p)), scaled_once(make(init_scale=4.0))
    del wrapper.optimizer.wrapper
    scaler.unscale_(wrapper)
    state = scaler._per_optimizer_states[id(wrapper)]
    assert state["stage"] is torch.amp.grad_scaler.OptState.UNSCALED
    assert [float(found) for found in state["found_inf_per_device"].values()] == [1.0]


# - G05: default dtypes


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@OURS
@FUSED
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("call", ["step", "unscale_", "clip_grad_norm_", "and_step"])
def test_another_default_dtype(
    make: Any, fused: bool, dtype: torch.dtype, call: str
) -> None:
    p = scalar_weight()
    optimizer, scaler = sgd(p, fused=fused), make(init_scale=4.0)
    scaled_once(scaler)
    with default_dtype(dtype):
        for gradient in (16.0, INF, 8.0):
            p.grad = torch.tensor([gradient], dtype=torch.float32)
            if call == "and_step":
                norm = scaler.clip_and_step(optimizer, 0.5)
                assert norm.dtype is torch.float32
            else:
                if call == "unscale_":
                    scaler.unscale_(optimizer)
                if call == "clip_grad_norm_":
                    norm = scaler.clip_grad_norm_(optimizer, 0.5)
                    assert norm.dtype is torch.float32
                scaler.step(optimizer)
            scaler.update()
    steps = 0.5 if call in ("clip_grad_norm_", "and_step") else 4.0
    assert p.item() == pytest.approx(1.0 - 2 * steps, abs=1e-5)
    assert scaler.get_scale() == 2.0
    assert scaler._scale.dtype is torch.float32


# - G06: settings that torch takes


@PLAIN
@pytest.mark.parametrize("interval", [2**31, 10**10, sys.maxsize])
def test_a_growth_interval_beyond_int32(make: Any, interval: int) -> None:
    scaler = scaled_once(make(init_scale=4.0, growth_interval=interval))
    scaler.step(sgd(scalar_weight(gradient=1.0)))
    scaler.update()
    assert scaler.get_scale() == 4.0
    state = scaler.state_dict()
    assert state["growth_interval"] == interval
    other = make(init_scale=2.0)
    other.load_state_dict(state)
    other.set_growth_interval(interval)
    assert other.state_dict() == state


@PLAIN
def test_a_growth_factor_of_one_can_be_set_and_loaded(make: Any) -> None:
    scaler = scaled_once(make(init_scale=4.0, growth_interval=1))
    scaler.set_growth_factor(1.0)
    scaler.step(sgd(scalar_weight(gradient=1.0)))
    scaler.update()
    assert scaler.get_scale() == 4.0
    other = make()
    other.load_state_dict(scaler.state_dict())
    assert other.get_growth_factor() == 1.0


# - G07, G08: optimizers of others


class OwnFused:
    """A user's fused optimizer with momentum, and with an int in its state."""

    _step_supports_amp_scaling = True
    grad_scale: Any
    found_inf: Any

    def __init__(self, *params: Any) -> None:
        group: dict[str, Any] = {"params": list(params), "momentum": 0.5, "lr": 1.0}
        self.param_groups = [group]
        self.state: dict[Any, Any] = {"steps": 0}

    def step(self) -> None:
        if float(self.found_inf):
            return
        self.state["steps"] += 1
        divisor = 1.0 if self.grad_scale is None else self.grad_scale
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad / divisor)


@CLASSES
def test_an_int_in_the_state_of_a_fused_optimizer(make: Any) -> None:
    p = scalar_weight()
    optimizer, scaler = OwnFused(p), make(init_scale=4.0)
    for gradient in (2.0, INF, 2.0):
        p.grad = torch.tensor([gradient])
        scaled_once(scaler)
        scaler.step(optimizer)
        scaler.update()
    assert (p.item(), optimizer.state["steps"]) == (-0.5, 2)


@PLAIN
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_argument_called_grad_scaler_is_replaced(make: Any) -> None:
    p = scalar_weight(gradient=2.0)
    optimizer, scaler = TakesScaler(p), scaled_once(make(init_scale=4.0))
    scaler.step(optimizer, grad_scaler=None)
    scaler.update()
    assert p.item() == 0.5


class OddGroups(OwnFused):
    """Optimizer with groups that lack ``get``."""

    def __init__(self, *params: Any) -> None:
        super().__init__(*params)
        self.param_groups = [Group([*params])]  # type: ignore[list-item]


class Unfused(OddGroups):
    """Optimizer without a fused kernel."""

    _step_supports_amp_scaling = False

    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad)


@CLASSES
@pytest.mark.parametrize("kind", [OddGroups, Unfused])
def test_groups_without_get(make: Any, kind: Any) -> None:
    p = scalar_weight()
    optimizer, scaler = kind(p), make(init_scale=4.0)
    for gradient in (2.0, INF, 2.0):
        p.grad = torch.tensor([gradient])
        scaled_once(scaler)
        scaler.step(optimizer)
        scaler.update()
    assert (p.item(), scaler.get_scale()) == (-0.5, 2.0)


# - G09, G10: fake tensors, swapped parameters


@PLAIN
@FUSED
def test_a_step_under_fake_tensors(make: Any, fused: bool) -> None:
    """A fused step works; an unfused one has to read found_inf, and raises."""

    def step() -> None:
        with FakeTensorMode():
            p = nn.Parameter(torch.ones(1))
            scaler, optimizer = make(init_scale=4.0), sgd(p, fused=fused)
            scaler.scale(p.sum()).backward()
            scaler.step(optimizer)

    if fused:
        step()
    else:
        with pytest.raises(DataDependentOutputException):
            step()


@FUSED
@pytest.mark.parametrize(
    ("make", "clip"),
    [
        *((make, False) for make in (torch_plain, torch_sharded)),
        *((make, clip) for make in (ours_plain, ours_sharded) for clip in (0, 1)),
    ],
)
def test_a_module_is_moved_before_the_update(
    make: Any, fused: bool, clip: bool
) -> None:
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        scaler, optimizer = make(init_scale=4.0), sgd(model.weight, fused=fused)
        scaler.scale(model(torch.full((1, 1), 0.5)).sum()).backward()
        if clip:
            scaler.clip_grad_norm_(optimizer, 1e9)
        scaler.step(optimizer)
        model.to(torch.float64)
        scaler.update()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
    assert model.weight.dtype is torch.float64
    assert model.weight.tolist() == [[0.5]]


# - G11: linear in the number of optimizers


def work(call: Callable[[], None]) -> int:
    """Return how many bytecodes of the scaler's files ran."""
    folder, count = str(ours.__path__[0]), 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(folder):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pairs(
    OURS,
    FUSED,
    pytest.mark.parametrize(
        "call", ["step", "unscale_", "clip_grad_norm_", "clip_and_step"]
    ),
)
@pytest.mark.few(3)
def test_the_work_is_linear_in_the_number_of_optimizers(
    make: Any, fused: bool, call: str
) -> None:
    def iteration(count: int) -> list[int]:
        params = [scalar_weight() for _ in range(count)]
        optimizers = [sgd(p, fused=fused) for p in params]
        scaler = scaled_once(make(init_scale=4.0))

        def run() -> None:
            for optimizer in optimizers:
                if call == "clip_and_step":
                    scaler.clip_and_step(optimizer, 1e9)
                    continue
                if call == "unscale_":
                    scaler.unscale_(optimizer)
                elif call == "clip_grad_norm_":
                    scaler.clip_grad_norm_(optimizer, 1e9)
                scaler.step(optimizer)
            scaler.update()

        works = []
        for _ in range(2):
            for p in params:
                p.grad = torch.ones(1)
            works.append(work(run))
        return works

    for few, many in zip(iteration(30), iteration(120), strict=True):
        assert few > 0
        assert many < 4.4 * few


# - G19: what .grad holds


@OURS
@FUSED
@pytest.mark.parametrize("call", ["unscale_", "clip_grad_norm_", "both"])
@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_gradients_are_what_the_call_says(
    make: Any, fused: bool, call: str, is_view: bool, other: bool
) -> None:
    """Gradients are right in every iteration, and a user may change them."""
    a, b, c = scalar_weight(), scalar_weight(), scalar_weight()
    optimizer, scaler = sgd(a, b, fused=fused), make(init_scale=1024.0)
    second = sgd(c, fused=fused)
    expected = 1.0
    for _ in range(3):
        flat = torch.tensor([3.0 * 1024, 4.0 * 1024])
        a.grad = flat[:1] if is_view else flat[:1].clone()
        b.grad = flat[1:] if is_view else flat[1:].clone()
        c.grad = torch.tensor([1024.0])
        scaled_once(scaler)
        if call != "clip_grad_norm_":
            scaler.unscale_(optimizer)
        if call != "unscale_":
            assert float(scaler.clip_grad_norm_(optimizer, 2.5)) == 5.0
        factor = 1.0 if call == "unscale_" else 0.5
        held = [float(gradient_of(a)), float(gradient_of(b))]
        assert held == pytest.approx([3.0 * factor, 4.0 * factor], rel=1e-6)
        if other:
            scaler.step(second)
        gradient_of(a).mul_(0.5)
        scaler.step(optimizer)
        scaler.update()
        expected -= 1.5 * factor
        assert a.item() == pytest.approx(expected, rel=1e-5)


# - G21: a scheduler can be pickled
