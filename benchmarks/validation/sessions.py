"""Run long test sessions, and record the baseline of ``make gate``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gradparity.conformance.status import UsageError

__all__ = ["baseline", "histories", "planted", "under_load"]

ROOT = Path(__file__).resolve().parents[2]
BASELINE = "ci/baselines/linux-cpu-gloo-torch2.13.jsonl"
GATE = ("--preset", "parity", "--model", "digits", "--precision", "fp32", "--quiet")
"""Options of ``make gate``."""


def histories(arguments: Sequence[str]) -> int:
    """Draw call histories of the scaler for a number of minutes, 10 by default."""
    session = ["-n", "auto", "--dist", "worksteal", "tests/scaler/test_histories.py"]
    return _pytest([*session, "-k", "TestOurs"], "HISTORY_MINUTES", arguments, "10")


def planted(arguments: Sequence[str]) -> int:
    """Run the gate on copies of this tree, each with one regression."""
    return _pytest(["tests/ci/test_planted.py"], "PLANTED", arguments, "1")


def under_load(arguments: Sequence[str]) -> int:
    """Run ``make test`` beside busy loops a number of times, 3 by default."""
    runs = _number(arguments, "3")
    return _run([sys.executable, "tests/under_load.py", runs])


def baseline(arguments: Sequence[str]) -> int:
    """Record the gate's baseline anew from two runs; the second measures the noise."""
    if arguments:
        raise UsageError(f"baseline takes no argument, got {arguments[0]}")
    gradparity = [sys.executable, "-m", "gradparity.conformance"]
    folders = [f"parity-report/{name}" for name in ("baseline", "baseline-again")]
    for folder in folders:
        if code := _run([*gradparity, "run", *GATE, "--out", folder]):
            return code
    first, again = (f"{folder}/report.jsonl" for folder in folders)
    options = ["--baseline", BASELINE, "--update-baseline", "--yes", "--repeat", again]
    return _run([*gradparity, "gate", first, *options])


def _pytest(
    session: Sequence[str], variable: str, arguments: Sequence[str], default: str
) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-rP", *session]
    return _run(command, {variable: _number(arguments, default)})


def _number(arguments: Sequence[str], default: str) -> str:
    text = arguments[0] if arguments else default
    if len(arguments) > 1 or not text.isdecimal():
        raise UsageError(f"expected one whole number, got {' '.join(arguments)}")
    return text


def _run(command: Sequence[str], more: dict[str, str] | None = None) -> int:
    return subprocess.run(command, cwd=ROOT, env=os.environ | (more or {})).returncode
