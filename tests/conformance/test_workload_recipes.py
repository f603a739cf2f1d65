"""Recipes of workloads with their own train_step: support, and detected faults."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from gradparity.conformance import Case, Runner, Scenario, Status
from gradparity.conformance.rank.worker import observe_rank
from gradparity.conformance.space.catalogue import Selection, not_tried, select
from gradparity.conformance.space.constraints import why_not
from gradparity.conformance.space.recipes import RECIPES
from gradparity.conformance.status import UsageError
from gradparity.fixtures import CannotError, resolve_workload
from gradparity.fixtures.faulty import own_steps, steps
from gradparity.fixtures.faulty.plain import Broken
from gradparity.fixtures.faulty.stacks import Held, Named
from gradparity.fixtures.faulty.steps import FAULTY_STEPS, RIGHT_STEPS
from gradparity.multiprocess import WorldError
from gradparity.tests.workloads.steps import (
    Engine,
    MicroBatches,
    Trains,
    TrainsSharded,
)

PLAIN = "gradparity.fixtures.faulty:PlainScaler"
TRAINS = "gradparity.fixtures.faulty.steps:Trains"
TRAINERS = "gradparity.fixtures.faulty.trainers"


def at(model: str, recipe: str, rest: str = "none") -> Scenario:
    steps = 2 if rest == "none" else 4  # one before and one after a skip and a load
    return Scenario.parse(
        f"dp2/2/fp32/own/{rest}/model={model},steps={steps},recipe={recipe}"
    )


def here(stack: type, recipe: str) -> Scenario:
    return at(f"{__name__}:{stack.__name__}", recipe)


def failed_checks(case: Case) -> dict[str, str]:
    assert not case.problem
    return {v.law: v.message for v in case.verdicts if v.status == "fail"}


# - What can be done and what cannot


def test_a_train_step_is_skipped_only_for_what_it_decides_itself() -> None:
    told = "\n".join(not_tried(Selection(workload=TRAINS)))
    for line in (
        "unscale: train_step decides whether it calls unscale_",
        "clip-value: train_step clips only by the norm (clip_norm)",
        "accumulate-no-sync: train_step decides in which backward it reduces",
        "two-optimizers, two-optimizers-unscale: train_step steps the optimizers that",
        "scheduler: train_step sets the schedule",
        f"random, random-recompute, random-resume: {TRAINS} has no random",
    ):
        assert line in told
    tried = {s.recipe for s in select("default", Selection(workload=TRAINS))}
    assert {"clip-norm", "frozen", "resume", "recompute", "accumulate"} <= tried


@pytest.mark.parametrize(
    ("model", "recipe", "reason"),
    [
        (f"{TRAINERS}:WaitsForTheStep", "clip-norm", "the workload has no clip_norm,"),
        (
            "gradparity.fixtures.faulty.stacks:FlatEngine",
            "resume",
            "the workload has no save_checkpoint and load_checkpoint",
        ),
        (
            "gradparity.tests.workloads.random_stacks:Recomputes",
            "recompute",
            "its model recomputes by itself, in every recipe",
        ),
        (f"{__name__}:Counts", "recompute", "it depends on more than its inputs"),
        (f"{__name__}:Flat", "recompute", "calls no module of its own"),
    ],
)
def test_unsupported_scenarios_of_a_workload_are_reported_before_the_start(
    model: str, recipe: str, reason: str
) -> None:
    choices = {"topology": "dp2", "recipe": recipe, "model": model}
    assert reason in why_not(resolve_workload(model), choices)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(8, 16), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.inner(x) * self.inner.weight.norm() ** self.calls
        return found


class Counts(steps.Trains):
    """Its forward depends on the number of earlier calls."""

    def model(self) -> nn.Module:
        return nn.Sequential(Counting())


class Alone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(nn.init.ones_(Tensor(16, 8)))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Flat(steps.Trains):
    """Its model is one module without children."""

    def model(self) -> nn.Module:
        return Alone()


class OwnClipNorm(steps.Trains):
    """Clips by another number than the workload declares."""

    def clip(self, stack: Held) -> Tensor:
        return nn.utils.clip_grad_norm_(stack.module.parameters(), 1000.0)


class NoNewStack(steps.Trains):
    """Raises if laid out a second time in a process."""

    made = 0

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Held:
        self.made += 1
        if self.made % 2 == 0:
            raise RuntimeError("already initialised")
        return super().parallelize(model, mesh)


class NeedsEveryGradient(steps.Trains):
    """Fails for a parameter without a gradient."""

    def clip(self, stack: Held) -> Tensor:
        for parameter in stack.module.parameters():
            parameter.grad.abs()  # type: ignore[union-attr]
        return super().clip(stack)


class MakesModulesAnew(steps.Trains):
    """Trains a model that it creates itself, with the given model's weights."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Held:
        fresh = self.model()
        fresh.load_state_dict(model.state_dict())
        return super().parallelize(fresh, mesh)


class Hidden:
    """Object whose modules a function keeps, where gradparity cannot find them."""

    def __init__(self, made: Held) -> None:
        self.kept: Callable[[], Any] = lambda: made

    @property
    def module(self) -> Any:
        return self.kept().module

    @property
    def optimizer(self) -> Any:
        return self.kept().optimizer


class SavesWithAScaler(steps.Trains):
    """Needs the scaler to save; other ranks than rank 0 save 0.3 s later."""

    def save_checkpoint(self, stack: Held, scaler: Any, folder: str) -> None:
        if dist.get_rank():
            time.sleep(0.3)
        super().save_checkpoint(stack, scaler, folder)
        scaler.state_dict()


class HidesItsModules(MakesModulesAnew):
    """Trains a model that it creates itself, and shows no module."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Hidden:  # type: ignore[override]
        return Hidden(super().parallelize(model, mesh))


@pytest.mark.parametrize(
    ("scenario", "reason"),
    [
        (here(MakesModulesAnew, "frozen"), "train again once parallelize is done"),
        *(
            pytest.param(scenario, reason, marks=pytest.mark.slow)
            for scenario, reason in (
                (here(NoNewStack, "resume"), "RuntimeError: already initialised"),
                (here(NeedsEveryGradient, "frozen"), "raised AttributeError"),
                (here(HidesItsModules, "recompute"), "no part of the model ran again"),
                (here(SavesWithAScaler, "resume"), "without a scaler: "),
            )
        ),
    ],
)
def test_scenarios_that_a_workload_cannot_run_are_skipped_with_the_reason(
    runner: Runner, scenario: Scenario, reason: str
) -> None:
    case = runner.run("none", scenario)
    assert case.status is Status.SKIPPED, (case.problem, case.verdicts[:2])
    assert reason in case.verdicts[0].message


def test_a_clip_norm_that_nothing_reads_is_inconclusive(runner: Runner) -> None:
    """Each rank may clip by its own norm, to a limit that no gradient reaches."""
    case = runner.run("none", here(OwnClipNorm, "clip-norm"))
    assert case.status is Status.INCONCLUSIVE
    assert "neither parallelize nor train_step reads clip_norm" in (
        case.verdicts[0].message
    )
    assert "clip to self.clip_norm" in case.verdicts[0].message


def test_a_rank_that_fails_leaves_the_folder_to_those_that_still_write(
    runner: Runner,
) -> None:
    scenario = here(SavesWithAScaler, "resume")
    with pytest.raises(WorldError) as failure:
        runner.place.ranks(2).run(
            observe_rank, scenario, "none", ".", files=runner.place.files
        )
    said = [str(outcome.exception) for outcome in failure.value.outcomes]
    assert len(said) == 2 and all("without a scaler: " in text for text in said), said


class LeavesTheAverageIn(steps.Trains):
    """After a save the weights stay changed, as if an average had been left in them."""

    def save_checkpoint(self, stack: Held, scaler: Any, folder: str) -> None:
        super().save_checkpoint(stack, scaler, folder)
        with torch.no_grad():
            for parameter in stack.module.parameters():
                parameter.mul_(0.5)


def test_a_save_that_changes_the_weights_is_an_error(runner: Runner) -> None:
    case = runner.run("none", here(LeavesTheAverageIn, "resume"))
    assert case.status is Status.ERROR
    assert "save_checkpoint: changed the weights that it saves" in case.problem


class LacksAKey(steps.Trains):
    """Loads a key that was never saved."""

    def load_checkpoint(self, stack: Held, scaler: Any, folder: str) -> None:
        load({"nosuch": torch.zeros(2)}, checkpoint_id=folder)

    def save_checkpoint(self, stack: Held, scaler: Any, folder: str) -> None:
        save({"weights": torch.zeros(2)}, checkpoint_id=folder)


def test_a_load_that_raises_is_an_error_of_the_stack(runner: Runner) -> None:
    """A load that raises is skipped only if it raises because there is no scaler."""
    case = runner.run("none", here(LacksAKey, "resume"))
    assert case.status is Status.ERROR, case.verdicts[:1]
    assert "load_checkpoint: raised CheckpointException" in case.problem
    assert "Missing key in checkpoint state_dict: nosuch" in case.problem


class LoadsNothing(steps.Trains):
    """The load restores no tensor."""

    def load_checkpoint(self, stack: Held, scaler: Any, folder: str) -> None:
        pass


class LoadsWhatComputes(own_steps.StepsFp32Copies):
    """The load restores the module's weights, but not their fp32 copies."""

    def load_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        weights, _ = torch.load(f"{folder}/states.pt", weights_only=True)
        for parameter, weight in zip(stack.module.parameters(), weights, strict=True):
            parameter.data.copy_(weight)


class LoadsHalf(steps.Trains):
    """The load restores only the first parameter."""

    def load_checkpoint(self, stack: Held, scaler: Any, folder: str) -> None:
        was = [p.detach().clone() for p in stack.module.parameters()]
        super().load_checkpoint(stack, scaler, folder)
        _, *others = stack.module.parameters()
        for parameter, old in zip(others, was[1:], strict=True):
            parameter.data.copy_(old)


@pytest.mark.parametrize(
    "scenario",
    [
        here(LoadsNothing, "resume"),
        replace(here(LoadsWhatComputes, "resume"), precision="bf16-params"),
    ],
    ids=["nothing", "copies"],
)
def test_a_load_that_restores_no_weight_is_no_pass(
    runner: Runner, scenario: Scenario
) -> None:
    case = runner.run("none", scenario)
    assert case.status is Status.INCONCLUSIVE, (case.problem, case.verdicts[:1])
    assert "restored none of the weights" in case.verdicts[0].message
    assert 'checkpoint = "scaler"' in case.verdicts[0].message


def test_a_load_that_restores_a_part_is_a_failure(runner: Runner) -> None:
    assert "trainer.weights" in failed_checks(
        runner.run("none", here(LoadsHalf, "resume"))
    )


def test_a_checkpoint_of_the_scaler_alone_is_no_resume() -> None:
    with pytest.raises(UsageError, match="they contain only the scaler"):
        at(f"{TRAINERS}:WaitsForTheStep", "resume")


class OfTheOptimizer(steps.Trains):
    """Declares an unknown value of ``checkpoint``."""

    checkpoint = "optimizer"


def test_a_checkpoint_of_another_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="got 'optimizer', expected 'scaler'"):
        here(OfTheOptimizer, "plain")


class LearnsToLearn(Trains):
    """No fault: the loss is computed after one inner step (MAML)."""

    reference = "one rank"
    clip_norm = None  # type: ignore[assignment]  # it does not clip

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = Engine(model, self.optimizer([*model.named_parameters()]))
        engine.kept["mesh"] = mesh["dp"]
        return engine

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        stack.optimizer.zero_grad()
        weights: dict[str, Tensor] = {**dict(stack.module.named_parameters())}
        total = torch.zeros(())
        for x, y in micro_batches:
            within = self.loss(functional_call(stack.module, weights, (x,)), y)
            steps = torch.autograd.grad(within, [*weights.values()], create_graph=True)
            near = {
                name: weight - 0.1 * step
                for (name, weight), step in zip(weights.items(), steps, strict=True)
            }
            loss = self.loss(functional_call(stack.module, near, (x,)), y)
            (loss / len(micro_batches)).backward()
            total = total + loss.detach() / len(micro_batches)
        group = stack.kept["mesh"].get_group()
        for weight in weights.values():
            assert weight.grad is not None
            dist.all_reduce(weight.grad, group=group)
            weight.grad /= group.size()
        stack.optimizer.step()
        return total

    def batch(self, step: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return a batch of two equal halves: inner steps are equal on both ranks."""
        x, y = super().batch(step, seed)
        return torch.cat([x[:8], x[:8]]), torch.cat([y[:8], y[:8]])


def test_weights_that_are_swapped_in_a_forward_are_not_tried(runner: Runner) -> None:
    assert failed_checks(runner.run("none", here(LearnsToLearn, "plain"))) == {}
    case = runner.run("none", here(LearnsToLearn, "recompute"))
    assert case.skipped, (case.problem, case.verdicts)
    assert "a part has other parameters when it runs again" in case.verdicts[0].message


def test_modules_that_a_layout_makes_anew_recompute_as_well(runner: Runner) -> None:
    case = runner.run("none", here(MakesModulesAnew, "recompute"))
    assert case.status is Status.PASS, (case.problem, failed_checks(case))


# - Right stacks, and faults that plain steps do not show


OFTEN = ("frozen", "resume", "recompute")
"""Recipes in which the tests run every right workload by default."""


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(at, marks=[pytest.mark.slow] * (not at.endswith(OFTEN)))
        for places in RIGHT_STEPS.values()
        for at in places
    ],
)
def test_a_right_step_passes_in_each_recipe(runner: Runner, place: str) -> None:
    case = runner.run("none", Scenario.parse(place))
    assert case.status is Status.PASS, (case.problem, failed_checks(case))


@pytest.mark.parametrize(
    "place",
    [
        "tp/2/bf16-autocast/sgd/none/model=digits",
        *(
            pytest.param(place, marks=pytest.mark.slow)
            for place in (
                "fsdp+tp/4/bf16-autocast/sgd/inf@r1s0:first/model=text",
                "fsdp1/2/fp16-params/adam/none/model=text-tied",
                "ep/2/fp32/sgd/none/model=digits-experts",
                "pp/2/fp32/sgd/none/model=digits",
            )
        ),
    ],
)
def test_models_of_ours_recompute_on_any_layout(runner: Runner, place: str) -> None:
    case = runner.run(PLAIN, Scenario.parse(f"{place},steps=2,recipe=recompute"))
    assert case.status is Status.PASS, (case.problem, failed_checks(case))


@pytest.mark.parametrize(
    ("recipe", "rest"),
    [
        ("resume", "inf@r1s2:first"),
        *(
            pytest.param(recipe, rest, marks=pytest.mark.slow)
            for recipe, rest in (
                ("resume", "none"),
                ("clip-norm", "inf@r1s2:first"),
                ("frozen", "none"),
                ("recompute", "none"),
            )
        ),
    ],
)
def test_a_right_scaler_passes_in_each_recipe(
    runner: Runner, recipe: str, rest: str
) -> None:
    case = runner.run(PLAIN, at(TRAINS, recipe, rest))
    assert case.status is Status.PASS, (case.problem, failed_checks(case))


@pytest.mark.parametrize(
    ("stack", "broken"), FAULTY_STEPS.items(), ids=lambda x: getattr(x, "__name__", "")
)
@pytest.mark.few(3)
def test_a_faulty_step_is_caught_in_its_recipe(
    runner: Runner, stack: type[Any], broken: Broken
) -> None:
    assert broken.law in failed_checks(runner.run("none", Scenario.parse(broken.at)))
    scenario = Scenario.parse(broken.at)
    recipe = "random" if scenario.recipe == "random-recompute" else "plain"
    assert not failed_checks(runner.run("none", replace(scenario, recipe=recipe)))


@pytest.mark.slow
def test_a_pass_that_runs_again_in_another_dtype_ends_the_run(runner: Runner) -> None:
    model = "gradparity.fixtures.faulty.steps:RecomputesInAnotherDtype"
    plain = f"dp2/2/bf16-autocast/own/none/model={model},steps=2"
    assert runner.run("none", Scenario.parse(plain)).status is Status.PASS
    case = runner.run("none", Scenario.parse(f"{plain},recipe=recompute"))
    assert case.status is Status.ERROR
    assert "train_step: raised CheckpointError" in case.problem
    assert "different metadata than during the forward pass" in case.problem


@pytest.mark.slow
def test_clip_norm_is_given_back(runner: Runner) -> None:
    """The recipe restores the clip norm: the same ranks run the next scenario."""
    tight = here(ClipsHard, "clip-norm")
    assert runner.run("none", tight).status is Status.PASS
    assert runner.run("none", replace(tight, recipe="plain")).status is Status.PASS


class ClipsHard(steps.Trains):
    """Declares a clip norm below that of the recipe."""

    clip_norm = 0.01

    def optimizer(self, parameters: Named) -> Any:
        return super().optimizer(parameters)


# - Many passes, and many steps


class ForgetsTheFourthPass(Trains):
    """Gradients of passes after the third are lost."""

    def backward(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> float:
        total = super().backward(stack, micro_batches, scaler)
        if len(micro_batches) > 3:
            stack.optimizer.zero_grad()
            super().backward(stack, micro_batches[:3], scaler)
        return total


class TrainsForFiveSteps(Trains):
    """Gradients are zeroed from the sixth step on."""

    def clip(self, stack: Engine) -> Tensor:
        stack.kept["steps"] = stack.kept.get("steps", 0) + 1
        if stack.kept["steps"] > 5:
            stack.optimizer.zero_grad(set_to_none=False)
        return super().clip(stack)


@pytest.mark.parametrize("stack", [Trains, ForgetsTheFourthPass, TrainsForFiveSteps])
@pytest.mark.slow
def test_six_passes_and_twenty_steps_are_tried_once(
    runner: Runner, stack: type
) -> None:
    # regression: P9
    spec = f"{stack.__module__}:{stack.__name__}"
    chosen = select("default", Selection(workload=spec, no_scaler=True))
    due = [s for s in chosen if s.recipe == "accumulate-six" or s.steps == 20]
    assert len(due) == 2
    told = {s.recipe: runner.run("none", s).status for s in due}
    wrong = {"ForgetsTheFourthPass": "accumulate-six", "TrainsForFiveSteps": "plain"}
    assert [r for r, s in told.items() if s != "pass"] == [
        r for name, r in wrong.items() if name == stack.__name__
    ]


@pytest.mark.parametrize("rows", [5, 6, 8, 12])
def test_six_parts_differ_by_a_row_at_most(rows: int) -> None:
    recipe = RECIPES["accumulate-six"]
    if rows < 6:
        with pytest.raises(CannotError, match="in 6 equal parts"):
            recipe.sizes(rows)
        return
    sizes = recipe.sizes(rows)
    assert (len(sizes), sum(sizes)) == (6, rows)
    assert max(sizes) - min(sizes) <= 1


# - Clipping after several passes


class ClipsEachPass(Trains):
    """Clips after each pass; its gradients are below the limit of its own."""

    clip_norm = 64.0

    def backward(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> float:
        total, rows = 0.0, sum(len(x) for x, _ in micro_batches)
        for x, y in micro_batches:
            loss = self.loss(stack.module(x), y) * (len(x) / rows)
            loss.backward()
            nn.utils.clip_grad_norm_(stack.module.parameters(), self.clip_norm)
            total += loss.item()
        return total

    def clip(self, stack: Engine) -> None:  # type: ignore[override]  # it has clipped
        return None


def test_a_clip_after_each_pass_fails_where_the_recipe_clips(runner: Runner) -> None:
    for recipe in ("plain", "accumulate"):  # the limit has no effect
        assert not failed_checks(runner.run("none", here(ClipsEachPass, recipe)))
    told = failed_checks(runner.run("none", here(ClipsEachPass, "clip-norm")))
    assert "parity.gradient" in told


@pytest.mark.parametrize(("rows", "sizes"), [(8, [4, 4]), (7, [7])])
def test_a_step_that_clips_gets_two_micro_batches(rows: int, sizes: list[int]) -> None:
    for recipe in ("clip-norm", "recompute"):
        assert here(ClipsEachPass, recipe).sizes(rows) == sizes
    assert here(ClipsEachPass, "plain").sizes(rows) == [rows]


# - Averages under recipes


class Averages(Trains):
    """No fault: a running average moves once a step and is in the checkpoint."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        engine.kept = {n: p.detach().clone() for n, p in model.named_parameters()}
        return engine

    def move(self, stack: Engine) -> None:
        for name, p in stack.module.named_parameters():
            stack.kept[name.removeprefix("module.")].lerp_(p.detach(), 0.1)

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        returned = super().train_step(stack, micro_batches, scaler)
        self.move(stack)
        return returned

    def ema(self, stack: Engine) -> dict[str, Tensor]:
        return dict(stack.kept)

    def save_checkpoint(self, stack: Engine, scaler: Any, folder: str) -> None:
        held = stack.module, stack.optimizer
        states = [each.state_dict() for each in held]
        if torch.distributed.get_rank() == 0:
            torch.save([*states, stack.kept], f"{folder}/all.pt")
        torch.distributed.barrier()

    def load_checkpoint(self, stack: Engine, scaler: Any, folder: str) -> None:
        module, optimizer, average = torch.load(f"{folder}/all.pt", weights_only=True)
        stack.module.load_state_dict(module)
        stack.optimizer.load_state_dict(optimizer)
        stack.kept = average


class AveragesEachPass(Averages):
    """The average moves once for each micro-batch."""

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        for _ in micro_batches[1:]:
            self.move(stack)
        return super().train_step(stack, micro_batches, scaler)


class AveragesNoMoreOnceLoaded(Averages):
    """The average no longer moves after a load."""

    def load_checkpoint(self, stack: Engine, scaler: Any, folder: str) -> None:
        super().load_checkpoint(stack, scaler, folder)
        stack.loaded = True  # type: ignore[attr-defined]  # of this fault

    def move(self, stack: Engine) -> None:
        if not hasattr(stack, "loaded"):
            super().move(stack)


class EachPassOnOneRank(AveragesEachPass):
    """The average moves at each micro-batch, also in the reference on one rank."""

    reference = "one rank"


class AveragesOnOneRank(Averages):
    """No fault: the reference is one rank, which keeps an average as well."""

    reference = "one rank"


class AveragesWhole(TrainsSharded):
    """No fault: weights are shards, and rank 0 keeps an average of the whole."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        engine.kept = {n: p.clone() for n, p in self.whole(engine).items()}
        return engine

    def whole(self, stack: Engine) -> dict[str, Tensor]:
        state = stack.module.state_dict()
        return {n: shard.full_tensor() for n, shard in state.items()}

    def move(self, stack: Engine) -> None:
        for name, weight in self.whole(stack).items():
            stack.kept[name].lerp_(weight, 0.1)

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        returned = super().train_step(stack, micro_batches, scaler)
        self.move(stack)
        return returned

    def ema(self, stack: Engine) -> dict[str, Tensor]:
        return {} if torch.distributed.get_rank() else dict(stack.kept)


class AveragesWholeEachPass(AveragesWhole):
    """The average of the whole moves once for each micro-batch."""

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        for _ in micro_batches[1:]:
            self.move(stack)
        return super().train_step(stack, micro_batches, scaler)


class AveragesWholeTwice(AveragesWhole):
    """The average has another decay on several ranks than on one."""

    def move(self, stack: Engine) -> None:
        super().move(stack)
        if torch.distributed.get_world_size() > 1:
            super().move(stack)


class TwiceOnOneRank(AveragesWholeTwice):
    """The same, and all training is compared with one rank."""

    reference = "one rank"


class AveragesOfSums(Averages):
    """The average takes the sum of the ranks' weights instead of their mean."""

    def move(self, stack: Engine) -> None:
        for name, p in stack.module.named_parameters():
            total = p.detach().clone()
            torch.distributed.all_reduce(total)
            stack.kept[name.removeprefix("module.")].lerp_(total, 0.1)


class AveragesAPart(Averages):
    """On several ranks one parameter has no average."""

    def ema(self, stack: Engine) -> dict[str, Tensor]:
        averages = super().ema(stack)
        if torch.distributed.get_world_size() > 1:
            averages.pop(next(iter(averages)))
        return averages


class AveragesNothing(Averages):
    """On several ranks there is no average."""

    def ema(self, stack: Engine) -> dict[str, Tensor]:
        several = torch.distributed.get_world_size() > 1
        return {} if several else super().ema(stack)


class AveragesItsShards(TrainsSharded):
    """Rank 0 alone keeps an average, and has a part of each weight."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        parts = engine.module.state_dict().items()
        engine.kept = {n: part.to_local().clone() for n, part in parts}
        return engine

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        returned = super().train_step(stack, micro_batches, scaler)
        for name, weight in stack.module.state_dict().items():
            stack.kept[name].lerp_(weight.to_local(), 0.1)
        return returned

    def ema(self, stack: Engine) -> dict[str, Tensor]:
        return {} if torch.distributed.get_rank() else dict(stack.kept)


class AveragesRoundWeights(Averages):
    """Weights begin as numbers of bf16, and the average never moves on the mesh."""

    def model(self) -> nn.Module:
        return super().model().bfloat16().float()

    def move(self, stack: Engine) -> None:
        if torch.distributed.get_world_size() == 1:
            super().move(stack)


class ReportsNoNorm(Averages):
    """On several ranks it reports no norm."""

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        loss, norm = super().train_step(stack, micro_batches, scaler)
        return (loss, norm) if torch.distributed.get_world_size() == 1 else loss


class FailsOnOneRank(Averages):
    """No fault on two ranks, and one rank raises an error."""

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        if torch.distributed.get_world_size() == 1:
            raise ValueError("a stage needs a neighbour")
        return super().train_step(stack, micro_batches, scaler)


class AveragesFlat(AveragesWhole):
    """No fault, but the elements of the average are unknown."""

    def ema(self, stack: Engine) -> dict[str, Tensor]:
        return {n: average.flatten()[:3] for n, average in stack.kept.items()}


@pytest.mark.parametrize(
    ("stack", "recipe", "caught"),
    [
        (AveragesWhole, "accumulate", False),
        (AveragesWholeEachPass, "accumulate", True),
        (Averages, "accumulate", False),
        (Averages, "accumulate-uneven", False),
        (Averages, "resume", False),
        (AveragesOnOneRank, "accumulate", False),
        (AveragesEachPass, "accumulate", True),
        (AveragesWholeTwice, "plain", True),
        (TwiceOnOneRank, "plain", True),
        (AveragesOfSums, "plain", True),
        (AveragesRoundWeights, "plain", True),
        (Averages, "frozen", False),
        (Averages, "clip-norm", False),
        (EachPassOnOneRank, "accumulate", True),
        (AveragesNoMoreOnceLoaded, "resume", True),
    ],
)
@pytest.mark.few(3)
def test_an_average_is_that_of_one_rank(
    runner: Runner, stack: type, recipe: str, caught: bool
) -> None:
    # regression: P6
    found = runner.run("none", replace(here(stack, recipe), steps=5))
    told = failed_checks(found)
    assert found.status == ("fail" if caught else "pass"), told
    assert [*told] == ["trainer.average"] * caught
    if caught:
        assert "of the same training on one rank" in told["trainer.average"]


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (AveragesAPart, "0 of "),
        (AveragesItsShards, "32 of 64 "),
        (AveragesNothing, "0 of "),
    ],
)
def test_ranks_together_have_the_whole_average(
    runner: Runner, stack: type, words: str
) -> None:
    told = failed_checks(runner.run("none", here(stack, "plain")))
    assert [*told] == ["trainer.average"]
    assert f"all ranks together have {words}" in told["trainer.average"]


def test_an_average_of_half_precision_is_that_of_one_rank(runner: Runner) -> None:
    for stack, caught in ((Averages, False), (AveragesWholeTwice, True)):
        scenario = replace(here(stack, "plain"), precision="bf16-autocast")
        told = failed_checks(runner.run("none", scenario))
        assert [*told] == ["trainer.average"] * caught, told


def test_a_norm_that_one_rank_alone_reports_is_inconclusive(runner: Runner) -> None:
    found = runner.run("none", here(ReportsNoNorm, "plain"))
    (verdict,) = [v for v in found.verdicts if v.status == "inconclusive"]
    assert verdict.law == "norm.reported"
    assert verdict.message == "one rank reports a norm, and no rank of this mesh does"


class HangsOnOneRank(Averages):
    """No fault on two ranks, and one rank waits for a message."""

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        if torch.distributed.get_world_size() == 1:
            time.sleep(60)
        return super().train_step(stack, micro_batches, scaler)


def test_an_average_that_hangs_on_one_rank_is_inconclusive() -> None:
    with Runner(folder=".", timeout_s=6) as runner:
        begin = time.monotonic()
        for recipe in ("plain", "accumulate"):  # the second one does not wait again
            found = runner.run("none", here(HangsOnOneRank, recipe))
            assert found.status == "inconclusive", (found.problem, failed_checks(found))
        assert time.monotonic() - begin < 60
    (verdict,) = [v for v in found.verdicts if v.status == "inconclusive"]
    assert verdict.law == "trainer.average"
    assert "on one process, without other ranks" in verdict.message


def test_an_average_that_one_rank_cannot_compute_is_inconclusive(
    runner: Runner,
) -> None:
    found = runner.run("none", here(FailsOnOneRank, "plain"))
    assert found.status == "inconclusive", failed_checks(found)
    (verdict,) = [v for v in found.verdicts if v.status == "inconclusive"]
    assert verdict.law == "trainer.average"
    assert "compared with one rank" in verdict.message
    assert "a stage needs a neighbour" in verdict.message


def test_an_average_of_unknown_elements_is_inconclusive(runner: Runner) -> None:
    found = runner.run("none", here(AveragesFlat, "accumulate"))
    assert found.status == "inconclusive", failed_checks(found)
    (verdict,) = [v for v in found.verdicts if v.status == "inconclusive"]
    assert verdict.law == "trainer.average"
    assert "neither the elements of this rank's part" in verdict.message


class Statistics(nn.Module):
    """A layer with running statistics, which no gradient depends on."""

    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.last = x.detach().mean(0)
        self.mean = self.mean.lerp(self.last, 0.1)
        self.calls = self.calls + 1
        return x


class SavesStatistics(Trains):
    """No fault: rank 0 saves the buffers for all, and each rank has its own rows'."""

    local_buffers = ("mean",)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), Statistics(), nn.Linear(8, 4))

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        made = nn.parallel.DistributedDataParallel(
            model, process_group=mesh.get_group("dp"), broadcast_buffers=False
        )
        return Engine(made, self.optimizer([*made.named_parameters()]))

    def saved(self, module: nn.Module) -> dict[str, Tensor]:
        return module.state_dict()

    def save_checkpoint(self, stack: Engine, scaler: Any, folder: str) -> None:
        if torch.distributed.get_rank() == 0:
            states = self.saved(stack.module), stack.optimizer.state_dict()
            torch.save(states, f"{folder}/all.pt")
        torch.distributed.barrier()

    def load_checkpoint(self, stack: Engine, scaler: Any, folder: str) -> None:
        module, optimizer = torch.load(f"{folder}/all.pt", weights_only=True)
        stack.module.load_state_dict(module, strict=False)
        stack.optimizer.load_state_dict(optimizer)


class LosesStatistics(SavesStatistics):
    """The checkpoint holds parameters alone."""

    def saved(self, module: nn.Module) -> dict[str, Tensor]:
        return {n: p.detach() for n, p in module.named_parameters()}


class LosesCounts(SavesStatistics):
    """The checkpoint lacks the buffers of integers."""

    def saved(self, module: nn.Module) -> dict[str, Tensor]:
        state = module.state_dict()
        return {n: t for n, t in state.items() if t.is_floating_point()}


class CountsAgain(SavesStatistics):
    """A load gives a buffer a value that no rank had saved."""

    def load_checkpoint(self, stack: Engine, scaler: Any, folder: str) -> None:
        super().load_checkpoint(stack, scaler, folder)
        stack.module.get_buffer("module.1.calls").add_(7)


@pytest.mark.parametrize(
    ("stack", "lost"),
    [
        (SavesStatistics, ""),
        (LosesStatistics, "1.mean"),
        (LosesCounts, "1.calls"),
        (CountsAgain, "1.calls"),
    ],
)
def test_a_checkpoint_holds_the_buffers_that_training_moves(
    runner: Runner, stack: type, lost: str
) -> None:
    told = failed_checks(runner.run("none", here(stack, "resume")))
    assert [*told] == ["trainer.weights"] * bool(lost), told
    if lost:
        words = f"the buffer {lost} on rank 0 is not the one that was saved, once the"
        assert words in told["trainer.weights"]


class OnTwoMeshes(Averages):
    """No fault; trains on two meshes."""

    meshes = ({"dp": 2}, {"dp": 4})


@pytest.mark.parametrize("recipe", ["frozen", "resume"])
def test_quick_runs_on_each_mesh_what_a_fault_of_one_mesh_needs(recipe: str) -> None:
    """Where a checkpoint loses a state may depend on the mesh."""
    chosen = Selection(workload=f"{__name__}:OnTwoMeshes", no_scaler=True)
    runs = select("quick", chosen)
    seen = {(s.topology, s.precision) for s in runs if s.recipe == recipe}
    assert {("dp2", "fp32"), ("dp4", "fp32")} <= seen
    plain = {s.topology for s in runs if s.precision == "bf16-autocast"}
    assert {"dp2", "dp4"} <= plain


class LosesItsStateInASave(Averages):
    """Rank 0 loses the optimizer's state in a save, and goes on training."""

    def save_checkpoint(self, stack: Engine, scaler: Any, folder: str) -> None:
        super().save_checkpoint(stack, scaler, folder)
        if torch.distributed.get_rank() == 0:
            stack.optimizer.state.clear()


class EvaluatesAfterASave(Averages):
    """The model stays in eval mode after a save."""

    def save_checkpoint(self, stack: Engine, scaler: Any, folder: str) -> None:
        super().save_checkpoint(stack, scaler, folder)
        stack.module.eval()


class ResetsInASave(SavesStatistics):
    """A save moves the statistics of the running job."""

    def save_checkpoint(self, stack: Engine, scaler: Any, folder: str) -> None:
        super().save_checkpoint(stack, scaler, folder)
        stack.module.get_buffer("module.1.mean").zero_()


class LeavesItsRate(Averages):
    """A save leaves the learning rate of an evaluation."""

    def save_checkpoint(self, stack: Engine, scaler: Any, folder: str) -> None:
        super().save_checkpoint(stack, scaler, folder)
        stack.optimizer.param_groups[0]["lr"] = 0.5


class FreezesInASave(Averages):
    """A save turns gradients off."""

    def save_checkpoint(self, stack: Engine, scaler: Any, folder: str) -> None:
        super().save_checkpoint(stack, scaler, folder)
        stack.module.requires_grad_(False)


class FallsOnceLoaded(Averages):
    """Its rate falls in step 4, and the checkpoint lacks that."""

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        returned = super().train_step(stack, micro_batches, scaler)
        stack.steps = getattr(stack, "steps", 0) + 1  # type: ignore[attr-defined]  # of this fault
        if stack.steps == 4:  # type: ignore[attr-defined]  # of this fault
            stack.optimizer.param_groups[0]["lr"] /= 10
        return returned


def test_a_schedule_that_should_move_after_a_load_fails(runner: Runner) -> None:
    case = runner.run("none", replace(here(FallsOnceLoaded, "resume"), steps=5))
    assert [*failed_checks(case)] == ["trainer.settings"]


class SavesNothing(Averages):
    """A save fails on an attribute of None that no scaler has."""

    def save_checkpoint(self, stack: Engine, scaler: Any, folder: str) -> None:
        nothing: Any = None
        nothing.items()


def test_none_without_items_is_no_missing_scaler(runner: Runner) -> None:
    case = runner.run("none", here(SavesNothing, "resume"))
    assert case.status == "error" and "has no attribute 'items'" in case.problem


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (LosesItsStateInASave, "changed the state of optimizer 0 ("),
        (ResetsInASave, "changed the buffer 1.mean on rank 0"),
        (LeavesItsRate, "changed lr of group 0 of optimizer 0 ("),
        (FreezesInASave, "changed requires_grad of "),
        (EvaluatesAfterASave, "changed the mode (train or eval) of the model"),
    ],
)
def test_a_save_changes_nothing_that_training_goes_on_with(
    runner: Runner, stack: type, words: str
) -> None:
    case = runner.run("none", replace(here(stack, "resume"), steps=5))
    assert f"save_checkpoint: {words}" in case.problem
