"""``optimizers(stack)`` declares optimizers of copies that gradparity cannot find."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradparity.conformance import Case, Runner, Scenario
from gradparity.fixtures import WorkloadError, resolve_workload
from gradparity.fixtures.faulty.own_steps import Stepped, Steps
from gradparity.tests.verdicts import failed
from gradparity.tests.workloads.schedules import OfCopiesInTwoGroups
from gradparity.tests.workloads.steps import Engine, MicroBatches

MODULE = "gradparity.tests.conformance.test_declared_optimizers"
PLAIN = "gradparity.fixtures.faulty:PlainScaler"


class StepsMasters(Steps):
    """No fault: optimizers of weights and of biases step copies of the parameters."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Stepped:
        stack = super().parallelize(model, mesh)
        stack.kept = {n: p.detach().clone() for n, p in model.named_parameters()}
        for master in stack.kept.values():
            master.requires_grad_()
        parts = [self.named(stack, kind) for kind in ("weight", "bias")]
        stack.optimizer, stack.second = map(self.optimizer, parts)
        return stack

    def named(self, stack: Stepped, kind: str) -> list[tuple[str, Any]]:
        return [(n, master) for n, master in stack.kept.items() if n.endswith(kind)]

    def weights(self, stack: Stepped) -> dict[str, Tensor]:
        return dict(stack.module.named_parameters())

    def train_step(self, stack: Stepped, micro_batches: Any, scaler: Any) -> Tensor:
        module, masters = stack.module, stack.kept
        module.zero_grad()
        scale = 1.0 if scaler is None else scaler.scale(torch.ones(()))
        [(x, y)] = micro_batches
        loss = self.loss(module(x), y)
        (loss * scale).backward()
        for name, parameter in module.named_parameters():
            assert parameter.grad is not None
            self.reduce(stack, parameter.grad)
            masters[name].grad = parameter.grad
        for optimizer in (stack.optimizer, stack.second):
            optimizer.step() if scaler is None else scaler.step(optimizer)
        if scaler is not None:
            scaler.update()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(masters[name])
        return loss.detach()

    def reduce(self, stack: Stepped, gradient: Tensor) -> None:
        stack.average(gradient)


class SumsForMasters(StepsMasters):
    """Gradients are summed, not averaged; with AdamW the updates hardly show it."""

    def reduce(self, stack: Stepped, gradient: Tensor) -> None:
        stack.average(gradient)
        gradient *= stack.ranks


class Says:
    """Mixin that declares, for each parameter, the optimizer of its copy."""

    def optimizers(self, stack: Stepped) -> dict[str, Any]:
        owners = {"weight": stack.optimizer, "bias": stack.second}
        return {name: owners[name.rpartition(".")[2]] for name in stack.kept}


class SaysMasters(Says, StepsMasters):
    pass


class SaysSums(Says, SumsForMasters):
    pass


class StepsFirstGroupTwice(OfCopiesInTwoGroups):
    """Steps of the first param group are twice as long."""

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        first = stack.optimizer.param_groups[0]["params"]
        before = [shard.detach().clone() for shard in first]
        found = super().train_step(stack, micro_batches, scaler)
        with torch.no_grad():
            for shard, was in zip(first, before, strict=True):
                shard.add_(shard - was)
        return found


class SaysGroups:
    """Mixin that declares, for each parameter, the param group of its copy."""

    def optimizers(self, stack: Engine) -> dict[str, Any]:
        groups = {
            id(shard): group
            for group in stack.optimizer.param_groups
            for shard in group["params"]
        }
        return {name: groups[id(p)] for name, p in stack.kept["shards"].items()}


class SaysTwoGroups(SaysGroups, OfCopiesInTwoGroups):
    pass


class SaysTwice(SaysGroups, StepsFirstGroupTwice):
    pass


def case(
    runner: Runner, stack: type, scaler: str = "none", *, faults: str = "none"
) -> Case:
    steps = 2 if faults == "none" else 3  # one after a skip
    settings = f"model={MODULE}:{stack.__name__},steps={steps},scale=1024"
    text = f"dp2/2/fp32/own/{faults}/{settings}"
    return runner.run(scaler, Scenario.parse(text))


@pytest.mark.parametrize(
    ("inferred", "declared", "law"),
    [
        (StepsMasters, SaysMasters, ""),
        (SumsForMasters, SaysSums, "parity.gradient"),
        (OfCopiesInTwoGroups, SaysTwoGroups, ""),
        (StepsFirstGroupTwice, SaysTwice, "parity.update"),
    ],
)
def test_what_cannot_be_observed_is_checked_once_it_is_declared(
    runner: Runner, inferred: type, declared: type, law: str
) -> None:
    unsaid = case(runner, inferred)
    assert unsaid.status == "inconclusive", (unsaid.problem, failed(unsaid))
    told = [v.message for v in unsaid.verdicts if v.status == "inconclusive"]
    assert any("optimizers(stack)" in message for message in told), told
    said = case(runner, declared)
    assert [*failed(said)] == [law] * bool(law), (said.problem, failed(said))
    if not law:
        assert said.status == "pass", [v for v in said.verdicts if v.status != "pass"]


def test_optimizers_of_copies_decide_each_for_itself(runner: Runner) -> None:
    found = case(runner, SaysMasters, PLAIN, faults="inf@r0s1:first.bias")
    assert found.status == "pass", failed(found)
    assert found.evidence is not None
    moved = [d.parameters_changed for d in found.evidence.ranks[1].steps[1].decisions]
    assert moved == [True, False]
    unsaid = case(runner, StepsMasters, PLAIN)
    assert not failed(unsaid)
    unsaid = case(runner, StepsMasters, PLAIN, faults="inf@r0s1:first.bias")
    assert "2 optimizers of copies: which of them must skip? Write" in unsaid.problem


class AloneMasters(SaysMasters):
    """The reference is the same ``train_step`` on one rank."""

    reference = "one rank"


@pytest.mark.slow
def test_on_one_rank_they_skip_each_for_itself_too(runner: Runner) -> None:
    found = case(runner, AloneMasters, PLAIN, faults="inf@r0s1:first.bias")
    assert found.status == "pass", (found.problem, failed(found))


class NoDict(StepsMasters):
    def optimizers(self, stack: Stepped) -> Any:
        return [stack.optimizer, stack.second]


class OfTwoGroups(OfCopiesInTwoGroups):
    def optimizers(self, stack: Engine) -> dict[str, Any]:
        return dict.fromkeys(stack.kept["shards"], stack.optimizer)


class OtherNames(StepsMasters):
    def optimizers(self, stack: Stepped) -> dict[str, Any]:
        return {"inner.first.weight": stack.optimizer}


class WithoutTrainStep(Says, Steps):
    train_step = None  # type: ignore[assignment]  # as absent


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (NoDict, "optimizers: returned list, expected a dict of name -> optimizer"),
        (OfTwoGroups, "gave AdamW of 2 param groups for 0.weight, expected the one of"),
        (OtherNames, "gave 'inner.first.weight', which is not in the model"),
    ],
)
def test_what_says_nothing_is_refused(runner: Runner, stack: type, words: str) -> None:
    place = "dp2/2/fp32/own/none"
    found = runner.run(
        "none", Scenario.parse(f"{place}/model={MODULE}:{stack.__name__}")
    )
    assert found.status == "error"
    assert words in found.problem


def test_gradparitys_own_loop_has_no_such_optimizers() -> None:
    with pytest.raises(WorkloadError, match="optimizers: needs train_step"):
        resolve_workload(f"{MODULE}:WithoutTrainStep")
