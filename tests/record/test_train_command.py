"""``gradparity train`` runs a scenario as a job, which ``record`` can record."""

import subprocess
import sys
from pathlib import Path

import pytest

from gradparity.conformance.__main__ import main
from gradparity.conformance.run.launcher import Place
from gradparity.conformance.run.training import train
from gradparity.conformance.status import UsageError

GRADPARITY = (sys.executable, "-m", "gradparity.conformance")


def record(folder: Path, name: str, id: str, noise: int) -> None:
    train = [*GRADPARITY, "train", id]
    options = ["record", name, "--noise", str(noise), "--"]
    done = subprocess.run(
        [*GRADPARITY, *options, *train], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"trained {id}: 3 steps" in done.stdout


@pytest.mark.slow
def test_two_scenarios_are_recorded_and_compared(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record(tmp_path, "one", "single/1/fp32/sgd/none/steps=3", 2)
    record(tmp_path, "two", "ddp/2/fp32/sgd/none/steps=3", 0)
    record(tmp_path, "other", "single/1/fp32/sgd-momentum/none/steps=3", 0)
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "one", "two"]) == 0
    assert "start: 8 of 8 tensors have equal bits" in capsys.readouterr().out
    assert main(["compare", "one", "other"]) == 2
    settings = "lr of norm.weight is 0.1 in one and 0.05 in other"
    assert f"settings differ at step 0: {settings}" in capsys.readouterr().out


def test_a_scenario_of_two_jobs_is_refused() -> None:
    with pytest.raises(UsageError, match="is two jobs, which a checkpoint joins"):
        train(
            "fsdp/2/fp32/sgd/none/steps=4,recipe=resume-resharded",
            "none",
            Place.__new__(Place),
        )
