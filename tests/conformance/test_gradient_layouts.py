"""Gradients that are laid out unlike their parameters: right ones pass, wrong fail."""

from functools import partial
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from gradparity.conformance import Case, Runner, Scenario
from gradparity.conformance.rank.observe import partial_ranks
from gradparity.tests.workloads.stacks import Right

MODULE = "gradparity.tests.conformance.test_gradient_layouts"


class Laid(Right):
    """Parameters and gradients have different placements; all ranks see one batch.

    When SGD adds them, DTensor converts the gradient to the parameter's placement.
    """

    meshes = ({"tp": 2},)
    parameter: ClassVar[Placement] = Shard(0)
    gradient: ClassVar[Placement] = Replicate()

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for module in model.children():
            for name, parameter in list(module.named_parameters(recurse=False)):
                split = distribute_tensor(parameter.detach(), mesh, [self.parameter])
                made = nn.Parameter(split)
                module.register_parameter(name, made)
                made.register_post_accumulate_grad_hook(self.lay_out)
            if isinstance(module, nn.Linear):
                module.forward = partial(on_whole_tensors, module)  # type: ignore[method-assign]  # as plans do
        return model

    def lay_out(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        mesh = gradient.device_mesh
        if isinstance(self.gradient, Partial):
            whole = gradient.full_tensor()
            rank = mesh.get_local_rank()
            sum_ = self.gradient.reduce_op == "sum"
            part = whole * (0.25 + 0.5 * rank) * (1 if sum_ else 2)
            laid = DTensor.from_local(part, mesh, [self.gradient])
        else:
            laid = gradient.redistribute(placements=[self.gradient])
        parameter.grad = laid


def on_whole_tensors(linear: nn.Linear, x: Tensor) -> Tensor:
    weight, bias = linear.weight, linear.bias
    assert isinstance(weight, DTensor) and isinstance(bias, DTensor)
    return nn.functional.linear(x, weight.full_tensor(), bias.full_tensor())


class ShardAndPartial(Laid):
    gradient = Partial()


class ShardAndMean(Laid):
    gradient = Partial("avg")


class ReplicateAndShard(Laid):
    parameter = Replicate()
    gradient = Shard(0)


class ShardAndOtherShard(Laid):
    gradient = Shard(-1)


class OneElementOff(Laid):
    """Rank 0 has whole gradients, with an error in an element outside of its shard."""

    def lay_out(self, parameter: Tensor) -> None:
        super().lay_out(parameter)
        assert isinstance(parameter.grad, DTensor)
        if parameter.grad.device_mesh.get_local_rank() == 0:
            parameter.grad.to_local().view(-1)[-1] *= 1.001


class ShardsSwapped(ReplicateAndShard):
    """The two ranks have each other's shard."""

    def lay_out(self, parameter: Tensor) -> None:
        super().lay_out(parameter)
        assert isinstance(parameter.grad, DTensor)
        mesh = parameter.grad.device_mesh
        other = parameter.grad.full_tensor().chunk(2)[1 - mesh.get_local_rank()]
        parameter.grad = DTensor.from_local(other.clone(), mesh, [Shard(0)])


class PartIsLost(ShardAndPartial):
    """The summand of rank 1 is replaced by a copy of rank 0's."""

    def lay_out(self, parameter: Tensor) -> None:
        super().lay_out(parameter)
        assert isinstance(parameter.grad, DTensor)
        if parameter.grad.device_mesh.get_local_rank() == 1:
            parameter.grad.to_local().div_(3)


def case(runner: Runner, stack: type, recipe: str = "plain") -> Case:
    text = (
        f"tp2/2/fp32/own/none/recipe={recipe},model={MODULE}:{stack.__name__},steps=2"
    )
    return runner.run("none", Scenario.parse(text))


RIGHT = (Laid, ShardAndPartial, ShardAndMean, ReplicateAndShard, ShardAndOtherShard)


@pytest.mark.parametrize("recipe", ["plain", "clip-norm", "clip-value"])
@pytest.mark.parametrize("stack", RIGHT)
@pytest.mark.few(5)
def test_right_gradients_pass_however_they_are_laid_out(
    runner: Runner, stack: type, recipe: str
) -> None:
    found = case(runner, stack, recipe)
    assert found.status == "pass", (
        found.problem,
        [v.message for v in found.verdicts if v.status == "fail"],
    )
    assert found.evidence is not None
    trace = found.evidence.ranks[0]
    seen = trace.steps[0]
    assert recipe == "clip-value" or any(
        seen.partial[n] or not np.array_equal(seen.places[n], trace.index[n])
        for n in seen.gradients
    )


@pytest.mark.parametrize("stack", [OneElementOff, ShardsSwapped, PartIsLost])
def test_wrong_gradients_fail_however_they_are_laid_out(
    runner: Runner, stack: type
) -> None:
    found = case(runner, stack)
    told = {v.law: v.message for v in found.verdicts if v.status == "fail"}
    assert "differs from the fp64 truth" in told["parity.gradient"], found.problem


@pytest.mark.slow
@pytest.mark.world(world_size=4)
def test_a_partial_sum_over_one_axis_may_be_a_mean_over_the_other() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    for placements, divisor in (
        (("sum", "avg"), 2),
        (("avg", "avg"), 4),
        (("sum", "sum"), 1),
    ):
        partial_sum = DTensor.from_local(
            torch.ones(2), mesh, [Partial(kind) for kind in placements]
        )
        assert partial_ranks(partial_sum) == ((0, 1, 2, 3), divisor)
