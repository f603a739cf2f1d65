"""``gradparity train`` runs a scenario as a job, which ``record`` can record."""

import subprocess
from pathlib import Path

import pytest

from gradparity.conformance.__main__ import main
from gradparity.conformance.run.launcher import Place
from gradparity.conformance.run.training import train
from gradparity.conformance.status import UsageError


def record(folder: Path, python: list[str], name: str, id: str, noise: int) -> None:
    gradparity = [*python, "-m", "gradparity.conformance"]
    options = ["record", name, "--noise", str(noise), "--"]
    done = subprocess.run(
        [*gradparity, *options, *gradparity, "train", id],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f"trained {id}: 3 steps" in done.stdout


@pytest.mark.slow
def test_two_scenarios_are_recorded_and_compared(
    tmp_path: Path,
    warm_ranks: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record(tmp_path, warm_ranks, "one", "single/1/fp32/sgd/none/steps=3", 2)
    record(tmp_path, warm_ranks, "two", "ddp/2/fp32/sgd/none/steps=3", 0)
    record(tmp_path, warm_ranks, "other", "single/1/fp32/sgd-momentum/none/steps=3", 0)
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
