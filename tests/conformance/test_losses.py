"""Losses: the dtype in which one is computed."""

from typing import Any

import torch
from torch import Tensor

from gradparity.conformance import Case, Runner, Scenario
from gradparity.conformance.status import Verdict
from gradparity.tests.conformance.test_workload_steps import Engine, Trains

HALF = "dp2/2/bf16-autocast/own/none"


class FarFromTargets(Trains):
    """No fault: a loss that is mostly of targets has little of the noise of outputs."""

    def batch(self, step: int, seed: int) -> Any:
        x, y = super().batch(step, seed)
        return x, 8 * y


class ComputesInHalf(FarFromTargets):
    """``loss`` computes in fp32, and ``train_step`` in the dtype of the output."""

    def backward(self, stack: Engine, micro_batches: Any, scaler: Any) -> Any:
        ((x, y),) = micro_batches
        output = stack.module(x)
        with torch.autocast("cpu", enabled=False):
            loss = (output - y.to(output.dtype)).square().mean()
        loss.backward()
        return self.returned(loss.detach())

    def returned(self, loss: Tensor) -> Any:
        return loss.float()


class ReturnsHalf(ComputesInHalf):
    """The same, and the dtype shows that it is rounded."""

    def returned(self, loss: Tensor) -> Any:
        return loss


def judged(runner: Runner, kind: type[Trains], where: str) -> Case:
    text = f"{where}/model={kind.__module__}:{kind.__name__},steps=4,seed=1"
    return runner.run("none", Scenario.parse(text))


def verdict(case: Case, law: str = "parity.loss") -> Verdict:
    return next(v for v in case.verdicts if v.law == law)


def test_a_loss_is_bounded_by_the_rounding_of_its_own_dtype(runner: Runner) -> None:
    right = judged(runner, FarFromTargets, HALF)
    assert right.status == "pass", right.problem
    assert verdict(judged(runner, ComputesInHalf, HALF)).status == "fail"


def test_a_loss_that_is_returned_in_16_bits_is_compared_within_them(
    runner: Runner,
) -> None:
    told = verdict(judged(runner, ReturnsHalf, HALF))
    assert told.status == "pass"
    assert "ranks returned it in bfloat16, and loss() gives float32" in told.message
