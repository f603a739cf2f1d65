"""Figures of docs/gpu-results.md equal those of its records and of a report."""

import json
from typing import Any

import pytest

from gradparity.benchmarks.validation.gpu import (
    PAGE,
    RESULTS,
    SCALER,
    record_of,
    tables,
)
from gradparity.conformance.report.records import Report

RECORD: dict[str, Any] = json.loads(RESULTS.read_text())
OF_SCALER: dict[str, Any] = json.loads(SCALER.read_text())
TABLES = tables(RECORD, OF_SCALER)


@pytest.mark.parametrize(("name", "table"), TABLES.items())
def test_the_page_shows_the_record(name: str, table: str) -> None:
    assert f"<!-- recorded: {name} -->\n\n{table}\n\n<!-- end -->" in PAGE.read_text()


def test_ours_never_fails_there_and_no_right_case_is_near_its_bound() -> None:
    ours = [case for case in RECORD["cases"] if case[0].startswith("gradparity.")]
    assert {case[3] for case in ours} == {"pass", "inconclusive"}
    assert max(case[4] for case in RECORD["cases"] if case[3] == "pass") <= 0.25


@pytest.mark.slow
def test_a_record_has_every_case_of_its_reports(real: Report) -> None:
    record = record_of("abc", "2.31", [real, real])
    assert len(record["cases"]) == 2 * len(real.cases)
    assert {case[3] for case in record["cases"]} == {c.status for c in real.cases}
    bounded = [case[4] for case in record["cases"] if case[3] == "pass"]
    assert all(0 < ratio < 1 for ratio in bounded if ratio is not None)
    assert tables(record, OF_SCALER)["made"].startswith("gradparity at abc")
