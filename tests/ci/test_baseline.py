"""Baselines: their content, refused files, and when the file changes."""

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from gradparity.ci.baseline import (
    BaselineError,
    make_baseline,
    read_baseline,
    write_baseline,
)
from gradparity.ci.gate import main
from gradparity.ci.ratios import LUCK, Spread, limit, worst
from gradparity.tests.ci.test_samples import (
    MESSAGES,
    report_of,
    sample,
    verdict,
    with_curves,
    with_verdict,
    write,
)


def update(report: Path, baseline: Path, *options: str) -> int:
    return main(
        [str(report), "--baseline", str(baseline), "--update-baseline", *options]
    )


@pytest.fixture
def report(tmp_path: Path) -> Path:
    return write(sample(), tmp_path / "report.jsonl")


def test_a_status_that_does_not_exist_is_no_baseline(tmp_path: Path) -> None:
    path = tmp_path / "baseline.jsonl"
    write_baseline(path, make_baseline([sample()]))
    path.write_text(path.read_text().replace('"status":"pass"', '"status":"PASS"', 1))
    with pytest.raises(BaselineError, match="line 2: Expected `str` matching regex"):
        read_baseline(path)


def test_a_baseline_reads_as_it_was_written(tmp_path: Path) -> None:
    made = make_baseline([sample()])
    write_baseline(tmp_path / "b.jsonl", made)
    assert read_baseline(tmp_path / "b.jsonl") == made


def test_provenance_is_the_first_line_and_fields_are_apart(tmp_path: Path) -> None:
    write_baseline(tmp_path / "b.jsonl", make_baseline([sample()]))
    lines = [json.loads(x) for x in (tmp_path / "b.jsonl").read_text().splitlines()]
    assert [x["kind"] for x in lines] == ["baseline", "case", "case", "case"]
    assert (lines[0]["torch"], lines[0]["cases"]) == ("2.13.0+cpu", 3)
    exact, measured = lines[1]["exact"], lines[1]["measured"]
    numbers = {"compared", "not_compared"}
    assert set(exact) == {"status", "laws", *numbers, "stepped", "scale"}
    assert exact["compared"] == dict.fromkeys(MESSAGES, 6)
    assert exact["not_compared"] == dict.fromkeys(MESSAGES, 0)
    assert exact["scale"] == [[8.0, 4.0, 4.0]] * 2
    assert measured["ratio"] == {"low": 0.6, "high": 0.6}
    assert measured["parameters"]["b"] == {"low": 0.05, "high": 0.05}


def test_neither_order_nor_timing_changes_the_file(tmp_path: Path) -> None:
    turned = report_of(replace(c, seconds=9.0) for c in reversed(sample().cases))
    for name, each in {"a": sample(), "b": turned}.items():
        write_baseline(tmp_path / name, make_baseline([each]))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_repeated_runs_give_the_spread_and_widen_the_noise(
    report: Path, tmp_path: Path
) -> None:
    luckier = with_curves(
        sample().cases[0], parity=[0.1, 0.5, 0.1], parameters={"w": 0.5, "b": 0.05}
    )
    other = write(report_of([luckier, *sample().cases[1:]]), tmp_path / "other.jsonl")
    target = tmp_path / "b.jsonl"
    assert update(report, target, "--yes", "--repeat", str(other)) == 0
    made = read_baseline(target)
    assert made.provenance.runs == 2
    (spread,) = {c.measured.ratio for c in made.cases if c.scenario == luckier.scenario}
    assert spread == Spread(low=0.5, high=0.6)
    assert spread is not None
    assert limit(spread) == pytest.approx(0.9)


def test_repeated_runs_must_agree_in_exact_fields() -> None:
    other = with_verdict(sample().cases[0], verdict("scale.rule", "fail"))
    runs = [sample(), report_of([other, *sample().cases[1:]])]
    with pytest.raises(BaselineError, match=r"run 2 of fsdp/2/fp32/sgd/none"):
        make_baseline(runs)
    with pytest.raises(BaselineError, match="other cases"):
        make_baseline([sample(), report_of(sample().cases[1:])])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "report 2 is report 1, and shows no noise"),
        ({"commit": "other"}, "report 2 was made with commit other, and report 1 with"),
        ({"torch": "2.99.0"}, "report 2 was made with torch 2.99.0"),
        ({"data": {"digits": "0"}}, "report 2 was made with other data"),
    ],
)
def test_a_repeat_is_another_run_of_the_same_code(
    changes: dict[str, object], words: str
) -> None:
    with pytest.raises(BaselineError, match=re.escape(words)):
        make_baseline([sample(), report_of(sample().cases, **changes)])


@pytest.mark.parametrize(
    ("low", "high", "end"),
    [(0.0, 0.0, LUCK), (0.01, 0.02, LUCK), (0.6, 0.6, 0.75), (0.2, 0.4, 1.0)],
)
def test_the_limit_of_the_recorded_noise(low: float, high: float, end: float) -> None:
    assert limit(Spread(low=low, high=high)) == pytest.approx(end)


def test_nan_is_the_worst_and_no_noise() -> None:
    assert worst([0.5, "nan", 0.1]) == float("inf")
    assert worst(["nan", 0.5]) == float("inf")
    with pytest.raises(ValueError, match="not a range"):
        Spread(low="nan", high="nan")


def test_update_shows_the_difference_and_asks(
    report: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "b.jsonl"
    failing = with_verdict(sample().cases[0], verdict("scale.rule", "fail"))
    write_baseline(target, make_baseline([report_of([failing])]))
    before = target.read_bytes()
    for answer, code in {"": 2, "n\n": 2, "maybe\n": 2, "y\n": 0}.items():
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert target.read_bytes() == before
        assert update(report, target) == code
    told = capsys.readouterr().out
    where = "fsdp/2/fp32/sgd/none mine.amp:Scaler"
    assert f"note: better: scale.rule passes in {where}" in told
    assert "new: tp/2/bf16/sgd/none mine.amp:Scaler is not in the baseline" in told
    assert f"write 3 cases to {target}? [y/N]" in told
    assert target.read_bytes() != before
    assert main([str(report), "--baseline", str(target), "--strict"]) == 0


def test_update_shows_what_the_gate_will_no_longer_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "b.jsonl"
    write_baseline(target, make_baseline([sample()]))
    moved = with_curves(sample().cases[0], scale=[[8.0, 4.0, 2.0]] * 2)
    failing = [
        with_verdict(c, verdict("scale.rule", "fail")) for c in sample().cases[1:]
    ]
    worse = write(report_of([moved, *failing]), tmp_path / "worse.jsonl")
    assert main([str(worse), "--baseline", str(target)]) == 1
    _, *said = capsys.readouterr().out.splitlines()
    assert update(worse, target, "--yes", "--accept-failures") == 0
    *shown, count, _ = capsys.readouterr().out.splitlines()
    assert shown == said and count == "2 differences"
    assert "sequence: the scale after step 2 on rank 0 is 2.0, was 4.0" in shown[1]
    assert shown[0].startswith("worse (2 cases): scale.rule")


# regression: N23
def test_failures_are_written_only_where_they_are_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [with_verdict(c, verdict("scale.rule", "fail")) for c in sample().cases]
    cases[0] = with_verdict(sample().cases[0], verdict("scale.rule", "inconclusive"))
    failing = write(report_of(cases), tmp_path / "failing.jsonl")
    target = tmp_path / "b.jsonl"
    assert update(failing, target, "--yes") == 1
    told = capsys.readouterr().err
    assert "a failing report cannot be a baseline: failing (2 cases): scale" in told
    assert "expectations.toml" in told and "--accept-failures" in told
    assert not target.exists()
    # What fails stays out of the baseline where an expectation excuses it: without the
    # expectation a later gate fails.
    expect = tmp_path / "known.toml"
    expect.write_text('[[expect]]\nlaw = "scale.rule"\nreason = "known"\n')
    assert update(failing, target, "--yes", "--expect", str(expect)) == 0
    baseline = ["--baseline", str(target)]
    assert main([str(failing), *baseline, "--expect", str(expect), "--strict"]) == 0
    assert main([str(failing), *baseline]) == 1
    assert update(failing, target, "--yes", "--accept-failures") == 0
    assert main([str(failing), *baseline]) == 0
    assert main([str(failing), "--accept-failures"]) == 2
    assert "--accept-failures goes with --update-baseline" in capsys.readouterr().err


def test_a_second_update_changes_nothing(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "deep" / "b.jsonl"
    assert update(report, target, "--yes") == 0
    before = target.read_bytes()
    assert update(report, target, "--yes") == 0
    assert target.read_bytes() == before
    assert "\n0 differences\n" in capsys.readouterr().out
    assert [p.name for p in target.parent.iterdir()] == ["b.jsonl"]


REFUSED: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "no footer": (
        lambda p: write(replace(sample(), footer=None), p),
        3,
        "the footer is missing",
    ),
    "a contradiction": (
        lambda p: write(
            report_of(replace(c, status="fail") for c in sample().cases), p
        ),
        3,
        "its verdicts give pass",
    ),
    "nothing compared": (lambda p: write(report_of([]), p), 4, "nothing was"),
    "no report": (lambda p: p.unlink(), 3, "No such file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_no_baseline_is_made_of_a_bad_report(
    name: str, report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil, code, words = REFUSED[name]
    spoil(report)
    assert update(report, tmp_path / "b.jsonl", "--yes") == code
    assert words in capsys.readouterr().err
    assert not (tmp_path / "b.jsonl").exists()


def test_the_message_about_a_missing_baseline_says_how_to_make_one(
    report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "b.jsonl"
    assert main([str(report), "--baseline", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.endswith(
        f"{path}: No such file or directory. To write one: gradparity gate REPORT "
        f"--baseline {path} --update-baseline\n"
    )


CUT: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "a case is gone": lambda lines: lines[:-1],
    "a case twice": lambda lines: [*lines[:-1], lines[1]],
    "no provenance": lambda lines: lines[1:],
    "provenance twice": lambda lines: [lines[0], *lines[:-1]],
    "empty": lambda lines: [],
    "no JSON": lambda lines: [*lines, b"{"],
    "not UTF-8": lambda lines: [b'"\xff"', *lines],
    "version of tomorrow": lambda lines: [
        lines[0].replace(b'"schema":1', b'"schema":2'),
        *lines[1:],
    ],
    "noise is a word": lambda lines: [x.replace(b"0.05", b'"much"') for x in lines],
    "noise is negative": lambda lines: [
        x.replace(b'"low":0.05', b'"low":-50') for x in lines
    ],
}


@pytest.mark.parametrize("name", CUT)
def test_a_baseline_that_was_cut_or_edited_is_no_baseline(
    name: str, report: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "b.jsonl"
    write_baseline(target, make_baseline([sample()]))
    lines = target.read_bytes().splitlines()
    target.write_bytes(b"\n".join(CUT[name](lines)))
    with pytest.raises(BaselineError, match=r"b\.jsonl"):
        read_baseline(target)
    assert main([str(report), "--baseline", str(target)]) == 2
    assert str(target) in capsys.readouterr().err
