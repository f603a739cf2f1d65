"""A right scaler trains every topology, recipe and model correctly."""

import pytest

from gradparity.conformance import Runner, Scenario, Status
from gradparity.conformance.space.recipes import RECIPES
from gradparity.fixtures import TOPOLOGIES

SCALER = "gradparity.fixtures.faulty:ClippingScaler"  # has what recipes need
LAID_OUT = [
    f"{t.name}/{t.default_world_size}/fp32/adamw/nan@r*s1:last[last]/model={t.models[0]},steps=3"
    for t in TOPOLOGIES.values()
]
WITH_RECIPE = [
    pytest.param(
        f"{'ddp' if recipe.compile else 'fsdp'}/2/fp32/sgd/none/"
        f"steps={4 if recipe.resume or recipe.new_scale else 2},recipe={name}",
        marks=[pytest.mark.slow] * recipe.compile,
    )
    for name, recipe in RECIPES.items()
    if not recipe.of_stacks
]
SPECIAL = [
    "fsdp/4/fp32/adamw/none/model=digits-uneven,steps=3,recipe=clip-norm",
    "fsdp1/4/fp16-params/adamw/none/model=digits-uneven,steps=3",
    "pp/2/fp32/adamw/none/steps=3,recipe=frozen",
    "tp+sp/2/fp32/adamw/none/model=text,steps=3,recipe=frozen",
    "ddp/2/fp32/sgd-fused/inf@r1s0:up.bias/steps=4,recipe=two-optimizers",
    "ddp/2/fp32/sgd-fused/inf@r1s0:up.bias/steps=4,recipe=clip-and-step",
    "pp/2/fp32/adamw/nan@r1s0:loss[last]/steps=3",
    "fsdp/2/fp32/adamw/-inf@r1s1:loss[last]/steps=3,recipe=accumulate",
    "ddp/2/fp32/adamw/none/steps=3,loss-factor=9.313225746154785e-10",
]
LONG = [
    "ddp/2/fp32/sgd/nan@r0s*:first/steps=30,scale=7.888609052210118e-31",
    "fsdp+tp/4/fp16-reduce/adagrad/none/model=text,steps=12,param-order=reversed,"
    "scale=67108864,interval=2",
]


@pytest.mark.parametrize(
    "scenario",
    [
        *(pytest.param(laid_out, marks=pytest.mark.slow) for laid_out in LAID_OUT),
        *WITH_RECIPE,
        *SPECIAL,
        *(pytest.param(long, marks=pytest.mark.slow) for long in LONG),
    ],
)
@pytest.mark.few(9)
def test_a_right_scaler_passes(runner: Runner, scenario: str) -> None:
    case = runner.run(SCALER, Scenario.parse(scenario))
    bad = {
        v.law: v.message
        for v in case.verdicts
        if v.status not in (Status.PASS, Status.SKIPPED)
    }
    assert bad == {}, case.problem
    assert case.status is Status.PASS


def test_a_loss_fault_strikes_the_ranks_that_see_the_same_rows(runner: Runner) -> None:
    case = runner.run(SCALER, Scenario.parse("tp/2/fp32/sgd/nan@r1s1:loss/steps=3"))
    assert case.evidence is not None
    injected = [bool(t.steps[1].faults) for t in case.evidence.ranks]
    assert injected == [True, True]


def test_optimizers_decide_each_for_itself(runner: Runner) -> None:
    plan = "inf@r1s1:up.bias;nan@r0s2:up.weight"
    scenario = f"fsdp/2/fp32/sgd/{plan}/steps=4,recipe=two-optimizers"
    case = runner.run(SCALER, Scenario.parse(scenario))
    assert case.evidence is not None and case.status is Status.PASS
    for trace in case.evidence.ranks:
        moved = [[d.parameters_changed for d in s.decisions] for s in trace.steps]
        assert moved == [[True, True], [True, False], [False, True], [True, True]]
