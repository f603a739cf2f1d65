"""``scheduler(optimizer)``: the reference steps it, so learning rates are checked."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import lr_scheduler

from gradparity.conformance import Case, Runner, Scenario
from gradparity.fixtures import WorkloadError, resolve_workload
from gradparity.tests.conformance.test_stack_schedules import BeginsAgain, update
from gradparity.tests.verdicts import failed
from gradparity.tests.workloads.schedules import (
    BeganElsewhere,
    Cosine,
    CyclesBetas,
    CyclesMomentum,
    MovesInEachPass,
    OfCopiesInTwoGroups,
    OnTwoAxes,
    Piped,
    TwoRates,
    WarmsUp,
    warm_up,
)
from gradparity.tests.workloads.stacks import Named
from gradparity.tests.workloads.steps import (
    Engine,
    MicroBatches,
    Pipeline,
    Trains,
    TrainsOnTwoAxes,
)

MODULE = "gradparity.tests.conformance.test_declared_schedulers"
PLAIN = "gradparity.fixtures.faulty:PlainScaler"


class Declares:
    """Declares by ``scheduler`` the schedule that its train_step moves."""

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return self.schedule(optimizer)  # type: ignore[attr-defined]  # of a stack


# - Right stacks


class DeclaredWarmUp(Declares, WarmsUp):
    pass


class DeclaredCosine(Declares, Cosine):
    pass


class DeclaredPipeline(Declares, Piped):
    pass


class DeclaredOnTwoAxes(Declares, OnTwoAxes):
    pass


class DeclaredMomentum(Declares, CyclesMomentum):
    pass


class DeclaredBetas(Declares, CyclesBetas):
    pass


class DeclaredFromTheStart(Declares, BeganElsewhere):
    pass


class DeclaredTwoRates(Declares, TwoRates):
    """Each group has its own schedule, which needs the optimizer of all parameters."""

    def move(self, stack: Engine) -> None:
        stack.kept["scheduler"].step()


class DeclaredOfCopies(Declares, OfCopiesInTwoGroups):
    """The workload's ``optimizer`` has two param groups, so each rate is known."""

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        mine = [p for _, p in parameters]
        made = [{"params": mine[n::2]} for n in range(2) if mine[n::2]]
        return torch.optim.AdamW(made, lr=1e-2)


# - Faults of the schedule itself, which are believed where nothing is declared


class DeclaredInEachPass(Declares, MovesInEachPass):
    """The schedule moves at each micro-batch instead of each step."""


class WarmsUpTwiceAsLong(WarmsUp):
    """``train_step`` warms up twice as slowly as the declared schedule."""

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.LambdaLR(optimizer, lambda step: warm_up(2 * step))


class MovesOnSkips(Declares, Cosine):
    """The schedule also moves in skipped steps."""

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        found = Trains.train_step(self, stack, micro_batches, scaler)
        self.move(stack)
        return found


class DeclaredBeginsAgain(Declares, BeginsAgain):
    """The checkpoint does not contain the declared schedule."""


class ForgetsIt(Trains):
    """Declares a schedule that its train_step does not move."""

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.LambdaLR(optimizer, warm_up)


def case(runner: Runner, stack: type, scaler: str = "none", **more: str) -> Case:
    place = "pp2/2" if issubclass(stack, Pipeline) else "dp2/2"
    place = "dp2-tp2/4" if issubclass(stack, TrainsOnTwoAxes) else place
    faults, precision = more.get("faults", "none"), more.get("precision", "fp32")
    recipe = more.get("recipe", "plain")
    settings = f"recipe={recipe},steps=5,model={MODULE}:{stack.__name__},scale=1024"
    text = f"{place}/{precision}/own/{faults}/{settings}"
    return runner.run(scaler, Scenario.parse(text))


@pytest.mark.parametrize(
    "stack",
    [
        DeclaredWarmUp,
        DeclaredCosine,
        DeclaredPipeline,
        DeclaredOnTwoAxes,
        DeclaredMomentum,
        DeclaredBetas,
        DeclaredFromTheStart,
        DeclaredTwoRates,
        DeclaredOfCopies,
    ],
)
@pytest.mark.few(3)
def test_a_stack_that_keeps_its_schedule_passes(runner: Runner, stack: type) -> None:
    found = case(runner, stack)
    assert found.status == "pass", (found.problem, failed(found), update(found))
    assert "the reference follows" not in update(found)


@pytest.mark.parametrize("stack", [DeclaredWarmUp, DeclaredMomentum])
@pytest.mark.parametrize(
    "more",
    [
        {"faults": "inf@r1s2:0.bias"},
        {"recipe": "resume"},
        {"faults": "nan@r0s1:loss", "precision": "bf16-autocast"},
    ],
)
@pytest.mark.few(2)
def test_it_waits_for_skips_and_goes_on_after_a_load(
    runner: Runner, stack: type, more: dict[str, str]
) -> None:
    found = case(runner, stack, PLAIN, **more)
    assert found.status == "pass", (found.problem, failed(found), update(found))


@pytest.mark.parametrize(
    ("stack", "more", "words"),
    [
        (
            DeclaredInEachPass,
            {"recipe": "accumulate"},
            "lr of 0.weight is 0.00333333 on rank 0 at step 0, and 0 by the",
        ),
        (
            WarmsUpTwiceAsLong,
            {},
            "is 0.00333333 on rank 0 at step 1, and 0.00666667 by the workload's",
        ),
        (
            MovesOnSkips,
            {"faults": "inf@r1s2:0.bias"},
            "is 0.00146447 on rank 0 at step 3, and 0.005 by the workload's",
        ),
        (
            DeclaredBeginsAgain,
            {"recipe": "resume"},
            "is 0.00125 on rank 0 at step 4, and 0 by the workload's",
        ),
        (ForgetsIt, {}, "lr of 0.weight is 0.01 on rank 0 at step 0, and 0 by the"),
    ],
)
@pytest.mark.few(2)
def test_a_stack_with_another_schedule_fails(
    runner: Runner, stack: type, more: dict[str, str], words: str
) -> None:
    found = case(runner, stack, PLAIN if "faults" in more else "none", **more)
    assert found.status == "fail", (found.problem, update(found))
    assert words in failed(found)["parity.update"]


class WithoutSteps(Trains):
    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return None


class WithoutTrainStep:
    meshes = ({"dp": 2},)

    def model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def batch(self, step: int, seed: int) -> Any:
        return torch.ones(2, 2), torch.ones(2, 2)

    def loss(self, output: Any, targets: Any) -> Any:
        return (output - targets).square().mean()

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        return model

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in parameters], lr=0.1)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.ConstantLR(optimizer)


def test_what_is_no_scheduler_is_refused(runner: Runner) -> None:
    found = case(runner, WithoutSteps)
    assert found.status == "error"
    assert "scheduler: returned None, expected torch's scheduler" in str(found.problem)
    with pytest.raises(WorkloadError, match="scheduler: needs train_step"):
        resolve_workload(f"{MODULE}:{WithoutTrainStep.__name__}")
