"""Expectations: which failures they excuse, when they count, and their messages."""

from datetime import date
from pathlib import Path

import pytest

from gradparity.ci.baseline import make_baseline
from gradparity.ci.decision import Decision, Terms, decide
from gradparity.ci.expectations import (
    Expectation,
    ExpectationError,
    read_expectations,
    version_holds,
)
from gradparity.ci.gate import main
from gradparity.ci.reasons import Outcome
from gradparity.conformance.report.records import Report
from gradparity.tests.ci.test_samples import (
    SCALER,
    report_of,
    sample,
    verdict,
    with_curves,
    with_verdict,
    write,
)

TODAY = date(2026, 11, 21)


def failing(law: str = "scale.rule", status: str = "fail") -> Report:
    cases = sample().cases
    return report_of([with_verdict(cases[0], verdict(law, status)), *cases[1:]])


def known(**fields: object) -> Expectation:
    patterns = {"scenario": "fsdp/*", "law": "scale.*", "reason": "known"}
    return Expectation(**{**patterns, **fields})  # type: ignore[arg-type]  # a table


def held(report: Report, *entries: Expectation, strict: bool = False) -> Decision:
    terms = Terms(
        today=TODAY,
        baseline=make_baseline([sample()]),
        expectations=entries,
        strict=strict,
    )
    return decide(report, terms)


COUNTS: dict[str, Expectation] = {
    "patterns": known(),
    "scaler, too": known(scaler="mine.*"),
    "its very name": known(scaler=SCALER, scenario="fsdp/2/fp32/sgd/none"),
    "torch": known(torch=">=2.13,<2.14"),
    "backend": known(backend="gloo"),
    "world": known(world_size=2),
    "worlds": known(world_size=[2, 4]),
    "one of two statuses": known(status=["error", "fail"]),
    "its last day": known(expires=TODAY),
}
COUNTS_NOT: dict[str, Expectation] = {
    "another law": known(law="skip.*"),
    "another scaler": known(scaler="theirs.*"),
    "another scenario": known(scenario="tp/*"),
    "another case of letters": known(law="Scale.*"),
    "another torch": known(torch=">=2.14"),
    "another backend": known(backend="nccl"),
    "another world": known(world_size=4),
    "another status": known(status="inconclusive"),
    "the day after": known(expires=date(2026, 11, 20)),
}


@pytest.mark.parametrize("name", COUNTS)
def test_an_expectation_excuses_what_it_names(name: str) -> None:
    decision = held(failing(), COUNTS[name], strict=True)
    assert decision.outcome is Outcome.PASS, decision.reasons
    assert any(n.startswith("expected, known: scale.rule") for n in decision.notes)


@pytest.mark.parametrize("name", COUNTS_NOT)
def test_an_expectation_excuses_nothing_else(name: str) -> None:
    assert held(failing(), COUNTS_NOT[name]).outcome is Outcome.FAIL


def test_an_inconclusive_verdict_can_be_expected() -> None:
    undecided = failing(status="inconclusive")
    assert held(undecided).outcome is Outcome.INCONCLUSIVE
    entry = known(status="inconclusive")
    assert held(undecided, entry).outcome is Outcome.PASS


def test_a_check_of_the_baseline_can_be_expected_by_its_id() -> None:
    cases = sample().cases
    other = with_curves(cases[0], scale=[[8.0, 4.0, 2.0]] * 2)
    report = report_of([other, *cases[1:]])
    assert held(report).outcome is Outcome.FAIL
    assert held(report, known(law="baseline.scale")).outcome is Outcome.PASS


def test_a_vanished_case_cannot_be_expected() -> None:
    report = report_of(sample().cases[1:])
    entry = known(scenario="*", law="*", scaler="mine.*", status=["fail", "error"])
    assert held(report, entry).outcome is Outcome.FAIL


IDLE: dict[str, tuple[Expectation, str]] = {
    "matches nothing": (
        known(law="sclae.*"),
        'law = "sclae.*" (known) matches nothing',
    ),
    "stale": (
        known(scenario="tp/*"),
        "is stale: none of 2 verdicts has the status fail",
    ),
    "expired": (known(expires=date(2026, 11, 20)), "expired on 2026-11-20"),
}


@pytest.mark.parametrize("name", IDLE)
def test_an_idle_expectation_is_reported_and_fails_in_strict(name: str) -> None:
    entry, words = IDLE[name]
    lenient, strict = held(sample(), entry), held(sample(), entry, strict=True)
    assert lenient.outcome is Outcome.PASS
    assert any(words in note for note in lenient.notes)
    assert strict.outcome is Outcome.FAIL
    assert [words in r.text for r in strict.reasons] == [True]


def test_an_expectation_for_another_environment_is_not_idle() -> None:
    decision = held(sample(), known(torch=">=3"), known(backend="nccl"), strict=True)
    assert (decision.outcome, decision.notes) == (Outcome.PASS, ())


def test_an_unexpected_pass_is_reported() -> None:
    decision = held(failing(), known(scenario="*"), strict=True)
    assert decision.outcome is Outcome.PASS
    told = [n for n in decision.notes if n.startswith("unexpected pass")]
    assert [n.endswith("known (and 1 more)") for n in told] == [True]
    assert "scale.rule in tp/2/bf16/sgd/none" in told[0]


@pytest.mark.parametrize(
    ("condition", "version", "holds"),
    [
        (">=2.11,<2.15", "2.13.0+cpu", True),
        ("==2.13.*", "2.13.1", True),
        ("~=2.13", "2.14.0", True),
        ("==2.13", "2.13.0+cpu", True),
        ("!=2.13.0", "2.13.1", True),
        ("<2.9", "2.13.0", False),
        (">=2.13.1", "2.13", False),
        ("==2.14.*", "2.14.0.dev20260101+cu128", True),
        (">=2.14", "2.14.0a0+git12", True),
        (">=2", "no version", False),
    ],
)
def test_a_condition_on_versions(condition: str, version: str, holds: bool) -> None:
    assert version_holds(condition, version) is holds


FILE = """
[[expect]]
scaler = "torch.amp:*"
scenario = "fsdp+tp/*"
law = "agreement.*"
status = ["fail", "inconclusive"]
torch = ">=2.11"
world_size = [4]
reason = "ranks disagree under tensor parallel"
link = "https://example.org/1"
expires = 2027-06-30
"""


def test_a_file_of_expectations_is_read(tmp_path: Path) -> None:
    path = tmp_path / "expectations.toml"
    path.write_text(FILE)
    (entry,) = read_expectations(path)
    assert (entry.statuses, entry.world_size) == (["fail", "inconclusive"], [4])
    assert entry.expires == date(2027, 6, 30)
    path.write_text("")
    assert read_expectations(path) == []


REFUSED = {
    "no reason": '[[expect]]\nlaw = "a"\n',
    "empty reason": '[[expect]]\nlaw = "a"\nreason = " "\n',
    "no pattern": '[[expect]]\nreason = "r"\n',
    "unknown field": '[[expect]]\nlaw = "a"\nreason = "r"\nexpiry = 2027-01-01\n',
    "unknown table": "[[expected]]\n",
    "unknown status": '[[expect]]\nlaw = "a"\nreason = "r"\nstatus = "xfail"\n',
    "a pass": '[[expect]]\nlaw = "a"\nreason = "r"\nstatus = ["fail", "pass"]\n',
    "expiry no date": '[[expect]]\nlaw = "a"\nreason = "r"\nexpires = "soon"\n',
    "torch no condition": '[[expect]]\nlaw = "a"\nreason = "r"\ntorch = "2.13"\n',
    "world no number": '[[expect]]\nlaw = "a"\nreason = "r"\nworld_size = "all"\n',
    "no TOML": "[[expect\n",
    "not UTF-8": "\udcff",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_file_is_usage(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "expectations.toml"
    path.write_text(REFUSED[name], errors="surrogateescape")
    with pytest.raises(ExpectationError, match=r"expectations\.toml"):
        read_expectations(path)
    report = write(sample(), tmp_path / "report.jsonl")
    assert main([str(report), "--expect", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
