"""Speeds in docs/harness-inside.md equal the record and keep the promises."""

import json
from pathlib import Path

import pytest

from gradparity.benchmarks.harness import RESULTS
from gradparity.benchmarks.harness_tables import PAGE, tables, write_tables
from gradparity.tests.fault_matrix import MATRIX

RECORD = json.loads(RESULTS.read_text())


@pytest.mark.parametrize("name", tables(RECORD))
def test_the_page_shows_the_record(name: str) -> None:
    table = tables(RECORD)[name]
    assert f"<!-- recorded: {name} -->\n\n{table}\n\n<!-- end -->" in PAGE.read_text()


def test_a_new_record_takes_the_place_of_the_old(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    write_tables(RECORD, page)
    assert page.read_text() == PAGE.read_text()
    exit_0 = {"promised_s": 0.5, "median_s": 12.34}
    changed = {**RECORD["faults_size_4"], "exit 0": exit_0}
    write_tables({**RECORD, "faults_size_4": changed}, page)
    assert "| exit 0 | 12.34 | 0.5 |" in page.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["page.md"]


def test_every_fault_is_recorded_and_was_seen_in_time() -> None:
    found = RECORD["faults_size_4"]
    assert list(found) == list(MATRIX)
    for name, fault in MATRIX.items():
        assert found[name]["promised_s"] == fault.within_s
        assert found[name]["median_s"] <= fault.within_s, name


@pytest.mark.parametrize(
    ("peer", "goal"), [("MultiProcContinuousTest", 4), ("MultiProcessTestCase", 50)]
)
def test_the_goals_against_the_peers_were_met(peer: str, goal: int) -> None:
    found = RECORD["sessions"]
    # above what any session pays that imports torch
    alone = found["torch imported, no ranks"]["cpu_s"]
    ours = found["gradparity"]["cpu_s"] - alone
    assert found[peer]["cpu_s"] - alone >= goal * ours
