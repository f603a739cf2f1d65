"""Names and batches of a workload that look as if a wrapper had made them."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from gradparity.conformance import Runner, Scenario
from gradparity.conformance.rank.local_parts import full_name
from gradparity.fixtures.faulty import PlainScaler
from gradparity.tests.scripts import Scripts
from gradparity.tests.workloads.stacks import Right

MODULE = "gradparity.tests.conformance.test_workload_names"


class Pair(NamedTuple):
    x: Tensor
    flag: Tensor


class NamedLikeWrappers(Right):
    """No fault: layers called ``text_module`` and ``module``; a namedtuple batch."""

    meshes = ({"dp": 2},)

    def model(self) -> nn.Module:
        return Layers()

    def batch(self, step: int, seed: int) -> tuple[Pair, Tensor]:  # type: ignore[override]  # the protocol allows it
        x, y = super().batch(step, seed)
        return Pair(x, torch.ones(len(x), 1)), y

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text_module = nn.Linear(8, 8)
        self.module = nn.ModuleDict({"head": nn.Linear(8, 4)})

    def forward(self, inputs: Pair) -> Tensor:
        hidden = self.text_module(inputs.x * inputs.flag).tanh()
        found: Tensor = self.module["head"](hidden)
        return found


class StateOfItsOwn:
    """Class whose objects ``torch.load`` refuses by default."""


class KeepsAnObject(PlainScaler):
    """Has an object in its state that ``torch.load`` refuses by default."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"more": StateOfItsOwn()}


WHOLE = ("text_module.weight", "module.head.weight", "a.module.b.weight", "c.weight")


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("text_module.weight", "text_module.weight"),
        ("module.text_module.weight", "text_module.weight"),
        ("module.head.weight", "module.head.weight"),
        ("module.module.head.weight", "module.head.weight"),
        ("module._orig_mod.head.weight", "module.head.weight"),
        ("_orig_mod.module.c.weight", "c.weight"),
        ("a.module.b.module.weight", "a.module.b.weight"),
        ("_fsdp_wrapped_module.a.module._fsdp_wrapped_module.b.weight", WHOLE[2]),
        ("c._checkpoint_wrapped_module.weight", "c.weight"),
        ("inner.c.weight", "inner.c.weight"),
    ],
)
def test_only_path_segments_of_wrappers_are_removed_from_names(
    name: str, full: str
) -> None:
    assert full_name(name, WHOLE) == full


SCENARIO = f"dp2/2/fp32/own/none/model={MODULE}:NamedLikeWrappers,steps=2"


def test_a_stack_keeps_its_names_and_the_type_of_its_batches(runner: Runner) -> None:
    found = runner.run("none", Scenario.parse(SCENARIO))
    assert found.status == "pass", found.problem


def test_the_script_of_a_renaming_workload_passes(scripts: Scripts) -> None:
    assert scripts("none", SCENARIO) == (0, "no violation\n")


def test_a_state_that_cannot_be_loaded_is_reported_as_such(runner: Runner) -> None:
    scenario = Scenario.parse("single/1/fp32/sgd/none/recipe=resume,steps=4")
    found = runner.run(f"{MODULE}:KeepsAnObject", scenario)
    told = {v.law: v.message for v in found.verdicts if v.status == "fail"}
    assert "torch.load of its state_dict raised" in told["liveness.completes"]
    assert "load_state_dict raised" not in told["liveness.completes"]
