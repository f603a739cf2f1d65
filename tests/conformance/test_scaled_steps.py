"""Training steps that call a scaler in unusual forms: right ones fail no check."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import softplus

from gradparity.conformance import Case, Runner, Scenario, Status
from gradparity.conformance.rank.watched import WatchedScaler
from gradparity.examples.gan import Gan
from gradparity.fixtures.faulty.agreement import NeverAgrees
from gradparity.fixtures.faulty.plain import ClippingScaler, PlainScaler
from gradparity.tests.workloads.stacks import rank
from gradparity.tests.workloads.steps import Engine, MicroBatches, Trains

OURS = "gradparity.scaler:GradScaler"
OVERFLOWS = "scale=1.7e38,backoff=0.0001"
"""Settings with which gradients overflow at the first scale, but not at the second."""


class Steep(Trains):
    """No fault: gradients are large enough to overflow in fp32."""

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return 512 * super().loss(output, targets)


class ClipsAndSteps(Steep):
    """No fault: the scaler clips and steps in one call."""

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        if scaler is None:
            return super().train_step(stack, micro_batches, scaler)
        stack.optimizer.zero_grad()
        loss = self.backward(stack, micro_batches, scaler)
        norm = self.clip_and_step(scaler, stack.optimizer)
        scaler.update()
        return loss, norm

    def clip_and_step(self, scaler: Any, optimizer: Any) -> Any:
        return scaler.clip_and_step(optimizer, self.clip_norm)


class ClipsAndStepsFused(ClipsAndSteps):
    """No fault: the kernel of the optimizer divides and clips."""

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in parameters], lr=1e-2, fused=True)


class ClipsAndStepsOneRank(ClipsAndSteps):
    """No fault: the reference is the same step on one rank."""

    reference = "one rank"


class ClipsByTheScaler(ClipsAndStepsOneRank):
    """No fault: the scaler clips, and its other methods are called as well."""

    def clip_and_step(self, scaler: Any, optimizer: Any) -> Any:
        norm = scaler.clip_grad_norm_(optimizer, self.clip_norm)
        scaler.step(optimizer)
        assert scaler.step_was_skipped(optimizer) in (True, False)
        assert scaler.get_growth_factor() >= 1.0 > scaler.get_backoff_factor()
        assert scaler.get_growth_interval() > 0
        return norm


class ScaledGan(Gan):
    """No fault: a GAN in turns, whose optimizers share a scaler."""

    def train_step(self, stack: Any, micro_batches: list[Any], scaler: Any) -> Tensor:
        total = torch.zeros(())
        for noise, real in micro_batches:
            for name in ("critic", "maker"):
                optimizer = stack.optimizers[name]
                optimizer.zero_grad()
                fake = stack["maker"](noise)
                loss = softplus(-stack["critic"](fake))
                if name == "critic":
                    fake = stack["critic"](fake.detach())
                    loss = softplus(fake) + softplus(-stack["critic"](real))
                loss = 512 * loss.mean()
                (loss if scaler is None else scaler.scale(loss)).backward()
                optimizer.step() if scaler is None else scaler.step(optimizer)
            total = total + loss.detach() / len(micro_batches)
        if scaler is not None:
            scaler.update()
        return total


class SharesNoOptimizer(Steep):
    """No fault: the first of two stages has one more optimizer, which steps first."""

    meshes = ({"pp": 2},)
    clip_norm = None  # type: ignore[assignment]  # as absent

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        assert isinstance(model, nn.Sequential)
        parts = [nn.Sequential(), nn.Sequential()]
        for name, layer in model.named_children():
            parts[int(name) > 2].add_module(name, layer)
        part = parts[rank()]
        stage = PipelineStage(
            part, rank(), 2, torch.device("cpu"), group=mesh.get_group("pp")
        )
        engine = Engine(part, self.optimizer([*part.named_parameters()][-2:]))
        if not rank():
            engine.kept["first"] = self.optimizer([*part.named_parameters()][:2])
        # the scale is a factor of the loss, which the schedule calls
        engine.kept["schedule"] = ScheduleGPipe(stage, 2, loss_fn=self.scaled)
        return engine

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
        )

    scaler: Any = None
    losses: list[Tensor]

    def scaled(self, output: Tensor, targets: Tensor) -> Tensor:
        self.losses.append(self.loss(output, targets))
        last = self.losses[-1]
        return last if self.scaler is None else self.scaler.scale(last)

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        self.scaler = scaler
        optimizers = [stack.kept.get("first"), stack.optimizer]
        for optimizer in optimizers:
            if optimizer is not None:
                optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in micro_batches:
            self.losses = []
            if rank():
                stack.kept["schedule"].step(target=y)
                mean = torch.stack(self.losses[-2:]).mean().detach()
                total += mean / len(micro_batches)
            else:
                stack.kept["schedule"].step(x)
        for parameter in stack.module.parameters():
            assert parameter.grad is not None
            parameter.grad /= len(micro_batches)
        for optimizer in optimizers:
            if scaler is None:
                if optimizer is not None:
                    optimizer.step()
            else:
                self.step(scaler, optimizer)
        if scaler is not None:
            scaler.update()
        return total if rank() else None

    def step(self, scaler: Any, optimizer: Any) -> None:
        if optimizer is None:
            scaler.step(None)
        else:
            scaler.step(optimizer)


class ClipsWithoutOptimizer(SharesNoOptimizer):
    """No fault: a rank that lacks an optimizer passes None to ``clip_and_step``."""

    def step(self, scaler: Any, optimizer: Any) -> None:
        scaler.clip_and_step(optimizer, 1e9)


class SaysNothing(SharesNoOptimizer):
    """No fault: a rank without the optimizer makes no call, instead of passing None."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        if "first" in engine.kept:
            engine.kept["first"].own = True
        return engine

    def step(self, scaler: Any, optimizer: Any) -> None:
        if optimizer is not None:
            scaler.step(optimizer)


class AgreesOverSharedOptimizers(PlainScaler):
    """No fault: ranks agree whether to skip an optimizer that they share."""

    own = False

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        self.own = getattr(optimizer, "own", False)
        super().unscale_(optimizer)

    def agree(self, found: bool) -> bool:
        return found if self.own else super().agree(found)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        self.found[0] = super().agree(any(self.found.values()))
        super().update(new_scale)


class Apart(NeverAgrees, ClippingScaler):
    """Faulty: each rank decides alone whether to skip."""


RIGHT: dict[type, str] = {
    ClipsAndSteps: "dp2/2",
    ClipsAndStepsFused: "dp2/2",
    ClipsAndStepsOneRank: "dp2/2",
    ClipsByTheScaler: "dp2/2",
    ScaledGan: "dp2/2",
    SharesNoOptimizer: "pp2/2",
    ClipsWithoutOptimizer: "pp2/2",
}
FAULTS = ("none", "inf@r1s1:first", "inf@r*s1:last", "nan@r0s0:first!")


def checked(
    runner: Runner, stack: type, faults: str, more: str = "", scaler: str = OURS
) -> Case:
    where = "pp2/2" if stack is SaysNothing else RIGHT[stack]
    settings = f"steps=3,interval=2{more}"
    text = f"{where}/fp32/own/{faults}/model={__name__}:{stack.__name__},{settings}"
    return runner.run(scaler, Scenario.parse(text))


def failed(case: Case) -> dict[str, str]:
    right = (Status.PASS, Status.SKIPPED)
    return {v.law: v.message for v in case.verdicts if v.status not in right}


@pytest.mark.parametrize(
    ("stack", "faults"),
    [  # two faults for each stack, each beside every way to call a scaler
        (stack, FAULTS[(number + more) % 4])
        for more in (0, 2)
        for number, stack in enumerate(RIGHT)
    ],
)
@pytest.mark.few(2)
def test_a_right_step_fails_no_check(runner: Runner, stack: type, faults: str) -> None:
    found = checked(runner, stack, faults)
    assert found.status == "pass", (found.problem, failed(found))


FEW = (ClipsAndStepsFused, ClipsByTheScaler, ScaledGan, SharesNoOptimizer)
"""Workloads that run by default, one for each way to call a scaler."""


@pytest.mark.parametrize("stack", FEW)
@pytest.mark.few(1)
def test_a_right_step_that_overflows_fails_no_check(
    runner: Runner, stack: type
) -> None:
    found = checked(runner, stack, "none", f",{OVERFLOWS}")
    assert found.evidence is not None
    assert found.evidence.ranks[0].steps[0].scale_after < 1e38
    assert found.status == "pass", (found.problem, failed(found))


@pytest.mark.parametrize("stack", [ClipsAndSteps, ScaledGan, ClipsAndStepsOneRank])
def test_a_scaler_that_lets_ranks_disagree_is_caught_in_such_a_step(
    runner: Runner, stack: type
) -> None:
    found = checked(
        runner, stack, "inf@r1s1:last!", scaler=f"{__name__}:{Apart.__name__}"
    )
    assert {"skip.all-ranks-skip", "agreement.scale"} <= {*failed(found)}


def test_a_skip_is_undecided_if_a_rank_makes_no_call_for_an_optimizer_it_lacks(
    runner: Runner,
) -> None:
    scaler = f"{__name__}:{AgreesOverSharedOptimizers.__name__}"
    assert checked(runner, SaysNothing, "none", scaler=scaler).status == "pass"
    found = checked(runner, SaysNothing, "inf@r1s1:first", scaler=scaler)
    assert found.status == "inconclusive", (found.problem, failed(found))
    assert "ranks step 2, 1 optimizers" in failed(found)["skip.all-ranks-step"]
    assert "as in scaler.step(None)" in failed(found)["skip.all-ranks-step"]
    assert "agreement.scale" not in failed(found)


def test_torchs_checkpoints_save_the_scaler_by_its_state() -> None:
    scaler = WatchedScaler(
        torch.amp.GradScaler("cpu"),
        watch=lambda _: nullcontext(),
        inject=lambda loss: loss,
        handing=lambda _: nullcontext(),
        new_scale=None,
    )
    assert isinstance(scaler, Stateful)
    assert scaler.state_dict()["scale"] == 65536.0
