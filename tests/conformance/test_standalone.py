"""Standalone scripts run without gradparity, and show the same failures."""

import ast
import inspect
import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gradparity.conformance import Scenario
from gradparity.conformance.__main__ import main
from gradparity.conformance.run.runner import Runner
from gradparity.conformance.script import scaled, template
from gradparity.conformance.script.bundle import Bundle
from gradparity.conformance.script.standalone import standalone_script
from gradparity.conformance.space.catalogue import Selection, select
from gradparity.conformance.status import UsageError
from gradparity.fixtures import OPTIMIZERS
from gradparity.tests.scripts import Scripts, alone

TORCH = "torch.amp:GradScaler"
OURS = "gradparity.scaler:GradScaler"
FAULTY = "gradparity.fixtures.faulty"
BAD = "inf@r1s1:up.weight"
BAD_EXPERT = "inf@r3s1:down.experts.weight/model=digits-experts,steps=3"
EXPERTS = f"fsdp+ep-local/4/fp32/adamw-groups/{BAD_EXPERT}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scaler", "scenario", "words"),
    [
        (TORCH, f"fsdp+tp/4/fp32/sgd/{BAD}/steps=3", "step 1: ranks disagree on"),
        (OURS, "tp+sp/2/fp32/sgd/none/model=text,steps=2", "no violation\n"),
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
        (
            f"{FAULTY}:NeverAgrees",
            "fsdp/2/fp32/sgd/inf@r0s1:first/steps=3,recipe=primed",
            "ranks disagree",
        ),
        (f"{FAULTY}:NeverAgrees", f"fsdp/2/fp32/sgd/{BAD}/steps=3", "ranks disagree"),
        (
            f"{FAULTY}:ForgetsToUnscale",
            "ddp/2/fp32/sgd/none/steps=1",
            "gradient of up.weight: relative error 1e+03; reference: one process in",
        ),
        (TORCH, EXPERTS, "{0: True, 1: False, 2: True, 3: False}"),
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
            "ddp/2/fp32/adagrad/nan@r1s1:loss[last]/model=digits-uneven,steps=3",
            "each rank stepped or not: {0: True, 1: True}",
        ),
        (
            f"{FAULTY}:UnscalesSlightlyOff",
            "fsdp/2/fp32/adam/none/steps=2,recipe=unscale,loss-factor=1073741824",
            "relative error 0.001; reference: one process in fp64",
        ),
        (
            f"{FAULTY}:KeepsTheTrackerOnGrowth",
            "single/1/fp32/sgd/none/steps=3",
            "growth tracker (2048.0, 3), the rule says (2048.0, 0)",
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
        "hsdp/4/fp16-params/adamw-fused/none/steps=3,scale=67108864",
        "ddp/2/fp16-autocast/sgd/nan@r0s1:last/recipe=accumulate,steps=3",
        "fsdp1/2/fp16-params/adagrad/none/steps=12,scale=67108864,interval=2,"
        "recipe=accumulate-no-sync",
        "fsdp+ep/4/fp32/adam/inf@r3s1:loss/model=digits-experts,steps=3,recipe=clip-norm",
        EXPERTS,
        "fsdp+plain/2/fp32/adamw-groups/nan@r0s1:last[last]/steps=3,recipe=unscale",
        "tp/2/fp32/adamw/none/model=text-tied,steps=3",
        "tp+sp/4/fp16-autocast/adam/nan@r*s0:middle/model=text,steps=3",
        "fsdp/3/fp32/adagrad/none/model=digits-uneven,steps=3",
        "fsdp+tp/4/fp32/sgd-momentum/none/steps=4,recipe=primed",
        "ep/2/fp32/adamw-groups/inf@r1s2:loss/model=digits-experts,steps=4",
        "single/1/fp32/adamw/nan@r0s*:first/steps=30,scale=7.888609052210118e-31",
    ],
)
def test_a_right_scaler_passes(scripts: Scripts, scenario: str) -> None:
    assert scripts(OURS, scenario) == (0, "no violation\n")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_those_of_the_fixtures(tmp_path: Path, name: str) -> None:
    script = executed(tmp_path, f"single/1/fp32/{name}/none")
    named = [(n, torch.nn.Parameter(torch.ones(2))) for n in ("up.weight", "up.bias")]
    made = script["WORKLOAD"].optimizer(named)
    wanted = OPTIMIZERS[name](named)
    assert type(made) is type(wanted)
    assert [{**group, "params": 0} for group in made.param_groups] == [
        {**group, "params": 0} for group in wanted.param_groups
    ]


def executed(folder: Path, scenario: str) -> dict[str, Any]:
    """Return the global names of a script that is imported, not run as a program."""
    (folder / "s.py").write_text(standalone_script(Scenario.parse(scenario), OURS))
    with warnings.catch_warnings():
        return runpy.run_path(str(folder / "s.py"), run_name="s")


def test_the_template_is_short_and_whole_in_every_script() -> None:
    """Each script contains the definitions of the template unchanged."""
    ours = Path(inspect.getfile(template)).read_text()
    assert len(ours.splitlines()) <= 320
    scenario = Scenario.parse("ddp/2/fp32/sgd/none")
    for spec, modules in ((TORCH, (template, scaled)), ("none", (template,))):
        text = standalone_script(scenario, spec)
        for module in modules:
            for name, found in definitions(inspect.getsource(module)):
                assert f"\n\n{found}\n" in text, name


def definitions(source: str) -> Iterator[tuple[str, str]]:
    """Yield name and source of each function and class, without ``type: ignore``."""
    lines = [line.partition("  # type: ignore")[0] for line in source.splitlines()]
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min(n.lineno for n in (node, *node.decorator_list))
            yield node.name, "\n".join(lines[first - 1 : node.end_lineno])


def test_a_script_holds_what_it_needs_and_no_more() -> None:
    text = standalone_script(Scenario.parse("ddp/2/fp32/sgd/none"), TORCH)
    tree = ast.parse(text)
    made = {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    }
    assert {"ddp", "micro_batches", "train", "DigitsMLP"} <= made
    assert made <= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert not made & {"placed", "halves", "fsdp", "TransformerLM"}


@pytest.mark.parametrize(
    "recipe",
    [
        "resume",
        "resume-resharded",
        "two-losses",
        "two-optimizers",
        "manual-scale",
        "disabled",
        "frozen",
        "scheduler",
        "compiled",
        "recompute",
        "clip-value",
    ],
)
def test_a_recipe_with_a_loop_of_its_own_has_no_script(recipe: str) -> None:
    scenario = Scenario.parse(f"single/1/fp32/sgd/none/steps=4,recipe={recipe}")
    with pytest.raises(ValueError, match=f"for recipe '{recipe}', which needs"):
        standalone_script(scenario, TORCH)


@pytest.mark.slow
def test_every_failure_of_the_parity_preset_is_shown(
    scripts: Scripts, tmp_path: Path
) -> None:
    """The script finds faults of torch's class, and no false positives.

    Runs every second scenario of four topologies: a script takes two seconds of a core.
    """
    topologies = ["single", "fsdp", "tp", "fsdp+tp"]
    chosen = select("parity", Selection(topologies=topologies))[::2]
    with Runner(folder=str(tmp_path)) as runner:
        statuses = {each.id: runner.run(TORCH, each).status for each in chosen}
    failed = {text for text, status in statuses.items() if status == "fail"}
    assert len(failed) >= 5 and len(failed) < len(statuses)
    wrong = {
        text: output
        for text in statuses
        for code, output in [scripts(TORCH, text)]
        if code != int(text in failed)
    }
    assert not wrong


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
def test_every_scenario_has_a_script_or_a_recipe_that_has_none() -> None:
    """The script of each scenario compiles, or the recipe has no script."""
    made = 0
    for scenario in select("default", Selection()):
        try:
            made += scenario.id in standalone_script(scenario, TORCH)
        except UsageError as error:
            assert re.search("recipe|a pipeline needs", str(error))
    assert made > 100


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
    text = standalone_script(Scenario.parse(scenario), TORCH)
    assert (tmp_path / "s.py").read_text() == text
    assert main(["replay", scenario, "--scaler", TORCH, "--script", "s.py"]) == 0


@pytest.mark.parametrize("command", ["replay", "hunt"])
def test_a_script_replaces_only_a_script(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    """It would have been the workload's own module."""
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "mine.py"
    own.write_text("class Stack: ...\n")
    words = ["single/1/fp32/sgd/none/steps=1"] if command == "replay" else []
    assert main([command, *words, "--scaler", TORCH, "--script", "mine.py"]) == 2
    assert "mine.py exists, and is no script of gradparity" in capsys.readouterr().err
    assert own.read_text() == "class Stack: ...\n"
    there = ["--scaler", TORCH, "--script", "elsewhere/torch.py"]
    assert main([command, *words, *there]) == 2
    assert "would hide torch, which it imports" in capsys.readouterr().err


@pytest.mark.parametrize("time", ["60", "0s", "-1m", "s", "infh", "nans", "1d"])
def test_a_budget_has_a_unit(time: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hunt", f"--budget={time}"]) == 2
    assert "is not a positive time such as 60s" in capsys.readouterr().err


@pytest.mark.usefixtures("counted_budget")
@pytest.mark.slow
def test_each_scaler_is_hunted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(
        [
            "hunt",
            "--budget",
            "12s",
            "--topology",
            "single",
            "--precision",
            "fp32",
            "--model",
            "digits",
            "--scaler",
            f"{FAULTY}:PlainScaler",
            "--scaler",
            f"{FAULTY}:ForgetsToUnscale",
        ]
    )
    output = capsys.readouterr().out
    assert code == 1, output
    assert "tried with gradparity.fixtures.faulty:PlainScaler" in output
    assert "script: failure-2.py" in output.replace("\n", "")
    assert not (tmp_path / "failure.py").exists()
    compile((tmp_path / "failure-2.py").read_text(), "failure-2.py", "exec")


def test_what_no_script_can_hold_is_an_error_of_the_script_alone() -> None:
    # regression: O15, an assert ended the run
    with pytest.raises(UsageError, match=r"no script: .* renames COMMANDS"):
        Bundle().need("gradparity.conformance.__main__", "GROUP")
