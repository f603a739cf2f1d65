"""Functions whose derivative jumps: passes if rounding decides the side of a jump."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradparity.conformance import Case, Runner, Scenario
from gradparity.conformance.comparison import bounds, reference_run
from gradparity.conformance.comparison.bounds import make_parity_bounds
from gradparity.conformance.comparison.noise.sides import JumpLog, Sides, sides_of
from gradparity.conformance.comparison.noise.ties import FLIPPED
from gradparity.conformance.comparison.reference import Schedule
from gradparity.conformance.comparison.variants import on_sides
from gradparity.tests.conformance.test_routing import failed
from gradparity.tests.workloads.stacks import AtZero

STACKS = "gradparity.tests.workloads.stacks"
SIDE = "tp2/2/fp32/own/none/model={},steps=1,seed=10"
"""Scenario in which the sum over two ranks has another sign than the truth and all five
noisy runs."""


def case(runner: Runner, text: str) -> Case:
    found = runner.run("none", Scenario.parse(text))
    assert not found.problem, found.problem
    return found


# - Stacks


@pytest.mark.parametrize(
    ("stack", "precision", "seed"),
    [
        ("AtZero", "fp32", 10),
        ("AtZero", "fp32", 72),
        ("AtZero", "bf16-autocast", 41),
        ("AtZeroOnOneRank", "fp32", 22),
        ("AtZeroOnOneRank", "fp32", 49),  # there the plain run has an exact zero
    ],
)
def test_an_input_at_zero_passes(
    runner: Runner, stack: str, precision: str, seed: int
) -> None:
    text = f"tp2/2/{precision}/own/none/model={STACKS}:{stack},steps=1,seed={seed}"
    found = case(runner, text)
    assert found.status == "pass", found.verdicts


@pytest.mark.parametrize("place", ["single/1/fp32", "dp2/2/fp32"])
def test_numbers_that_are_drawn_without_effect_do_not_move(
    runner: Runner, place: str
) -> None:
    """The model draws a number for each layer, and leaves none out."""
    stack = "gradparity.tests.workloads.random_stacks:DropsLayers"
    found = case(runner, f"{place}/own/none/model={stack},steps=2")
    assert found.status == "pass", found.verdicts


def test_without_the_moves_it_is_a_false_positive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "sides_of", lambda *_: ())
    with Runner(folder=".", timeout_s=60) as other:
        # here, where what is patched is patched
        monkeypatch.setattr(other.place, "alone", lambda call, *args, **_: call(*args))
        found = case(other, SIDE.format(f"{STACKS}:AtZero"))
    assert failed(found) == {"parity.gradient", "parity.update"}


class Larger(AtZero):
    """A gradient is slightly too large, whichever sign the input near zero has."""

    def parallelize(self, model: nn.Module, mesh: Any) -> nn.Module:
        found = super().parallelize(model, mesh)
        found[2].weight.register_hook(lambda g: 1.0001 * g)  # type: ignore[index]  # it is a Sequential
        return found


def test_what_no_side_changes_is_bounded_as_before(runner: Runner) -> None:
    found = case(runner, SIDE.format(f"{__name__}:Larger"))
    row = next(v for v in found.verdicts if v.law == "parity.gradient")
    assert (row.status, row.parameter) == ("fail", "2.weight")
    located = runner.localise(found)
    assert located is not None
    assert (located.where, located.parameters) == ("gradient", ("2.weight",))
    assert float(located.bound or 1.0) < 1e-5


def test_the_bound_is_four_times_what_the_side_changes() -> None:
    scenario = Scenario.parse(SIDE.format(f"{STACKS}:AtZero"))
    schedule = Schedule(skipped=(frozenset(),), scales=(1.0,))
    _, largest = make_parity_bounds(scenario, schedule).gradient[0]["0.bias"]
    torch.manual_seed(scenario.seed)
    first, _, second = AtZero().model().double().children()
    x, y = (t.double() for t in AtZero().batch(0, 0))
    biases: list[Tensor] = []
    for by in (-1e-5, 2e-5):
        with torch.no_grad():
            first.get_parameter("bias")[0] += by
        loss = F.mse_loss(second(first(x).relu()), y)
        biases += torch.autograd.grad(loss, [first.get_parameter("bias")])
    changes = float((biases[1] - biases[0]).abs().max())
    assert largest == pytest.approx(4 * changes, rel=1e-2)


# - Moves

Function = Callable[[Tensor], Tensor]
MOVED = 1e-3
ELEMENTWISE: dict[str, tuple[Function, float]] = {
    "relu": (nn.ReLU(), 0.0),
    "relu in place": (lambda x: F.relu(x * 1, inplace=True), 0.0),
    "relu_": (lambda x: (x * 1).relu_(), 0.0),
    "relu6": (nn.ReLU6(), 6.0),
    "leaky_relu": (nn.LeakyReLU(), 0.0),
    "prelu": (nn.PReLU(dtype=torch.float64), 0.0),
    "elu": (nn.ELU(alpha=0.5), 0.0),
    "selu": (nn.SELU(), 0.0),
    "hardtanh": (nn.Hardtanh(), 1.0),
    "hardsigmoid": (nn.Hardsigmoid(), -3.0),
    "hardswish": (nn.Hardswish(), -3.0),
    "hardswish above": (nn.Hardswish(), 3.0),
    "hardshrink": (nn.Hardshrink(), 0.5),
    "softshrink": (nn.Softshrink(), -0.5),
    "threshold": (nn.Threshold(0.5, 0.5), 0.5),
    "abs": (abs, 0.0),
    "clamp": (lambda x: x.clamp(min=0.25), 0.25),
    "clamp_": (lambda x: (x * 1).clamp_(max=0.25), 0.25),
    "torch.clamp": (lambda x: torch.clamp(x, 0.0, 2.0), 2.0),
    "maximum": (lambda x: torch.maximum(x, torch.full_like(x, 0.75)), 0.75),
    "max of two": (lambda x: torch.max(input=x, other=torch.ones_like(x)), 1.0),
    "comparison": (lambda x: x * (x > 0.5), 0.5),
    "where": (lambda x: torch.where(0.5 >= x, x, 2 * x), 0.5),
    "l1_loss": (lambda x: F.l1_loss(x, torch.ones_like(x)), 1.0),
}


def moves(side: int, *, zeros: bool = True) -> Sides:
    return Sides(distances=(((MOVED, zeros),),), side=side)


def derivative(function: Function, x: Tensor, log: JumpLog) -> Tensor:
    leaf = x.clone().requires_grad_()
    with log:
        function(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("beside", [-MOVED / 4, 0.0, MOVED / 4])
def test_an_input_beside_a_jump_is_on_both_sides(name: str, beside: float) -> None:
    function, at = ELEMENTWISE[name]
    x = torch.linspace(-8.0, 8.0, 97, dtype=torch.float64) + 0.04
    x[40] = at + beside
    below, above = (
        derivative(function, torch.where(x == x[40], at + by, x), JumpLog())[40]
        for by in (-MOVED, MOVED)
    )
    plain = derivative(function, x, JumpLog())
    found = [derivative(function, x, JumpLog(moves(side))) for side in (1, -1)]
    torch.testing.assert_close(
        torch.stack(sorted(g[40] for g in found)),
        torch.stack(sorted((below, above))),
        rtol=1e-2,
        atol=0.0,
    )
    others = torch.arange(len(x)) != 40
    for each in found:
        assert torch.equal(each[others], plain[others])


POOLED: dict[str, Function] = {
    "max_pool1d": nn.MaxPool1d(4),
    "max_pool2d": lambda x: nn.MaxPool2d(2)(x.view(1, 6, 6)),
    "with indices": lambda x: nn.MaxPool1d(4, return_indices=True)(x)[0],
    "adaptive": nn.AdaptiveMaxPool1d(9),
    "amax": lambda x: x.view(9, 4).amax(1),
    "max": lambda x: x.view(9, 4).max(1).values,
    "cummax": lambda x: x.cummax(1).values,
}


@pytest.mark.parametrize("name", POOLED)
def test_two_nearly_equal_maxima_change_places(name: str) -> None:
    function = POOLED[name]
    seen = set()
    for seed in range(8):  # both may be moved the same way
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(36, generator=generator, dtype=torch.float64)
        x[0], x[1] = 2.0, 2.0 + MOVED / 4
        for side in (1, -1):
            log = JumpLog(moves(side))
            log._generator.manual_seed(seed)
            found = derivative(function, x.view(1, 36), log).view(36)
            seen.add(bool(found[1]))
    assert seen == {True, False}


def test_no_more_than_a_few_are_moved_and_none_that_is_exactly_zero() -> None:
    x = torch.full((1000,), MOVED / 4, dtype=torch.float64)
    changed = sum(
        int((derivative(F.relu, x, JumpLog(moves(side))) == 0.0).sum())
        for side in (1, -1)
    )
    assert changed == 2 * FLIPPED
    for zeros, moved in ((False, 0), (True, FLIPPED)):
        found = derivative(F.relu, 0.0 * x, JumpLog(moves(1, zeros=zeros)))
        assert found.count_nonzero() == moved


def test_masks_and_what_is_far_from_a_jump_stay_bitwise() -> None:
    lowest = torch.finfo(torch.float32).min
    x = torch.tensor([lowest, -1.0, 1.0, 3.0])
    log = JumpLog(moves(1))
    with log:
        assert torch.equal(F.relu(x), torch.relu(x))
        assert torch.equal(x.clamp(min=lowest), x)
    assert [len(some) for some in log.inputs] == [4, 4, 4]


# - Distances


def test_inputs_move_by_what_a_run_is_off() -> None:
    true = np.array([1.0, -2.0, 3.0e38])
    with_zero = np.array([0.0, 1.0])
    off = np.array([0.25, -0.5, 1e38])
    first, second = sides_of([(true, with_zero)], [(true + off, with_zero)])
    assert first.distances == (((0.75, True), (0.0, False)),)
    assert (first.side, second.side) == (1, -1)
    assert not sides_of([(true,)], [(true,)])  # exact
    assert not sides_of([(), ()], [(), ()])
    # another shape: other calls from there on
    (one, _) = sides_of([(true, true)], [(true + 1.0, true[:1])])
    assert len(one.distances[0]) == 1


def test_a_function_that_writes_into_its_input_is_noted_before() -> None:
    x = torch.tensor([-1.0, 2.0], dtype=torch.float64)
    with JumpLog() as log:
        x.relu_()
    assert log.inputs[0].tolist() == [-1.0, 2.0]


def test_a_call_without_gradients_is_moved_too() -> None:
    x = torch.tensor([MOVED / 4, -2.0, 2.0])
    with torch.no_grad():
        found = []
        for side in (1, -1):
            with JumpLog(moves(side)):
                found.append(x.clamp(min=0.0)[0])
    assert sorted(float(value) for value in found) == [0.0, float(x[0])]


def test_functions_that_cannot_be_noted_run_as_they_are() -> None:
    x = torch.tensor([[MOVED / 4, 1.0], [-1.0, 2.0]], requires_grad=True)
    out = torch.zeros(2, 2)
    log = JumpLog(moves(1))
    with log:
        each = torch.func.vmap(torch.relu)(x)
        assert F.relu(torch.ones(2, device="meta")).is_meta
        with torch.no_grad():
            assert torch.maximum(x, -x, out=out) is out
        of_all = torch.func.grad(lambda t: t.relu().sum())(x.detach())
    assert torch.equal(each, x.relu())
    assert torch.equal(of_all, (x > 0).float())
    assert log.inputs == ()


def test_scores_that_were_moved_are_no_noise_of_scores() -> None:
    key = reference_run.Setup(
        model="gradparity.tests.workloads.routed_stacks:TopOne",
        optimizer="own",
        steps=1,
        seed=0,
    )
    run = reference_run.ReferenceRun(key, "fp32", on_sides(moves(1)))
    run.step(0, frozenset(), 1.0, reference_run.Idle())
    assert run.errors == [{}]
