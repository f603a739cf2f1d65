"""What goes wrong in one process with torch's scalers, by the ids of the defects."""

import copy
import math
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gradparity.scaler import (
    GradScaler,
    InvalidSettingError,
    ShardedGradScaler,
)

BOTH = pytest.mark.parametrize("make", [GradScaler, ShardedGradScaler])
FUSED = pytest.mark.parametrize("fused", [False, True])
INF = float("inf")


def parameter(value: float = 1.0, dtype: Any = torch.float32) -> Tensor:
    return torch.full((2,), value, dtype=dtype, requires_grad=True)


def scaled(make: Any = GradScaler, scale: float = 4.0, **settings: Any) -> Any:
    scaler = make(device="cpu", init_scale=scale, **settings)
    scaler.scale(torch.ones(()))
    return scaler


def one_step(scaler: Any, optimizer: Any, gradient: float) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, gradient)
    scaler.step(optimizer)
    scaler.update()


def sgd(*params: Tensor, fused: bool = False, lr: float = 1.0) -> Any:
    return torch.optim.SGD(list(params), lr=lr, fused=fused)


# - B05: the scale and what it does to finite gradients


@BOTH
def test_b05a_scale_never_grows_to_inf(make: Any) -> None:
    scaler, optimizer = scaled(make, 2.0**125, growth_interval=1), sgd(parameter())
    for _ in range(6):
        one_step(scaler, optimizer, 1.0)
    assert scaler.get_scale() == 2.0**127


@BOTH
@pytest.mark.parametrize("fused", [False, True])
def test_b05b_scale_never_underflows(make: Any, fused: bool) -> None:
    p = parameter()
    scaler, optimizer = scaled(make, 2.0**16, growth_interval=1), sgd(p, fused=fused)
    for _ in range(170):
        one_step(scaler, optimizer, INF)
    assert scaler.get_scale() == 2.0**-126
    one_step(scaler, optimizer, 2.0**-126)
    assert p.tolist() == [0.0, 0.0]
    assert scaler.get_scale() == 2.0**-125


@BOTH
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("scale", "gradient"), [(2.0**-20, 3e38), (2.0**-126, 8.0)])
def test_b05c_unscaled_overflow_is_an_overflow(
    make: Any, fused: bool, scale: float, gradient: float
) -> None:
    p = parameter()
    one_step(scaler := scaled(make, scale), sgd(p, fused=fused), gradient)
    assert p.tolist() == [1.0, 1.0]
    assert scaler.get_scale() == max(scale / 2, 2.0**-126)


@BOTH
def test_b05d_lowered_interval_still_grows(make: Any) -> None:
    scaler, optimizer = scaled(make, growth_interval=10), sgd(parameter())
    for _ in range(6):
        one_step(scaler, optimizer, 1.0)
    scaler.set_growth_interval(3)
    one_step(scaler, optimizer, 1.0)
    assert scaler.get_scale() == 8.0


# - B08: fp16


def test_b08a_fp16_loss_is_not_cast_back() -> None:
    loss = torch.tensor(2.0, dtype=torch.float16)
    for make in (GradScaler, ShardedGradScaler):
        product = make(device="cpu").scale(loss)
        assert product.dtype is torch.float32 and product.item() == 131072.0
    wide = torch.tensor(2.0, dtype=torch.bfloat16)
    assert ShardedGradScaler(device="cpu").scale(wide).dtype is torch.bfloat16


def test_b08b_widened_gradients_keep_small_values() -> None:
    p = parameter(0.0, torch.float16)
    optimizer = sgd(p, lr=16.0)
    scaler = scaled(scale=2.0**16, fp16_gradients="widen")
    p.grad = torch.full_like(p, 1e-8 * 2**16)
    scaler.unscale_(optimizer)
    assert p.grad is not None and p.grad.dtype is torch.float32
    torch.testing.assert_close(p.grad, torch.full((2,), 1e-8), rtol=1e-3, atol=0)
    scaler.step(optimizer)
    scaler.update()
    assert p[0].item() == pytest.approx(-1.6e-7, rel=0.3)
    (p * 3).sum().backward()  # and so does every later backward
    assert p.grad.dtype is torch.float32


@pytest.mark.parametrize("fused", [False, True])
def test_b08c_fp16_gradients_by_choice(fused: bool) -> None:
    p = parameter(1.0, torch.float16)
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaled().unscale_(sgd(p, fused=fused))
    for scaler in (scaled(fp16_gradients="in place"), scaled(ShardedGradScaler)):
        p.grad = torch.full_like(p, 4.0)
        scaler.unscale_(sgd(p, fused=fused))
        assert p.grad.tolist() == [1.0, 1.0]


@BOTH
def test_b08d_sparse_gradients(make: Any) -> None:
    dtype = torch.float32 if make is GradScaler else torch.float16
    table = torch.zeros(3, 1, dtype=dtype, requires_grad=True)

    def gradient(value: float) -> Tensor:
        values = torch.full((2, 1), value, dtype=dtype)
        return torch.sparse_coo_tensor(
            torch.tensor([[1, 1]]), values, (3, 1), check_invariants=True
        )

    scaler, optimizer = scaled(make), sgd(table)
    table.grad = gradient(4.0)
    scaler.step(optimizer)
    scaler.update()
    assert table.flatten().tolist() == [0.0, -2.0, 0.0]
    table.grad = gradient(40000.0 if dtype is torch.float16 else INF)
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)


# - B10: which gradients, unscaled how often


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


# - B11: settings, copies, states


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
        {"growth_factor": 1.0},
        {"growth_factor": INF},
        {"growth_factor": math.nan},
        {"growth_interval": 0},
        {"growth_interval": 2.5},
        {"growth_interval": 2**31},
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


def with_grad() -> Tensor:
    p = parameter()
    p.grad = torch.ones_like(p)
    return p


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


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """What nobody has written is nan, and not what lay there by chance."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("sees", [True, False])
def test_b21_fused_momentum_waits_for_a_good_step(
    monkeypatch: pytest.MonkeyPatch, sees: bool
) -> None:
    if not sees:  # as on an accelerator, whose memory the host does not read
        monkeypatch.setattr("gradparity.scaler.grad_scaler.on_host", lambda _: False)
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.5, fused=True)
    scaler = scaled(scale=4.0)
    for gradient in (INF, INF, 2.0, 2.0):
        one_step(scaler, optimizer, gradient)
    # scales 4, 2, 1, 1: momentum 2 and then 3
    assert p.tolist() == [1.0 - 0.5 * 2.0 - 0.5 * 3.0] * 2


@pytest.mark.usefixtures("nan_in_new_memory")
def test_torch_takes_momentum_that_nobody_wrote() -> None:
    """Why the scaler looks itself; when this fails, torch is mended."""
    p = parameter()
    optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.5, fused=True)
    scaler = scaled(torch.amp.GradScaler)
    for gradient in (INF, 2.0):
        one_step(scaler, optimizer, gradient)
    assert all(map(math.isnan, p.tolist()))


# Tracing torch's own optimizers, dynamo meets what torch itself has deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_b17_compiled_step_is_right() -> None:
    p = parameter(0.0)
    scaler, optimizer = scaled(), sgd(p)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    compiled = torch.compile(step, backend="eager")
    for gradient, value in ((4.0, -1.0), (INF, -1.0), (2.0, -2.0)):
        p.grad = torch.full_like(p, gradient)
        compiled()
        assert p.tolist() == [value, value]
    assert scaler.get_scale() == 2.0


def test_b20_sharded_works_alone() -> None:
    p = parameter(0.0)
    one_step(scaled(ShardedGradScaler), sgd(p), 4.0)
    assert p.tolist() == [-1.0, -1.0]


# - Beyond the rows


@BOTH
def test_frozen_and_mixed_dtypes(make: Any) -> None:
    wide, narrow = parameter(0.0), parameter(0.0, torch.bfloat16)
    frozen = torch.zeros(2)
    optimizer = sgd(wide, frozen, narrow)
    wide.grad, narrow.grad = torch.full((2,), 4.0), torch.full((2,), 4.0).bfloat16()
    scaler = scaled(make)
    scaler.step(optimizer)
    scaler.update()
    assert (wide.tolist(), narrow.tolist()) == ([-1.0, -1.0], [-1.0, -1.0])
    narrow.grad.fill_(INF)
    scaler.step(optimizer)
    assert scaler.step_was_skipped(optimizer)


@pytest.mark.parametrize("bad", [0, 1, None])
@pytest.mark.parametrize("fused", [(0, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("clip", [False, True])
def test_step_together(bad: int | None, fused: tuple[int, int], clip: bool) -> None:
    params = [parameter(0.0), parameter(0.0)]
    optimizers = [sgd(p, fused=bool(f)) for p, f in zip(params, fused, strict=True)]
    scaler = scaled()
    for i, p in enumerate(params):
        p.grad = torch.full((2,), INF if i == bad else 4.0)
    if clip:
        scaler.unscale_(optimizers[0])
    assert scaler.step_together(*optimizers) is (bad is None)
    scaler.update()
    value = -1.0 if bad is None else 0.0
    assert [p.tolist() for p in params] == [[value] * 2] * 2
    assert scaler.get_scale() == (4.0 if bad is None else 2.0)
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.update()


def test_fused_attributes_are_removed() -> None:
    p = with_grad()
    optimizer = sgd(p, fused=True)

    def fail(*_: Any) -> None:
        raise KeyError("from a hook")

    optimizer.register_step_pre_hook(fail)
    with pytest.raises(KeyError):
        scaled().step(optimizer)
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


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
