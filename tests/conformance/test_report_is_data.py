"""Showing, comparing and gating a report imports no module that it names."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from gradparity.conformance.report.records import CaseRecord
from gradparity.tests.conformance.test_report import case, write

HEAVY = ("torch", "numpy", "hypothesis")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder of modules that raise in place of torch, or of a module in a report."""
    for name in (*HEAVY, "setup_evil"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('imported {name}')\n")
    return tmp_path


class Done(NamedTuple):
    """Exit code and output of one command."""

    code: int
    printed: str
    said: str
    """Text on stderr, with the names of imported modules that are forbidden."""


# One process, because none of its commands may import anything: where one does, the
# module ends it, and is found out again by the next one that does.
PROGRAM = """
import contextlib, io, json, sys
from gradparity.conformance.__main__ import main
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):
                code = print(code, file=sys.stderr) or 1
    print(json.dumps([code or 0, out.getvalue(), err.getvalue()]))
"""


def run_all(folder: Path, commands: Iterable[Sequence[str]]) -> list[Done]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([*commands])],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "400"},
    )
    assert done.returncode == 0, done.stderr
    return [Done(*json.loads(line)) for line in done.stdout.splitlines()]


def evil(status: str) -> CaseRecord:
    """Return a case whose scenario and scaler name a class of the current folder."""
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


SHOWN = [
    ("report", "R"),
    ("report", "R", "--html", "page"),
    ("report", "R", "--markdown"),
    ("report", "R", "--annotations"),
    ("report", "R", "--junit"),
    ("report", "R", "--badge"),
    ("compare", "R", "R"),
    ("table", "R"),
    ("gate", "R"),
    ("gate", "R", "--baseline", "b", "--update-baseline", "--yes"),
    ("explain", "report.jsonl"),
]


@pytest.mark.parametrize("status", ["pass", "fail"])
def test_nothing_is_imported_to_show_a_report(status: str, folder: Path) -> None:
    write(folder / "R", evil(status), planned=1)
    for arguments, done in zip(SHOWN, run_all(folder, SHOWN), strict=True):
        assert "imported" not in done.said, arguments
        assert done.code in (0, 1), (arguments, done)
        assert "Traceback" not in done.said, arguments


def test_the_folder_would_notice_an_import(folder: Path) -> None:
    done, after = run_all(folder, [("list", "scenarios"), ("explain", "report.jsonl")])
    assert "imported" in done.said
    assert (after.code, "imported" in after.said) == (0, False)


USAGE = [
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
    ("run", "--workload", "stack_of_mine.py"),
    ("localise", "fsdp/2/fp32/sgdd/none"),
    ("replay", "fsdp/fp32"),
    ("explain", "agreement.scal"),
    ("survey",),
    ("list", "law"),
    ("run", "--topolgy", "ddp"),
    (),
]


def test_usage_errors_are_reported_before_torch_is_imported(folder: Path) -> None:
    (folder / "stack_of_mine.py").write_text("class Workload: ...\n")
    for arguments, done in zip(USAGE, run_all(folder, USAGE), strict=True):
        assert "imported" not in done.said, arguments
        if "--help" in arguments:
            assert done.code == 0 and "examples:" in done.printed
        elif not arguments:
            assert done.code == 2 and "examples:" in done.said
        else:
            assert done.code == 2, (arguments, done)
            assert len(done.said.splitlines()) == 1, (arguments, done)
