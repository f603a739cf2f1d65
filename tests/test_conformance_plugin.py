"""The catalogue as pytest items, in a stranger's empty folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradparity.conformance.report import read_report

SCENARIOS = [
    "single/1/fp32/sgd/none/steps=2",
    "ddp/2/fp32/sgd/inf@r1s1:first/steps=2",
]
NEVER = "gradparity.fixtures.faulty:NeverAgrees"
PLAIN = "gradparity.fixtures.faulty:PlainScaler"
FSDP = "fsdp/2/fp32/sgd/inf@r1s1:up.weight/steps=2"


def session(
    folder: Path, *options: str, scaler: str = PLAIN
) -> subprocess.CompletedProcess[str]:
    chosen = [f"--gradparity-scenario={s}" for s in [*SCENARIOS, FSDP]]
    pytest_ = [sys.executable, "-m", "pytest", "-q", f"--gradparity-scaler={scaler}"]
    return subprocess.run(
        [*pytest_, *chosen, *options],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=250,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_session_that_asks_for_nothing_pays_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "import sys\ndef test_it():\n    assert 'torch' not in sys.modules\n"
        "    assert 'gradparity.conformance.suite' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"],
        capture_output=True, text=True, cwd=tmp_path, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gradparity-scaler", "nosuch:Thing"], "cannot import"),
        (["--gradparity-scaler", PLAIN, "--gradparity-topology=ring"], "unknown"),
        (["--gradparity-topology", "fsdp"], "needs --gradparity-scaler"),
    ],
)
def test_bad_options_are_usage_errors(
    options: list[str], words: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        capture_output=True, text=True, cwd=tmp_path, timeout=100,
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_under_xdist_no_record_is_lost(tmp_path: Path) -> None:
    done = session(tmp_path, "-n", "2", "--junitxml=j.xml", scaler=NEVER)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "agreement.scale: step 1: rank 0 scale 1024" in done.stdout
    assert f"FAILED gradparity::{FSDP}" in done.stdout
    report = read_report(tmp_path / "parity-report" / "report.jsonl")
    assert {c.scenario: c.status for c in report.cases}[FSDP] == "fail"
    assert len(report.cases) == 3
    assert report.incomplete == ""
    assert "Traceback" not in done.stdout
    assert 'tests="3"' in (tmp_path / "j.xml").read_text()


def test_choosing_stopping_and_trying_again(tmp_path: Path) -> None:
    assert session(tmp_path, "-k", "fsdp", scaler=NEVER).returncode == 1
    report = tmp_path / "parity-report" / "report.jsonl"
    assert [c.scenario for c in read_report(report).cases] == [FSDP]
    assert "1 failed, 2 deselected" in session(tmp_path, "--lf", scaler=NEVER).stdout
    done = session(tmp_path, "-x", "-p", "no:randomly", scaler=NEVER)
    assert done.returncode == 1
    assert "planned cases were judged" in read_report(report).incomplete or (
        len(read_report(report).cases) == 3
    )
