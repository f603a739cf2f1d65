"""A report is complete or says that it is not; tampering is reported."""

import dataclasses
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec
import pytest
from msgspec.structs import replace

from gradparity.ci import annotations, junit, markdown
from gradparity.conformance.__main__ import main
from gradparity.conformance.comparison.law import LAWS, apply_checks
from gradparity.conformance.rank.devices import Devices
from gradparity.conformance.report.compare import compare
from gradparity.conformance.report.page import render_page
from gradparity.conformance.report.plots import (
    CHARACTER,
    LEFT,
    Series,
    line_chart,
    scale_chart,
)
from gradparity.conformance.report.records import (
    HARNESS,
    SCHEMA_VERSION,
    CaseRecord,
    Curves,
    Header,
    Report,
    ReportError,
    ReportWriter,
    read_report,
)
from gradparity.conformance.report.terminal import cell
from gradparity.conformance.run.launcher import Pool
from gradparity.conformance.run.recorder import Recorder, make_header
from gradparity.conformance.run.runner import Case
from gradparity.conformance.space.scenario import Scenario
from gradparity.conformance.status import Status, UsageError, Verdict
from gradparity.tests.made_up import evidence

HOSTILE = "<script>alert(1)</script>\x1b[31m&\"'$x$"


def header(planned: int = 2) -> Header:
    return Header(
        schema=SCHEMA_VERSION,
        gradparity="0",
        torch="0",
        python="3",
        platform="linux",
        backend="gloo",
        device="cpu",
        threads=1,
        commit="abc",
        command="gradparity run",
        preset="parity",
        seed=0,
        started="2026-01-01T00:00:00+00:00",
        planned=planned,
        data={},
        environment={},
    )


def case(
    scaler: str = "a:B", status: str = "pass", message: str = "fine"
) -> CaseRecord:
    verdict = Verdict(
        law="agreement.scale",
        status=status,
        message=message,
        compared=int(status == "pass"),
    )
    return CaseRecord(
        scaler=scaler,
        scenario="fsdp/2/fp32/sgd/none",
        topology="fsdp",
        world_size=2,
        precision="fp32",
        model="digits",
        status=status,
        verdicts=(verdict,),
        seconds=0.1,
        replay=f"gradparity replay x --scaler {scaler}",
        curves=Curves(
            loss=[1.0, None, "nan"],
            reference_loss=[1.0, 1.0, 1.0],
            scale=[[2.0, "inf", 4.0], [2.0, 2.0, 2.0]],
            growth=[[0, 1, 2], [0, 1, 2]],
            stepped=[[True, None, False], [True, True, True]],
            bad=[["", "", "w"], ["", "", ""]],
            parity=[0.1, 0.2, 0.3],
            parameters={"w": 0.3},
        ),
    )


def write(path: Path, *cases: CaseRecord, planned: int = 2, close: bool = True) -> Path:
    with ReportWriter(path, header(planned)) as writer:
        for each in cases:
            writer.case(each)
        if close:
            writer.close(1.5)
    return path


def test_a_text_that_utf8_does_not_have_is_escaped(tmp_path: Path) -> None:
    """An exception may name a file whose name is not UTF-8."""
    path = tmp_path / "report.jsonl"
    broken = replace(
        case("a:B"), status="error", verdicts=(), problem="no file bad \udcff"
    )
    write(path, broken)
    (read,) = read_report(path).cases
    assert read.problem == "no file bad \\udcff"


def test_a_whole_report_comes_back_equal(tmp_path: Path) -> None:
    cases = (case("a:B"), case("c:D", "fail", "step 1: rank 0"))
    report = read_report(write(tmp_path / "r.jsonl", *cases))
    assert report.cases == cases
    assert report.incomplete == ""
    assert report.footer is not None
    assert report.footer.counts == {"fail": 1, "pass": 1}
    lines = (tmp_path / "r.jsonl").read_bytes().splitlines()
    kinds = [msgspec.json.decode(line)["kind"] for line in lines]
    assert kinds == ["header", "case", "case", "footer"]


def test_verdicts_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Verdicts are written unchanged; values that JSON lacks (nan) become words."""
    of = evidence()
    of.ranks[0].steps[1].scale_after = float("nan")
    verdicts = tuple(apply_checks(of))
    made = msgspec.structs.replace(case(), verdicts=verdicts)
    path = write(tmp_path / "r.jsonl", made)
    (kept,) = read_report(path).cases
    assert kept.verdicts == verdicts
    split = kept.verdict("agreement.scale")
    assert split is not None and split.numbers == {"rank 0": "nan", "rank 1": 16.0}


def test_a_run_that_was_cut_off_is_readable_and_says_so(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", case(), close=False)
    with path.open("ab") as file:
        file.write(b'{"kind":"case","scal')  # killed in the middle of a line
    report = read_report(path)
    assert len(report.cases) == 1
    assert "cut off after 1 of 2" in report.incomplete


def test_fewer_cases_than_planned_are_incomplete(tmp_path: Path) -> None:
    report = read_report(write(tmp_path / "r.jsonl", case()))
    assert "1 of 2 planned" in report.incomplete


def test_earlier_reports_are_kept_however_many(tmp_path: Path) -> None:
    path, written = tmp_path / "r.jsonl", []
    for scaler in ("a:B", "c:D", "e:F"):
        written.append(write(path, case(scaler)).read_bytes())
    names = ("r.jsonl.1", "r.jsonl.2", "r.jsonl")
    assert [(tmp_path / name).read_bytes() for name in names] == written


def test_two_writers_of_one_report_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with ReportWriter(path, header()) as writer:
        writer.case(case("a:B"))
        with pytest.raises(UsageError, match="another run writes this report now"):
            write(path, case("c:D"))
    assert [c.scaler for c in read_report(path).cases] == ["a:B"]
    write(path, case("c:D"))  # the first has ended


def test_a_report_that_cannot_be_written_is_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="Not a directory"):
        write(tmp_path / "file" / "r.jsonl", case())


def tampered(path: Path, old: bytes, new: bytes) -> Path:
    raw = path.read_bytes()
    assert old in raw
    path.write_bytes(raw.replace(old, new, 1))
    return path


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (b'"schema":2', b'"schema":99', "schema version 99"),
        (b'"kind":"header"', b'"kind":"case"', "line 1"),
        (b'"cases":2', b'"cases":3', "the footer counts 3"),
        (b'"pass":2', b'"pass":1', "the footer counts 2"),
        (b'"planned":2', b'"planned":5', "2 of 5 planned"),
        (b'"scaler":"c:D"', b'"scaler":"a:B"', "occurs more than once"),
        (b'"status":"pass"', b'"status":"fail"', "the footer counts"),
        (b'"seconds":', b'"seconds":}', "line 2"),
    ],
)
def test_tampering_is_reported(
    tmp_path: Path, old: bytes, new: bytes, words: str
) -> None:
    path = write(tmp_path / "r.jsonl", case("a:B"), case("c:D"))
    with pytest.raises(ReportError, match=words):
        read_report(tampered(path, old, new))


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="No such file"):
        read_report(tmp_path / "nosuch.jsonl")


def report_of(*cases: CaseRecord) -> Report:
    return Report(header=header(len(cases)), cases=cases, footer=None)


def test_compare_reports_regressions_fixes_new_and_gone() -> None:
    before = report_of(case("a:B"), case("c:D", "fail"), case("gone:X"))
    after = report_of(case("a:B", "fail", "step 2"), case("c:D"), case("new:X"))
    kinds = [change.kind for change in compare(before, after)]
    assert kinds == ["regression", "gone", "fix", "new"]
    assert compare(before, before) == []


def with_scale(scale: list[list[float]]) -> CaseRecord:
    made = case()
    assert made.curves is not None
    curves = msgspec.structs.replace(made.curves, scale=scale)
    return msgspec.structs.replace(made, curves=curves)


def test_compare_reports_changed_numbers() -> None:
    before = report_of(with_scale([[2.0, 4.0], [2.0, 4.0]]))
    after = report_of(with_scale([[2.0, 4.0], [2.0, 2.0]]))
    (change,) = compare(before, after)
    assert change.kind == "changed"
    words = "the scale after step 1 on rank 1 is 2.0, was 4.0 in fsdp/2/fp32/sgd/none"
    assert words in change.text
    (change,) = compare(report_of(case(message="6 steps")), report_of(case()))
    assert change.text.endswith("a:B: 6 steps -> fine")


def test_compare_ignores_dates_timings_machines_and_order() -> None:
    cases = [case("a:B"), case("c:D", "fail")]
    late = [msgspec.structs.replace(c, seconds=99.0, replay="x") for c in cases]
    head = msgspec.structs.replace(
        header(2), started="2027-01-01", commit="def", platform="darwin", torch="9"
    )
    after = Report(header=head, cases=tuple(reversed(late)), footer=None)
    assert compare(report_of(*cases), after) == []


def test_compare_on_the_command_line_drives_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = write(tmp_path / "a", case("a:B"), case(HOSTILE))
    after = write(tmp_path / "b", case("a:B", "fail", HOSTILE), case("a:C"))
    assert main(["compare", str(before), str(after)]) == 1
    printed = capsys.readouterr().out
    assert [line.partition(":")[0] for line in printed.splitlines()] == [
        *("regression", "gone", "new"),
        "3 differences",
    ]
    assert "\x1b" not in printed
    cut = write(tmp_path / "c", case("a:B"), case(HOSTILE), close=False)
    assert main(["compare", str(before), str(cut)]) == 3
    assert "c is incomplete: the run was cut off after" in capsys.readouterr().out
    assert main(["compare", str(before), str(tmp_path / "none\x1b[31m")]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_hostile_text_is_escaped_in_the_page() -> None:
    page = render_page(report_of(case(HOSTILE, "fail", HOSTILE)))
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page


@pytest.mark.parametrize(
    ("low", "high"), [(-1.153e-09, 2.5), (1e-300, 1.0), (-123456.7, 1e22), (0.1234, 3)]
)
def test_labels_of_a_plot_find_room_left_of_it(low: float, high: float) -> None:
    line = Series(label="a", values=[low, high], style="s0")
    drawn = line_chart("title", [line])
    labels = re.findall(r'text-anchor="end">([^<]*)<', drawn)[:2]
    assert [float(x) for x in labels] == pytest.approx([low, high], rel=0.06)
    assert max(map(len, labels)) * CHARACTER <= LEFT - 6


def test_a_run_without_a_scaler_has_no_plot_of_its_scale() -> None:
    made = with_scale([[1.0, 1.0]] * 2)
    assert made.curves is not None
    assert scale_chart(made, made.curves) == ""
    other = with_scale([[1.0, 2.0]] * 2)
    assert other.curves is not None
    assert "log2 of the scale" in scale_chart(other, other.curves)


def test_checks_that_apply_to_no_run_have_no_column() -> None:
    idle = Verdict(law="dtype.reduction", status="skipped", message="no dtype")
    record = case()
    record = msgspec.structs.replace(record, verdicts=(*record.verdicts, idle))
    page = render_page(report_of(record))
    assert '<th scope="col" class="chapter">agreement</th>' in page
    assert '<th scope="col" class="chapter">dtype</th>' not in page
    assert "Checks of dtype apply to no run here." in page


def test_a_page_shows_what_is_wrong_first() -> None:
    """Runs of a topology are adjacent, and failing runs come first."""
    bad = case("none", "fail", "step 1: by 1.05 of its norm, bound 1.79e-06")
    numbers = {"error": 1.05019, "bound": 1.79233e-06, "ratio": 7.0}
    (verdict,) = bad.verdicts
    verdicts = (msgspec.structs.replace(verdict, step=1, numbers=numbers),)
    runs = [
        msgspec.structs.replace(
            record, topology=t, precision=p, scenario=f"{t}/2/{p}/{record.status}"
        )
        for t, p, record in (
            ("ddp", "fp32", case("none")),
            ("fsdp", "fp32", case("none")),
            ("ddp", "fp16", msgspec.structs.replace(bad, verdicts=verdicts)),
        )
    ]
    page = render_page(report_of(*runs))
    heads = re.findall(r'<th scope="row">(ddp|fsdp)</th><th', page)
    assert heads == ["ddp", "ddp", "fsdp"]
    stories = re.findall(r'data-verdict="(\w+)"', page)
    assert stories == ["fail", "pass", "pass"]
    assert re.findall(r'<span class="soft why">(.*?)</span>', page) == ["ratio = 7"]


def test_runs_without_a_scaler_have_a_column_of_verdicts() -> None:
    alone = render_page(report_of(case("none")))
    assert "<code>verdict</code>" in alone and "no scaler" not in alone
    beside = render_page(report_of(case("none"), case("a:S")))
    assert "<code>no scaler</code>" in beside and "<code>none</code>" not in beside


def test_the_page_of_an_incomplete_report_says_so() -> None:
    assert "This report is incomplete" in render_page(report_of(case()))


SCRIPT = "script that shows it with torch alone"
TORCH = "torch.amp:GradScaler"


def failing(scenario: str, *laws: str) -> Case:
    return Case(
        scaler=TORCH,
        scenario=Scenario.parse(scenario),
        verdicts=tuple(
            Verdict(law=law, status=Status.FAIL, message="step 1: rank 0")
            for law in laws
        ),
        evidence=None,
        seconds=0.1,
    )


@pytest.fixture(scope="module")
def place() -> Iterator[Pool]:
    with Pool(Devices(), 60.0) as made:
        yield made


@pytest.mark.parametrize(
    "scenario",
    [
        "fsdp/2/fp32/sgd/none",
        "ep/2/fp32/sgd/none/model=digits-experts",
        "fsdp/2/fp32/sgd/none/steps=2,recipe=accumulate",
    ],
)
def test_a_violation_comes_with_a_script(place: Pool, scenario: str) -> None:
    record = Recorder(place).record(failing(scenario, "agreement.scale"))
    page = render_page(report_of(record))
    assert SCRIPT in page
    assert "from torch.amp import GradScaler" in page


def test_the_first_case_of_each_failed_check_has_a_script(place: Pool) -> None:
    recorder = Recorder(place)
    seen = [
        failing("ddp/2/fp32/sgd/none/seed=1", "agreement.scale"),
        failing("ddp/2/fp32/sgd/none/seed=2", "agreement.scale"),
        failing("ddp/2/fp32/sgd/none/seed=3", "agreement.scale", "scale.rule"),
        failing("ddp/2/fp32/sgd/none/seed=4", "scale.rule"),
        failing("ddp/2/fp32/sgd/none/seed=5"),
    ]
    there = [bool(recorder.record(each).script) for each in seen]
    assert there == [True, False, True, False, False]


def test_the_page_and_the_record_have_no_script_for_unknown_names(place: Pool) -> None:
    odd = msgspec.structs.replace(case(TORCH, "fail"), scenario="no id")
    assert SCRIPT not in render_page(report_of(odd))
    strange = dataclasses.replace(failing("ddp/2/fp32/sgd/none", "x.y"), scaler="a-b:c")
    assert Recorder(place).record(strange).script == ""


def test_a_script_that_cannot_be_made_ends_no_run(
    place: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(*_: object) -> str:
        raise AssertionError("two names")

    monkeypatch.setattr(place, "alone", breaks)
    record = Recorder(place).record(failing("ddp/2/fp32/sgd/none", "scale.rule"))
    assert (record.status, record.script) == ("fail", "")
    assert "no script could be made for ddp/2/fp32/sgd/none" in caplog.text


def test_a_cell_names_the_check_that_fails_first() -> None:
    """The failure of the earliest step is named, since later ones follow from it."""
    late, soon = (
        Verdict(
            law=f"parity.{what}", status="fail", message=f"step {n}: {what}", step=n
        )
        for n, what in ((1, "gradient"), (0, "update"))
    )
    record = msgspec.structs.replace(case(TORCH, "fail"), verdicts=(late, soon))
    assert cell([record]).endswith("step 0: update")


def test_a_broken_harness_is_reported_once(place: Pool) -> None:
    broke = dataclasses.replace(failing("ddp/2/fp32/sgd/none"), problem="rank 1: gone")
    record = Recorder(place).record(broke)
    assert (record.status, record.verdicts) == ("error", ())
    assert [(v.law, v.status) for v in record.findings] == [(HARNESS, "error")]
    report = report_of(record)
    # evidence, its run, the table
    assert render_page(report).count("rank 1: gone") == 3
    words = "ERROR (harness, 1 of 2 runs) digits: rank 1: gone"
    assert cell([case(), record]) == words
    (test,) = ET.fromstring(junit.render(report)).findall("testsuite[1]/testcase")
    assert (test.get("name"), [e.tag for e in test]) == (HARNESS, ["error"])
    (_, line) = annotations.render(report).splitlines()  # the first: incomplete
    assert "rank 1: gone" in line
    assert markdown.render(report).count("rank 1: gone") == 2


def test_compare_reports_a_broken_harness_once(place: Pool) -> None:
    broke = dataclasses.replace(failing("ddp/2/fp32/sgd/none"), problem="rank 1: gone")
    good = failing("ddp/2/fp32/sgd/none", "scale.rule", "agreement.scale")
    broken_, checked = (
        report_of(Recorder(place).record(each)) for each in (broke, good)
    )
    where = "ddp/2/fp32/sgd/none  torch.amp:GradScaler"
    (change,) = compare(checked, broken_)
    assert change.text == f"regression: fail -> error in {where}: rank 1: gone"
    (change,) = compare(broken_, checked)
    assert change.kind == "fix"
    assert compare(broken_, broken_) == []


def broken(number: int) -> CaseRecord:
    """Return a case that fails ten checks, with the texts and curves of a long run."""
    made = case("package.module:GradScaler", "fail", "step 1: " + "rank 0 differs " * 6)
    assert made.curves is not None
    curves = msgspec.structs.replace(
        made.curves,
        scale=[[float(2**step) for step in range(20)]] * 4,
        stepped=[[True, False] * 10] * 4,
        bad=[["", "w"] * 10] * 4,
        parameters={f"blocks.{n}.feed_forward.up.weight": n / 3 for n in range(9)},
    )
    return msgspec.structs.replace(
        made,
        scenario=f"fsdp+tp/4/fp32/adamw/inf@r3s1:up.weight;nan@r0s3:last/seed={number}",
        verdicts=tuple(
            msgspec.structs.replace(made.verdicts[0], law=law)
            for law in list(LAWS)[:10]
        ),
        curves=curves,
    )


def test_a_page_of_500_runs_is_small_whatever_they_come_to() -> None:
    cases = [broken(number) for number in range(500)]
    page = render_page(report_of(*cases))
    assert len(page.encode()) < 3_000_000
    assert all(each.scenario in page for each in cases)
    drawn = page.count("decisions by rank and step") // 2  # title and text
    assert 100 < drawn < 500
    assert f"{500 - drawn} runs have no plots here" in page


def test_room_is_for_the_plots_of_violations_first() -> None:
    good = [
        msgspec.structs.replace(broken(n), status="pass", verdicts=())
        for n in range(1000, 1700)
    ]
    page = render_page(report_of(*good, broken(1)))
    assert page.count("decisions by rank and step") == 2


def made_header() -> Header:
    return make_header(
        planned=1, preset="quick", seed=3, arguments=["run"], place=Pool(Devices(), 9.0)
    )


def test_the_commit_is_that_of_the_tested_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert made_header().commit == ""
    (tmp_path / "mine.py").write_text("x = 1\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "one"]):
        subprocess.run(["git", *command], check=True)
    clean = made_header().commit
    assert len(clean) == 12
    (tmp_path / "mine.py").write_text("x = 2\n")
    assert made_header().commit == f"{clean}-dirty"


def test_the_header_says_how_to_run_it_again() -> None:
    said = made_header()
    assert (said.command, said.preset, said.seed) == ("gradparity run", "quick", 3)
    assert (said.backend, said.device, said.planned) == ("gloo", "cpu", 1)
