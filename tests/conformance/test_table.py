"""The table for pull requests: its content, its size, and escaped names."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from gradparity.ci.integrity import contradictions
from gradparity.conformance.__main__ import main
from gradparity.conformance.report.records import (
    CaseRecord,
    Comparison,
    Location,
    Report,
    read_report,
)
from gradparity.conformance.report.table import MAX_LINES, render
from gradparity.conformance.space.catalogue import LAYOUT_STEPS, Selection, select
from gradparity.conformance.status import Verdict
from gradparity.tests.ci.test_samples import case, report_of, with_verdict, write
from gradparity.tests.conformance.test_report import HOSTILE


def compared(**changes: object) -> Comparison:
    found = Comparison(
        kind="gradient",
        parameter="q_norm.weight",
        step=1,
        rank=3,
        measure="norm",
        error=0.5,
        absolute=0.004,
        bound=1e-6,
    )
    return replace(found, **changes)


def failed(scenario: str) -> CaseRecord:
    law = Verdict(law="parity.gradient", status="fail", message="it differs")
    where = Location(where="forward", text="forward of q_norm")
    bad = with_verdict(case(scenario), law)
    return replace(
        bad, worst=(compared(kind="loss", error=1e-7), compared()), location=where
    )


def rows(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_a_row_has_verdict_worst_tensor_errors_and_bound() -> None:
    fine = replace(case("ddp/2/fp32/sgd/none"), worst=(compared(error=1e-7),))
    bad = [failed("tp/2/fp32/sgd/none"), case("tp/2/fp32/sgd/none/steps=3")]
    table = render(report_of([fine, *bad]))
    first, second = rows(table)
    tensor = "gradient of q_norm.weight, step 1, rank 3, norm"
    assert first == ["ddp", "2", "fp32", "pass", tensor, "1e-07", "0.004", "1e-06"]
    assert second[:4] == ["tp", "2", "fp32", "**FAIL** (1 of 2): parity.gradient"]
    # of all tensors the one furthest beyond its bound
    assert second[4:] == [tensor, "0.5", "0.004", "1e-06"]
    assert "- tp: it differs Where: forward of q_norm" in table
    assert table.startswith("**gradparity: violations**, 3 cases\n")


def test_cases_that_were_skipped_are_not_counted() -> None:
    right, left = case("ddp/2/fp32/sgd/none"), case("ddp/2/fp32/sgd/none/steps=3")
    left = replace(left, status="skipped")
    assert rows(render(report_of([right, left])))[0][3] == "pass"
    assert rows(render(report_of([left])))[0][3] != "pass"


def test_the_table_shows_dashes_and_marks_incomplete_reports() -> None:
    report = report_of([case()])
    assert rows(render(report))[0][3:] == ["pass", "-", "-", "-", "-"]
    assert "incomplete" in render(Report(header=report.header, cases=(), footer=None))


def test_the_table_fits_a_comment_and_drops_no_failure() -> None:
    many = [case(f"mesh{n}/2/fp32/sgd/none") for n in range(60)]
    bad = [failed(f"broken{n}/2/fp32/sgd/none") for n in range(20)]
    table = render(report_of([*many, *bad]))
    assert len(table.splitlines()) <= MAX_LINES
    assert sum("**FAIL**" in line for line in table.splitlines()) == 20
    assert "54 more rows, none of them worse" in table


def test_names_are_shown_as_they_are() -> None:
    evil = f"{HOSTILE} | `x` [a](http://b) @all #1"
    record = replace(failed("tp/2/fp32/sgd/none"), topology=evil, scaler=evil)
    table = render(report_of([record, case()]))
    assert not set("<>`@[\x1b") & set(table.replace("**", ""))
    assert {line.count("|") for line in table.splitlines() if line[:1] == "|"} == {10}


def test_the_command_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of([failed("tp/2/fp32/sgd/none")])
    assert main(["table", str(write(report, tmp_path / "r.jsonl"))]) == 1
    assert capsys.readouterr().out == render(report)
    assert main(["table", str(tmp_path / "none")]) == 2


def test_a_worst_tensor_that_is_not_the_worst_is_a_contradiction() -> None:
    fine = replace(case(), worst=(compared(error=0.6, bound=1.0),))
    assert contradictions(report_of([fine])) == []
    painted = replace(case(), worst=(compared(error=0.1, bound=1.0),))
    (told,) = contradictions(report_of([painted]))
    assert "its worst tensor is not at the largest error / bound" in told


def test_a_real_report_has_its_worst_tensors(real: Report) -> None:
    measured = [c for c in real.cases if c.curves is not None and c.curves.parity]
    assert measured
    for record in measured:
        assert {c.kind for c in record.worst} >= {"update", "loss"}, record.scenario
    assert contradictions(real) == []


def test_layouts_are_each_topology_against_one_process() -> None:
    spec = "gradparity.examples.workload:Stack"
    chosen = Selection(workload=spec, topologies=("single", "dp2-tp2"), no_scaler=True)
    ids = [
        (s.topology, s.recipe, s.precision, s.steps) for s in select("layouts", chosen)
    ]
    assert ids == [
        (name, recipe, "fp32", LAYOUT_STEPS)
        for name in ("single", "dp2-tp2")
        for recipe in ("plain", "accumulate")
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ["--layouts", "fsdp,nosuch"],
            "unknown topology 'nosuch': expected one of single, ddp",
        ),
        (["--layouts", "fsdp", "--topology", "ddp"], "give no --topology"),
        (["--layouts", "fsdp", "--quick"], "give no --topology, --scenario or preset"),
    ],
)
def test_bad_layouts_are_one_line(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *options]) == 2
    told = capsys.readouterr().err
    assert words in told and len(told.splitlines()) == 1


@pytest.mark.slow
def test_a_run_prints_the_table_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = "single/1", "ddp/2"
    options = [f"--scenario={at}/fp32/sgd/none/steps=1" for at in places]
    options += ["--scaler=none", "--table"]
    assert main(["run", *options, "--out", str(tmp_path)]) == 0
    report = read_report(tmp_path / "report.jsonl")
    assert capsys.readouterr().out == render(report)
    assert {row[0] for row in rows(render(report))} == {"single", "ddp"}
