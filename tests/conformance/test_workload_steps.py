"""Workloads with their own train_step are checked, with a scaler and without."""

import pytest

from gradparity.conformance import Case, Runner, Scenario
from gradparity.tests.verdicts import failed
from gradparity.tests.workloads.steps import (
    Averages,
    AveragesTwice,
    ClipsInTurns,
    DividesAgain,
    EvaluatesAgain,
    FlatShards,
    GivesWeightsInAnotherOrder,
    HidesItsParameters,
    LogsBetween,
    LogsBetweenRight,
    LosesAWeight,
    LosesShards,
    LosesShardsBesideOthers,
    NeverClips,
    OtherSlices,
    OwnersForgetOthers,
    Pipeline,
    ReducesToOwners,
    Renames,
    ReportsTheScaledLoss,
    ReturnsNoGradients,
    ReturnsNumpyNumbers,
    ReturnsText,
    ReturnsThree,
    RoundedCopies,
    RunsFromItsWeights,
    ScalesLate,
    ShardsUnreduced,
    StepsCopies,
    StepsNever,
    StepsTwice,
    SumsMicroBatches,
    TakesTurns,
    TakesWrongTurns,
    TrainRaises,
    Trains,
    TrainsAModule,
    TrainsOnTwoAxes,
    TrainsSharded,
    TwoOptimizers,
    UnknownAverages,
    UnknownGradients,
    UnknownWeights,
    WeightsAreAList,
    WeightsNotParameters,
    WrongSlices,
)

MODULE = "gradparity.tests.workloads.steps"
PLAIN = "gradparity.fixtures.faulty:PlainScaler"
NEVER = "gradparity.fixtures.faulty:NeverAgrees"


def case(
    runner: Runner,
    stack: type,
    scaler: str = "none",
    *,
    recipe: str = "plain",
    faults: str = "none",
    precision: str = "fp32",
) -> Case:
    place = "pp2/2" if issubclass(stack, Pipeline) else "dp2/2"
    steps = 2 if faults == "none" else 3  # one after a skip
    settings = f"recipe={recipe},steps={steps},model={MODULE}:{stack.__name__}"
    text = f"{place}/{precision}/own/{faults}/{settings}"
    return runner.run(scaler, Scenario.parse(text))


RIGHT = (Trains, TrainsSharded, TrainsAModule, TwoOptimizers, FlatShards, Pipeline)


def elements(found: Case) -> int:
    """Return the number of elements of parameters, summed over the ranks."""
    assert found.evidence is not None
    return sum(len(i) for t in found.evidence.ranks for i in t.index.values())


@pytest.mark.parametrize("recipe", ["plain", "accumulate", "accumulate-uneven"])
@pytest.mark.parametrize("stack", RIGHT)
@pytest.mark.few(6)
def test_right_steps_pass(runner: Runner, stack: type, recipe: str) -> None:
    if recipe == "accumulate-uneven" and stack is Pipeline:
        pytest.skip("its schedule has a fixed number of rows")
    found = case(runner, stack, recipe=recipe)
    assert found.status == "pass", (found.problem, failed(found))
    assert found.evidence is not None and found.evidence.parity is not None
    parity = found.evidence.parity
    # all elements of all parameters in 2 steps, on each rank that holds them
    held = elements(found)
    assert parity.compared == {"loss": 2, "gradient": 2 * held, "update": 2 * held}
    assert not parity.not_compared


@pytest.mark.parametrize("stack", [GivesWeightsInAnotherOrder, ReturnsNumpyNumbers])
def test_the_form_of_what_a_step_gives_does_not_matter(
    runner: Runner, stack: type
) -> None:
    found = case(runner, stack)
    assert found.status == "pass", (found.problem, failed(found))


@pytest.mark.parametrize("stack", [TakesTurns, ClipsInTurns, EvaluatesAgain])
def test_weights_that_move_before_a_later_pass_are_undecided(
    runner: Runner, stack: type
) -> None:
    found = case(runner, stack)
    assert found.status == "inconclusive", (found.problem, failed(found))
    told = {v.law: v.message for v in found.verdicts}["parity.gradient"]
    assert "train_step moves weights, runs a forward, and then steps" in told


def test_what_is_logged_between_two_steps_hides_no_fault(runner: Runner) -> None:
    assert case(runner, LogsBetweenRight).status == "pass"
    assert "parity.gradient" in failed(case(runner, LogsBetween))


def test_gradients_are_due_where_an_optimizer_inside_uses_them(runner: Runner) -> None:
    found = case(runner, ReducesToOwners)
    assert found.status == "pass", (found.problem, failed(found))
    assert found.evidence is not None and found.evidence.parity is not None
    # of two ranks one has each gradient, in 2 steps
    assert found.evidence.parity.compared["gradient"] == 2 * elements(found) // 2
    assert not found.evidence.parity.not_compared


def test_weights_are_read_by_name_and_layout_whoever_trains(runner: Runner) -> None:
    for stack, place in ((TrainsOnTwoAxes, "dp2-tp2/4"), (Renames, "dp2/2")):
        text = f"{place}/fp32/own/none/steps=2,model={MODULE}:{stack.__name__}"
        found = runner.run("none", Scenario.parse(text))
        assert found.status == "pass", (stack, found.problem, failed(found))
        assert found.evidence is not None and found.evidence.parity is not None
        assert found.evidence.parity.compared["update"] == 2 * elements(found)
        assert not found.evidence.parity.not_compared


def test_averages_are_known_by_names_of_wrapped_parameters(runner: Runner) -> None:
    found = case(runner, Averages)
    assert found.status == "pass", (found.problem, failed(found))
    told = {v.law: v for v in found.verdicts}["trainer.average"]
    # 4 parameters in 2 steps: between two ranks, and each rank with one alone
    assert (told.status, told.compared) == ("pass", 24)


def test_the_norm_that_a_stack_reports_is_kept(runner: Runner) -> None:
    for stack in (Trains, TrainsSharded, FlatShards):
        found = case(runner, stack)
        assert found.evidence is not None and found.evidence.parity is not None
        for trace in found.evidence.ranks:
            told = [seen.reported_norm for seen in trace.steps]
            assert told == pytest.approx(found.evidence.parity.reference_norm, rel=1e-5)
        assert max(found.evidence.parity.norm_bound) < 1e-4


@pytest.mark.parametrize("stack", [Trains, TrainsSharded, TwoOptimizers])
@pytest.mark.parametrize(
    ("faults", "precision"),
    [("none", "fp32"), ("inf@r1s1:0.bias", "fp32"), ("nan@r0s1:loss", "bf16-autocast")],
)
@pytest.mark.few(3)
def test_a_right_scaler_passes_in_a_step_of_its_users(
    runner: Runner, stack: type, faults: str, precision: str
) -> None:
    found = case(runner, stack, PLAIN, faults=faults, precision=precision)
    assert found.status == "pass", (found.problem, failed(found))
    assert found.evidence is not None
    injected = [bool(t.steps[1].faults) for t in found.evidence.ranks]
    assert any(injected) is (faults != "none")


@pytest.mark.parametrize(
    ("faults", "status"),
    [("nan@r0s1:loss", "pass"), ("nan@r0s*:loss", "skipped"), ("none", "pass")],
)
def test_a_loss_of_a_step_that_overflows_is_not_compared(
    runner: Runner, faults: str, status: str
) -> None:
    found = case(runner, ReportsTheScaledLoss, PLAIN, faults=faults)
    assert found.status == "pass", (found.problem, failed(found))
    (of_loss,) = [v for v in found.verdicts if v.law == "parity.loss"]
    assert of_loss.status == status, of_loss
    assert ("the step overflowed" in of_loss.message) == (faults != "none")


def test_a_loss_that_comes_from_tiny_scaled_losses_is_rounded(runner: Runner) -> None:
    settings = f"steps=2,scale=1e-40,model={MODULE}:{ReportsTheScaledLoss.__name__}"
    found = runner.run(PLAIN, Scenario.parse(f"dp2/2/fp32/own/none/{settings}"))
    of_loss = {v.law: v for v in found.verdicts}["parity.loss"]
    assert of_loss.status == "pass", of_loss


def test_two_optimizers_of_a_step_decide_each_for_itself(runner: Runner) -> None:
    found = case(runner, TwoOptimizers, PLAIN, faults="inf@r0s1:0.bias")
    assert found.evidence is not None
    moved = [d.parameters_changed for d in found.evidence.ranks[1].steps[1].decisions]
    assert moved == [True, False]


def test_a_wrong_scaler_is_caught_in_a_step_of_its_users(runner: Runner) -> None:
    found = case(runner, TrainsSharded, NEVER, faults="inf@r1s1:0.weight")
    assert "agreement.scale" in failed(found)


def test_a_step_that_clips_scaled_gradients_fails_with_any_scaler(
    runner: Runner,
) -> None:
    assert case(runner, ScalesLate).status == "pass"
    found = case(runner, ScalesLate, PLAIN)
    assert "differs from the fp64 truth" in failed(found)["parity.gradient"]


@pytest.mark.parametrize(
    ("stack", "recipe", "law"),
    [
        (NeverClips, "plain", "parity.gradient"),
        (ShardsUnreduced, "plain", "parity.gradient"),
        (OwnersForgetOthers, "plain", "parity.gradient"),
        (TakesWrongTurns, "plain", "parity.gradient"),
        (SumsMicroBatches, "accumulate", "parity.gradient"),
        (DividesAgain, "accumulate", "parity.gradient"),
    ],
)
def test_a_wrong_step_is_caught(
    runner: Runner, stack: type, recipe: str, law: str
) -> None:
    found = case(runner, stack, recipe=recipe)
    assert law in failed(found), found.problem
    if recipe == "accumulate":
        assert case(runner, stack).status == "pass"


@pytest.mark.parametrize("stack", [ReturnsNoGradients, StepsCopies])
def test_a_stack_without_gradients_does_not_pass(runner: Runner, stack: type) -> None:
    found = case(runner, stack)
    assert found.status == "inconclusive"
    told = {v.law: v for v in found.verdicts}["parity.gradient"]
    assert (told.compared, told.not_compared) == (0, 2 * elements(found))


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (StepsTwice, "train_step: stepped twice in one call: AdamW.step() was called"),
        (StepsNever, "train_step: stepped never: no optimizer of torch was called"),
        (UnknownWeights, "weights: gave 'inner.0.weight', which is not in the model"),
        (
            UnknownGradients,
            "gradients: gave 'inner.0.weight', which is not in the model",
        ),
        (
            UnknownAverages,
            "ema: gave 'inner.module.0.weight', which is not in the model",
        ),
        (AveragesTwice, "ema: gave 0.weight twice"),
        (LosesAWeight, "weights: no longer gives 2.bias: it must give the names that"),
        (WrongSlices, "weights: gave 0.bias with 4 elements, and its slices"),
        (OtherSlices, "parallelize: changed the values of 0.bias: 4 of 4 elements"),
        (
            RoundedCopies,
            "those of model() but those rounded to torch.bfloat16: have model() round",
        ),
        (LosesShards, "parallelize: no rank holds 32 of 32 elements of 2.weight"),
        (LosesShardsBesideOthers, "weights: returned nothing, and this rank has "),
        (
            WeightsNotParameters,
            "weights: returned 0.weight, which is not an nn.Parameter",
        ),
        (WeightsAreAList, "weights: returned list, expected a dict of name -> tensor"),
        (RunsFromItsWeights, "parallelize: changed the values of 2.bias"),
        (HidesItsParameters, "a stack of another type needs weights(stack)"),
        (ReturnsText, "train_step: returned '0.5' as the loss, expected a number"),
        (ReturnsThree, "train_step: returned 3 values, expected the loss, or"),
        (TrainRaises, "train_step: raised RuntimeError: no norm here (steps"),
    ],
)
@pytest.mark.few(6)
def test_a_step_that_breaks_the_protocol_is_an_error(
    runner: Runner, stack: type, words: str
) -> None:
    found = case(runner, stack)
    assert found.status == "error", failed(found)
    assert words in found.problem
    assert f"workload {MODULE}:{stack.__name__}: " in found.problem
    assert found.verdicts == ()
