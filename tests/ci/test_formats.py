"""Output formats stay valid for any name of a model or an exception."""

import re
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import junitparser
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from junitparser import xunit2
from markdown_it import MarkdownIt
from msgspec.structs import replace

from gradparity.ci import annotations, badge, junit, markdown
from gradparity.conformance.report.records import Location, Report
from gradparity.conformance.report.table import legible
from gradparity.conformance.report.terminal import plain
from gradparity.tests.ci.test_samples import (
    case,
    report_of,
    sample,
    verdict,
    with_verdict,
)

RENDERERS: dict[str, Callable[[Report], str]] = {
    "annotations": annotations.render,
    "badge": badge.render,
    "junit": junit.render,
    "markdown": markdown.render,
}
HOSTILE = [
    "\x00\x1b[31m\x07 bell",
    "]]> <![CDATA[",
    "<script>alert(1)</script>",
    "a | b \\| c",
    "one\ntwo\r\nthree\u2028four",
    "`code` **bold** [link](http://x) ![i](//x) @team #1 :smile: ~~no~~ $x$",
    "&amp; &#124; \"quoted\" 'single'",
    "::error file=x::y %0A::warning::",
    "\u202eevil \ufffe \ud800 \U0001f600",
    "</pre></details><img src=x onerror=alert(1)>",
]


def hostile_report(text: str) -> Report:
    """Return a report in which every text field is ``text``."""
    broken = replace(
        verdict("scale.rule", "fail", text),
        step=1,
        ranks=(0, 1),
        parameter=text,
        numbers={text: "inf", "error": 0.5},
    )
    record = with_verdict(case(), broken)
    record = replace(
        record, scaler=text, topology=text, model=text, problem=text, replay=text
    )
    report = report_of([record], command=text, commit=text, platform=text)
    assert report.footer is not None
    return replace(report, footer=replace(report.footer, complete=False, reason=text))


# regression: N24
DIAGNOSIS = "the loss of step 0 differs: it is 0.500 x the truth: a share of it"


def located_report() -> Report:
    """Report in which one check fails in three cases; the second one has a location."""
    broken = verdict("parity.loss", "fail", "step 0: the loss differs")
    cases = [
        replace(c, verdicts=(*c.verdicts, broken), status="fail")
        for c in sample().cases
    ]
    located = Location(where="loss", text=DIAGNOSIS)
    cases[1] = replace(cases[1], location=located)
    return report_of(cases)


@pytest.mark.parametrize("name", ["annotations", "junit", "markdown"])
def test_every_format_has_the_diagnosis_beside_the_finding(name: str) -> None:
    made = unescape(RENDERERS[name](located_report()))
    found = made.index("step 0: the loss differs")
    assert found < made.index(f"where it begins: {'(in ' * (name != 'junit')}")
    assert DIAGNOSIS in made
    if name == "annotations":
        (line,) = made.splitlines()  # one law of one scaler
        assert f"(in {located_report().cases[1].scenario}) {DIAGNOSIS}" in line


class Tags(HTMLParser):
    """Collects the HTML tags of a text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_shows_hostile_text_as_it_is(text: str) -> None:
    made = markdown.render(hostile_report(text))
    assert Tags(made).seen <= {"pre"}
    assert plain(text) in unescape(made)
    table = [line for line in made.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {3}
    markup = r"[`*~$\[\]!<>@#\\]|:(?!\s|$)|(?<![^\W_])_|_(?![^\W_])"
    for found in re.findall(markup, markdown.escape(text)):
        assert found == "#", "only the sign of a character reference is left"


def test_markdown_of_usual_text_is_readable_raw() -> None:
    usual = "linux-x86_64, fp16 autocast: step 1: ranks 0, 1 scale 512 (it's 50%)"
    assert markdown.escape(usual) == usual
    assert markdown.escape("_a_ :b: http://c") == ("&#95;a&#95; &#58;b: http&#58;//c")


@pytest.mark.parametrize("text", [*HOSTILE, "_scale is `None` | ``x``", "`", r"a\|b"])
def test_a_legible_cell_shows_the_text_as_it_is(text: str) -> None:
    page = (
        MarkdownIt("commonmark")
        .enable("table")
        .render(f"| a | b |\n|---|---|\n| {legible(text)} | end |\n")
    )
    table = ET.fromstring(page)
    cells = ["".join(cell.itertext()).strip() for cell in table.iter("td")]
    assert cells == [plain(text).strip(), "end"]


@pytest.mark.parametrize("text", HOSTILE)
def test_junit_is_valid_xml_for_hostile_text(text: str) -> None:
    root = ET.fromstring(junit.render(hostile_report(text)).encode())
    message = root.findall(".//failure")[0].get("message")
    assert message == junit.xml_text(text)


@pytest.mark.parametrize("text", HOSTILE)
def test_annotations_stay_one_command_a_line(text: str) -> None:
    lines = annotations.render(hostile_report(text)).split("\n")
    assert all(line.startswith("::error ") for line in lines[:-1])
    assert lines[-1] == ""
    for line in lines[:-1]:
        properties = line.removeprefix("::error ").partition("::")[0]
        assert {p.partition("=")[0] for p in properties.split(",")} == {"title"}


@settings(deadline=None, max_examples=30)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_every_format_takes_every_text(text: str) -> None:
    report = hostile_report(text)
    made = {name: render(report) for name, render in RENDERERS.items()}
    assert Tags(made["markdown"]).seen <= {"pre"}
    ET.fromstring(made["junit"].encode())
    ET.fromstring(made["badge"].encode())


def failing_report(count: int, message: str = "why", *, alike: bool = True) -> Report:
    """Report of sound cases and ``count`` failures, of one cause or of one each."""
    broken = verdict("scale.rule", "fail", message)
    ids = [f"tp/2/fp32/sgd/none/seed={n}" for n in range(count)]
    bad = [
        with_verdict(case(each), broken if alike else replace(broken, cause=each))
        for each in ids
    ]
    return report_of([*sample().cases, *bad])


def test_markdown_is_folded_by_cause_as_the_gate_does() -> None:
    """Ninety failures of one cause are one paragraph."""
    report = failing_report(90)
    first, *others = report.cases
    late = replace(verdict("parity.gradient", "fail", "off"), step=2)
    soon = replace(verdict("agreement.scale", "fail", "apart"), step=1)
    both = with_verdict(with_verdict(first, late), soon)
    undecided = with_verdict(case("pp/2/x"), verdict("scale.rule", "inconclusive"))
    broke = replace(case("dp/2/x"), status="error", verdicts=(), problem="killed")
    made = markdown.render(report_of([both, *others, undecided, broke]))
    heads = [line for line in made.splitlines() if line.startswith("### ")]
    assert heads == [
        "### error: dp/2/x mine.amp&#58;Scaler",
        "### fail (1 case, 1 consequence): fsdp/2/fp32/sgd/none mine.amp&#58;Scaler",
        "### fail (90 cases): tp/2/fp32/sgd/none/seed=0 mine.amp&#58;Scaler",
        "### inconclusive: pp/2/x mine.amp&#58;Scaler",
    ]
    assert "**agreement.scale** apart" in made and "parity.gradient" not in made
    failed = made.partition("### inconclusive")[0]
    assert failed.count("**scale.rule** why") == 1


def test_markdown_lists_failures_first() -> None:
    made = markdown.render(failing_report(1))
    lines = [line for line in made.splitlines() if line]
    assert lines[0] == "## gradparity: violations"
    assert lines[1] == "4 of 4 cases: 3 pass, 1 fail"
    assert lines[2].startswith("### fail: tp/2/fp32/sgd/none/seed=0")
    assert made.index("### fail") < made.index("| topology")


def test_markdown_keeps_below_the_limit_and_says_what_is_left_out() -> None:
    made = markdown.render(failing_report(600, "\U0001f600 <" * 500, alike=False))
    assert 900_000 < len(made.encode()) <= markdown.LIMIT_BYTES
    shown = made.count("\n### fail")
    assert f"{600 - shown} more causes are in report.jsonl" in made


def test_markdown_of_an_incomplete_report_says_so() -> None:
    made = markdown.render(replace(sample(), footer=None))
    assert made.startswith("## gradparity: incomplete\n")
    assert "**Incomplete:** the run was cut off after 3 of 3 cases" in made


def test_junit_counts_and_properties() -> None:
    numbers = {"error": 0.5, "bound": 0.1}
    law = replace(verdict("scale.rule", "fail"), step=2, ranks=(0, 3), numbers=numbers)
    undecided = verdict("agreement.scale", "inconclusive")
    record = with_verdict(with_verdict(case(), law), undecided)
    root = ET.fromstring(junit.render(report_of([record])).encode())
    suite = root[0]
    counts = [suite.get(k) for k in ("tests", "failures", "errors", "skipped")]
    assert counts == ["6", "1", "1", "1"]
    assert [root.get(k) for k in ("tests", "failures", "errors")] == ["6", "1", "1"]
    (test,) = (t for t in suite.iter("testcase") if t.get("name") == "scale.rule")
    found = {p.get("name"): p.get("value") for p in test.iter("property")}
    assert found == {"step": "2", "rank": "0, 3", "error": "0.5", "bound": "0.1"}
    (error,) = suite.iter("error")
    assert error.get("type") == "inconclusive"


def test_a_reader_of_junit_finds_what_we_wrote(tmp_path: Path) -> None:
    law = replace(verdict("scale.rule", "fail", HOSTILE[2]), step=2, ranks=(0, 3))
    undecided = verdict("agreement.scale", "inconclusive")
    record = with_verdict(with_verdict(case(), law), undecided)
    file = tmp_path / "junit.xml"
    file.write_text(junit.render(report_of([record, *sample().cases[1:]])))
    suite: Any = next(iter(xunit2.JUnitXml.fromfile(str(file))))
    assert (suite.name, suite.time) == (f"{record.scenario} {record.scaler}", 0.5)
    told = (suite.tests, suite.failures, suite.errors, suite.skipped)
    suite.update_statistics()  # what the reader counts by itself
    assert told == (suite.tests, suite.failures, suite.errors, suite.skipped)
    assert told == (6, 1, 1, 1)
    tests = {test.name: test for test in suite}
    (failure,) = tests["scale.rule"].result
    assert isinstance(failure, junitparser.Failure)
    assert failure.message == HOSTILE[2]
    found = {p.name: p.value for p in tests["scale.rule"].properties()}
    assert found == {"step": "2", "rank": "0, 3"}
    assert isinstance(tests["agreement.scale"].result[0], junitparser.Error)
    assert isinstance(tests["skip.all-ranks-skip"].result[0], junitparser.Skipped)
    assert tests["liveness.completes"].is_passed


def test_junit_of_an_incomplete_report_has_an_error() -> None:
    root = ET.fromstring(junit.render(replace(sample(), footer=None)).encode())
    assert root.get("errors") == "1"
    assert [e.get("type") for e in root.iter("error")] == ["incomplete"]


@pytest.mark.parametrize(
    ("passed", "total", "words"),
    [(1, 1, "100 %"), (199, 200, "99 %"), (9999, 10000, "99 %"), (0, 3, "0 %")],
)
def test_the_badge_truncates(passed: int, total: int, words: str) -> None:
    assert f"{badge.percentage(passed, total)} %" == words


@settings(deadline=None)
@given(st.integers(1, 10**9), st.data())
def test_a_badge_shows_100_only_if_every_case_passed(
    total: int, data: st.DataObject
) -> None:
    passed = data.draw(st.integers(0, total))
    assert (badge.percentage(passed, total) == 100) == (passed == total)


def test_the_badge_of_an_incomplete_or_empty_run_has_no_percentage() -> None:
    assert "100 %" in badge.render(sample())
    assert "incomplete" in badge.render(replace(sample(), footer=None))
    assert "no cases" in badge.render(report_of([]))
    # a case that was skipped has not run
    right, other, *_ = sample().cases
    left = replace(other, status="skipped")
    assert "100 %" in badge.render(report_of([right, left]))
    assert "no cases" in badge.render(report_of([left]))
    with pytest.raises(ValueError, match="2 of 1"):
        badge.percentage(2, 1)


def test_each_failed_check_has_one_annotation_with_the_command_that_replays_it() -> (
    None
):
    lines = annotations.render(failing_report(3)).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("::error title=scale.rule%3A mine.amp%3AScaler::")
    assert "(and in 2 more cases)" in lines[0]
    assert "%0Agradparity replay tp/2/fp32/sgd/none/seed=0" in lines[0]


def test_annotations_stop_where_github_does() -> None:
    bad = [
        replace(with_verdict(case(), verdict("scale.rule", "fail")), scaler=f"a:S{n}")
        for n in range(30)
    ]
    lines = annotations.render(report_of(bad)).splitlines()
    assert len(lines) == annotations.SHOWN
    assert "21 more failed checks" in lines[-1]
    assert annotations.render(sample()) == ""
