"""Standalone scripts run without us, and show what the catalogue shows."""

import ast
import inspect
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from gradparity.conformance import Scenario
from gradparity.conformance.__main__ import main
from gradparity.conformance.script.runtime import scaler
from gradparity.conformance.script.runtime.resharding import Resharded
from gradparity.conformance.script.standalone import standalone_script
from gradparity.conformance.space.catalogue import Selection, select
from gradparity.fixtures import OPTIMIZERS
from gradparity.tests.script_server import Scripts, alone

TORCH = "torch.amp:GradScaler"
OURS = "gradparity.scaler:GradScaler"
FAULTY = "gradparity.fixtures.faulty"
BAD = "inf@r1s1:up.weight"
TWO = "ddp/2/fp32/sgd/inf@r1s1:up.bias;nan@r0s2:up.weight/steps=4,recipe=two-optimizers"

BAD_EXPERT = "inf@r3s1:down.experts.weight/model=digits-experts,steps=3"
OWN_EXPERTS = f"fsdp+ep-local/4/fp32/sgd/{BAD_EXPERT},recipe=two-optimizers"
EXPERTS_FIRST = f"fsdp+ep-local/4/fp32/adamw-groups/{BAD_EXPERT}"


MOVED = "recipe=resume-resharded,interval=4,steps=4"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scaler", "scenario", "words"),
    [
        (TORCH, f"fsdp+tp/4/fp32/sgd/{BAD}/steps=3", "step 1: ranks disagree on"),
        (OURS, "tp+sp/2/fp32/sgd/none/model=text,steps=2", "no violation\n"),
        (OURS, f"pp/2/fp32/adamw/none/{MOVED}", "no violation\n"),
    ],
)
def test_a_script_needs_nothing_of_the_tests(
    tmp_path: Path, scaler: str, scenario: str, words: str
) -> None:
    code, output = alone(tmp_path, scaler, scenario)
    assert code == int(scaler == TORCH)
    assert words in output


@pytest.mark.parametrize(
    ("scaler", "scenario", "words"),
    [
        (TORCH, "tp/2/fp32/sgd/none/steps=2", "got mixed torch.Tensor"),
        (TORCH, "pp/2/fp32/sgd/none/steps=2", "_scale is None"),
        (
            TORCH,
            "pp/2/fp32/sgd/inf@r0s1:first/steps=3,recipe=primed",
            "ranks disagree",
        ),
        (f"{FAULTY}:NeverAgrees", f"fsdp/2/fp32/sgd/{BAD}/steps=3", "ranks disagree"),
        (
            f"{FAULTY}:ForgetsToUnscale",
            "ddp/2/fp32/sgd/none/steps=1",
            "gradient / scale is wrong",
        ),
        (TORCH, OWN_EXPERTS, "{0: True, 1: False, 2: True, 3: False}"),
        (TORCH, EXPERTS_FIRST, "{0: True, 1: False, 2: True, 3: False}"),
        (TORCH, "ep/2/fp32/adam/none/model=digits-experts,steps=2", "got mixed torch"),
        (
            TORCH,
            "fsdp+tp/4/fp32/sgd-momentum/nan@r0s*:up.weight/steps=3,param-order=reversed",
            "ranks disagree",
        ),
        (
            f"{FAULTY}:NeverAgrees",
            "fsdp1/2/fp32/adamw-groups/-inf@r1s1:middle[last]/steps=3,param-order=vectors-first",
            "each rank stepped or not: {0: True, 1: False}",
        ),
        (
            f"{FAULTY}:NeverSkips",
            "pp/2/fp32/adagrad/nan@r1s1:loss[last]/model=digits-uneven,steps=3",
            "each rank stepped or not: {0: True, 1: True}",
        ),
        (f"{FAULTY}:LooksAtFirstOptimizerOnly", TWO, "{0: True, 1: True}"),
        (
            f"{FAULTY}:IgnoresManualScale",
            "single/1/fp32/sgd/none/steps=4,recipe=manual-scale",
            "step 2: rank 0: scale 1024.0, the rule says 64.0",
        ),
        (
            f"{FAULTY}:WorksThoughDisabled",
            "single/1/fp32/sgd/none/steps=4,recipe=disabled",
            "the rule says",
        ),
        (
            f"{FAULTY}:UnscalesSlightlyOff",
            "fsdp/2/fp32/adam/none/steps=2,recipe=clip-norm,loss-factor=1073741824",
            "gradient / scale is wrong",
        ),
        (
            f"{FAULTY}:SavesATrackerForEachRank",
            f"fsdp/4/fp32/sgd/none/{MOVED}",
            "step 2: rank 3 raised IndexError: list index out of range",
        ),
        (
            f"{FAULTY}:SharesItsScaleAmongRanks",
            f"pp/2/fp32/sgd/none/{MOVED}",
            "step 2: rank 1: starts with (scale, growth tracker) (512.0, 2), "
            "(1024.0, 2) was left",
        ),
        (
            f"{FAULTY}:ForgetsOnAnotherWorld",
            f"single/1/fp32/adam/none/{MOVED}",
            "step 2: rank 0: starts with (scale, growth tracker) (1024.0, 0)",
        ),
        (
            f"{FAULTY}:SavesStaleTracker",
            f"ddp/4/fp32/sgd/none/{MOVED}",
            "step 3: rank 0: scale 1024.0, the rule says 2048.0",
        ),
        (
            f"{FAULTY}:NeverAgrees",
            f"fsdp/4/fp32/sgd/inf@r3s1:up.weight/{MOVED}",
            "step 1: ranks disagree",
        ),
        (
            TORCH,
            f"fsdp+tp/4/fp32/sgd/inf@r3s2:up.weight/{MOVED}",
            "step 2: ranks disagree",
        ),
        (
            f"{FAULTY}:KeepsTheTrackerOnGrowth",
            "single/1/fp32/sgd/none/steps=3",
            "step 2: rank 0: tracker 3, the rule says 0",
        ),
    ],
)
def test_a_failure_is_shown(
    scripts: Scripts, scaler: str, scenario: str, words: str
) -> None:
    code, output = scripts(scaler, scenario)
    assert code == 1, output
    assert words in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "scenario",
    [
        f"fsdp+tp/4/fp32/sgd/{BAD}/steps=4",
        f"tp/2/fp32/adamw/{BAD}/steps=3",
        "pp/2/fp32/sgd/nan@r0s1:last/steps=3",
        "hsdp/4/fp16-params/adamw-fused/none/steps=3,scale=67108864",
        "ddp/2/fp16-autocast/sgd/nan@r0s1:last/recipe=accumulate,steps=3",
        "pp+fsdp/4/fp32/sgd/none/steps=2,recipe=clip-value",
        "fsdp/2/fp32/adamw/none/steps=4,recipe=resume",
        TWO,
        "fsdp1/2/fp16-params/adagrad/none/steps=12,scale=67108864,interval=2,"
        "recipe=accumulate-no-sync",
        "fsdp+ep/4/fp32/adam/inf@r3s1:loss/model=digits-experts,steps=3,recipe=clip-norm",
        OWN_EXPERTS,
        EXPERTS_FIRST,
        "fsdp+plain/2/fp32/adamw-groups/nan@r0s1:last[last]/steps=3,recipe=frozen",
        "tp/2/fp32/adamw/none/model=text-tied,steps=3,recipe=two-losses",
        "fsdp/2/fp32/sgd/nan@r0s1:last/steps=3,recipe=recompute",
        "single/1/fp32/adamw/nan@r0s*:first/steps=150",
        f"fsdp1/4/fp32/adamw/inf@r3s2:last/{MOVED}",
        f"fsdp/3/fp32/adagrad/none/model=digits-uneven,{MOVED}",
        f"fsdp+tp/4/fp32/sgd-momentum/none/{MOVED}",
        f"tp+sp/4/fp16-autocast/adam/nan@r*s0:middle/model=text,{MOVED}",
        f"fsdp+ep/4/fp16-params/adamw/none/model=digits-experts,{MOVED}",
        f"ep/2/fp32/adamw-groups/inf@r1s2:loss/model=digits-experts,{MOVED}",
        f"pp+fsdp/4/fp32/adamw-fused/nan@r3s3:last/{MOVED}",
    ],
)
def test_a_right_scaler_passes(scripts: Scripts, scenario: str) -> None:
    assert scripts(OURS, scenario) == (0, "no violation\n")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_those_of_the_fixtures(tmp_path: Path, name: str) -> None:
    script = executed(tmp_path, f"single/1/fp32/{name}/none")
    named = [(n, torch.nn.Parameter(torch.ones(2))) for n in ("up.weight", "up.bias")]
    made = script["STACK"].workload.optimizer(named)
    wanted = OPTIMIZERS[name](named)
    assert type(made) is type(wanted)
    assert [{**group, "params": 0} for group in made.param_groups] == [
        {**group, "params": 0} for group in wanted.param_groups
    ]


def executed(folder: Path, scenario: str) -> dict[str, Any]:
    """The names of a script that is imported, not run."""
    (folder / "s.py").write_text(standalone_script(Scenario.parse(scenario), OURS))
    with warnings.catch_warnings():
        return runpy.run_path(str(folder / "s.py"), run_name="s")


def test_a_script_holds_what_it_needs_of_our_modules_and_no_more() -> None:
    text = standalone_script(Scenario.parse("ddp/2/fp32/sgd/none"), TORCH)
    tree = ast.parse(text)
    functions = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    assert {"ddp", "one_pass", "train_on_ranks", "rule"} <= functions
    assert functions <= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    attributes = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    assert {"init_scale", "order"} <= attributes
    assert not attributes & {"primed", "reshard", "faults", "clip"}


@pytest.mark.parametrize("name", ["train", "violations"])
def test_a_script_of_all_that_is_set_is_our_function_without_types(name: str) -> None:
    text = "ddp/2/fp32/sgd/inf@r0s1:loss/recipe=resume-resharded,steps=4"
    text = standalone_script(Scenario.parse(text), OURS)
    (found,) = (n for n in ast.parse(text).body if getattr(n, "name", "") == name)
    for node in ast.walk(found):
        assert getattr(node, "annotation", None) is None
        assert getattr(node, "returns", None) is None
    source = inspect.getsource(getattr(scaler, name)).splitlines()
    lines = {line.partition("  # type: ignore")[0].strip() for line in source}
    lines |= {re.sub(r"^(\w+): .* = ", r"\1 = ", line) for line in lines}
    mine = [line.strip() for line in ast.get_source_segment(text, found).splitlines()]  # type: ignore[union-attr]  # it is there
    assert [x for x in mine if x not in lines and not x.startswith("def ")] == []
    assert len(mine) > 30


def test_saved_state_is_resharded_bitwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _trained(torch.arange(5.0))
    for rank, places in enumerate(([4, 0, 2], [1, 2, 3])):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        where = {"w": torch.tensor(places)}
        part = _trained(where["w"].float())
        Resharded(tmp_path, *part, where).save({"rank": rank})
    for places in ([0, 1, 2, 3, 4], [3], [1, 0]):
        where = {"w": torch.tensor(places)}
        part = _trained(torch.zeros(len(places)), steps=0)
        assert Resharded(tmp_path, *part, where).load() == {"rank": 0}
        mine, wanted = (_held(*trained) for trained in (part, whole))
        assert mine.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(mine[key], value[places] if value.ndim else value), key


Trained = tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]


def _trained(values: torch.Tensor, steps: int = 2) -> Trained:
    weight = torch.nn.Parameter(values.clone())
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    for _ in range(steps):
        weight.grad = weight.detach() + 0.3
        optimizer.step()
    return {"w": weight}, optimizer


def _held(
    params: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    return {"": params["w"].detach(), **optimizer.state[params["w"]]}


def test_only_torch_is_imported() -> None:
    text = standalone_script(Scenario.parse(f"tp/2/fp32/sgd/{BAD}"), TORCH)
    names = {
        name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        for name in (
            [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert names - set(sys.stdlib_module_names) == {"torch"}


def test_a_scaler_without_a_standalone_script_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="no standalone script for scaler 'a b:c'"):
        standalone_script(Scenario.parse("single/1/fp32/sgd/none"), "a b:c")


@pytest.mark.slow
def test_every_scenario_has_a_script() -> None:
    """``standalone_script`` compiles what it returns."""
    for scenario in select("default", Selection()):
        if scenario.recipe == "clip-and-step":  # no scaler of torch's has the call
            continue
        assert scenario.id in standalone_script(scenario, TORCH)


def test_a_script_is_of_one_scaler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["replay", "single/1/fp32/sgd/none/steps=1", "--script", "s.py"]
    assert main([*arguments, "--scaler", TORCH, "--scaler", OURS]) == 2
    assert "--script shows one scaler" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_replay_writes_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scenario = "single/1/fp32/sgd/none/steps=1"
    assert main(["replay", scenario, "--scaler", TORCH, "--script", "s.py"]) == 0
    assert (tmp_path / "s.py").read_text() == standalone_script(
        Scenario.parse(scenario), TORCH
    )


@pytest.mark.parametrize("time", ["60", "0s", "-1m", "s", "infh", "nans", "1d"])
def test_a_budget_has_a_unit(time: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hunt", f"--budget={time}"]) == 2
    assert "is no positive time such as 60s" in capsys.readouterr().err


def test_each_scaler_is_hunted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(
        ["hunt", "--budget", "3s", "--topology", "single", "--precision", "fp32",
         "--model", "digits", "--scaler", f"{FAULTY}:PlainScaler",
         "--scaler", f"{FAULTY}:ForgetsToUnscale"]
    )  # fmt: skip
    output = capsys.readouterr().out
    assert code == 1, output
    assert "tried with gradparity.fixtures.faulty:PlainScaler" in output
    assert "script: violation-2.py" in output.replace("\n", "")
    assert not (tmp_path / "violation.py").exists()
    compile((tmp_path / "violation-2.py").read_text(), "violation-2.py", "exec")
