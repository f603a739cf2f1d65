"""Torch's defects are found by name: every row of docs/defects.md is run."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from gradparity.benchmarks.validation.survey_scalers_run import OURS
from gradparity.conformance import Runner, Scenario
from gradparity.conformance.status import Status
from gradparity.fixtures.peers import PEERS
from gradparity.tests.scaler.histories.call_histories import Ranks
from gradparity.tests.scaler.histories.history import parse

PAGE = Path(__file__).resolve().parents[2] / "docs/defects.md"


class Row(NamedTuple):
    """One line of the page."""

    id: str
    scaler: str
    scenario: str
    law: str

    @property
    def history(self) -> str:
        """Calls of the history, or empty if the row is a scenario."""
        kind, _, text = self.scenario.partition(" ")
        return text.strip("`") if kind == "history" else ""


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if re.fullmatch(r"B\d\d[a-z]?", cells[0]):
            known, scaler, _, scenario, law = cells
            found.append(Row(known, PEERS[scaler].spec, scenario, law.strip("`")))
    return found


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with Runner(folder=str(tmp_path_factory.mktemp("defects"))) as kept:
        yield kept


SCENARIOS = [row for row in rows() if not row.history]
HISTORIES = [row for row in rows() if row.history]


QUICK = ("B02", "B03b", "B04a", "B21")
"""Rows that run by default, one of each family; all others are slow."""


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=f"{row.id}-{row.scaler[-12:]}",
            marks=[pytest.mark.slow] * (row.id not in QUICK),
        )
        for row in SCENARIOS
    ],
)
@pytest.mark.few(1)
def test_the_scaler_fails_the_check_and_ours_passes_all(
    runner: Runner, row: Row
) -> None:
    scenario = Scenario.parse(row.scenario.strip("`"))
    case = runner.run(row.scaler, scenario)
    assert not case.problem
    broken = {v.law for v in case.verdicts if v.status is Status.FAIL}
    assert row.law in broken
    ours = runner.run(OURS, scenario)
    assert ours.status is Status.PASS, ours.verdicts


@pytest.mark.parametrize("row", HISTORIES, ids=lambda r: r.id)
@pytest.mark.slow
def test_the_scaler_departs_from_the_oracle_and_ours_does_not(row: Row) -> None:
    history = parse(row.history)
    with Ranks() as ranks:
        assert ranks.departure(history, row.scaler)
        assert not ranks.departure(history, OURS)


def test_known_defects_of_every_family_are_listed() -> None:
    families = {row.id[:3] for row in rows()}
    assert families >= {"B01", "B02", "B03", "B04", "B05", "B06", "B09", "B13", "B14"}
