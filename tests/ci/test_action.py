"""The GitHub action: its schema, inputs from the templates, and its real steps."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import gradparity
from gradparity.ci.gate import main
from gradparity.ci.reasons import Outcome
from gradparity.conformance.status import USAGE
from gradparity.tests.ci.test_templates import TEMPLATES
from gradparity.tests.json_schemas import lint

ROOT = Path(gradparity.__file__).parent
ACTION = ROOT / "action.yml"
SCHEMA = "vendor.github-actions"
EXAMPLE = (ROOT / "examples" / "workload.py").read_text()
# as docs/start.md breaks it: no gradient is averaged over the ranks of "dp"
BROKEN = EXAMPLE.replace(
    "        fully_shard(",
    '        if mesh["dp"].size() < 2:\n            fully_shard(',
)
SMALL = "--topology dp2 --precision fp32"


def read(file: Path) -> Any:
    return YAML(typ="safe", pure=True).load(file)


def test_the_action_keeps_its_schema(tmp_path: Path) -> None:
    assert lint(ACTION, SCHEMA) == (0, "")
    broken = tmp_path / "action.yml"
    broken.write_text(ACTION.read_text().replace("using: composite", "using: nothing"))
    assert lint(broken, SCHEMA)[0] == 1


def test_inputs_reach_the_shell_as_variables_only() -> None:
    """An input that is pasted into a script could begin another command."""
    action = read(ACTION)
    given = {f"${{{{ inputs.{name} }}}}" for name in action["inputs"]}
    used: set[str] = set()
    for step in action["runs"]["steps"]:
        assert "${{" not in step.get("run", "")
        used |= set(step.get("env", {}).values())
    assert used == given


def test_the_template_hands_over_inputs_that_there_are() -> None:
    inputs = set(read(ACTION)["inputs"])
    workflow = read(TEMPLATES / "github-actions.yml")
    jobs = workflow["jobs"].values()
    uses = [
        step["with"]
        for job in jobs
        for step in job["steps"]
        if "/gradparity@" in step.get("uses", "")
    ]
    assert len(uses) == 2
    assert set().union(*uses) == inputs
    names = [
        row["name"] for row in workflow["jobs"]["cpu"]["strategy"]["matrix"]["include"]
    ]
    assert names == ["scaler", "stack"]


def run_action(
    tree: Path, folder: Path, site: Path, **inputs: str
) -> tuple[dict[str, int], str]:
    """Run the steps as a runner does; return exit codes by name, and the output."""
    action = read(tree / "action.yml")
    values = {name: how["default"] for name, how in action["inputs"].items()} | inputs
    path = os.pathsep.join(
        [str(site / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    runner = {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(site),
        "OMP_NUM_THREADS": "1",
        "GITHUB_ACTION_PATH": str(tree),
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
        # into a folder, and with nothing from a registry: what it needs is here
        "PIP_TARGET": str(site),
        "PIP_UPGRADE": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",
    }
    codes: dict[str, int] = {}
    told = ""
    for step in action["runs"]["steps"]:
        if not wanted(step.get("if", "success()"), codes, folder):
            continue
        assert step["shell"] == "bash"
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=folder,
            env=runner | {k: filled(v, values) for k, v in step.get("env", {}).items()},
            capture_output=True,
            text=True,
        )
        codes[step["name"]] = done.returncode
        told += done.stdout + done.stderr
    return codes, told


def asked(folder: Path, options: str, **variables: str) -> list[str]:
    """Return the arguments of each command that the step *Gate* starts."""
    (gate,) = (s for s in read(ACTION)["runs"]["steps"] if s["name"] == "Gate")
    command = folder / "gradparity"
    command.write_text('#!/bin/sh\necho "asked $*"\n')
    command.chmod(0o755)
    variables = {name: "" for name in gate["env"]} | variables
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", gate["run"]],
        cwd=folder,
        env={
            "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
            "GITHUB_ACTION_PATH": str(ROOT),
            **variables,
            "OPTIONS": options,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    return [line.removeprefix("asked ") for line in lines]


def test_options_on_several_lines_all_count(tmp_path: Path) -> None:
    run, _ = asked(tmp_path, "--topology dp2\n--precision fp32\n", PRESET="full")
    assert " --preset full --topology dp2 --precision fp32 " in run


def test_a_baseline_that_is_a_lost_link_is_not_left_out(tmp_path: Path) -> None:
    baseline = tmp_path / "gradparity-baseline.jsonl"
    assert not any("--baseline" in line for line in asked(tmp_path, ""))
    baseline.symlink_to("none")
    assert asked(tmp_path, "")[1].endswith(f" --baseline {baseline.name}")


def filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: values[found[1]], text)


def wanted(condition: str, codes: Mapping[str, int], folder: Path) -> bool:
    if condition == "success()":
        return not any(codes.values())
    found = re.fullmatch(r"always\(\) && hashFiles\('([^']+)'\) != ''", condition)
    assert found, condition
    return (folder / found[1]).is_file()


@pytest.mark.slow
def test_a_stack_is_gated_by_the_action(site: Path, tmp_path: Path) -> None:
    tree, folder = site.parent / "gradparity", tmp_path / "project"
    installed = tmp_path / "installed"
    folder.mkdir()
    inputs = {"workload": "mine:Stack", "options": SMALL}

    (folder / "mine.py").write_text(EXAMPLE)
    codes, told = run_action(tree, folder, installed, **inputs)
    assert set(codes.values()) == {0}, told
    assert (installed / "gradparity" / "conformance").is_dir()
    report = folder / "parity-report" / "report.jsonl"
    baseline = folder / "gradparity-baseline.jsonl"
    update = ["--baseline", str(baseline), "--update-baseline", "--yes"]
    assert main([str(report), *update]) == 0

    (folder / "mine.py").write_text(BROKEN)
    codes, told = run_action(tree, folder, installed, **inputs)
    assert codes == {
        "Install gradparity": 0,
        "Gate": Outcome.FAIL.value,
        "Summary, annotations and JUnit": 0,
    }, told
    assert "agreement.replicas skipped -> fail in dp2/" in told
    assert "::error" in told
    assert "agreement.replicas" in (folder / "summary.md").read_text()
    assert "<failure" in (folder / "parity-report" / "junit.xml").read_text()

    hostile = {"workload": "mine:Stack; touch hacked", "scaler": "$(touch hacked)"}
    codes, told = run_action(tree, folder, installed, **hostile)
    assert codes["Gate"] == USAGE, told
    assert not (folder / "hacked").exists()
