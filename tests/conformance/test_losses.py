"""Losses: the dtype of their computation, and heads with separate counts."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gradparity.conformance import Case, Runner, Scenario
from gradparity.conformance.comparison.bounds import _loss_roundoff
from gradparity.conformance.comparison.reference import Reference
from gradparity.conformance.status import Verdict
from gradparity.fixtures import PRECISIONS
from gradparity.tests.workloads.stacks import Ddp
from gradparity.tests.workloads.steps import ClipsInTurns, Engine, Trains

FULL, HALF = "dp2/2/fp32/own/none", "dp2/2/bf16-autocast/own/none"


class FarFromTargets(Trains):
    """No fault: targets are large, so the loss contains little noise of the outputs."""

    def batch(self, step: int, seed: int) -> Any:
        x, y = super().batch(step, seed)
        return x, 8 * y


class ComputesInHalf(FarFromTargets):
    """``train_step`` computes the loss in the dtype of the output, ``loss`` in fp32."""

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
    """Returns the loss in half precision: its dtype shows the rounding."""

    def returned(self, loss: Tensor) -> Any:
        return loss


class LosesNothing(Ddp):
    """No fault: the loss is 0 at every step, as with advantages that cancel."""

    meshes = ({"dp": 2},)

    def loss(self, output: Tensor, targets: Tensor) -> Any:
        error = (output - targets).square().mean()
        return error - error.detach()


class TwoHeads(Ddp):
    """No fault: each half of the output has its own targets and its own count."""

    meshes = ({"dp": 2},)

    def loss(self, output: Tensor, targets: Tensor) -> Any:
        least = torch.tensor([0.5, 0.5, 1.0, 1.0])
        errors = (output - targets).square() * (targets > least)
        counts = (targets > least).chunk(2, -1)
        parts = zip(errors.chunk(2, -1), counts, strict=True)
        return [(error.sum(), count.sum()) for error, count in parts]


class DividesByAll(TwoHeads):
    """No fault: ``train_step`` divides each head's loss by its count on all ranks."""

    by_head = of_all_ranks = True

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        made = super().parallelize(model, mesh)
        return Engine(made, self.optimizer([*made.named_parameters()]))

    def weights(self, stack: Engine) -> Any:
        return dict(stack.module.named_parameters())

    def train_step(self, stack: Engine, micro_batches: Any, scaler: Any) -> Any:
        stack.optimizer.zero_grad()
        heads = [self.loss(stack.module(x), y) for x, y in micro_batches]
        sums = torch.stack([torch.stack([s for s, _ in parts]) for parts in heads])
        counts = torch.tensor([[c for _, c in parts] for parts in heads]).sum(0).float()
        whole, ranks = counts.clone(), dist.get_world_size()
        dist.all_reduce(whole)
        if not self.of_all_ranks:
            whole = counts * ranks
        if not self.by_head:
            whole = whole.sum().expand(2)
        loss = (sums.sum(0) / whole).sum()
        (loss * ranks).backward()
        stack.optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total


class DividesByItsOwn(DividesByAll):
    """Each rank divides by its own counts, and ranks are averaged."""

    of_all_ranks = False


class DividesByBoth(DividesByAll):
    """Both heads are divided by the sum of both counts."""

    by_head = False


def checked(runner: Runner, kind: type, where: str, recipe: str = "plain") -> Case:
    text = f"{where}/model={kind.__module__}:{kind.__name__},steps=4,seed=1"
    text += f",recipe={recipe}"
    return runner.run("none", Scenario.parse(text))


def verdict(case: Case, law: str = "parity.loss") -> Verdict:
    return next(v for v in case.verdicts if v.law == law)


def test_a_loss_is_bounded_by_the_rounding_of_its_own_dtype(runner: Runner) -> None:
    right = checked(runner, FarFromTargets, HALF)
    assert right.status == "pass", right.problem
    assert verdict(checked(runner, ComputesInHalf, HALF)).status == "fail"


def test_a_loss_that_is_returned_in_16_bits_is_compared_within_them(
    runner: Runner,
) -> None:
    told = verdict(checked(runner, ReturnsHalf, HALF))
    assert told.status == "pass"
    assert "ranks returned it in bfloat16, and loss() gives float32" in told.message


def test_a_loss_of_zero_is_compared(runner: Runner) -> None:
    right = checked(runner, LosesNothing, FULL)
    assert right.status == "pass", right.problem


@pytest.mark.parametrize("kind", [TwoHeads, DividesByAll])
@pytest.mark.parametrize("recipe", ["plain", "accumulate", "accumulate-uneven"])
def test_heads_with_counts_of_their_own_are_compared(
    runner: Runner, kind: type, recipe: str
) -> None:
    case = checked(runner, kind, FULL, recipe)
    assert case.status == "pass", case.problem
    assert verdict(case).compared > 0


@pytest.mark.parametrize("kind", [DividesByItsOwn, DividesByBoth])
def test_a_head_that_is_divided_by_another_count_fails(
    runner: Runner, kind: type
) -> None:
    case = checked(runner, kind, FULL)
    for law in ("parity.gradient", "parity.loss"):
        assert verdict(case, law).status == "fail", case.problem


@pytest.mark.parametrize(
    ("dtypes", "unit"),
    [
        (("float32",), 2.0**-24),
        (("float64",), 2.0**-24),
        (("float32", "bfloat16"), 2.0**-8),
        (("",), 2.0**-8),
    ],
)
def test_the_roundoff_of_a_loss_is_that_of_its_narrowest_dtype(
    dtypes: tuple[str, ...], unit: float
) -> None:
    plain, *returned = dtypes
    run = Reference((), (), (), {}, loss_dtype=plain)
    found = _loss_roundoff(PRECISIONS["bf16-autocast"], run, frozenset(returned))
    assert found == unit
    assert _loss_roundoff(PRECISIONS["fp32"], run, frozenset(returned)) == 2.0**-24


@pytest.mark.parametrize("where", [FULL, HALF])
def test_the_loss_of_a_second_turn_of_frozen_weights_is_not_a_fault(
    runner: Runner, where: str
) -> None:
    case = checked(runner, ClipsInTurns, where, "frozen")
    told = verdict(case)
    assert case.status == told.status == "inconclusive", case.problem
    assert "train_step moves weights, runs a forward, and then steps" in told.message


class TargetsOfItsTokens(Trains):
    """No fault: a rank has all inputs, and the targets of its own tokens."""

    meshes = ({"dp": 1, "cp": 2},)
    data_axes = ("dp", "cp")
    model_axes = ()
    clip_norm = None  # type: ignore[assignment]  # as absent

    def batch(self, step: int, seed: int) -> Any:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(4, 6, 8, generator=generator)
        return x, x.abs()[..., :4] * (torch.arange(6) < 4)[:, None]

    def loss(self, output: Tensor, targets: Tensor) -> Any:
        errors = nn.functional.mse_loss(output, targets, reduction="none")
        counted = targets.sum(-1) > 0  # 3 and 1 of a row's tokens on the two ranks
        return errors[counted].sum(), counted.sum()

    def shard(self, batch: Any, mesh: DeviceMesh) -> Any:
        x, y = batch
        return x, y.chunk(2, 1)[mesh.get_local_rank("cp")]

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        return Engine(model, self.optimizer([*model.named_parameters()]))

    def train_step(self, stack: Engine, micro_batches: Any, scaler: Any) -> Any:
        stack.optimizer.zero_grad()
        ((x, y),) = micro_batches
        mine = x.chunk(2, 1)[dist.get_rank()]
        total, count = self.loss(stack.module(mine), y)
        whole = torch.stack([total.detach(), count.float()])
        dist.all_reduce(whole)
        (total / whole[1]).backward()
        for p in stack.module.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
        stack.optimizer.step()
        return whole[0] / whole[1]


def test_targets_of_some_tokens_of_the_inputs_are_a_part_of_a_batch(
    runner: Runner,
) -> None:
    """The output of the whole model has more tokens than the targets of a rank."""
    name = f"{__name__}:TargetsOfItsTokens"
    text = f"dp1-cp2/2/fp32/own/none/model={name},steps=2"
    found = runner.run("none", Scenario.parse(text))
    assert found.status == "pass", (found.problem, found.verdicts)
