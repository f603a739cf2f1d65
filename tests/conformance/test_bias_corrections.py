"""Adam's bias corrections in fp32: a compiled step is right, a longer one is not."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradparity.conformance import Runner, Scenario
from gradparity.conformance.formulas import bias_error
from gradparity.tests.workloads.stacks import Named, rank
from gradparity.tests.workloads.steps import Engine, Trains

MODULE = "gradparity.tests.conformance.test_bias_corrections"
BETAS = (0.9, 0.999)


def ratios(steps: Tensor, betas: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return the ratio of each bias correction in fp32 to the exact one."""
    first, second = ((1 - b**steps) / (1 - b ** steps.double()) for b in betas)
    return first, second


class InFp32(Trains):
    """No fault: the bias corrections are computed in fp32."""

    def train_step(self, stack: Engine, micro_batches: Any, scaler: Any) -> Any:
        t = stack.kept["t"] = stack.kept.get("t", 0) + 1
        first, second = ratios(torch.tensor([float(t)]), BETAS)
        before = [p.detach().clone() for p in stack.module.parameters()]
        found = super().train_step(stack, micro_batches, scaler)
        # not by the learning rate: the reference would follow it
        with torch.no_grad():
            for parameter, was in zip(stack.module.parameters(), before, strict=True):
                longer = float(second.sqrt() / first) - 1
                parameter.add_(parameter - was, alpha=longer)
        return found


class Compiled(Trains):
    """No fault: a compiled step computes the corrections as fp32 tensors."""

    kind: type[torch.optim.Optimizer] = torch.optim.AdamW

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return self.kind([p for _, p in parameters], lr=1e-2)  # type: ignore[call-arg]  # each takes it

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        # "eager" needs no compiler; the arithmetic is the same
        engine.kept["step"] = torch.compile(engine.optimizer.step, backend="eager")
        return engine

    def train_step(self, stack: Engine, micro_batches: Any, scaler: Any) -> Any:
        stack.optimizer.zero_grad()
        loss, norm = self.backward(stack, micro_batches, scaler), self.clip(stack)
        stack.kept["step"]()
        return loss, norm


class CompiledAdam(Compiled):
    """No fault: a compiled step of Adam computes the corrections in fp32."""

    kind = torch.optim.Adam


class CompiledAdamax(Compiled):
    """No fault: Adamax corrects the first moment only."""

    kind = torch.optim.Adamax


class CompiledNAdam(Compiled):
    """No fault: a compiled step of NAdam computes the corrections in fp32."""

    kind = torch.optim.NAdam


class Longer(Trains):
    """Steps are longer by twice the error of the first step's corrections."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        engine.optimizer.param_groups[0]["lr"] *= 1 + 2 * bias_error(BETAS, 1)
        return engine


class LongerOnOneRank(Trains):
    """Steps on rank 1 are longer, as in `Longer`; steps on other ranks are right."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        far = 2 * bias_error(BETAS, 1) * rank()
        engine.optimizer.param_groups[0]["lr"] *= 1 + far
        return engine


def checked(runner: Runner, stack: type, steps: int = 3) -> Any:
    text = f"dp2/2/fp32/own/none/steps={steps},model={MODULE}:{stack.__name__}"
    found = runner.run("none", Scenario.parse(text))
    assert found.evidence is not None and found.evidence.parity is not None
    return found


COMPILED = (Compiled, CompiledAdam, CompiledAdamax, CompiledNAdam)
SLOW = [pytest.param(stack, marks=pytest.mark.slow) for stack in COMPILED]


@pytest.mark.parametrize("stack", [InFp32, *SLOW])
def test_corrections_in_fp32_pass(runner: Runner, stack: type) -> None:
    found = checked(runner, stack, steps=8)
    assert found.status == "pass", (found.problem, found.verdicts)


@pytest.mark.parametrize("stack", [Longer, LongerOnOneRank])
def test_steps_longer_than_the_error_explains_fail(runner: Runner, stack: type) -> None:
    found = checked(runner, stack)
    told = {v.law: v.message for v in found.verdicts if v.status == "fail"}
    assert "step 0" in told["parity.update"]


@pytest.mark.parametrize("betas", [BETAS, (0.9, 0.95), (0.95, 0.98), (0.5, 0.9999)])
def test_the_bound_holds_for_corrections_in_fp32(betas: tuple[float, float]) -> None:
    steps = torch.arange(1, 2001, dtype=torch.float32)
    first, second = ratios(steps, betas)
    off = (first / second.sqrt() - 1).abs()
    bound = torch.tensor([bias_error(betas, int(t)) for t in steps])
    assert bool((off <= bound).all())
    assert float((off / bound).max()) > 0.05  # it is not a bound of anything
