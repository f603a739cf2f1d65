"""The lowest pytest that pyproject.toml allows runs the plugin's own tests."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
TESTS = Path("tests", "multiprocess")
CHOSEN = "passing_tests or failing_tests or wrong_marker or conftest or hypothesis"


def lowest() -> str:
    """Return the lower bound of a package in the extra of the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = map(Requirement, project["optional-dependencies"]["test"])
    (bound,) = next(r for r in extras if r.name == "pytest").specifier
    assert bound.operator == ">="
    return bound.version


# regression: M4
@pytest.mark.slow
def test_the_lowest_pytest_runs_the_plugins_tests(tmp_path: Path) -> None:
    version = lowest()
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    # Beside the packages of this environment, before them on the path.
    only = ["--no-deps", "--target", str(tmp_path), f"pytest=={version}"]
    subprocess.run([*pip, "install", *only], check=True)
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ask = [sys.executable, "-c", "import pytest; print(pytest.__version__)"]
    used = subprocess.check_output(ask, env=env, text=True)
    assert Version(used) == Version(version)
    done = subprocess.run(
        [*command, "-k", CHOSEN, str(TESTS / "test_pytest_plugin.py")],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Some pass, none is skipped.
    assert re.search(r"^\d+ passed, \d+ deselected in", done.stdout, re.M), done.stdout
