"""Buffers that training changes: compared between ranks, and with one process."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from gradparity.conformance import Case, Runner, Scenario
from gradparity.conformance.status import Verdict
from gradparity.fixtures import WorkloadError, resolve_workload
from gradparity.tests.workloads.stacks import Batch, Named, Right

DATA, TENSOR = "dp2/2/fp32/own/none", "dp1-tp2/2/fp32/own/none"


class StatisticsOfRanks(Right):
    """Each rank keeps running statistics of its own rows."""

    meshes: object = ({"dp": 2},)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def micro_batches(self, batch: Batch) -> list[Batch]:
        inputs, targets = batch
        return list(zip(inputs.split(4), targets.split(4), strict=True))


class SaysSo(StatisticsOfRanks):
    """No fault: ``local_buffers`` declares that the statistics differ."""

    local_buffers = ("running_mean", "running_var")


class AveragesThem(StatisticsOfRanks):
    """No fault: statistics are averaged after each forward."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        found = super().parallelize(model, mesh)

        def average(norm: nn.Module, *_: Any) -> None:
            for name, buffer in norm.named_buffers():
                if name.startswith("running"):
                    # .data: backward has saved the buffer
                    dist.all_reduce(buffer.data, group=mesh["dp"].get_group())
                    buffer.data /= mesh["dp"].size()

        found.get_submodule("1").register_forward_hook(average)
        return found


class TakesThoseOfTheFirst(StatisticsOfRanks):
    """No fault: DDP takes the first rank's statistics before each forward."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


class WholeBatch(Right):
    """No fault: both ranks see all rows, so their statistics are those of all rows."""

    meshes = ({"dp": 1, "tp": 2},)
    momentum = 0.1

    def model(self) -> nn.Module:
        return nn.Sequential(*Right.model(self).children(), nn.BatchNorm1d(4))

    def micro_batches(self, batch: Batch) -> list[Batch]:
        return [batch]

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        found = super().parallelize(model, mesh)
        norm = found.get_submodule("3")
        assert isinstance(norm, nn.BatchNorm1d)
        norm.momentum = self.momentum
        return found


class AnotherMomentum(WholeBatch):
    """The layout gives the norm another momentum."""

    momentum = 0.125


class KeepsACopy(WholeBatch):
    """No fault: a copy of the model, with statistics of its own, follows the model."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        copied = copy.deepcopy(model)
        live = super().parallelize(model, mesh)
        optimizer = self.optimizer([*live.named_parameters()])
        return SimpleNamespace(live=live, optimizer=optimizer, copied=copied)

    def weights(self, stack: Any) -> dict[str, Tensor]:
        return dict(stack.live.named_parameters())

    def train_step(self, stack: Any, micro_batches: list[Batch], scaler: Any) -> Any:
        ((inputs, targets),) = micro_batches
        stack.optimizer.zero_grad()
        loss = self.loss(stack.live(inputs), targets)
        loss.backward()
        stack.optimizer.step()
        buffers = zip(stack.copied.buffers(), stack.live.buffers(), strict=True)
        for mine, new in buffers:
            mine.copy_(new / 2)
        return loss.detach()


class Caches(nn.Module):
    """Module with a buffer that grows, and one that forward removes."""

    seen: Tensor
    last: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.detach().mean().reshape(1)])
        self.last = None
        return x


class KeepsCaches(Right):
    """No fault: the caches of a rank hold values that one process never has."""

    meshes: object = ({"dp": 2},)

    def model(self) -> nn.Module:
        return nn.Sequential(Caches(), *Right.model(self).children())


class Router(nn.Module):
    """Two experts; a bias that balances them is added to the scores."""

    bias: Tensor
    load: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 4)
        self.experts = nn.Linear(8, 16)
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("load", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.scores(x).softmax(-1)
        chosen = (scores + self.bias).argmax(-1, keepdim=True)
        self.load += torch.zeros_like(self.load).scatter_add(
            0, chosen.flatten(), torch.ones(len(x), dtype=self.load.dtype)
        )
        outputs = self.experts(x).unflatten(-1, (4, 4))
        mine = outputs.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 4)).squeeze(1)
        found: Tensor = mine * scores.gather(1, chosen)
        return found


class Balances(Right):
    """No fault: the bias follows the load of all ranks."""

    meshes: object = ({"dp": 2},)
    reference = "one rank"
    whole = True

    def model(self) -> nn.Module:
        return Router()

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        model.optimizer = self.optimizer([*model.named_parameters()])  # type: ignore[assignment]
        return super().parallelize(model, mesh)

    def train_step(self, stack: Any, micro_batches: list[Batch], scaler: Any) -> Any:
        stack.optimizer.zero_grad()
        rows, total = sum(len(x) for x, _ in micro_batches), torch.zeros(())
        for x, y in micro_batches:
            loss = self.loss(stack(x), y) * (len(x) / rows)
            loss.backward()
            total = total + loss.detach()
        stack.optimizer.step()
        if self.whole:
            dist.all_reduce(stack.load)
        with torch.no_grad():
            stack.bias += 1e-3 * (stack.load.mean() - stack.load).sign()
            stack.load.zero_()
        return total

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in parameters], lr=0.1)


class Marks(Balances):
    """On several ranks ``train_step`` moves a buffer that no forward reads."""

    def model(self) -> nn.Module:
        model = Router()
        model.register_buffer("mark", torch.zeros(2))
        return model

    def train_step(self, stack: Any, micro_batches: list[Batch], scaler: Any) -> Any:
        if dist.get_world_size() > 1:
            stack.mark += 1
        return super().train_step(stack, micro_batches, scaler)


class MarksBesideLoss(Marks):
    """The same with the plain reference, which does not call ``train_step``."""

    reference = None  # type: ignore[assignment]  # as if it were not declared

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        model.register_buffer("mark", torch.zeros(2))
        model.register_buffer("load", torch.zeros(4), persistent=False)
        model.register_buffer("bias", torch.zeros(4), persistent=False)
        return model


class BalancesItsOwn(Balances):
    """The bias of a rank follows the rank's own load."""

    whole = False


class BalancesBackwards(Balances):
    """On several ranks the bias moves in the wrong direction, to the larger load."""

    def train_step(self, stack: Any, micro_batches: list[Batch], scaler: Any) -> Any:
        before = stack.bias.clone()
        total = super().train_step(stack, micro_batches, scaler)
        if dist.get_world_size() > 1:
            stack.bias.copy_(2 * before - stack.bias)
        return total


class ShowsNoModule(KeepsACopy):
    """The momentum is another one, and a function keeps the model."""

    momentum = 0.125

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        stack = super().parallelize(model, mesh)
        return SimpleNamespace(stack=lambda: stack)

    def weights(self, stack: Any) -> dict[str, Tensor]:
        return super().weights(stack.stack())

    def train_step(self, stack: Any, micro_batches: list[Batch], scaler: Any) -> Any:
        return super().train_step(stack.stack(), micro_batches, scaler)


def checked(runner: Runner, kind: type[Right], where: str) -> Case:
    text = f"{where}/model={kind.__module__}:{kind.__name__},steps=3"
    return runner.run("none", Scenario.parse(text))


def failed(case: Case) -> dict[str, Verdict]:
    assert not case.problem
    return {v.law: v for v in case.verdicts if v.status == "fail"}


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (SaysSo, DATA),
        (AveragesThem, DATA),
        (TakesThoseOfTheFirst, DATA),
        (KeepsCaches, DATA),
        (WholeBatch, TENSOR),
        (KeepsACopy, TENSOR),
        (Balances, DATA),
    ],
)
def test_buffers_that_ranks_move_alike_are_right(
    runner: Runner, kind: type[Right], where: str
) -> None:
    case = checked(runner, kind, where)
    assert case.status == "pass", (case.problem, failed(case))


@pytest.mark.parametrize(
    ("kind", "name"),
    [(StatisticsOfRanks, "running_mean"), (BalancesItsOwn, "bias")],
)
def test_a_buffer_that_differs_on_ranks_fails_with_the_line_to_add(
    runner: Runner, kind: type[Right], name: str
) -> None:
    told = failed(checked(runner, kind, DATA))["agreement.replicas"]
    assert told.step == 0
    assert f'local_buffers = ("{name}",)' in told.message


@pytest.mark.parametrize(
    ("kind", "where", "name"),
    [(AnotherMomentum, TENSOR, "3.running_mean"), (BalancesBackwards, DATA, "bias")],
)
def test_a_buffer_that_moves_otherwise_than_on_one_process_fails(
    runner: Runner, kind: type[Right], where: str, name: str
) -> None:
    told = failed(checked(runner, kind, where))["parity.update"]
    assert (told.step, told.parameter) == (0, name)
    assert f"{name} is a buffer" in told.message


def test_a_buffer_that_no_rank_shows_is_inconclusive(runner: Runner) -> None:
    case = checked(runner, ShowsNoModule, TENSOR)
    assert (case.status, failed(case)) == ("inconclusive", {})
    (told,) = [v for v in case.verdicts if v.status == "inconclusive"]
    assert told.law == "parity.update"
    assert "moves the buffer 3.running_mean, and gradparity sees it whole on no" in (
        told.message
    )


def test_a_buffer_that_only_ranks_move_is_no_pass(runner: Runner) -> None:
    told = failed(checked(runner, Marks, DATA))["parity.update"]
    assert (told.step, told.ranks, told.parameter) == (0, (0,), "mark")
    assert "rank 0 moves the buffer mark, and one process leaves it" in told.message
    case = checked(runner, MarksBesideLoss, DATA)
    assert failed(case) == {}
    (unclear,) = [v for v in case.verdicts if v.status == "inconclusive"]
    assert 'reference = "one rank"' in unclear.message


class NamesNothing(StatisticsOfRanks):
    """``local_buffers`` is one string in place of a list of names."""

    local_buffers = "running_mean"


def test_local_buffers_are_a_tuple() -> None:
    with pytest.raises(WorkloadError, match="expected a tuple of names"):
        resolve_workload(f"{__name__}:NamesNothing")
