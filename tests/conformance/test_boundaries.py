"""Gradients at module boundaries, compared with a run on the whole batch."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_gather

from gradparity.conformance import Runner, Scenario
from gradparity.examples.gan import Gan
from gradparity.tests.workloads.misplaced import RightContext


class Towers(nn.Module):
    """Model with two towers and a temperature, which is an output without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 4)
        self.right = nn.Linear(6, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left, right = x.chunk(2, -1)
        return self.left(left), self.right(right), self.temperature.exp()


class Contrasts:
    """Compares each row with the rows of all ranks: no fault."""

    meshes = ({"dp": 2},)
    reference = "one rank"

    def model(self) -> nn.Module:
        return Towers()

    def batch(self, step: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(100 * seed + step)
        x = torch.randn(8, 12, generator=generator)
        return x, x[:, 0]

    def micro_batches(self, batch: Any) -> list[Any]:
        return [batch]

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        self.group = mesh.get_group("dp")
        self.optimizer_of_all = torch.optim.SGD(model.parameters(), lr=0.1)
        return model

    def train_step(self, stack: nn.Module, micro_batches: Any, scaler: Any) -> Tensor:
        self.optimizer_of_all.zero_grad()
        ((x, _),) = micro_batches
        left, right, scale = stack(x)
        everything = torch.cat(all_gather(right, group=self.group))
        place = dist.get_rank(self.group) * len(x)
        labels = torch.arange(place, place + len(x))
        logits = scale * left @ everything.T
        loss = nn.functional.cross_entropy(logits, labels)
        loss.backward()
        self.average(stack)
        self.optimizer_of_all.step()
        return loss.detach()

    def average(self, stack: nn.Module) -> None:
        for parameter in stack.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=self.group)
            parameter.grad /= dist.get_world_size(self.group)


class KeepsItsTemperature(Contrasts):
    """The gradient of the temperature is not averaged."""

    def average(self, stack: nn.Module) -> None:
        own = stack.temperature.grad.clone()  # type: ignore[union-attr, operator]
        super().average(stack)
        stack.temperature.grad = own


class SixRows(RightContext):
    """No fault: the six rows are cut into micro-batches of three, two and one row."""

    def batch(self, step: int, seed: int) -> tuple[Tensor, Tensor]:
        x, y = super().batch(step, seed)
        return x[:6], y[:6]


class Places(nn.Module):
    """Embedding of tokens and of their positions, which all rows share."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Linear(8, 8), nn.Embedding(6, 8)
        self.first = 0

    def forward(self, x: Tensor) -> Tensor:
        places = self.first + torch.arange(x.shape[1])
        found: Tensor = self.tokens(x) + self.positions(places)
        return found


class Positions(RightContext):
    """No fault: each rank has the positions of its own tokens."""

    def model(self) -> nn.Module:
        model = super().model()
        model.embed = Places()
        return model

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        model.embed.first = 3 * mesh.get_local_rank("cp")  # type: ignore[union-attr]  # a module
        return super().parallelize(model, mesh)


class OwnBias(Positions):
    """The gradient of the last bias is not averaged."""

    def average(self, name: str, group: Any, parameter: nn.Parameter) -> None:
        if name != "head.bias":
            super().average(name, group, parameter)


def located(runner: Runner, stack: type, more: str, place: str = "dp2/2") -> Any:
    model = f"{stack.__module__}:{stack.__name__}"
    id = f"{place}/fp32/own/none/model={model},{more}"
    found = runner.localise(runner.run("none", Scenario.parse(id)))
    assert found is not None
    return found


def test_a_gradient_of_what_all_rows_share_is_a_sum_over_ranks(runner: Runner) -> None:
    found = located(runner, Contrasts, "steps=1")
    assert found.where == "nowhere", found.text
    assert "all agree" in found.text, found.text


def test_a_temperature_that_is_not_averaged_is_named(runner: Runner) -> None:
    found = located(runner, KeepsItsTemperature, "steps=1")
    assert (found.where, found.parameters) == ("gradient", ("temperature",))
    assert "nothing averages them" in found.text, found.text


@pytest.mark.parametrize("place", ["dp2-cp2/4", "cp2/2"])
def test_a_part_of_what_all_rows_share_is_a_sum_over_ranks_with_that_part(
    runner: Runner, place: str
) -> None:
    found = located(runner, Positions, "steps=1", place)
    assert found.where == "nowhere", found.text
    assert "all agree" in found.text, found.text


def test_a_fault_beside_positions_that_all_rows_share_is_named(runner: Runner) -> None:
    found = located(runner, OwnBias, "steps=1", "dp2-cp2/4")
    assert (found.where, found.parameters) == ("gradient", ("head.bias",)), found.text
    assert "nothing averages them" in found.text, found.text


def test_a_score_of_one_row_is_compared_with_the_score_of_that_row(
    runner: Runner,
) -> None:
    # some micro-batches are one row, and any score is a multiple of any other
    found = located(runner, Gan, "steps=1,recipe=accumulate-six")
    assert found.where == "nowhere", found.text
    assert "all agree" in found.text, found.text


def test_unequal_micro_batches_of_a_sequence_are_compared_with_their_rows(
    runner: Runner,
) -> None:
    # the rank's part of a row cannot run alone, so the reference has all rows
    found = located(runner, SixRows, "steps=1,recipe=accumulate-uneven", "cp2/2")
    assert found.where == "nowhere", found.text
    assert "all agree" in found.text, found.text
