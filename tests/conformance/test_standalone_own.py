"""Standalone scripts for a user's workload: they need torch, scaler and workload."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradparity.conformance import Scenario
from gradparity.conformance.script.standalone import standalone_script
from gradparity.conformance.status import UsageError
from gradparity.fixtures import specimens
from gradparity.tests.extras import needs
from gradparity.tests.scripts import LIMIT_S, Scripts, alone
from gradparity.tests.workloads import stacks

MODULE = "gradparity.tests.workloads.stacks"
ALONE = "gradparity.tests.conformance.test_one_rank"
HERE = "gradparity.tests.conformance.test_standalone_own"
STEPS = "gradparity.tests.workloads.steps"
SCHEDULES = "gradparity.tests.workloads.schedules"
LAYOUTS = "gradparity.tests.conformance.test_gradient_layouts"
OURS = "gradparity.scaler:GradScaler"
NEVER = "gradparity.fixtures.faulty:NeverAgrees"
BAD = f"dp2-tp2/4/fp32/own/inf@r3s1:0.weight/model={MODULE}:Right,steps=3"
EXAMPLE = "model=gradparity.examples.workload:Stack,steps=3"


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        (stacks.ForgetsOneBias, "gradient of 2.bias: relative error"),
        (stacks.SumsForMean, "gradient of 0.weight: relative error 1; reference: one"),
        (stacks.SlightlyOff, "gradient of 0.weight: relative error 0.00"),
        (stacks.BiasOnOneRank, "weight of 2.bias: relative error"),
        pytest.param(  # the ranks wait for each other until the limit
            stacks.StrayCollective, "rank 1 raised RuntimeError", marks=pytest.mark.slow
        ),
        (
            stacks.RaisesOnRank1,
            "rank 1 raised RuntimeError: no such layer",
        ),
    ],
)
def test_a_wrong_stack_is_shown_without_a_scaler(
    scripts: Scripts, stack: type, words: str
) -> None:
    if stack is stacks.StrayCollective:
        scripts.limit_s = 30
    place = f"dp2/2/fp32/own/none/model={MODULE}:{stack.__name__}"
    code, output = scripts("none", f"{place},steps=1")
    assert code == 1, output
    assert words in output


@pytest.mark.parametrize(
    ("scaler", "scenario"),
    [
        (
            "none",
            f"dp2/2/fp32/own/none/model={MODULE}:Nested,recipe=accumulate,steps=3",
        ),
        ("none", f"dp2-tp2/4/fp32/own/none/model={MODULE}:ZeroBiases,steps=3"),
        pytest.param(
            *("none", "hsdp/4/fp32/adamw/none/steps=2"), marks=pytest.mark.slow
        ),
        ("none", f"tp2/2/fp32/own/none/model={LAYOUTS}:Laid,steps=2"),
        ("none", f"tp2/2/fp32/own/none/model={LAYOUTS}:ShardAndPartial,steps=2"),
        ("none", f"dp2/2/fp32/own/none/model={SCHEDULES}:TwoRates,steps=4"),
        ("none", f"dp2/2/fp32/own/none/model={SCHEDULES}:CyclesMomentum,steps=4"),
        pytest.param(OURS, BAD, marks=pytest.mark.slow),  # the next one has more
        (OURS, f"{BAD},recipe=accumulate,param-order=reversed"),
        (
            OURS,
            f"single/1/bf16-autocast/own/nan@r0s*:loss/model={MODULE}:Right,steps=3",
        ),
        (
            OURS,
            f"dp2/2/fp16-params/own/inf@r1s1:last[last]/{EXAMPLE},recipe=clip-norm",
        ),
    ],
)
def test_scripts_of_right_runs_find_no_violation(
    scripts: Scripts, scaler: str, scenario: str
) -> None:
    assert scripts(scaler, scenario) == (0, "no violation\n")


class Keeps(stacks.Right):
    """Drops all gradients before the optimizer uses them."""

    def reduce(self, name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
        parameter.grad = None

    def optimizer(self, parameters: stacks.Named) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for _, p in parameters])


def test_a_script_that_compares_nothing_has_shown_nothing(scripts: Scripts) -> None:
    scenario = f"dp2/2/fp32/own/none/model={HERE}:Keeps,steps=1"
    assert scripts("none", scenario) == (3, "nothing was compared: no gradients\n")


def test_a_wrong_gradient_is_shown_however_it_is_laid_out(scripts: Scripts) -> None:
    scenario = f"tp2/2/fp32/own/none/model={LAYOUTS}:ShardsSwapped,steps=2"
    code, output = scripts("none", scenario)
    assert (code, "reference: one process in fp64" in output) == (1, True), output


def test_a_wrong_scaler_is_shown(scripts: Scripts) -> None:
    code, output = scripts(NEVER, BAD)
    assert code == 1, output
    assert output.startswith("step 1: ranks disagree on (scale, growth tracker)")


@pytest.mark.slow
def test_the_workload_is_looked_for_where_the_script_runs(
    scripts: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"from {MODULE} import Right, SumsForMean\nright = Right()\n"
    for folder in (tmp_path, scripts.path.parent):
        (folder / "stack_of_mine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    place = "dp2/2/fp32/own/none/steps=2,model=stack_of_mine"
    assert alone(tmp_path, "none", f"{place}:right") == (0, "no violation\n")
    code, output = scripts(OURS, f"{place}:SumsForMean")
    assert (code, "reference: one process in fp64" in output) == (1, True), output


@pytest.mark.parametrize(
    ("precision", "scaler"), [("fp32", OURS), ("bf16-autocast", "none")]
)
def test_a_script_of_a_workload_with_train_step_is_refused(
    precision: str, scaler: str
) -> None:
    text = f"dp2/2/{precision}/own/none/model={STEPS}:Trains"
    with pytest.raises(UsageError, match=r"needs gradparity's own loop") as told:
        standalone_script(Scenario.parse(text), scaler)
    assert f"{STEPS}:Trains: its train_step needs" in str(told.value)


SPECIMENS = {
    "W01": ("tp2/2/fp32/own/none/steps=2,recipe=accumulate", "gradient of "),
    "W17": ("dp2/2/fp32/own/none/steps=2", "gradient of "),
    "W15": ("tp2/2/fp32/own/none/steps=2", "norm of all gradients: relative error"),
    "W08": ("cp2/2/fp32/own/none/steps=2", "gradient of "),
    "U01": ("dp2/2/fp32/own/none/steps=2", "gradient of "),
}
"""Specimen -> its scenario, and the first words of its script's output."""


@pytest.mark.parametrize("name", SPECIMENS)
def test_the_script_of_a_specimen_distinguishes_broken_from_fixed(
    scripts: Scripts, name: str
) -> None:
    place, words = SPECIMENS[name]
    pair = specimens.SPECIMENS[name]
    code, output = scripts("none", f"{place},model={pair.broken}")
    assert (code, words in output) == (1, True), output
    told = "reference: one process in fp64\n"
    assert output.count(told) == len(output.splitlines())
    assert scripts("none", f"{place},model={pair.fixed}") == (0, "no violation\n")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (f"dp2/2/fp32/own/none/model={ALONE}:InFp32", 'reference = "one rank" needs'),
        (
            f"dp2/2/fp32/own/none/model={MODULE}:Right,recipe=accumulate-uneven",
            "recipe 'accumulate-uneven', which needs",
        ),
        (
            f"dp2/2/fp32/own/none/model={MODULE}:Right,recipe=accumulate-six",
            "recipe 'accumulate-six', which needs",
        ),
        ("pp/2/fp32/sgd/none", "topology 'pp': a pipeline needs"),
    ],
)
def test_what_needs_more_than_two_forms_of_a_script_is_refused(
    place: str, words: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        standalone_script(Scenario.parse(place), "none")


STACKS = "gradparity.examples.stacks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "spec"),
    [
        # closures; the last stack that was made
        pytest.param(
            *("dp2-tp1/2", "lightning_model_parallel:Stack"),
            marks=needs("pytorch_lightning"),
        ),
        pytest.param(  # an optimizer steps through another
            *("dp2/2", "fairscale_sharded:Stack"), marks=needs("fairscale")
        ),
        ("dp2/2", "torch_ddp_hooks:Fp16"),  # gradients are summed in fp16
        ("single/1", "torch_ddp_hooks:Fp16"),  # nothing is laid out
    ],
)
def test_the_script_of_a_right_stack_finds_no_violation(
    scripts: Scripts, place: str, spec: str
) -> None:
    text = f"{place}/fp32/own/none/steps=2,model={STACKS}.{spec}"
    code, output = scripts("none", text)
    assert (code, output.splitlines()[-1]) == (0, "no violation"), output


@pytest.mark.slow
def test_differences_are_printed_before_a_rank_ends(tmp_path: Path) -> None:
    spec = specimens.SPECIMENS["W15"].broken
    place, words = SPECIMENS["W15"]
    text = standalone_script(Scenario.parse(f"{place},model={spec}"), "none")
    # the first rank that ends with 1 has the others ended
    tells = r'( +)(print\("\\n"\.join)'
    late = re.sub(tells, r"\1import time; time.sleep(2)\n\1\2", text)
    assert late != text
    (script := tmp_path / "script.py").write_text(late)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, words in done.stdout) == (1, True), done
