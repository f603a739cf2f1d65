"""The command ``run``: exit codes, when it stops, and its files."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gradparity.conformance.__main__ import main
from gradparity.conformance.report.records import Report, ReportWriter, read_report
from gradparity.conformance.run.runner import Case, Runner, _Seen
from gradparity.conformance.space.scenario import Scenario
from gradparity.conformance.status import Verdict
from gradparity.fixtures import WorkloadError
from gradparity.multiprocess import RankOutcome, RankState, WorldError
from gradparity.tests.conformance.test_report import header

IDS = [f"ddp/2/fp32/sgd/none/seed={seed}" for seed in range(1, 4)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def coming(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List to which a test adds the status of each case in turn; no rank starts."""
    due: list[str] = []
    left: Iterator[str] = iter(due)

    def observe(self: Runner, spec: str, scenario: Scenario) -> _Seen:
        status = next(left)
        if status == "ctrl-c":
            raise KeyboardInterrupt
        raises, hangs = status.startswith("raises "), status == "hangs"
        text = f"raised {status}"
        kind = "ValueError" if raises else ""
        error: Exception | None = None
        if raises:
            error = WorkloadError.of("W", "train_step", text, kind)
        elif hangs:
            hung = RankOutcome(rank=0, state=RankState.HUNG)
            error = WorldError((hung,), hung)
        broke = raises or hangs or status == "error"
        verdict = Verdict(law="scale.rule", status=status, message="as planned")
        case = Case(
            scaler=spec,
            scenario=scenario,
            verdicts=() if broke else (verdict,),
            evidence=None,
            seconds=0.0,
            problem=str(error or "as planned") if broke else "",
            error=error,
        )
        return _Seen(spec=spec, scenario=scenario, case=case)

    monkeypatch.setattr(Runner, "_observe", observe)
    return due


def run(*options: str) -> int:
    scenarios = [word for each in IDS for word in ("--scenario", each)]
    return main(["run", *scenarios, "--report", "R", *options])


def report() -> Report:
    return read_report(Path("R"))


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        (["pass", "pass", "pass"], 0),
        (["pass", "skipped", "pass"], 4),
        (["pass", "inconclusive", "pass"], 4),
        (["inconclusive", "fail", "pass"], 1),
        (["error", "fail", "inconclusive"], 3),
    ],
    ids=str,
)
def test_the_worst_case_decides_the_exit_code(
    statuses: list[str], code: int, coming: list[str]
) -> None:
    coming += statuses
    assert run() == code


def test_fail_fast_stops_at_an_error(coming: list[str]) -> None:
    # regression: P13
    coming += ["pass", "error", "pass"]
    assert run("--fail-fast") == 3
    assert [case.status for case in report().cases] == ["pass", "error"]


def test_a_page_that_cannot_be_written_is_no_bad_usage(
    coming: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The cases have run, and their result is shown."""
    coming += ["pass", "pass", "pass"]
    Path("site", "index.html").mkdir(parents=True)
    assert run("--out", "site") == 3
    told = capsys.readouterr()
    assert "PASS" in told.out and "the page was not written" in told.err


def test_a_required_scaler_needs_all_of_its_cases(coming: list[str]) -> None:
    """The first failure of another scaler ended the run, which had passed."""
    ours, theirs = "gradparity.scaler:GradScaler", "torch.amp:GradScaler"
    coming += ["pass", "fail", "pass", "pass", "pass", "pass"]
    scalers = "--scaler", f"{ours},{theirs}", "--require", ours
    assert run(*scalers, "--fail-fast") == 3
    assert [case.scaler for case in report().cases] == [ours, theirs]


def test_an_error_of_another_scaler_leaves_the_report_complete(
    coming: list[str],
) -> None:
    """``run`` ended with 0, and ``report`` with 3."""
    ours, theirs = "gradparity.scaler:GradScaler", "torch.amp:GradScaler"
    coming += ["pass", "error", "pass", "pass", "pass", "pass"]
    scalers = "--scaler", f"{ours},{theirs}", "--require", ours
    assert run(*scalers) == main(["report", "R"]) == 0
    assert not report().incomplete


def test_a_crowd_of_ranks_is_announced(
    coming: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """256 ranks on 2 cores started without a word."""
    for cores, told in ((1, "2 ranks on 1 core take long"), (2, "")):
        coming += ["pass", "pass", "pass"]
        monkeypatch.setattr("gradparity.conformance.run.session.CROWD", 1)
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert run() == 0
        error = capsys.readouterr().err
        assert told in error and bool(told) == ("take long" in error)


def test_a_workload_that_hangs_twice_ends_the_run(coming: list[str]) -> None:
    # regression: P13, 14 scenarios waited for the time limit each
    coming += ["hangs", "hangs", "pass"]
    assert run() == 3
    assert [case.status for case in report().cases] == ["error", "error"]
    told = "your workload hung in two cases: 2 of 3 cases ran, the other 1 did not"
    assert report().incomplete == told


def test_fail_fast_stops_at_the_first_violation_and_at_nothing_less(
    coming: list[str],
) -> None:
    coming += ["inconclusive", "fail", "pass"]
    assert run("--fail-fast") == main(["report", "R"]) == 1
    assert [case.status for case in report().cases] == ["inconclusive", "fail"]
    assert report().incomplete == "stopped at the first failed check: 2 of 3 cases ran"


@pytest.mark.parametrize("status", ["fail", "error"])
def test_the_command_that_runs_the_first_failure_again_is_printed(
    coming: list[str], capsys: pytest.CaptureFixture[str], status: str
) -> None:
    coming += ["pass", status, "pass"]
    run()
    again = report().cases[1].replay
    assert f"again:  {again}\n" in capsys.readouterr().out
    assert IDS[1] in again


def test_an_exception_of_the_workload_that_comes_twice_ends_the_run(
    coming: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    # regression: N37, one error repeated in nine runs; sizes differ by mesh
    coming += ["raises no column 69", "raises no column 70", "pass"]
    assert run() == 3
    assert [case.status for case in report().cases] == ["error", "error"]
    told = (
        "your train_step raised the same ValueError in two cases: 2 of 3 cases ran, "
        "the other 1 did not"
    )
    assert report().incomplete == told
    printed = capsys.readouterr().out
    assert f"INCOMPLETE: {told}\n" in printed
    assert " ".join(printed.split()).count("no column") == 1


@pytest.mark.parametrize("others", [["raises that"], ["error", "error"]])
def test_other_errors_end_no_run(coming: list[str], others: list[str]) -> None:
    coming += ["raises this", *others, *["pass"] * (2 - len(others))]
    assert run() == 3
    assert len(report().cases) == 3


def test_an_interrupt_leaves_a_report_and_its_page(
    coming: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    coming += ["pass", "ctrl-c"]
    assert run("--out", "page") == 130
    assert report().incomplete == "interrupted after 1 of 3 cases"
    assert (folder / "page" / "index.html").is_file()
    printed = capsys.readouterr().out
    assert "INCOMPLETE: interrupted after 1 of 3 cases" in printed
    assert "report: R" in printed


def test_two_runs_of_one_report_are_bad_usage(
    coming: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with ReportWriter(Path("R"), header()):
        assert run() == 2
    assert "another run writes this report now" in capsys.readouterr().err


def test_a_second_run_keeps_the_report_of_the_first(
    coming: list[str], folder: Path
) -> None:
    coming += ["pass"] * 9
    assert [run(), run(), run()] == [0, 0, 0]
    assert all((folder / name).is_file() for name in ("R", "R.1", "R.2"))
