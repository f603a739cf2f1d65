"""The wheel has all files for users, and no tools for work on gradparity itself."""

import ast
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradparity

ROOT = Path(gradparity.__file__).parent
ROOMS = ("scaler", "multiprocess", "fixtures", "conformance", "ci")
MODULES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]

SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
IN_NO_WHEEL = {"fixtures/faulty", "fixtures/specimens"}
"""Packages of the rooms that only tests and benchmarks use."""
PACKAGES = {
    name.removeprefix("gradparity").removeprefix(".").replace(".", "/") or "."
    for name in SETTINGS["packages"]
}
DATA = {
    "py.typed",
    "ci/templates/gate.sh",
    "ci/templates/github-actions.yml",
    "ci/templates/gitlab-ci.yml",
    "ci/templates/stack-github.yml.jinja",
    "ci/templates/stack-gitlab.yml.jinja",
    "conformance/draft/workload.py.jinja",
    "conformance/report.schema.json",
    "fixtures/data/LICENSE.digits",
    "fixtures/data/README.md",
    "fixtures/data/digits.csv.gz",
    "multiprocess/__init__.pyi",
}
"""Files of the wheel that are neither Python nor templates of a page."""


def package_of(module: Path) -> str:
    return str(module.relative_to(ROOT).parent)


def packages_of_imports(module: Path) -> Iterator[str]:
    """Return our packages that ``module`` imports, or from which it imports."""
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            home = module.parents[node.level - 1]
            home = home.joinpath(*(node.module or "").split("."))
            for found in (home, *(home / alias.name for alias in node.names)):
                if found.is_dir() and found != ROOT:
                    yield str(found.relative_to(ROOT))
                elif found.with_suffix(".py").is_file():
                    yield package_of(found)


def test_the_list_of_packages_is_whole() -> None:
    rooms = {package_of(path) for path in MODULES}
    assert PACKAGES == (rooms | {"."}) - IN_NO_WHEEL


def test_nothing_in_the_wheel_imports_what_it_lacks() -> None:
    words = {"tests", "benchmarks", *(name.split("/")[-1] for name in IN_NO_WHEEL)}
    lacking = {
        f"{module.relative_to(ROOT)} imports {name}"
        for module in MODULES
        if package_of(module) in PACKAGES
        and any(word in module.read_text(encoding="utf-8") for word in words)
        for name in packages_of_imports(module)
        if name not in PACKAGES
    }
    assert not lacking


def test_an_import_of_a_package_is_seen() -> None:
    found = {*packages_of_imports(ROOT / "conformance" / "run" / "runner.py")}
    assert {
        "fixtures",
        "conformance/comparison",
        "conformance/comparison/laws",
    } <= found


def test_the_wheel_holds_the_packages_and_no_more(site: Path) -> None:
    root = site / "gradparity"
    files = {
        path.relative_to(root)
        for path in root.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    code = {path for path in files if path.suffix == ".py"}
    pages = {path for path in files if path.suffix in (".j2", ".css")}
    assert {str(path.parent) for path in code} == PACKAGES
    assert {str(path) for path in files - code - pages} == DATA
    assert {path.parts[0] for path in pages} == {"conformance"}


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--help"], 0), (["mutants"], 2), (["survey", "--plan", "tp"], 2)],
)
def test_tools_are_not_listed_and_say_where_they_are(
    site: Path, tmp_path: Path, arguments: list[str], code: int
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gradparity.conformance", *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    if code:
        assert done.stderr.count("\n") == 1 and "in a checkout" in done.stderr
    else:
        assert "gate" in done.stdout
        assert not {"mutants", "bench", "laws", "survey"} & {*done.stdout.split()}
