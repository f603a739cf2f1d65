"""Settings of optimizers that no schedule moves must be those of ``optimizer``."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradparity.conformance import Case, Runner, Scenario
from gradparity.conformance.comparison.settings import OtherConstant, other_constant
from gradparity.conformance.rank.observe import constants_of
from gradparity.conformance.rank.trace import (
    Constants,
    RankTrace,
    Setting,
    StepTrace,
)
from gradparity.tests.conformance.test_stack_schedules import update
from gradparity.tests.verdicts import failed
from gradparity.tests.workloads.stacks import Named, Right, rank
from gradparity.tests.workloads.steps import Engine, MicroBatches, Trains

MODULE = "gradparity.tests.conformance.test_optimizer_settings"


def case(runner: Runner, stack: type, precision: str = "fp32") -> Case:
    text = f"dp2/2/{precision}/own/none/steps=3,model={MODULE}:{stack.__name__}"
    return runner.run("none", Scenario.parse(text))


# - Faults too small for the update to show them


class OtherEps(Trains):
    """Steps with another eps than that of ``optimizer()``."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        engine.optimizer.param_groups[0]["eps"] = 1e-7
        return engine


class OtherEpsOnRank1(Trains):
    """Steps with another eps on rank 1."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        if rank():
            engine.optimizer.param_groups[0]["eps"] = 1e-10
        return engine


class KeepsTheLargest(Trains):
    """Sets amsgrad, which has no effect as long as gradients grow."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        parameters = [*engine.module.parameters()]
        engine.optimizer = torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True)
        return engine


class EpsByRank(Right):
    """Chooses eps by the rank; has no train_step."""

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in parameters], eps=1e-8 * (1 + rank()))


@pytest.mark.parametrize(
    ("stack", "law", "words"),
    [
        (OtherEps, "parity.update", "eps of 0.weight is 1e-07 on rank 0 at step 0"),
        (KeepsTheLargest, "parity.update", "amsgrad of 0.weight is True on rank 0"),
        (OtherEpsOnRank1, "agreement.replicas", "eps of 0.weight is 1e-10 on rank 1"),
        (EpsByRank, "agreement.replicas", "eps of 0.weight is 2e-08 on rank 1"),
    ],
)
def test_another_setting_than_that_of_optimizer_fails(
    runner: Runner, stack: type, law: str, words: str
) -> None:
    found = case(runner, stack)
    assert found.status == "fail", (found.problem, update(found))
    assert words in failed(found)[law]
    assert "by the workload's optimizer" in failed(found)[law]


def test_another_setting_in_half_precision_is_reported(runner: Runner) -> None:
    found = case(runner, OtherEps, precision="bf16-autocast")
    assert found.status == "pass", (found.problem, failed(found))
    assert "; eps of 0.weight is 1e-07 on rank 0 at step 0" in update(found)


# - Right stacks


class OtherImplementation(Trains):
    """Chooses another implementation, with groups of its own and more keys in them."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        groups = [
            {"params": [p], "number": number, "shard": number / 2}
            for number, p in enumerate(engine.module.parameters())
        ]
        rate = torch.tensor(1e-2)
        engine.optimizer = torch.optim.AdamW(groups, lr=rate, foreach=False)
        return engine


class EpsMoves(Trains):
    """Changes eps from step to step, by less than shows."""

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        stack.optimizer.param_groups[0]["eps"] *= 1.01
        return super().train_step(stack, micro_batches, scaler)


class Unlike(torch.optim.AdamW):
    """Another class, which may read eps in another way."""


class OtherClass(Trains):
    """Steps by another class than that of ``optimizer()``."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        engine.optimizer = Unlike(engine.module.parameters(), lr=1e-2, eps=1.1e-8)
        return engine


class Around(torch.optim.Optimizer):
    """Wrapper that leaves the step to AdamW; its own eps means something else."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"eps": 1.0})
        self.inner = torch.optim.AdamW(self.param_groups[0]["params"], lr=1e-2)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Wrapped(Trains):
    """Steps by a wrapper."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine = super().parallelize(model, mesh)
        engine.optimizer = Around(engine.module.parameters())
        return engine


@pytest.mark.parametrize("stack", [OtherImplementation, EpsMoves, OtherClass, Wrapped])
def test_a_right_stack_is_not_said_to_have_other_settings(
    runner: Runner, stack: type
) -> None:
    found = case(runner, stack)
    assert found.status == "pass", (found.problem, failed(found))
    assert "by the workload's optimizer" not in update(found)


# - What is compared, from made-up traces


def other(
    mine: list[dict[str, Setting]],
    due: list[dict[str, Setting]],
    optimizer: str = "torch.Adam",
) -> OtherConstant | None:
    """Compare the settings of one rank, step by step."""
    trace = RankTrace(rank=0, coordinate={}, index={"w": np.arange(2)}, shards={})
    steps = [
        [(trace, StepTrace(step=n, constants={"w": Constants(optimizer, values)}))]
        for n, values in enumerate(mine)
    ]
    reference = [{"w": Constants("torch.Adam", values)} for values in due]
    return other_constant(steps, reference, "there")


@pytest.mark.parametrize(
    ("mine", "due"),
    [
        pytest.param({"eps": 1e-8}, {"eps": 1e-8 * (1 + 1e-7)}, id="rounded"),
        pytest.param({"ranks": 2}, {"ranks": 1}, id="counts ranks"),
        pytest.param({"sizes": (2, 2)}, {"sizes": (1, 4)}, id="counts several"),
        pytest.param({"eps": 1e-8, "rho": 0.1}, {"eps": 1e-8}, id="mine alone"),
        pytest.param({"eps": 1e-8}, {"eps": 1e-8, "rho": 0.1}, id="theirs alone"),
    ],
)
def test_settings_that_need_not_be_equal(
    mine: dict[str, Setting], due: dict[str, Setting]
) -> None:
    assert other([mine], [due]) is None


@pytest.mark.parametrize(
    ("mine", "due", "words"),
    [
        (
            {"alpha": 0.9},
            {"alpha": 0.99},
            "alpha of w is 0.9 on rank 0 at step 0, and ",
        ),
        ({"dampening": 0.1}, {"dampening": 0}, "is 0.1 on rank 0 at step 0, and 0 the"),
        ({"maximize": True}, {"maximize": False}, "is True on rank 0 at step 0, and F"),
        ({"eps": (1e-30, 1e-3)}, {"eps": (1e-30, 1e-2)}, "(1e-30, 0.001) on rank 0"),
    ],
)
def test_settings_that_must_be_equal(
    mine: dict[str, Setting], due: dict[str, Setting], words: str
) -> None:
    found = other([mine], [due])
    assert found is not None
    assert words in found.text
    assert other([mine], [due], optimizer="apex.FusedAdam") is None


def test_a_value_that_an_optimizer_changes_is_not_compared() -> None:
    still: list[dict[str, Setting]] = [{"d": 1e-6}, {"d": 1e-6}]
    moves: list[dict[str, Setting]] = [{"d": 2e-6}, {"d": 3e-6}]
    assert other(moves, still) is None
    assert other(still, moves) is None
    assert other(still, [{"d": 2e-6}] * 2) is not None


def test_constants_are_what_the_constructor_takes() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.RMSprop([weight], foreach=False, centered=True)
    group = optimizer.param_groups[0] | {"max_lr": 0.1, "alpha": torch.tensor(0.5)}
    found = constants_of(optimizer, group)
    assert found.optimizer.endswith("RMSprop")
    values = {"alpha": 0.5, "eps": 1e-8, "centered": True, "maximize": False}
    assert found.values == values
    assert not any(isinstance(value, Tensor) for value in found.values.values())
