"""Figures of docs/specimens.md are recorded and keep the promised limits."""

import json
from typing import Any

import pytest

from gradparity.benchmarks.validation.specimens import RESULTS, caught, placed
from gradparity.benchmarks.validation.specimens_tables import PAGE, tables, write_tables
from gradparity.fixtures.specimens import SPECIMENS

RECORD: dict[str, Any] = json.loads(RESULTS.read_text())
ROWS = RECORD["specimens"]


@pytest.mark.parametrize("name", tables(RECORD))
def test_the_page_shows_the_record(name: str) -> None:
    table = tables(RECORD)[name]
    assert f"<!-- recorded: {name} -->\n\n{table}\n\n<!-- end -->" in PAGE.read_text()


def test_the_page_marks_a_fixed_version_that_failed(tmp_path: Any) -> None:
    row = {**ROWS["W01"], "fixed_failed": ["seed 3: tp2/2/fp32/own/none"]}
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    write_tables({**RECORD, "specimens": {**ROWS, "W01": row}}, page)
    assert "**fails** 1 times" in page.read_text()
    assert "**fails**" not in PAGE.read_text()


def test_every_specimen_is_recorded_and_its_row_is_consistent() -> None:
    assert list(ROWS) == list(SPECIMENS)
    for name, row in ROWS.items():
        pair = SPECIMENS[name]
        assert (row["fault"], row["source"]) == (pair.fault, pair.source)
        assert row["caught"] == caught(pair, row["broken"])
        assert row["placed"] == placed(pair, row["broken"])


def test_the_goals_were_met() -> None:
    known = {n: r for n, r in ROWS.items() if n.startswith("W") and r["is_fault"]}
    assert sum(row["caught"] for row in known.values()) >= 22
    assert sum(row["placed"] for row in known.values()) >= 18
    assert [n for n, row in ROWS.items() if row["fixed_failed"]] == []
    assert RECORD["seeds"] >= 1


@pytest.mark.parametrize(
    ("told", "right"),
    [
        ({"module": "attention.k_norm"}, True),
        ({"module": "attention"}, False),
        ({"module": ""}, False),
        ({}, False),
    ],
)
def test_a_location_is_right_only_if_it_names_the_module(
    told: dict[str, str], right: bool
) -> None:
    found = {"laws": ["parity.gradient"], "problem": "", "location": told}
    assert placed(SPECIMENS["W01"], found) is right


def test_only_the_expected_checks_count_as_caught() -> None:
    found = {"laws": ["agreement.replicas"], "problem": "x", "location": {}}
    assert not caught(SPECIMENS["W01"], found)
    assert not caught(SPECIMENS["W32"], found)
