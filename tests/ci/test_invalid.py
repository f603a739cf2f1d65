"""A report that contradicts itself, was cut or was edited is refused by the gate."""

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from gradparity.ci.baseline import make_baseline, write_baseline
from gradparity.ci.gate import main
from gradparity.conformance.report.records import CaseRecord
from gradparity.tests.ci.test_samples import (
    report_of,
    sample,
    verdict,
    with_curves,
    with_verdict,
    write,
)

Lines = Callable[[list[bytes]], list[bytes]]


CONTRADICTIONS: dict[str, tuple[Callable[[CaseRecord], CaseRecord], str]] = {
    "case painted green": (
        lambda c: replace(
            with_verdict(c, verdict("scale.rule", "fail")), status="pass"
        ),
        "the case has the status pass, its verdicts give fail",
    ),
    "unknown word": (
        lambda c: replace(
            c, verdicts=(*c.verdicts[:-1], verdict("skip.all-ranks-skip", "PASS"))
        ),
        "line 2: Expected `str` matching regex '^(pass|",
    ),
    "a second verdict": (
        lambda c: replace(c, verdicts=(*c.verdicts, c.verdicts[0])),
        "check liveness.completes has 2 verdicts",
    ),
    "no verdict": (lambda c: replace(c, verdicts=()), "give inconclusive"),
    "another world than its id": (
        lambda c: replace(c, scenario="fsdp/4/fp32/sgd/none"),
        "the case says fsdp/2",
    ),
    "a pass over nothing": (
        lambda c: with_verdict(c, verdict("scale.rule", compared=0)),
        "scale.rule passes and compared nothing",
    ),
    "a rank is missing": (
        lambda c: with_curves(c, scale=[[8.0, 4.0, 4.0]]),
        "scale has 1 rows for 2 ranks",
    ),
    "ranks disagree on the scale": (
        lambda c: with_curves(c, scale=[[8.0, 4.0, 4.0], [8.0, 4.0, 8.0]]),
        "agreement.scale passes, but",
    ),
    "ranks disagree on a skip": (
        lambda c: with_curves(c, stepped=[[True, False, True], [True, True, True]]),
        "agreement.skip passes, but",
    ),
    "error beyond its bound": (
        lambda c: with_curves(
            c, parity=[0.1, 3.0, 0.1], parameters={"w": 3.0, "b": 0.1}
        ),
        "parity passes, but an error is beyond its bound",
    ),
    "error is nan": (
        lambda c: with_curves(c, parity=[0.1, "nan", 0.1], parameters={"w": "nan"}),
        "parity passes, but an error is beyond its bound",
    ),
    "error is a word": (
        lambda c: with_curves(c, parity=[0.1, "tiny", 0.1]),
        "line 2: Expected `str` matching regex '^(nan|",
    ),
    "error is negative": (
        lambda c: with_curves(c, parity=[0.1, 0.6, -9.0]),
        "an error / bound is below 0",
    ),
    "steps made smaller than parameters": (
        lambda c: with_curves(c, parity=[0.1, 0.1, 0.1]),
        "the largest error / bound of the steps is not that of the parameters",
    ),
    "a step without error": (
        lambda c: with_curves(c, parity=[0.1, 0.6]),
        "error / bound has 2 steps, the run has more or fewer",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_report_that_contradicts_itself_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words = CONTRADICTIONS[name]
    baseline = tmp_path / "baseline.jsonl"
    write_baseline(baseline, make_baseline([sample()]))
    first, *others = sample().cases  # the footer is honest
    path = write(report_of([change(first), *others]), tmp_path / "report.jsonl")
    assert main([str(path), "--baseline", str(baseline)]) == 3
    assert words in capsys.readouterr().out


TAMPERING: dict[str, tuple[Lines, str]] = {
    "cut off": (lambda lines: lines[:-1], "the footer is missing"),
    "cut in a line": (
        lambda lines: [*lines[:-1], lines[-1][:9]],
        "the footer is missing",
    ),
    "a case taken out": (lambda lines: [lines[0], *lines[2:]], "the footer counts 3"),
    "a case twice": (lambda lines: [*lines[:2], *lines[1:]], "more than once"),
    "footer first": (lambda lines: [*lines[:1], lines[-1], *lines[1:-1]], "last line"),
    "no header": (lambda lines: lines[1:], "not a report header"),
    "empty": (lambda lines: [], "no complete line"),
    "a baseline": (
        lambda lines: [b'{"kind":"baseline","schema":1}\n', *lines[1:]],
        "line 1 is not a report header: it is a baseline",
    ),
    "no JSON": (lambda lines: [b"<html>\n", *lines], "line 1"),
    "not UTF-8": (lambda lines: [lines[0], b'"\xff"\n', *lines[1:]], "line 2"),
    "schema of tomorrow": (
        lambda lines: [lines[0].replace(b'"schema":2', b'"schema":3'), *lines[1:]],
        "schema version 3",
    ),
    "footer counts a pass more": (
        lambda lines: [*lines[:-1], lines[-1].replace(b'"pass":3', b'"pass":4')],
        "the footer counts",
    ),
    "planned more than checked": (
        lambda lines: [lines[0].replace(b'"planned":3', b'"planned":4'), *lines[1:]],
        "complete with 3 of 4",
    ),
    "stopped early": (
        lambda lines: [*lines[:-1], lines[-1].replace(b":true", b":false")],
        "incomplete",
    ),
}


@pytest.mark.parametrize("name", TAMPERING)
def test_a_file_that_was_cut_or_edited_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit, words = TAMPERING[name]
    report = sample()
    if name == "stopped early":
        assert report.footer is not None
        report = replace(report, footer=replace(report.footer, reason="incomplete"))
    path = write(report, tmp_path / "report.jsonl")
    path.write_bytes(b"".join(edit(path.read_bytes().splitlines(keepends=True))))
    assert main([str(path)]) == 3
    told = capsys.readouterr().out
    assert "gate: INVALID" in told
    assert words in told
