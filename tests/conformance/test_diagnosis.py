"""Diagnosis lists exactly the causes that explain a factor."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from gradparity.conformance import Runner, Scenario
from gradparity.conformance.comparison.diagnosis import (
    Facts,
    causes_of,
    missing_reduction,
)
from gradparity.tests.workloads.stacks import Right

HERE = "gradparity.tests.conformance.test_diagnosis"

PLAIN = Facts(axes={"dp": 2, "tp": 4}, passes=2, scales=(1024.0, 512.0))
CLIPPED = Facts(axes={"dp": 1}, passes=1, scales=(8.0,), clip_norm=0.5, norm=2.0)
NEVER_MEANT = Facts(axes={"dp": 1}, passes=1)
NORMED = Facts(axes={"dp": 1}, passes=1, norm=0.984)


@pytest.mark.parametrize(
    ("facts", "factor", "causes"),
    [
        (
            PLAIN,
            0.5,
            [
                "averaged once too often over dp (2 ranks)",
                "divided twice by the 2 micro-batches",
                "scaled by 512, and divided by 1024",
            ],
        ),
        (PLAIN, 0.25, ["averaged once too often over tp (4 ranks)"]),
        (PLAIN, 0.125, ["averaged once too often over all 8 ranks"]),
        (
            PLAIN,
            2.0,
            [
                "added up where they are to be averaged over dp (2 ranks)",
                "not divided by the 2 micro-batches",
                "divided by the scale 512 of the step before, not 1024",
            ],
        ),
        (PLAIN, 1024.0, ["not divided by the scale 1024"]),
        (PLAIN, 1 / 1024, ["divided twice by the scale 1024"]),
        (
            CLIPPED,
            0.125,
            [
                "divided twice by the scale 8",
                "clipped before they were divided by the scale 8",
            ],
        ),
        (CLIPPED, 4.0, ["not clipped"]),
        (PLAIN, 0.3, []),
        (
            NORMED,
            0.3 / 0.984,
            [
                "clipped to the norm 0.3. If that is meant, declare clip_norm = 0.3 in "
                "the workload and clip to self.clip_norm"
            ],
        ),
        # a built-in loop has no limit of its own
        (replace(NORMED, may_clip=False), 0.3 / 0.984, ["clipped to the norm 0.3"]),
        # no limit has so many digits
        (NORMED, 0.31234 / 0.984, []),
        (PLAIN, 1.0005, []),
        (PLAIN, float("nan"), []),
        (NEVER_MEANT, 2.0, []),
    ],
)
def test_all_causes_of_a_factor_are_listed(
    facts: Facts, factor: float, causes: list[str]
) -> None:
    assert causes_of(factor, 1e-3, facts) == ", or ".join(causes)


@pytest.mark.parametrize(
    ("factors", "text"),
    [
        ((0.4, 0.4), ": each rank has its own part; nothing reduces them before the"),
        ((0.4, 0.2), ": each rank has its own part, clipped by its own norm; nothing"),
    ],
)
def test_parts_that_one_norm_clips_are_not_clipped_by_their_own(
    factors: tuple[float, float], text: str
) -> None:
    parts = np.random.default_rng(0).normal(size=(2, 8))
    whole = parts.sum(axis=0)
    group = [(r, f * parts[r], whole) for r, f in enumerate(factors)]
    told = missing_reduction([group], 1e-6, is_clipped=True, moves_rightly=False)
    assert told.startswith(text)


# - Circumstances of a departure


class SumsInFp16(Right):
    """Gradients are sent in fp16, without a declared ``reduce_dtype``."""

    meshes: object = ({"dp": 2},)
    hook: Any = staticmethod(default_hooks.fp16_compress_hook)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        made = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
        made.register_comm_hook(mesh.get_group("dp"), self.hook)
        return made


def halved(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return default_hooks.fp16_compress_hook(group, bucket).then(
        lambda done: done.value() / 2
    )


class SumsAndHalves(SumsInFp16):
    """Gradients are sent in fp16 and halved."""

    hook = staticmethod(halved)


@pytest.mark.parametrize(
    ("stack", "told"),
    [
        (f"{HERE}:SumsInFp16", "declare it by reduce_dtype"),
        (f"{HERE}:SumsAndHalves", ""),
        (
            "gradparity.fixtures.faulty.steps:ForgetsTheOptimizer,recipe=resume",
            "a checkpoint was loaded just before this step",
        ),
        ("gradparity.fixtures.faulty.steps:ClipsEachTensorBySize,recipe=clip-norm", ""),
    ],
)
def test_possible_causes_of_a_difference_are_named(
    runner: Runner, stack: str, told: str
) -> None:
    case = runner.run(
        "none", Scenario.parse(f"dp2/2/fp32/own/none/model={stack},steps=4")
    )
    found = runner.localise(case)
    assert (case.status, case.problem) == ("fail", "") and found is not None
    assert told in found.text
    assert ("checkpoint" in found.text) == ("checkpoint" in told)
    assert ("reduce_dtype" in found.text) == ("reduce_dtype" in told)


class OffBeforeANorm(Right):
    """A bias before a batch norm, whose true gradient is 0, gets a gradient of 1."""

    meshes: object = ({"tp": 2},)
    off = 1.0

    def model(self) -> nn.Module:
        norm = nn.BatchNorm1d(8, track_running_stats=False)
        return nn.Sequential(nn.Linear(8, 8), norm, nn.Linear(8, 4))

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        model.get_parameter("0.bias").register_post_accumulate_grad_hook(self.spoil)
        return model

    def spoil(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad += self.off


class RightBeforeANorm(OffBeforeANorm):
    """No fault: the gradient of the bias is 0 up to rounding."""

    off = 0.0


def test_a_gradient_whose_true_value_is_0_is_described_in_words(runner: Runner) -> None:
    """The message omits the relative error of a true 0, which would be 1e16."""
    place = f"tp2/2/fp32/own/none/model={HERE}"
    case = runner.run("none", Scenario.parse(f"{place}:OffBeforeANorm,steps=2"))
    (told,) = (v.message for v in case.verdicts if v.law == "parity.gradient")
    assert "the gradient of 0.bias" in told
    assert "its true value is 0 but for rounding" in told
    assert "here it is off by 2.83" in told  # the norm of eight ones
    assert "e+" not in told
    right = runner.run("none", Scenario.parse(f"{place}:RightBeforeANorm,steps=2"))
    assert right.status == "pass", right.problem
