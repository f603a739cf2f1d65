"""Optimizers of whole matrices: errors by rounding pass, and other updates fail."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import parallel as tp

from gradparity.conformance import Case, Runner, Scenario
from gradparity.conformance.rank.elementwise import HalfNoise, not_elementwise
from gradparity.tests.workloads.stacks import Named, Right

MODULE = "gradparity.tests.conformance.test_workload_muon"


class Matrices(Right):
    """No fault: torch's Muon on DTensors."""

    meshes = ({"dp": 2}, {"tp": 2})

    def model(self) -> nn.Module:
        layers = nn.Linear(8, 16, bias=False), nn.Linear(16, 4, bias=False)
        return nn.Sequential(layers[0], nn.Tanh(), layers[1])

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if "tp" in (mesh.mesh_dim_names or ()):
            plan = {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()}
            return tp.parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        return model

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return torch.optim.Muon([p for _, p in parameters], lr=0.05)


class Shards(Matrices):
    """Makes each rank's shard orthogonal, not the matrix."""

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return OfShards([p for _, p in parameters], lr=0.05)


class OfShards(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                shard = nn.Parameter(local(parameter).clone())
                shard.grad = local(parameter.grad).clone()
                torch.optim.Muon([shard], lr=0.05).step()
                local(parameter).copy_(shard)


class ShorterSteps(Matrices):
    """Steps have 0.6 of the right length on tensors that are not DTensors."""

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        lr = 0.05 if isinstance(parameters[0][1], DTensor) else 0.03
        return torch.optim.Muon([p for _, p in parameters], lr=lr)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def case(runner: Runner, stack: type, mesh: str) -> Case:
    text = f"{mesh}/2/fp32/own/none/steps=3,model={MODULE}:{stack.__name__}"
    return runner.run("none", Scenario.parse(text))


@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
def test_rounding_in_whole_matrices_is_no_fault(runner: Runner, mesh: str) -> None:
    found = case(runner, Matrices, mesh)
    assert found.status == "pass", found.problem
    assert found.evidence is not None and found.evidence.parity is not None
    parity = found.evidence.parity
    # elements are compared as they are, and with room: one noise is 1/8 of the bound
    assert parity.compared["update"] == 576 and not parity.not_compared["update"]
    assert parity.worst["update"].ratio < 0.5


@pytest.mark.parametrize("stack", [Shards, ShorterSteps])
@pytest.mark.parametrize("mesh", ["dp2", "tp2"])
def test_another_update_is_caught(runner: Runner, stack: type, mesh: str) -> None:
    found = case(runner, stack, mesh)
    failed = {v.law for v in found.verdicts if v.status == "fail"}
    assert "parity.update" in failed, found.problem


def test_gradients_of_the_first_step_are_held_as_tightly_as_ever(
    runner: Runner,
) -> None:
    found = case(runner, Matrices, "dp2")
    assert found.evidence is not None and found.evidence.parity is not None
    row = found.evidence.parity.worst["gradient"]
    assert row.step or row.bound < 1e-5


def test_whole_matrix_optimizers_are_recognised_by_their_updates() -> None:
    assert not_elementwise(f"{MODULE}:Matrices", "own") == {"0.weight", "2.weight"}
    right = f"{Right.__module__}:{Right.__name__}"
    nested = "gradparity.tests.workloads.stacks:Nested"  # AdamW
    assert not_elementwise(right, "own") == not_elementwise(nested, "own") == set()
    assert not_elementwise("digits", "adamw") == set()


def test_noise_strikes_what_is_computed_in_half_precision_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.ones(64)
    with HalfNoise(generator):
        wide, half = x * 3, x.bfloat16()
        view = half.view(8, 8)
        same = torch.equal(view.flatten(), half)
    assert torch.equal(wide, 3 * x) and same
    off = (half.float() - 1).abs().max().item()
    assert 0 < off <= 2.0**-7
