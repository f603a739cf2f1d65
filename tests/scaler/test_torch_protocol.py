"""The methods that torch's classes offer to optimizers and trainers, to the bit.

torch's own tests call ``_unscale_grads_`` with an ``inv_scale`` and a ``found_inf`` of
shape (1,), the classes themselves with (). Both shapes must be accepted everywhere.
"""

import copy
import itertools
import pickle
import random
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.amp.grad_scaler import _MultiDeviceReplicator as TheirReplicator
from torch.distributed.fsdp.sharded_grad_scaler import (
    _GeneralMultiDeviceReplicator as TheirGeneralReplicator,
)

import gradparity.scaler.grad_scaler as ours_module
import gradparity.scaler.sharded as ours_sharded_module
from gradparity.tests.beside_torch import (
    CLASSES,
    PAIRS,
    PLAIN,
    SHARDED,
    Pair,
    bits,
    filled,
    ours_plain,
    ours_sharded,
    outcome,
    scaled_once,
    torch_plain,
    torch_sharded,
)
from gradparity.tests.products import pairs
from gradparity.tests.stepping import sgd

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SHAPES: list[tuple[int, ...]] = [(), (1,)]
INF, NAN = float("inf"), float("nan")
CPU = torch.device("cpu")


def dense(dtype: Any, bad: float | None) -> Tensor:
    values = [3.0, -7.5, 1e-4, 60000.0 if bad is None else bad]
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def coo(indices: Tensor, values: Tensor, *shape: int) -> Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def sparse(dtype: Any, bad: float | None, coalesced: bool) -> Tensor:
    indices = torch.tensor([[0, 3, 3, 2], [2, 0, 0, 1]])
    made = coo(indices, dense(dtype, bad), 4, 3)
    if not coalesced:
        return made
    return made.double().coalesce().to(dtype)


def gradient(layout: str, dtype: Any, bad: float | None) -> Tensor:
    if layout == "dense":
        return dense(dtype, bad)
    if layout == "scalar":
        return dense(dtype, bad)[3]
    if layout == "empty":
        return dense(dtype, bad)[:0]
    if layout == "strided":
        return dense(dtype, bad).repeat(6).reshape(4, 6).t()[::2]
    if layout == "hybrid":
        rows = torch.stack([dense(dtype, bad), dense(dtype, None)])
        return coo(torch.tensor([[4, 1]]), rows, 5, 4)
    if layout == "nothing stored":
        nowhere = torch.zeros(1, 0, dtype=torch.int64)
        return coo(nowhere, torch.zeros(0, dtype=dtype), 5)
    return sparse(dtype, bad, layout == "coalesced")


LAYOUTS = ["dense", "scalar", "empty", "strided", "coalesced", "uncoalesced"]
LAYOUTS += ["hybrid", "nothing stored"]


def unscale(
    make: Any,
    gradients: list[Tensor],
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool = True,
) -> Any:
    # All that one call can change, in bits.
    params = [torch.zeros_like(g.to_dense()).requires_grad_() for g in gradients]
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.clone()
    scaler = scaled_once(make())

    args = sgd(*params), inv_scale, found_inf, allow_fp16
    return outcome(scaler._unscale_grads_, *args), bits([p.grad for p in params])


@pairs(
    PAIRS,
    pytest.mark.parametrize("layout", LAYOUTS),
    pytest.mark.parametrize("dtype", DTYPES, ids=str),
    pytest.mark.parametrize("bad", [None, INF, -INF, NAN]),
)
def test_unscale_grads_of_every_shape_and_dtype(
    pair: Pair, layout: str, dtype: Any, bad: float | None
) -> None:
    made = gradient(layout, dtype, bad)
    for inv, found in itertools.product(SHAPES, SHAPES):
        for factor, start in ((0.25, 0.0), (1.0, 0.0), (0.1, 0.0), (0.25, 1.0)):
            for allow_fp16 in (True, False):
                theirs, ours = (
                    unscale(
                        make,
                        [made],
                        torch.full(inv, factor),
                        torch.full(found, start),
                        allow_fp16,
                    )
                    for make in pair
                )
                assert ours == theirs, (inv, found, factor, start, allow_fp16)


@PAIRS
@pytest.mark.parametrize("inv", SHAPES)
@pytest.mark.parametrize("found", SHAPES)
@pytest.mark.parametrize("where", [None, *range(8)])
def test_every_kind_of_gradient_at_once(
    pair: Pair, inv: tuple[int, ...], found: tuple[int, ...], where: int | None
) -> None:
    kinds = [(k, d) for k in ("dense", "uncoalesced") for d in DTYPES]
    made = [
        gradient(kind, dtype, INF if place == where else None)
        for place, (kind, dtype) in enumerate(kinds)
    ]
    theirs, ours = (
        unscale(make, made, torch.full(inv, 0.5), torch.zeros(found)) for make in pair
    )
    assert ours == theirs
    uncoalesced_overflow = bits(torch.full(found, 1.0))  # 2**15.9 + -7.5 stays finite
    assert (theirs[0]["cpu"] == uncoalesced_overflow) is (where is not None)


@CLASSES
@pytest.mark.parametrize("shape", SHAPES)
def test_unscale_grads_leaves_its_arguments_alone(
    make: Any, shape: tuple[int, ...]
) -> None:
    inv_scale, found_inf = torch.full(shape, 0.25), torch.zeros(shape)
    result, _ = unscale(make, [dense(torch.float32, INF)], inv_scale, found_inf)
    assert result == {"cpu": bits(torch.ones(shape))}
    assert bits([inv_scale, found_inf]) == bits(
        [torch.full(shape, 0.25), torch.zeros(shape)]
    )


@PAIRS
def test_what_overflows_only_when_it_is_added_up(pair: Pair) -> None:
    indices, values = torch.tensor([[1, 1, 0]]), torch.tensor([6e4, 6e4, 32.0])
    made = coo(indices, values.half(), 2)
    for shape in SHAPES:
        results = [
            unscale(make, [made], torch.full(shape, 0.25), torch.zeros(shape))
            for make in pair
        ]
        assert results[0] == results[1]
        assert results[0][0] == {"cpu": bits(torch.full(shape, 1.0))}


@PAIRS
@pytest.mark.parametrize(
    ("inv", "found"),
    [
        (torch.full((), 0.5, dtype=torch.float64), torch.zeros(())),
        (torch.full((), 0.5, dtype=torch.float16), torch.zeros(())),
        (torch.full((), 0.5), torch.zeros((), dtype=torch.float64)),
        (torch.full((), 0.5), torch.zeros((), dtype=torch.int32)),
        (torch.full((2,), 0.5), torch.zeros(())),
        (torch.full((), 0.5), torch.zeros(2)),
        (torch.full((1, 1), 0.5), torch.zeros((1, 1))),
    ],
)
def test_what_the_kernel_refuses(pair: Pair, inv: Tensor, found: Tensor) -> None:
    made = [dense(torch.float32, None)]
    theirs, ours = (unscale(make, made, inv.clone(), found.clone()) for make in pair)
    assert ours == theirs


@PAIRS
def test_complex_gradients(pair: Pair) -> None:
    def run(make: Any) -> Any:
        p = torch.zeros(2, dtype=torch.complex64, requires_grad=True)
        p.grad = torch.tensor([1 + 2j, 3 - 4j])
        scaler = scaled_once(make(init_scale=4.0))
        return outcome(scaler.unscale_, sgd(p)), bits(p.grad)

    assert run(pair.ours) == run(pair.theirs)
    assert run(pair.theirs)[0] in ("NotImplementedError", "RuntimeError")


@PAIRS
def test_parameters_without_gradients(pair: Pair) -> None:
    def run(make: Any) -> Any:
        p, q = filled(0.0), filled(0.0)
        scaler, zero, one = scaled_once(make()), torch.zeros(()), torch.ones(())
        nothing = outcome(
            lambda: scaler._unscale_grads_(sgd(p, q), one, zero, allow_fp16=False)
        )
        q.grad = torch.ones(2)
        some = outcome(lambda: scaler._unscale_grads_(sgd(p, q), one, zero, False))
        return nothing, some, p.grad is None

    assert run(pair.ours) == run(pair.theirs)


@PLAIN
def test_what_is_no_tensor_is_refused(make: Any) -> None:
    optimizer = SimpleNamespace(param_groups=[{"params": [3.0]}])
    scaler, one = scaled_once(make()), torch.ones(())
    with pytest.raises(AssertionError, match="expected param to be"):
        scaler._unscale_grads_(optimizer, one, one, False)


@PLAIN
def test_an_fp16_gradient_is_refused_before_anything_changes(make: Any) -> None:
    p, q = filled(0.0), filled(0.0, dtype=torch.float16)
    p.grad, q.grad = torch.full((2,), 4.0), torch.full((2,), 4.0, dtype=torch.float16)
    scaler, optimizer = scaled_once(make(init_scale=4.0)), sgd(p, q)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)
    assert p.grad.tolist() == q.grad.tolist() == [4.0, 4.0]
    state = scaler._per_optimizer_states[id(optimizer)]
    assert (state["stage"], state["found_inf_per_device"]) == (OptState.READY, {})


# - The other methods


@CLASSES
@pytest.mark.parametrize("value", [1.0, INF, NAN])
def test_check_inf_per_device(make: Any, value: float) -> None:
    p = filled(0.0)
    p.grad = torch.full((2,), value)
    scaler, optimizer = scaled_once(make(init_scale=4.0)), sgd(p)
    before = bits(p.grad)
    found = scaler._check_inf_per_device(optimizer)
    assert bits(found) == {"cpu": bits(torch.tensor(float(value != 1.0)))}
    assert list(found) == [CPU]
    assert found is scaler._found_inf_per_device(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    assert found is state["found_inf_per_device"]
    assert state["stage"] is OptState.READY
    assert bits(p.grad) == before


@PAIRS
def test_check_inf_of_fp16_gradients(pair: Pair) -> None:
    def run(make: Any, layout: str, bad: float | None) -> Any:
        made = gradient(layout, torch.float16, bad)
        p = torch.zeros(made.shape, dtype=torch.float16, requires_grad=True)
        p.grad = made
        scaler = scaled_once(make())
        return outcome(scaler._check_inf_per_device, sgd(p)), bits(p.grad)

    for layout in ("dense", "coalesced", "uncoalesced"):
        for bad in (None, INF):
            args = layout, bad
            assert run(pair.ours, *args) == run(pair.theirs, *args), args


@CLASSES
def test_no_method_works_before_scale(make: Any) -> None:
    p = filled(0.0)
    p.grad = torch.ones(2)
    scaler, optimizer = make(), sgd(p)
    calls: list[Callable[[], Any]] = [
        lambda: scaler._check_scale_growth_tracker("it"),
        lambda: scaler._check_inf_per_device(optimizer),
        lambda: scaler.unscale_(optimizer),
        lambda: scaler.step(optimizer),
        lambda: scaler.update(),
        lambda: scaler.update(2.0),
    ]
    for call in calls:
        with pytest.raises(AssertionError, match="but _scale is None"):
            call()
    assert scaler._get_scale_async() is None
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (65536.0, 0)
    assert p.grad.tolist() == [1.0, 1.0]


@CLASSES
def test_lazy_init(make: Any) -> None:
    scaler = make(init_scale=8.0)
    scaler._lazy_init_scale_growth_tracker(CPU)
    scale, tracker = scaler._check_scale_growth_tracker("it")
    assert bits(scale) == bits(torch.tensor(8.0))
    assert bits(tracker) == bits(torch.tensor(0, dtype=torch.int32))
    assert scale is scaler._scale is scaler._get_scale_async()
    assert tracker is scaler._growth_tracker
    with pytest.raises(AssertionError, match="_growth_tracker initialized before"):
        scaler._lazy_init_scale_growth_tracker(CPU)


@CLASSES
@pytest.mark.parametrize(
    "found", [{}, {0: 0.0}, {0: 1.0}, {0: 0.0, 1: 1.0}, {0: 1.0, 1: 0.0}, {0: 3.0}]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_maybe_opt_step(
    make: Any, found: dict[int, float], shape: tuple[int, ...]
) -> None:
    scaler, calls = scaled_once(make()), []

    def step(*args: Any, **kwargs: Any) -> float:
        calls.append((args, kwargs))
        return 7.0

    state = {
        "stage": OptState.UNSCALED,
        "found_inf_per_device": {k: torch.full(shape, v) for k, v in found.items()},
    }
    result = scaler._maybe_opt_step(SimpleNamespace(step=step), state, 1, two=2)
    stepped = not any(found.values())
    assert result == (7.0 if stepped else None)
    assert calls == ([((1,), {"two": 2})] if stepped else [])


@PAIRS
def test_a_step_that_found_nothing(pair: Pair) -> None:
    # torch goes on with a stage of UNSCALED, and update raises: see deviations.md.
    def run(make: Any, unscaled: bool) -> Any:
        scaler, optimizer = scaled_once(make()), sgd(filled(0.0))
        first = outcome(scaler.unscale_, optimizer) if unscaled else None
        stepped = outcome(scaler.step, optimizer)
        state = scaler._per_optimizer_states[id(optimizer)]
        found = [float(f) for f in state["found_inf_per_device"].values()]
        updated = outcome(scaler.update)
        return first, stepped, state["stage"].name, found, updated

    for unscaled in (False, True):
        ours, theirs = run(pair.ours, unscaled), run(pair.theirs, unscaled)
        assert ours[:2] == theirs[:2]
        if ours[1] is None or theirs[1] is None:  # nothing was raised
            assert ours == theirs
        else:
            assert ours[2:] == ("READY", [], None)


@SHARDED
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("found", [[0, 0, 0], [0, 1, 0], [2, 0, 0], [0, 0, 1]])
def test_amp_update_scale_cpu(
    make: Any, shape: tuple[int, ...], found: list[int]
) -> None:
    expected, tracker = 4.0, 0
    scaler = make(init_scale=4.0, growth_interval=2, growth_factor=8.0)
    with pytest.raises(AssertionError):
        scaler._amp_update_scale_cpu_(torch.zeros(shape))
    scaled_once(scaler)
    for value in found:
        scaler._amp_update_scale_cpu_(torch.full(shape, float(value)))
        tracker = 0 if value else tracker + 1
        expected *= 0.5 if value else 8.0 if tracker == 2 else 1.0
        tracker %= 2
        assert bits(scaler._scale) == bits(torch.tensor(expected))
        assert scaler._growth_tracker.shape == ()
        assert scaler._get_growth_tracker() == tracker


@pytest.mark.parametrize(
    "kind",
    [
        TheirReplicator,
        TheirGeneralReplicator,
        ours_module._MultiDeviceReplicator,
        ours_sharded_module._GeneralMultiDeviceReplicator,
    ],
)
@pytest.mark.parametrize("shape", [(), (1,), (3,)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int32], ids=str)
def test_replicator(kind: Any, shape: tuple[int, ...], dtype: Any) -> None:
    master = torch.full(shape, 2, dtype=dtype)
    made = kind(master)
    assert made.master is master
    assert made._per_device_tensors == {}
    copied = made.get(CPU)
    assert copied is made.get(CPU) is made._per_device_tensors[CPU]
    assert bits(copied) == bits(master)
    assert copied.data_ptr() != master.data_ptr()
    elsewhere = made.get(torch.device("meta"))
    assert (elsewhere.device.type, elsewhere.dtype) == ("meta", dtype)
    assert isinstance(made, TheirReplicator)


@pytest.mark.parametrize(
    "kind",
    [TheirGeneralReplicator, ours_sharded_module._GeneralMultiDeviceReplicator],
)
def test_general_replicator_refuses_a_device_without_values(kind: Any) -> None:
    with pytest.raises(AssertionError):
        kind(torch.zeros((), device="meta"))


@CLASSES
def test_per_optimizer_states_is_the_dict_that_torch_has(make: Any) -> None:
    p = filled(0.0)
    p.grad = torch.full((2,), 4.0)
    scaler, optimizer = scaled_once(make(init_scale=4.0)), sgd(p)
    states = scaler._per_optimizer_states
    assert (isinstance(states, defaultdict), len(states)) == (True, 0)
    fresh = states[id(optimizer)]
    assert (fresh["stage"], fresh["found_inf_per_device"]) == (OptState.READY, {})
    scaler.unscale_(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED
    scaler.step(optimizer)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.STEPPED
    scaler.update()
    assert len(scaler._per_optimizer_states) == 0


@CLASSES
def test_a_stage_that_somebody_else_sets_is_trusted(make: Any) -> None:
    # accelerate and Lightning mark an optimizer that a closure has unscaled.
    p = filled(0.0)
    p.grad = torch.full((2,), 1.0)
    scaler, optimizer = scaled_once(make(init_scale=4.0)), sgd(p)
    state = scaler._per_optimizer_states[id(optimizer)]
    state["stage"], state["found_inf_per_device"] = OptState.UNSCALED, {}
    state["found_inf_per_device"][CPU] = torch.zeros(())
    scaler.step(optimizer)
    assert p.tolist() == [-1.0, -1.0]
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(optimizer)


# - Saving


@pytest.mark.parametrize("make", [torch_plain, ours_plain])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("how", ["pickle", "copy"])
def test_pickle(make: Any, lazy: bool, how: str) -> None:
    settings = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
    before = make(init_scale=3.0, **settings)
    before._init_growth_tracker = 1
    if lazy:
        scaled_once(before)
        assert before._growth_tracker.item() == 1
    if how == "pickle":
        after = pickle.loads(pickle.dumps(before))
    else:
        after = copy.deepcopy(before)
    assert after.state_dict() == before.state_dict()
    assert after.is_enabled()
    assert (after._init_scale, after._init_growth_tracker) == (3.0, 1)
    assert (after._scale, after._growth_tracker) == (None, None)
    for scaler in (before, after):
        p = filled(0.0)
        scaler.scale(p.sum()).backward()
        scaler.step(sgd(p))
        scaler.update()
        assert (scaler.get_scale(), scaler._get_growth_tracker()) == (12.0, 0)


@CLASSES
def test_pickle_is_refused_within_an_iteration(make: Any) -> None:
    p = filled(0.0)
    p.grad = torch.ones(2)
    scaler = scaled_once(make())
    scaler.unscale_(sgd(p))
    with pytest.raises(AssertionError, match="may only be pickled at the beginning"):
        pickle.dumps(scaler)


# - All of them, in any order


def program(make: Any, seed: int) -> list[Any]:
    """Run sixty random calls and return the state after each, in bits."""
    draw = random.Random(seed)
    # The findings of torch's sharded class have two shapes: it can neither step a fused
    # optimizer after unscale_ nor add them up (B09).
    can_fuse = make not in (torch_sharded, ours_sharded)
    calls = [c for c in CALLS if can_fuse or c != "_check_inf_per_device"]
    settings = {"init_scale": 2.0 ** draw.randint(0, 12), "growth_interval": 3}
    scaler = make(**settings, growth_factor=draw.choice([2.0, 1.5, 4.0]))
    params = [filled(1.0, 3), filled(2.0, 2, 2), filled(0.5, 1)]
    optimizers = [
        torch.optim.AdamW(params[:2], lr=0.5, fused=can_fuse and draw.random() < 0.5),
        torch.optim.SGD(params[2:], lr=0.5, fused=can_fuse and draw.random() < 0.5),
    ]
    scaler.scale(torch.stack([p.sum() for p in params]).sum()).backward()
    seen: list[Any] = []
    for _ in range(60):
        which = draw.choice(optimizers)
        held = [p for group in which.param_groups for p in group["params"]]
        factor, bad = draw.uniform(-2, 2), draw.random() < 0.15
        call = draw.choice(calls)
        if call == "backward":
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = sum(factor * (p * p).sum() for p in params)
            done = outcome(scaler.scale(loss).backward)
            if bad:
                held[0].grad.view(-1)[0] = INF
        elif call == "iteration":
            for optimizer in optimizers:
                done = outcome(scaler.step, optimizer)
            seen.append(outcome(scaler.update))
        elif call == "update":
            done = outcome(scaler.update)
        elif call == "set":
            done = outcome(scaler.update, abs(factor) * 64 + 1.0)
        elif call == "load":
            state = scaler.state_dict() | {"scale": 2.0 ** draw.randint(0, 12)}
            done = outcome(scaler.load_state_dict, state)
        else:
            done = outcome(getattr(scaler, call), which)
            if isinstance(done, dict):  # findings: torch's differ in shape (B09)
                done = {key: any(value[3]) for key, value in done.items()}
        stages = [
            (state["stage"].name, len(state["found_inf_per_device"]))
            for o in optimizers
            if (state := scaler._per_optimizer_states.get(id(o))) is not None
        ]
        seen.append([call, done, stages, bits(scaler.state_dict())])
        seen.append(bits([*params, *(p.grad for p in params)]))
    return seen


CALLS = ["backward"] * 3 + ["unscale_", "step", "step", "iteration", "iteration"]
CALLS += ["_check_inf_per_device", "_found_inf_per_device", "update", "set", "load"]


@PAIRS
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.few(15)
def test_random_programs(pair: Pair, seed: int) -> None:
    runs = program(pair.ours, seed), program(pair.theirs, seed)
    for step, (ours, theirs) in enumerate(zip(*runs, strict=True)):
        assert ours == theirs, f"step {step}"


def test_random_programs_step_and_skip() -> None:
    runs = [program(torch_sharded, seed) for seed in range(25)]
    scales = {str(e[3]) for run in runs for e in run if isinstance(e, list)}
    assert len(scales) > 100
