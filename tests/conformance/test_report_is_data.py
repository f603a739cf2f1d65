"""A report is data: showing, comparing and gating it imports nothing that it names."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from gradparity.conformance.report.records import CaseRecord
from gradparity.tests.conformance.test_report import case, write

HEAVY = ("torch", "numpy", "hypothesis")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder in which torch cannot be imported, nor a module that reports name."""
    for name in (*HEAVY, "setup_evil"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('imported {name}')\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gradparity.conformance", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "400"},
    )


def evil(status: str) -> CaseRecord:
    """A case whose scenario and scaler name a class of the current folder."""
    made = case("setup_evil:Scaler", status)
    assert made.curves is not None
    sound = msgspec.structs.replace(
        made.curves, scale=[[2.0, 2.0, 4.0]] * 2, stepped=[[True, None, True]] * 2
    )
    return msgspec.structs.replace(
        made,
        curves=sound,
        scenario="dp/2/fp32/own/none/model=setup_evil:Workload",
        topology="dp",
        model="setup_evil:Workload",
    )


SHOWN = {
    "terminal": ("report", "R"),
    "page": ("report", "R", "--html", "page"),
    "markdown": ("report", "R", "--markdown"),
    "annotations": ("report", "R", "--annotations"),
    "junit": ("report", "R", "--junit"),
    "badge": ("report", "R", "--badge"),
    "compare": ("compare", "R", "R"),
    "table": ("table", "R"),
    "gate": ("gate", "R"),
    "baseline": ("gate", "R", "--baseline", "b", "--update-baseline", "--yes"),
    "schema": ("explain", "report.jsonl"),
}


@pytest.mark.parametrize("arguments", SHOWN.values(), ids=SHOWN)
@pytest.mark.parametrize("status", ["pass", "fail"])
def test_nothing_is_imported_to_show_a_report(
    arguments: tuple[str, ...], status: str, folder: Path
) -> None:
    write(folder / "R", evil(status), planned=1)
    done = run(folder, *arguments)
    assert "imported" not in done.stderr
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr


def test_the_folder_would_notice_an_import(folder: Path) -> None:
    done = run(folder, "list", "laws")
    assert "imported" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("run", "--nosuch"),
        ("run", "--scaler", "torch"),
        ("run", "--timeout-s", "0"),
        ("run", "--world-size", "x"),
        ("run", "--require", "a:B"),
        ("run", "--out", "torch.py"),
        ("run", "--report", "."),
        ("hunt", "--budget", "soon"),
        ("replay",),
        ("nosuch",),
        ("run", "--topology", "ddpp"),
        ("run", "--layouts", "ddpp"),
        ("run", "--preset", "quik"),
        ("run", "--model", "mnist"),
        ("run", "--precision", "fp8"),
        ("list", "scenarios", "--optimizer", "adm"),
        ("replay", "fsdpp/2/fp32/sgd/none"),
        ("run", "--scenario", "fsdp/2/fp23/sgd/none/steps=3"),
        ("run", "--workload", "nosuch.stack:Workload"),
        ("run", "--workload", "stack_of_mine:Wrokload"),
        ("run", "--scaler", "torch:Scaler"),
        ("run", "--workload", "stack_of_mine.py"),
        ("localise", "fsdp/2/fp32/sgdd/none"),
        ("replay", "fsdp/fp32"),
        ("explain", "agreement.scal"),
        ("survey",),
        ("list", "law"),
        ("run", "--topolgy", "ddp"),
        (),
    ],
    ids=" ".join,
)
def test_usage_errors_are_reported_before_torch_is_imported(
    arguments: tuple[str, ...], folder: Path
) -> None:
    (folder / "stack_of_mine.py").write_text("class Workload: ...\n")
    done = run(folder, *arguments)
    assert "imported" not in done.stderr
    if "--help" in arguments:
        assert done.returncode == 0 and "examples:" in done.stdout
    elif not arguments:
        assert done.returncode == 2 and "examples:" in done.stderr
    else:
        assert done.returncode == 2, done.stderr
        assert len(done.stderr.splitlines()) == 1
