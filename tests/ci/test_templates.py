"""CI templates: the shell template runs from the wheel, as in another project."""

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import gradparity
from gradparity.ci.gate import main
from gradparity.ci.reasons import Outcome
from gradparity.conformance.report.records import read_report
from gradparity.tests.json_schemas import lint

ROOT = Path(gradparity.__file__).parent
TEMPLATES = ROOT / "ci" / "templates"
GOOD = """
from torch.amp import GradScaler


class Mine(GradScaler):
    def __init__(self, device="cpu", **settings):
        super().__init__(device, **settings)
"""
# never backs off: the scale after a bad step is the one before
BAD = GOOD + (
    "\n    def update(self, new_scale=None):\n"
    "        before = self.get_scale()\n"
    "        super().update(new_scale)\n"
    "        if self.get_scale() < before:\n"
    "            super().update(before)\n"
)
SMALL = ["--scenario", "single/1/fp32/sgd/inf@r0s1:last/steps=3"]


def gate(site: Path, folder: Path, *options: str, **settings: str) -> tuple[int, str]:
    """Run the wheel's template in ``folder``; return its exit code and output."""
    script = site / "gradparity" / "ci" / "templates" / "gate.sh"
    path = os.pathsep.join([str(site / "bin"), os.environ["PATH"]])
    variables = {"PATH": path, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", str(script), *options],
        cwd=folder,
        env={**os.environ, **variables, **settings},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_a_foreign_project_gates_its_own_scaler(site: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    code, told = gate(site, tmp_path, "mine:Mine", *SMALL)
    assert code == Outcome.PASS.value, told
    files = [str(tmp_path / "parity-report" / "report.jsonl"), "--baseline"]
    files += [str(tmp_path / "gradparity-baseline.jsonl")]
    assert main([*files, "--update-baseline", "--yes"]) == 0

    (tmp_path / "mine.py").write_text(BAD)
    code, told = gate(site, tmp_path, "mine:Mine", *SMALL)
    assert code == Outcome.FAIL.value, told
    cause = (
        r"worse \(1 case, \d+ consequences?\): scale\.rule pass -> fail in single/1/"
    )
    assert re.search(cause + r".*: step \d", told)
    assert (tmp_path / "parity-report" / "gate.json").is_file()
    assert (tmp_path / "parity-report" / "index.html").is_file()
    assert (site / "gradparity" / "conformance" / "report.schema.json").is_file()


@pytest.mark.slow
def test_the_command_that_runs_may_be_torchrun(site: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BAD)
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone"
    command = f"{torchrun} --nproc-per-node 1 -m gradparity.conformance run"
    run = [*SMALL, "--scenario", "ddp/2/fp32/sgd/none/steps=3"]
    code, told = gate(site, tmp_path, "mine:Mine", *run, GRADPARITY_RUN=command)
    assert code == Outcome.FAIL.value, told
    assert "needs 2 ranks, torchrun made 1 in ddp/2" in told
    assert re.search(r"failing: scale\.rule fails in single/1/", told), told
    report = read_report(tmp_path / "parity-report" / "report.jsonl")
    assert report.header.launcher.name == "torchrun"


@pytest.mark.slow
def test_a_command_that_cannot_start_leaves_no_pass(site: Path, tmp_path: Path) -> None:
    code, told = gate(site, tmp_path, "mine:Mine", *SMALL, GRADPARITY_RUN="no-such-run")
    assert code == Outcome.INVALID.value and "report.jsonl" in told


@pytest.mark.parametrize("options", [[], ["mine:Mine", "--topology", "none"]])
def test_bad_usage_of_the_script_exits_with_2(
    site: Path, tmp_path: Path, options: list[str]
) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    code, told = gate(site, tmp_path, *options)
    assert code == 2, told
    assert told.strip().count("\n") == 0


SCHEMAS = {
    "github-actions.yml": "vendor.github-workflows",
    "gitlab-ci.yml": "vendor.gitlab-ci",
}
"""Template -> name of its CI system's schema, which check-jsonschema contains."""


@pytest.mark.parametrize("name", SCHEMAS)
def test_templates_keep_the_schema_of_their_system(name: str, tmp_path: Path) -> None:
    assert lint(TEMPLATES / name, SCHEMAS[name]) == (0, "")
    broken = tmp_path / name
    text = (TEMPLATES / name).read_text()
    broken.write_text(
        re.sub(r"(runs-on|script): ?", r"\1: {no: 1}\nx: ", text, count=1)
    )
    assert lint(broken, SCHEMAS[name])[0] == 1


@pytest.mark.parametrize(
    ("file", "schema"),
    [
        (".github/workflows/ci.yml", "vendor.github-workflows"),
        (".github/workflows/release.yml", "vendor.github-workflows"),
        (".github/dependabot.yml", "vendor.dependabot"),
    ],
)
def test_files_of_this_repository_keep_their_schema(file: str, schema: str) -> None:
    assert lint(ROOT / file, schema) == (0, "")


@pytest.mark.parametrize("name", SCHEMAS)
def test_templates_name_only_what_there_is(name: str) -> None:
    text = (TEMPLATES / name).read_text()
    assert "\t" not in text
    formats = {entry.name for entry in entry_points(group="gradparity.formats")}
    used = re.findall(r"gradparity report \S+ --(\w+)", text)
    assert used and set(used) <= formats
    for command in ("gradparity run", "gradparity gate", "gradparity hunt"):
        assert command in text
    assert re.search(r"sh ci/gate\.sh|uses: OWNER/gradparity@", text)
    assert "mypackage.stack:Workload" in text  # a gate for a workload, too
