"""Schedules of a ``train_step``: the reference follows them, and hides no fault."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from gradparity.conformance import Case, Runner, Scenario
from gradparity.conformance.comparison.settings import settings_of, stack_schedule
from gradparity.conformance.rank.trace import RankTrace, Setting, StepTrace
from gradparity.tests.products import in_turn
from gradparity.tests.verdicts import failed
from gradparity.tests.workloads.schedules import (
    BeganElsewhere,
    Cosine,
    CyclesBetas,
    CyclesMomentum,
    MovesInEachPass,
    OfCopies,
    OfCopiesInTwoGroups,
    OnTwoAxes,
    Piped,
    TensorRate,
    TwoRates,
    WarmsUp,
)
from gradparity.tests.workloads.stacks import Named, Right, rank
from gradparity.tests.workloads.steps import (
    Engine,
    MicroBatches,
    Pipeline,
    Trains,
    TrainsOnTwoAxes,
)

MODULE = "gradparity.tests.conformance.test_stack_schedules"
PLAIN = "gradparity.fixtures.faulty:PlainScaler"


def case(
    runner: Runner,
    stack: type,
    scaler: str = "none",
    *,
    recipe: str = "plain",
    faults: str = "none",
    precision: str = "fp32",
    steps: int = 5,
) -> Case:
    place = "pp2/2" if issubclass(stack, Pipeline) else "dp2/2"
    place = "dp2-tp2/4" if issubclass(stack, TrainsOnTwoAxes) else place
    settings = f"recipe={recipe},steps={steps},model={MODULE}:{stack.__name__}"
    text = f"{place}/{precision}/own/{faults}/{settings},scale=1024"
    return runner.run(scaler, Scenario.parse(text))


def update(found: Case) -> str:
    return next(v.message for v in found.verdicts if v.law == "parity.update")


@pytest.mark.parametrize(
    ("stack", "followed"),
    [
        (WarmsUp, "lr (0.weight: 0 at step 0, 0.00333333 at step 1)"),
        (Cosine, "lr (0.weight: 0.01 at step 0, 0.00853553 at step 1)"),
        (OnTwoAxes, "lr (0.weight: 0 at step 0, 0.00333333 at step 1)"),
        (CyclesMomentum, "momentum (0.weight: 0.95 at step 0, 0."),
        (CyclesBetas, "betas (0.weight: (0.95, 0.999) at step 0, (0."),
        (TensorRate, "lr (0.weight: 0 at step 0, 0.00333333 at step 1)"),
        (TwoRates, "weight_decay (0.weight: 0.01 at step 0, 0.11 at step 1)"),
        (BeganElsewhere, "lr (0.weight: 0.01 where the schedule began, 0.005 at"),
        (OfCopies, "lr (0.weight: 0 at step 0, 0.00333333 at step 1)"),
    ],
)
@pytest.mark.few(4)
def test_a_right_stack_with_a_schedule_passes(
    runner: Runner, stack: type, followed: str
) -> None:
    found = case(runner, stack)
    assert found.status == "pass", (found.problem, failed(found), update(found))
    assert "the reference follows the stack's schedule of " in update(found)
    assert followed in update(found)


class MovesForEachRank(Cosine):
    """The schedule moves once for each rank in a step."""

    def train_step(self, stack: Any, micro_batches: Any, scaler: Any) -> Any:
        returned = super().train_step(stack, micro_batches, scaler)
        for _ in range(dist.get_world_size() - 1):
            self.move(stack)
        return returned


class StandsStill(Cosine):
    """The schedule moves on one rank alone."""

    def move(self, stack: Engine) -> None:
        if dist.get_world_size() == 1:
            super().move(stack)


def test_a_schedule_that_stands_still_on_several_ranks_fails(runner: Runner) -> None:
    told = failed(case(runner, StandsStill))["trainer.schedule"]
    assert "lr of 0.weight is 0.01 on rank 0 at step 1, and 0.00853553 on one" in told


class MovesUnseen(MovesForEachRank):
    """The same where one rank cannot train."""

    def train_step(self, stack: Any, micro_batches: Any, scaler: Any) -> Any:
        if dist.get_world_size() == 1:
            raise ValueError("a stage needs a neighbour")
        return super().train_step(stack, micro_batches, scaler)


@pytest.mark.parametrize("stack", [MovesUnseen, Piped])
def test_a_schedule_that_one_rank_cannot_check_is_inconclusive(
    runner: Runner, stack: type
) -> None:
    found = case(runner, stack)
    assert failed(found) == {}
    (told,) = [v for v in found.verdicts if v.status == "inconclusive"]
    assert told.law == "trainer.schedule"
    assert told.message.startswith("lr (0.weight: 0")
    assert told.message.endswith("let the workload declare its scheduler")


def test_a_schedule_that_moves_for_each_rank_fails(runner: Runner) -> None:
    found = case(runner, MovesForEachRank)
    told = failed(found)["trainer.schedule"]
    assert "lr of 0.weight is 0.005 on rank 0 at step 1, and 0.00853553 on one" in told
    assert told.endswith("on one rank: the schedule depends on the number of ranks")


MOVING = (WarmsUp, Cosine, CyclesMomentum, CyclesBetas)
SHAKEN = (
    ("plain", "inf@r1s2:0.bias", "fp32"),
    ("resume", "none", "fp32"),
    ("plain", "nan@r0s1:loss", "bf16-autocast"),
)


@pytest.mark.parametrize(("stack", "by"), in_turn(MOVING, SHAKEN))
@pytest.mark.few(3)
def test_a_schedule_is_followed_over_skips_loads_and_roundings(
    runner: Runner, stack: type, by: tuple[str, str, str]
) -> None:
    recipe, faults, precision = by
    found = case(
        runner, stack, PLAIN, recipe=recipe, faults=faults, precision=precision
    )
    assert found.status == "pass", (found.problem, failed(found), update(found))


def test_a_schedule_that_moves_too_often_is_trusted(runner: Runner) -> None:
    found = case(runner, MovesInEachPass, recipe="accumulate")
    assert found.status == "pass", (found.problem, failed(found))
    assert "lr (0.weight: 0.00333333 at step 0, 0.01 at step 1)" in update(found)


def test_settings_of_copies_in_several_groups_are_undecided(runner: Runner) -> None:
    found = case(runner, OfCopiesInTwoGroups)
    assert found.status == "inconclusive", failed(found)
    words = "the stack changes lr (0 at step 0, 0.00333333 at step 1) of optimizers"
    assert words in update(found)


# - Faults, with a schedule beside them


class OneRankAlone(WarmsUp):
    """The gradient of rank 1 never reaches rank 0."""

    def backward(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> float:
        with stack.module.no_sync():  # type: ignore[operator]  # DDP's
            total = super().backward(stack, micro_batches, scaler)
        for parameter in stack.module.parameters():
            assert parameter.grad is not None
            dist.broadcast(parameter.grad, 0)
        return total


class ClipsTwice(WarmsUp):
    """Clips a second time, to a tenth of the declared norm."""

    def clip(self, stack: Engine) -> Tensor:
        norm = super().clip(stack)
        nn.utils.clip_grad_norm_(stack.module.parameters(), 0.1 * self.clip_norm)
        return norm


class AppliesTwice(WarmsUp):
    """Each step is twice as long as it should be."""

    @contextmanager
    def doubled(self, module: nn.Module) -> Iterator[None]:
        before = [p.detach().clone() for p in module.parameters()]
        yield
        with torch.no_grad():
            for parameter, was in zip(module.parameters(), before, strict=True):
                parameter.add_(parameter - was)

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        with self.doubled(stack.module):
            return super().train_step(stack, micro_batches, scaler)


class OneRankForgets(Cosine):
    """The schedule does not move on rank 1; the ranks hold different shards."""

    def move(self, stack: Engine) -> None:
        if not rank():
            super().move(stack)


class FirstRankForgets(Cosine):
    """The schedule does not move on rank 0."""

    def move(self, stack: Engine) -> None:
        if rank():
            super().move(stack)


class BeginsAgain(Cosine):
    """The schedule is missing from the checkpoint, on all ranks."""

    def load_checkpoint(self, stack: Engine, scaler: Any, folder: str) -> None:
        super().load_checkpoint(stack, scaler, folder)
        stack.kept["scheduler"] = self.schedule(stack.optimizer)


class OneGroupOnOneRank(TwoRates):
    """The schedule misses the biases on rank 1."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        fully_shard(model, mesh=mesh)
        engine = Engine(model, self.optimizer([*model.named_parameters()]))
        engine.kept["scheduler"] = self.schedule(engine.optimizer)
        return engine

    def move(self, stack: Engine) -> None:
        kept = stack.optimizer.param_groups[1]["lr"]
        super().move(stack)
        if rank():
            stack.optimizer.param_groups[1]["lr"] = kept


class WrongConstant(Trains):
    """Uses another rate than that of ``optimizer()``, without a schedule."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        engine.optimizer.param_groups[0]["lr"] = 5e-3
        return engine


class LargerOnRank1(Trains):
    """Uses another rate on rank 1, without a schedule."""

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        made = super().optimizer(parameters)
        made.param_groups[0]["lr"] *= 1.0 + 0.01 * rank()
        return made


class DecaysWhatIsLarge(Right):
    """Weight decay on a rank depends on the size of its shard; has no train_step."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        fully_shard(model, mesh=mesh)
        return model

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        groups = [
            {
                "params": [p],
                "weight_decay": 0.1 * (getattr(p, "_local_tensor", p).numel() > 32),
            }
            for _, p in parameters
        ]
        return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize(
    ("stack", "law", "words"),
    [
        (OneRankAlone, "parity.gradient", "step 0: the gradient of"),
        (ClipsTwice, "parity.gradient", "step 0: the gradient of"),
        (AppliesTwice, "parity.update", "step 1: the update of"),
        (
            OneRankForgets,
            "parity.update",
            "; lr of 0.weight is 0.00853553 on rank 0 and 0.01 on rank 1 at step 1",
        ),
        (
            FirstRankForgets,
            "parity.update",
            "; lr of 0.weight is 0.01 on rank 0 and 0.00853553 on rank 1 at step 1",
        ),
        (OneGroupOnOneRank, "parity.update", "; lr of 0.bias is "),
        (WrongConstant, "parity.update", "step 0: the update of"),
        (
            WrongConstant,
            "parity.update",
            "; lr of 0.weight is 0.005 on rank 0 at step 0, and 0.01 by the "
            "workload's optimizer",
        ),
        (
            DecaysWhatIsLarge,
            "parity.update",
            "; weight_decay of 0.weight is 0 on rank 0 at step 0, and 0.1 by the "
            "workload's optimizer",
        ),
        (
            LargerOnRank1,
            "agreement.replicas",
            "; lr of 0.weight is 0.01 on rank 0 and 0.0101 on rank 1 at step 0",
        ),
    ],
)
@pytest.mark.few(3)
def test_a_fault_beside_a_schedule_is_caught(
    runner: Runner, stack: type, law: str, words: str
) -> None:
    found = case(runner, stack)
    assert found.status == "fail", (found.problem, update(found))
    assert words in failed(found)[law]


def test_a_schedule_that_a_checkpoint_loses_is_reported(runner: Runner) -> None:
    assert case(runner, BeginsAgain).status == "pass"
    found = case(runner, BeginsAgain, recipe="resume")
    assert [*failed(found)] == ["trainer.settings"], (found.problem, failed(found))
    assert (
        "in the same run without the interruption" in failed(found)["trainer.settings"]
    )


def test_a_rate_that_the_scaler_changes_is_not_followed(runner: Runner) -> None:
    changes = "gradparity.fixtures.faulty:ChangesTheLearningRate"
    found = case(runner, WarmsUp, changes)
    assert "parity.update" in failed(found), (found.problem, update(found))


def test_settings_that_differ_by_less_than_bf16_shows_are_reported(
    runner: Runner,
) -> None:
    found = case(runner, OneGroupOnOneRank, precision="bf16-autocast", steps=2)
    assert found.status == "pass", (found.problem, failed(found))
    assert "; lr of 0.bias is 0.029402 on rank 0 and 0.03 on rank 1" in update(found)


# - What moves, from made-up traces


def seen(*ranks: dict[str, Any], copies: Any = ()) -> list[Any]:
    """Return the trace of one step for each rank, with these optimizer settings."""
    found = []
    for number, settings in enumerate(ranks):
        index: Any = {"w": torch.arange(2).numpy(), "b": torch.arange(1).numpy()}
        trace = RankTrace(rank=number, coordinate={}, index=index, shards={})
        at = StepTrace(step=0, settings=settings, copies=[*copies])
        found.append((trace, at))
    return found


def lr(value: Setting) -> dict[str, dict[str, Setting]]:
    return {"w": {"lr": value}}


def test_what_never_moves_is_not_followed() -> None:
    found = stack_schedule([seen(lr(0.1), lr(0.1)), seen(lr(0.1), lr(0.1))])
    assert (found.settings, found.followed, found.differs) == ((), "", None)


def test_values_that_hardly_differ_are_given_with_all_digits_that_differ() -> None:
    found = stack_schedule([seen(lr(0.009), lr(0.009000001))])
    assert found.differs is not None
    told = "lr of w is 0.009 on rank 0 and 0.009000001 on rank 1 at step 0"
    assert found.differs[1] == told


def test_a_skipped_step_leaves_no_setting() -> None:
    found = stack_schedule([seen(lr(0.1)), seen({}), seen(lr(0.2))])
    assert found.settings == ((("w", "lr", 0.1),), (), (("w", "lr", 0.2),))


def test_a_rank_that_does_not_step_a_parameter_says_nothing_of_it() -> None:
    found = stack_schedule([seen({}, lr(0.1)), seen(lr(0.2), {})])
    assert found.settings == ((("w", "lr", 0.1),), (("w", "lr", 0.2),))
    assert found.differs is None


def test_settings_are_those_of_the_group_with_the_parameter() -> None:
    """A reference has one optimizer for each parameter, and some groups are empty."""
    bias = nn.Parameter(torch.ones(1))
    groups = [
        {"params": [], "weight_decay": 0.1},
        {"params": [bias], "weight_decay": 0.0},
    ]
    settings = settings_of({"bias": torch.optim.AdamW(groups)})
    decays = [value for _, key, value in settings if key == "weight_decay"]
    assert decays == [0.0]


def test_a_rate_that_is_not_finite_is_not_followed() -> None:
    found = stack_schedule([seen(lr(0.1)), seen(lr(math.nan))])
    assert found.settings == ((("w", "lr", 0.1),), ())


def test_what_all_copies_are_stepped_with_holds_for_each_parameter() -> None:
    rates = [[{"lr": 0.1}] * 2, [{"lr": 0.2}] * 2]
    found = stack_schedule([seen({}, {}, copies=copies) for copies in rates])
    assert found.settings[1] == (("w", "lr", 0.2), ("b", "lr", 0.2))
    assert not found.unclear


def test_copies_that_are_stepped_with_several_values_are_unclear() -> None:
    rates = [[{"lr": 0.1}, {"lr": 0.3}], [{"lr": 0.2}, {"lr": 0.3}]]
    found = stack_schedule([seen({}, copies=copies) for copies in rates])
    assert (found.settings, found.unclear) == ((), "lr (0.1 at step 0, 0.2 at step 1)")
