"""The findings of docs/wild: each script is what it says, and pages show the record."""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gradparity.benchmarks.wild import (
    BESIDE,
    PACKAGES,
    PAGES,
    README,
    RECORDS,
    SURVEYED,
    package_of,
    told_by_page,
    write_pages,
)

SCRIPTS = sorted(PAGES.glob("*.py"))
OWN = [script for script in SCRIPTS if not script.stem.startswith(SURVEYED)]
LINES = 80
KEYS = {
    "id", "package", "version", "what", "parameter", "relative_error", "reference",
    "where", "thread", "script", "date", "command",
}  # fmt: skip


def named(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


def imported(tree: ast.Module) -> set[str]:
    found = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    found |= {
        node.module or "."
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    }
    return {name.split(".")[0] for name in found}


def test_a_finding_is_a_script_a_page_and_a_record() -> None:
    for folder, ending in ((PAGES, "md"), (RECORDS, "json")):
        found = {p.stem for p in folder.glob(f"*.{ending}")} - {"README"}
        assert {n for n in found if not n.startswith(SURVEYED)} == set(named(OWN))
    assert len({package_of(script.stem) for script in OWN}) >= 3


@pytest.mark.parametrize("script", SCRIPTS, ids=named(SCRIPTS))
def test_a_script_is_short_and_needs_torch_and_the_package_alone(script: Path) -> None:
    source = script.read_text()
    tree = ast.parse(source)
    assert len(source.splitlines()) <= LINES
    package = package_of(script.stem)
    allowed = {"torch", PACKAGES[package], *BESIDE.get(package, ())}
    assert imported(tree) <= allowed | sys.stdlib_module_names


@pytest.mark.parametrize("script", OWN, ids=named(OWN))
def test_the_record_of_each_script_is_a_bug_and_equals_its_page(script: Path) -> None:
    record = json.loads((RECORDS / f"{script.stem}.json").read_text())
    told = told_by_page(script.with_suffix(".md"))
    assert record["id"] == script.stem
    assert record["package"] == package_of(script.stem)
    assert {key: record[key] for key in told} == told
    assert all(record[key] for key in KEYS)
    assert record["verdict"] == "bug"
    assert PAGES.parents[1] / record["script"] == script


def test_the_pages_show_the_record(tmp_path: Path) -> None:
    shutil.copytree(PAGES, tmp_path / "wild")
    write_pages(tmp_path / "wild" / README.name, RECORDS)
    for page in PAGES.glob("*.md"):
        assert (tmp_path / "wild" / page.name).read_text() == page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch-norm-sum", "megatron-core-label-smoothing"])
def test_a_script_shows_its_bug(name: str) -> None:
    script = PAGES / f"{name}.py"
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout.splitlines()[-1] == "verdict: bug"
