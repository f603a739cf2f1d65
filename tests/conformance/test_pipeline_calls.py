"""Calls of pipeline stages that only infer shapes belong to no micro-batch."""

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from gradparity.conformance import Runner, Scenario
from gradparity.conformance.rank.modules import INPUT, Boundary, ModuleLog, Passed
from gradparity.conformance.rank.watched_step import _inferring_calls
from gradparity.conformance.report.records import Location
from gradparity.tests.workloads.stacks import rank
from gradparity.tests.workloads.steps import Engine, MicroBatches, Pipeline

MODULE = "gradparity.tests.conformance.test_pipeline_calls"


class ScheduleForEach(Pipeline):
    """No fault: stage and schedule are made anew for each micro-batch."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        engine: Engine = super().parallelize(model, mesh)
        engine.kept = {"group": mesh.get_group("pp")}
        return engine

    def schedule(self, stack: Engine, x: Tensor, weight: float) -> ScheduleGPipe:
        chunks = 1 if len(x) % 2 else 2
        stage = PipelineStage(
            stack.module, rank(), 2, torch.device("cpu"), group=stack.kept["group"]
        )
        return ScheduleGPipe(
            stage,
            chunks,
            loss_fn=lambda output, y: self.loss(output, y) * weight / chunks,
            scale_grads=False,
        )

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        stack.optimizer.zero_grad()
        total, rows = 0.0, sum(len(x) for x, _ in micro_batches)
        for x, y in micro_batches:
            schedule = self.schedule(stack, x, len(x) / rows)
            if rank():
                losses: list[Tensor] = []
                schedule.step(target=y, losses=losses)
                total += torch.stack(losses).sum().item()
            else:
                schedule.step(x)
        stack.optimizer.step()
        return total if rank() else None


class LossOffByAPercent(ScheduleForEach):
    """Reports another loss than the one that it minimises."""

    def train_step(
        self, stack: Engine, micro_batches: MicroBatches, scaler: Any
    ) -> Any:
        loss = super().train_step(stack, micro_batches, scaler)
        return loss and 1.01 * loss


def located(runner: Runner, stack: type, recipe: str) -> Location:
    place = f"pp2/2/fp32/own/none/model={MODULE}:{stack.__name__}"
    scenario = Scenario.parse(f"{place},steps=2,recipe={recipe}")
    found = runner.localise(runner.run("none", scenario))
    assert found is not None
    return found


@pytest.mark.parametrize("recipe", ["accumulate", "accumulate-uneven"])
def test_a_schedule_for_each_micro_batch_is_right(runner: Runner, recipe: str) -> None:
    found = located(runner, ScheduleForEach, recipe)
    assert found.where == "nowhere", found.text
    assert "all agree" in found.text


def test_a_fault_beside_a_schedule_for_each_micro_batch_is_named(
    runner: Runner,
) -> None:
    found = located(runner, LossOffByAPercent, "accumulate")
    assert found.where == "loss", found.text


@pytest.mark.parametrize(
    ("called", "row_counts", "inferring"),
    [
        pytest.param([4, 4], [4, 4], [], id="none"),
        pytest.param([2, 2, 2], [4], [0], id="one batch"),
        pytest.param([2, 2, 2, 2], [4], [0, 1], id="two before one batch"),
        pytest.param([2, 2, 2, 2, 2], [4, 4], [0], id="one schedule"),
        pytest.param([2] * 6, [4, 4], [0, 3], id="one for each"),
        pytest.param([2, 2, 2, 1, 1, 1], [4, 2], [0, 3], id="one for each, uneven"),
        pytest.param([3] * 5 + [2] * 3, [6, 6, 4], [0, 5], id="one for each size"),
        pytest.param([2] * 8, [4, 4, 4], [0, 1], id="two before three batches"),
        pytest.param([2] * 4, [11], None, id="rows are dropped"),
        pytest.param([5, 5, 5], [6, 4], None, id="calls across batches"),
        pytest.param([], [4], None, id="never called"),
    ],
)
def test_calls_that_infer_shapes_are_told_by_their_rows(
    called: list[int], row_counts: list[int], inferring: Collection[int] | None
) -> None:
    assert _inferring_calls(called, row_counts) == inferring


def test_other_calls_are_numbered_anew() -> None:
    log = ModuleLog()
    for call in range(6):
        passed = Passed(values=torch.full((1,), call).numpy())
        log.passed[Boundary(call, "", 0, INPUT, 0)] = passed
    log.without_calls([0, 3])
    numbers = {b.micro_batch: p.values[0] for b, p in log.passed.items()}
    assert numbers == {0: 1, 1: 2, 2: 4, 3: 5}
