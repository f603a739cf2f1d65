"""The hunt finds a planted fault, shrinks it, and prints a line that replays it."""

import io
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from rich.console import Console

from gradparity.conformance import Scenario
from gradparity.conformance.run.hunt import HuntSettings, hunt, scenarios
from gradparity.conformance.run.runner import Runner
from gradparity.conformance.space.catalogue import Selection

MODULE = "gradparity.fixtures.faulty"


def hunted(
    scaler: str, budget_s: float, database: Path, module: str = MODULE
) -> tuple[int, str]:
    output = io.StringIO()
    code = hunt(
        HuntSettings(
            scaler=f"{module}:{scaler}",
            selection=Selection(
                topologies=["ddp"], models=["digits"], precisions=["fp32"]
            ),
            folder=".",
            budget_s=budget_s,
            database=str(database),
        ),
        Console(file=output, width=200),
    )
    return code, output.getvalue()


@settings(max_examples=300, database=None, deadline=None)
@given(scenarios(Selection()))
def test_drawn_scenarios_survive_a_round_trip_through_their_id(
    scenario: Scenario,
) -> None:
    assert Scenario.parse(scenario.id) == scenario


@pytest.mark.usefixtures("counted_budget")
def test_a_planted_fault_is_found_and_shrunk_to_one_step(tmp_path: Path) -> None:
    code, output = hunted("ForgetsToUnscale", 20, tmp_path)
    assert code == 1, output
    assert "violation of" in output
    words = _line(output, " replay ")
    scenario = Scenario.parse(words[words.index("replay") + 1])
    assert scenario.steps == 1
    assert scenario.faults == "none"


def _line(output: str, word: str) -> list[str]:
    return shlex.split(next(line for line in output.splitlines() if word in line))


@pytest.mark.slow
def test_a_hunt_finds_no_fault_in_a_right_scaler(tmp_path: Path) -> None:
    code, output = hunted("GradScaler", 4, tmp_path, module="gradparity.scaler")
    assert code == 0, output
    assert int(output.partition(" scenarios tried")[0]) > 0, output
    assert "gradparity.scaler:GradScaler: no check failed" in output


def test_an_error_of_gradparity_ends_a_hunt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise AssertionError("a fault of ours")

    monkeypatch.setattr(Runner, "run", broken)
    with pytest.raises(AssertionError, match="a fault of ours"):
        hunted("PlainScaler", 5, tmp_path)


def test_a_budget_must_be_positive() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        HuntSettings(scaler="a:B", selection=Selection(), folder=".", budget_s=0)
