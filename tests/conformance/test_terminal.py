"""Printed progress: live with the time left in a terminal, plain lines in a file."""

import io
import itertools
import re

import pytest
from msgspec.structs import replace
from rich.console import Console

from gradparity.conformance.report.page import render_page
from gradparity.conformance.report.records import LawText, Location, Report
from gradparity.conformance.report.terminal import (
    PLACES,
    cell,
    coverage,
    facts,
    not_tried_lines,
    print_report,
    progress,
    verdict_of,
)
from gradparity.conformance.status import Verdict, clipped
from gradparity.tests.conformance.test_report import HOSTILE, case, report_of

ESCAPE = "\x1b"


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    """Return a console that writes to a file and ignores variables like FORCE_COLOR."""
    file = io.StringIO()
    made = Console(file=file, force_terminal=terminal, width=160, _environ={})
    return made, file


def watch(
    report: Report, *, terminal: bool, quiet: bool = False, second: float = 0
) -> str:
    """Return what the terminal shows while the cases of ``report`` run.

    The clock moves by ``second`` each time it is read.
    """
    made, file = console(terminal=terminal)
    clock = itertools.count(step=second).__next__
    cases = len(report.cases)
    with progress(made, cases, quiet=quiet, clock=clock) as ticker:
        for each in report.cases:
            ticker.begin(each.scaler, each.scenario)
            ticker.end(each)
    return file.getvalue()


SEEN = report_of(case("a:B"), case("e:F"), case("g:H"), case(f"c:D{HOSTILE}", "fail"))


def test_a_terminal_shows_how_far_it_is_and_the_time_left() -> None:
    seen = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", watch(SEEN, terminal=True))
    assert re.search(r"100%.*4/4 \d:\d\d:\d\d left \d:\d\d:\d\d", seen)
    assert "fsdp/2/fp32/sgd/none" in seen
    assert "c:D<script>alert(1)</script> [31m" in seen  # shown, and drives nothing


def test_a_file_gets_a_line_a_violation_and_no_codes() -> None:
    seen = watch(SEEN, terminal=False)
    assert ESCAPE not in seen
    (line,) = seen.splitlines()
    assert line.startswith("fail         fsdp/2/fp32/sgd/none c:D<script>")


def test_a_line_of_a_skipped_case_has_its_reason_once() -> None:
    skipped = [case(f"a:B{n}", "skipped", "needs 4 ranks") for n in range(2)]
    first, second = watch(report_of(*skipped), terminal=False).splitlines()
    assert first.endswith("a:B0: needs 4 ranks")
    assert second.endswith("a:B1")


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_shows_nothing(terminal: bool) -> None:
    assert watch(SEEN, terminal=terminal, quiet=True, second=7) == ""


def test_a_file_gets_a_line_of_progress_every_ten_seconds() -> None:
    # regression: N30, eleven minutes of nothing in a log
    runs = [case(f"a:B{n}", "fail" if n == 1 else "pass") for n in range(6)]
    seen = watch(report_of(*runs), terminal=False, second=7).splitlines()
    assert [line for line in seen if not line.startswith("fail ")] == [
        "2 of 6 cases, 14 s, failing: 1",
        "4 of 6 cases, 28 s, failing: 1",
    ]


def test_the_table_in_a_file_has_no_codes() -> None:
    made, file = console(terminal=False)
    print_report(made, report_of(case("a:B", "fail", HOSTILE)))
    said = file.getvalue()
    assert ESCAPE not in said
    assert "FAIL (agreement, 1 of 1 runs)" in said
    assert "INCOMPLETE: the run was cut off" in said


def test_a_cell_counts_each_cause() -> None:
    """Two faults in one topology are two causes, each with its own count."""
    dropout = Verdict(law="random.replicas", status="fail", message="equal seeds")
    loss = Verdict(law="parity.loss", status="fail", message="twice the loss", step=0)
    runs = [case(f"a:B{n}") for n in range(6)]
    for n, verdict in enumerate((dropout, loss, loss)):
        runs[n] = replace(runs[n], status="fail", verdicts=(verdict,))
    assert cell(runs) == (
        "FAIL (random, 1 of 6 runs) digits: equal seeds; "
        "(parity, 2 of 6 runs) digits: twice the loss"
    )


def test_a_cell_names_the_workload_once() -> None:
    problem = "workload digits: rank 1, forward: raised RuntimeError: no rows"
    failed = replace(case("a:B", "error"), problem=problem, verdicts=())
    assert cell([failed]).endswith(
        ") digits: rank 1, forward: raised RuntimeError: no rows"
    )


# regression: N26
def test_a_cell_shows_the_whole_first_cause_and_counts_the_others() -> None:
    clue = "lr of 0.weight is 0.02 on rank 0, and 0.01 by the workload's scheduler"
    long = f"step 0: the update of {'a.' * 120}weight differs from the truth; {clue}"
    one = case("a:B", "fail")
    (broken,) = [v for v in one.verdicts if v.status == "fail"]
    causes = [
        replace(one, verdicts=(replace(broken, message=text, cause=text),))
        for text in (long, "step 1: another", "step 2: a third")
    ]
    told = cell(causes)
    assert clue in told and told.endswith("; 2 more causes in the report")
    assert "..." not in told
    short = cell(causes[1:])
    assert "another" in short and "a third" in short and "more cause" not in short
    made, file = console(terminal=False)
    print_report(made, report_of(*causes))
    assert clue in re.sub(r"\s+", " ", file.getvalue())


def test_a_text_is_cut_after_a_clause() -> None:
    assert clipped("one, two", 20) == "one, two"
    text = f"the first clause; {'x' * 20}"
    assert clipped(text, 30) == "the first clause [22 more characters in the report]"
    assert clipped("y" * 30, 20) == f"{'y' * 20} [10 more characters in the report]"


def test_a_cell_counts_the_runs_that_are_undecided() -> None:
    open_ = Verdict(law="scale.rule", status="inconclusive", message="no step")
    runs = [case(f"a:B{n}") for n in range(6)]
    runs[2] = replace(runs[2], status="inconclusive", verdicts=(open_,))
    assert cell(runs) == "INCONCLUSIVE (1 of 6 runs) digits: no step"
    assert cell(runs[:1]) == "PASS (1 run)"
    # a skipped one has not run
    runs[1] = replace(runs[1], status="skipped")
    assert cell(runs) == "INCONCLUSIVE (1 of 5 runs) digits: no step"
    assert cell(runs[:2]) == "PASS (1 run)"


def test_facts_are_step_ranks_parameter_and_numbers() -> None:
    (verdict,) = case(status="fail").verdicts
    assert facts(verdict) == []
    full = replace(
        verdict, step=0, ranks=(0, 3), parameter="w", numbers={"error": 0.1, "b": "inf"}
    )
    assert facts(full) == ["step 0", "ranks 0, 3", "w", "error = 0.1", "b = inf"]


def test_the_first_places_are_shown_and_the_others_counted() -> None:
    places = [f"the gradient of w{i} differs" for i in range(PLACES + 2)]
    wrong = case("a:B", "fail")
    verdicts = tuple(replace(v, law="parity.gradient") for v in wrong.verdicts)
    cases = [
        replace(
            wrong,
            verdicts=verdicts,
            location=Location(where="gradient", module=f"w{i}", text=text),
        )
        for i, text in enumerate([*places, f"{places[0]} in another recipe"])
    ]
    again = cases[-1].location
    assert again is not None
    cases[-1] = replace(cases[-1], location=replace(again, module="w0"))
    made, file = console(terminal=False)
    print_report(made, report_of(*cases))
    seen = file.getvalue()
    assert [text in seen for text in places] == [True] * PLACES + [False] * 2
    assert f"{places[0]} (and in 1 more run)" in seen
    assert "where: 2 more are on the page" in seen


def test_a_place_is_shown_only_if_it_is_that_of_the_cause() -> None:
    wrong = case("a:B", "fail")
    (law,) = wrong.verdicts
    text = "the update of w is 0.88 off: look at the optimizer"
    later = replace(law, law="parity.update", message="the update differs")
    both = replace(
        wrong,
        verdicts=(law, later),
        location=Location(where="update", module="w", text=text),
    )
    made, file = console(terminal=False)
    print_report(made, report_of(both))
    assert both.failures == (law, later)
    assert text not in file.getvalue()
    earlier = replace(later, step=-1 + (law.step or 1))
    first = replace(both, verdicts=(replace(law, step=5), earlier))
    print_report(made, report_of(first))
    assert text in file.getvalue()


@pytest.mark.parametrize(("step", "is_cause"), [(0, True), (2, True), (3, False)])
def test_a_place_is_shown_if_replicas_differ_no_earlier(
    step: int, is_cause: bool
) -> None:
    wrong = case("a:B", "fail")
    (law,) = wrong.verdicts
    text = "the gradient of w differs: each rank has a part of the sum"
    located = replace(
        wrong,
        verdicts=(replace(law, law="agreement.replicas", step=2),),
        location=Location(where="gradient", module="w", text=text, step=step),
    )
    made, file = console(terminal=False)
    print_report(made, report_of(located))
    assert (text in file.getvalue()) is is_cause


def test_a_skipped_case_without_verdicts_has_a_line() -> None:
    bare = replace(case("a:B"), status="skipped", verdicts=())
    assert not_tried_lines(report_of(bare))[0].endswith(": it has no verdicts")


def test_the_result_is_said_in_words() -> None:
    right, wrong = case("a:B"), case("c:D", "fail")
    report = report_of(right, wrong)
    assert verdict_of(report, "a:B").startswith("a:B passes all 1 run")
    assert verdict_of(report, "c:D").startswith("c:D fails on ")


def test_the_report_shows_how_much_each_check_compared() -> None:
    seen = case("a:B")
    (whole,) = seen.verdicts
    part = replace(whole, law="parity.update", compared=10, not_compared=30)
    idle = replace(whole, law="norm.factor", status="skipped", compared=0)
    report = report_of(replace(seen, verdicts=(whole, part, idle)))
    assert coverage(report) == {
        "agreement.scale": "1 of 1",
        "parity.update": "10 of 40",
    }
    made, file = console(terminal=False)
    print_report(made, report)
    line = "compared: parity.update 10 of 40 (why: on the page), "
    line += "everything in all other checks\n"
    assert line in file.getvalue()
    laws = {"parity.update": LawText(text="t", reason="r")}
    page = render_page(replace(report, header=replace(report.header, laws=laws)))
    left_out = f"Compared here: 10 of 40. Most was left out in {seen.scenario}: "
    assert f"{left_out}{part.message}." in page


def test_cases_skipped_for_one_exception_are_one_line() -> None:
    raised = "forward: raised RuntimeError: expected BFloat16 (mine.py line 3)"
    messages = [
        f"one process cannot run in bf16-params either: workload a:B: {raised}",
        f"workload a:B: rank 1, {raised}",
        "recipe 'resume' needs a checkpoint",
        f"workload a:B: rank 0, {raised}",
    ]
    cases = [
        replace(case("a:B", "skipped", why), scenario=f"dp{number}")
        for number, why in enumerate(messages)
    ]
    report = report_of(case(), *cases)
    left_out = ("dp1: an axis of size 1",)
    report = replace(report, header=replace(report.header, not_tried=left_out))
    assert not_tried_lines(report) == [
        f"dp0 and 2 more: {messages[0]}",
        f"dp2: {messages[2]}",
        *left_out,
    ]
    page = render_page(report)
    assert f"<li>dp2: {messages[2].replace(chr(39), '&#39;')}</li>" in page
    assert f"<li>{left_out[0]}</li>" in page
