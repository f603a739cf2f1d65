"""Steps that a workload skips by its own decision: right if all ranks agree."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradparity.conformance import Case, Runner, Scenario, Status
from gradparity.fixtures import REFERENCE_LINE
from gradparity.tests.verdicts import failed
from gradparity.tests.workloads.stacks import Batch, Named
from gradparity.tests.workloads.steps import Engine, MicroBatches, Trains

SPIKE = 1
"""Step in which the rows of rank 1 have very large targets."""


class SkipsSpikes(Trains):
    """No fault: ranks agree to skip a step whose gradient is much too large."""

    clip_norm = None  # type: ignore[assignment]  # as absent
    limit = 50.0

    def batch(self, step: int, seed: int) -> Batch:
        x, y = super().batch(step, seed)
        y[len(y) // 2 :] += 1000.0 * (step == SPIKE)
        return x, y

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        engine.kept["skipped"] = 0
        return engine

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        stack.optimizer.zero_grad()
        loss = self.backward(stack, micro_batches, scaler)
        if scaler is not None:
            scaler.unscale_(stack.optimizer)
        if self.is_spike(stack, loss):
            stack.kept["skipped"] += 1
        elif scaler is None:
            stack.optimizer.step()
        else:
            scaler.step(stack.optimizer)
        if scaler is not None:
            scaler.update()
        return loss

    def is_spike(self, stack: Engine, loss: Any) -> bool:
        grads = [p.grad for p in stack.module.parameters() if p.grad is not None]
        # averaged already: equal on all ranks
        return 50 < float(nn.utils.get_total_norm(grads)) < float("inf")

    def skipped_steps(self, stack: Engine) -> int:
        return int(stack.kept["skipped"])


class CountsNothing(SkipsSpikes):
    """No fault, but ``skipped_steps`` is missing, so skips are not declared."""

    skipped_steps = None  # type: ignore[assignment]  # as absent


class AsksOneRank(CountsNothing):
    """No fault: the reference on one rank decides itself whether to skip."""

    reference = "one rank"


class DecidesAlone(SkipsSpikes):
    """Each rank decides by its own loss."""

    def is_spike(self, stack: Engine, loss: Any) -> bool:
        return bool(loss > 10000.0)


class CountsAndSteps(SkipsSpikes):
    """Counts a skipped step, but takes it."""

    def is_spike(self, stack: Engine, loss: Any) -> bool:
        stack.kept["skipped"] += super().is_spike(stack, loss)
        return False


class DropsBadSteps(torch.optim.AdamW):
    """Does nothing in a step with a gradient that is not finite."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        every = [p.grad for group in self.param_groups for p in group["params"]]
        if all(g is None or bool(g.isfinite().all()) for g in every):
            return super().step()
        return None


class DividesByZero(SkipsSpikes):
    """Rank 1 divides by zero in one step, and the optimizer drops the step."""

    skipped_steps = None  # type: ignore[assignment]  # as absent

    def batch(self, step: int, seed: int) -> Batch:
        return Trains.batch(self, step, seed)

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return DropsBadSteps([p for _, p in parameters], lr=1e-2)

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        step = stack.kept["skipped"]
        stack.kept["skipped"] += 1
        stack.optimizer.zero_grad()
        loss = self.backward(stack, micro_batches, scaler)
        if step == SPIKE and dist.get_rank() == 1:
            for p in stack.module.parameters():
                assert p.grad is not None
                p.grad *= torch.zeros(()) / torch.zeros(())
        for p in stack.module.parameters():
            dist.all_reduce(p.grad)
            assert p.grad is not None
            p.grad /= dist.get_world_size()
        stack.optimizer.step()
        return loss


class OverflowsEverywhere(DividesByZero):
    """No fault: one process overflows in that step as well, and drops it."""

    def batch(self, step: int, seed: int) -> Batch:
        x, y = super().batch(step, seed)
        return x, y * (torch.inf if step == SPIKE else 1.0)

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        stack.optimizer.zero_grad()
        loss = self.backward(stack, micro_batches, scaler)
        stack.optimizer.step()
        return loss


def checked(
    runner: Runner, stack: type, scaler: str = "none", precision: str = "fp32"
) -> Case:
    text = f"dp2/2/{precision}/own/none/model={__name__}:{stack.__name__},steps=4"
    case = runner.run(scaler, Scenario.parse(text))
    assert not case.problem
    return case


@pytest.mark.parametrize("stack", [SkipsSpikes, AsksOneRank])
@pytest.mark.parametrize("scaler", ["none", "gradparity.scaler:GradScaler"])
@pytest.mark.few(2)
def test_a_skip_that_all_ranks_agree_on_is_right(
    runner: Runner, stack: type, scaler: str
) -> None:
    case = checked(runner, stack, scaler)
    assert case.status is Status.PASS, failed(case)
    assert case.evidence is not None
    update = {v.law: v for v in case.verdicts}["parity.update"]
    if stack is SkipsSpikes:
        assert "the reference skips step 1, as the stack decided" in update.message


def test_ranks_that_do_not_agree_on_a_skip_fail(runner: Runner) -> None:
    wrong = failed(checked(runner, DecidesAlone))
    assert "step 1: rank 1 did not step" in wrong["skip.all-ranks-step"]
    assert "parity.update" in wrong


def test_a_skip_that_is_counted_and_not_made_fails(runner: Runner) -> None:
    assert {*failed(checked(runner, CountsAndSteps))} == {"trainer.skips"}


def test_a_skip_that_nobody_declares_fails_with_the_line_to_add(
    runner: Runner,
) -> None:
    wrong = failed(checked(runner, CountsNothing))["skip.all-ranks-step"]
    assert "count them in skipped_steps(stack)" in wrong
    assert REFERENCE_LINE in wrong


@pytest.mark.parametrize("precision", ["fp32", "bf16-autocast"])
def test_a_gradient_that_is_not_finite_on_the_ranks_alone_fails(
    runner: Runner, precision: str
) -> None:
    wrong = failed(checked(runner, DividesByZero, precision=precision))
    assert {*wrong} == {"parity.gradient"}
    assert "step 1: the gradient of" in wrong["parity.gradient"]
    assert "it is inf or nan" in wrong["parity.gradient"]


def test_a_gradient_that_is_not_finite_on_one_process_either_is_right(
    runner: Runner,
) -> None:
    assert not failed(checked(runner, OverflowsEverywhere))
