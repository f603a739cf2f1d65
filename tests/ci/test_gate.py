"""The gate as a program: exit codes, one line per reason, JSON, tampered reports."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from gradparity.ci.baseline import make_baseline, write_baseline
from gradparity.ci.gate import main
from gradparity.ci.reasons import Reason, causes_of
from gradparity.conformance import LAWS as ALL_LAWS
from gradparity.conformance.__main__ import main as command_line
from gradparity.conformance.report.records import CaseRecord, Location, Report
from gradparity.tests.ci.test_samples import (
    SCALER,
    case,
    curves,
    report_of,
    sample,
    verdict,
    with_curves,
    with_verdict,
    write,
)

Edit = Callable[[Report], Report]


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    path = tmp_path / "baseline.jsonl"
    write_baseline(path, make_baseline([sample()]))
    return path


def gate(
    report: Report, tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, str]:
    path = write(report, tmp_path / "report.jsonl")
    code = main([str(path), *options])
    return code, capsys.readouterr().out


def first(change: Callable[[CaseRecord], CaseRecord]) -> Edit:
    """Return an edit that changes the first case, and the footer accordingly."""
    return lambda report: report_of([change(report.cases[0]), *report.cases[1:]])


def drop_law(record: CaseRecord) -> CaseRecord:
    kept = tuple(v for v in record.verdicts if v.law != "scale.rule")
    return replace(record, verdicts=kept)


def relabel(law: str, status: str, message: str | None = None) -> Edit:
    return first(lambda c: with_verdict(c, verdict(law, status, message)))


def counted(law: str, *, compared: int, not_compared: int = 0) -> Edit:
    """Return an edit that changes the counts of a check, but not its message."""
    return first(
        lambda c: with_verdict(
            c, verdict(law, compared=compared, not_compared=not_compared)
        )
    )


def errors(**parameters: float) -> Edit:
    """Return an edit that sets the ratios of errors to their bounds."""
    parity = [0.0, max(parameters.values()), 0.0]
    return first(lambda c: with_curves(c, parity=parity, parameters=parameters))


def header(**changes: object) -> Edit:
    return lambda report: report_of(report.cases, **changes)


def new_law(record: CaseRecord) -> CaseRecord:
    return replace(record, verdicts=(*record.verdicts, verdict("new.law")))


FAILING_DDP = relabel("scale.rule", "fail")(report_of([case("ddp/2/fp32/sgd/none")]))
WORSE: dict[str, tuple[Edit, int, str]] = {
    "a law fails": (relabel("scale.rule", "fail"), 1, "worse: scale.rule pass -> fail"),
    "a law breaks the harness": (relabel("scale.rule", "error"), 1, "pass -> error"),
    "a law is no longer checked": (relabel("scale.rule", "skipped"), 1, "-> skipped"),
    "a law decides nothing": (
        relabel("scale.rule", "inconclusive"),
        4,
        "undecided: scale.rule pass -> inconclusive",
    ),
    "fewer comparisons": (
        counted("scale.rule", compared=2),
        1,
        "too-few: scale.rule rests on 2 comparisons, was 6",
    ),
    "fewer comparisons of parity": (
        counted("parity.gradient", compared=5),
        1,
        "too-few: parity.gradient rests on 5 comparisons, was 6",
    ),
    "more that could not be compared": (
        counted("parity.gradient", compared=6, not_compared=3),
        1,
        "too-few: parity.gradient could not make 3 comparisons, was 0",
    ),
    "a law is gone": (first(drop_law), 1, "vanished: check scale.rule was not run in"),
    "a scenario is gone": (
        lambda r: report_of(r.cases[1:]),
        1,
        "vanished: scenario fsdp/2/fp32/sgd/none",
    ),
    "another scaler was checked": (
        first(lambda c: replace(c, scaler="other:Scaler")),
        1,
        "vanished: scenario",
    ),
    "no case at all": (lambda r: report_of([]), 1, "nothing was compared"),
    "another scale": (
        first(lambda c: with_curves(c, scale=[[8.0, 4.0, 2.0]] * 2)),
        1,
        "sequence: the scale after step 2 on rank 0 is 2.0, was 4.0",
    ),
    "another skip": (
        first(lambda c: with_curves(c, stepped=[[True, True, True]] * 2)),
        1,
        "sequence: whether the parameters changed in step 1 on rank 0 is True",
    ),
    "a decision is hidden": (
        first(lambda c: with_curves(c, stepped=[[True, None, True]] * 2)),
        1,
        "step 1 on rank 0 is None",
    ),
    "fewer steps": (
        first(
            lambda c: with_curves(
                c,
                scale=[[8.0, 4.0]] * 2,
                growth=[[1, 0]] * 2,
                stepped=[[True, False]] * 2,
                bad=[["", ""]] * 2,
                parity=[0.1, 0.6],
            )
        ),
        1,
        "the scale after each step covers [2, 2]",
    ),
    "the error grew": (
        errors(w=0.8, b=0.05),
        1,
        "ratio: the w error / bound grew to 0.8, was 0.6",
    ),
    "the error of a lesser parameter grew": (
        errors(w=0.6, b=0.55),
        1,
        "ratio: the b error / bound grew to 0.55, was 0.05",
    ),
    "a parameter is no longer measured": (
        errors(w=0.6),
        1,
        "ratio: the b error / bound is no longer measured",
    ),
    "nothing is measured": (
        first(lambda c: with_curves(c, parity=[], parameters={})),
        1,
        "ratio: the largest error / bound is no longer measured",
    ),
    "no curves": (first(lambda c: replace(c, curves=None)), 1, "no longer recorded"),
    "a new law fails": (
        first(lambda c: with_verdict(new_law(c), verdict("new.law", "fail"))),
        1,
        "failing: new.law fails",
    ),
    "a new law is not checked": (
        first(lambda c: with_verdict(new_law(c), verdict("new.law", "skipped"))),
        4,
        "undecided: new.law is skipped and missing in the baseline",
    ),
    "a new scenario fails": (
        lambda r: report_of([*r.cases, *FAILING_DDP.cases]),
        1,
        "failing: scale.rule fails in ddp/2/fp32/sgd/none",
    ),
    "another torch": (
        header(torch="2.14.0"),
        4,
        "environment: the baseline was made with torch 2.13",
    ),
    "another version of gradparity": (
        header(gradparity="0.2.0"),
        4,
        "environment: the baseline was made with gradparity 0.1, the report has 0.2",
    ),
    "another backend": (
        header(backend="nccl"),
        4,
        "backend gloo, the report has nccl",
    ),
    "another platform": (header(platform="darwin-arm64"), 4, "environment: "),
    "other data": (header(data={"digits": "0"}), 4, "data digits"),
    "no data": (header(data={}), 4, "the report has none"),
}


@pytest.mark.parametrize("name", WORSE)
def test_a_worse_report_is_refused(
    name: str, tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit, code, words = WORSE[name]
    told = gate(edit(sample()), tmp_path, capsys, "--baseline", str(baseline))
    assert told[0] == code, told[1]
    assert any(words in line for line in told[1].splitlines()), told[1]


def test_any_torch_lets_another_minor_pass_and_nothing_else(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--baseline", str(baseline), "--any-torch"]
    other = header(torch="2.15.0")
    assert gate(other(sample()), tmp_path, capsys, *options)[0] == 0
    broken = other(relabel("scale.rule", "fail")(sample()))
    assert gate(broken, tmp_path, capsys, *options)[0] == 1
    elsewhere = header(torch="2.15.0", backend="nccl")(sample())
    code, told = gate(elsewhere, tmp_path, capsys, *options)
    assert (code, "backend gloo" in told, "with torch" in told) == (4, True, False)
    assert main([str(tmp_path / "report.jsonl"), "--any-torch"]) == 2
    assert "goes with --baseline" in capsys.readouterr().err


def test_an_unchanged_report_passes(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = gate(sample(), tmp_path, capsys, "--baseline", str(baseline))
    assert code == 0
    assert told.splitlines() == ["gate: PASS: 3 cases, 27 checks"]


def test_the_gate_reads_no_numbers_out_of_words(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for message in ("all is well", "2 of 6 updates", "0 and 7"):
        told = relabel("scale.rule", "pass", message)(sample())
        assert gate(told, tmp_path, capsys, "--baseline", str(baseline))[0] == 0


def test_a_check_that_the_baseline_lacks_is_reported(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = report_of(new_law(c) for c in sample().cases)
    code, told = gate(new, tmp_path, capsys, "--baseline", str(baseline))
    assert code == 0
    line = "note: new: check new.law is not in the baseline: it passes in fsdp/2/"
    (note,) = [x for x in told.splitlines() if x.startswith(line)]
    assert note.endswith("--update-baseline records it (and 2 more)")


def test_a_baseline_of_another_torch_names_the_command_that_renews_it(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = header(torch="2.14.0")(sample())
    target = tmp_path / "gate.json"
    options = ("--baseline", str(baseline), "--json", str(target))
    code, told = gate(newer, tmp_path, capsys, *options)
    (note,) = [x for x in told.splitlines() if "--update-baseline" in x]
    assert code == 4 and "docs/gate.md" in note
    assert f"{tmp_path}/report.jsonl --baseline {baseline} --update-baseline" in note
    assert note.removeprefix("note: ") in json.loads(target.read_text())["notes"]


def known(law: str, *statuses: str, tmp_path: Path) -> list[str]:
    """Return the options that expect these statuses of a check."""
    path = tmp_path / "known.toml"
    entry = f'law = "{law}"\nstatus = {json.dumps(statuses)}\nreason = "known"\n'
    path.write_text(f"[[expect]]\n{entry}")
    return ["--expect", str(path)]


@pytest.mark.parametrize("status", ["inconclusive", "fail", "expected"])
@pytest.mark.parametrize("edit", ["fewer comparisons", "another scale", "gone"])
def test_a_case_that_is_no_pass_in_the_baseline_is_compared(
    edit: str, status: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    law, expects = "agreement.skip", status == "expected"
    open_ = relabel(law, "fail" if expects else status)
    path = tmp_path / "baseline.jsonl"
    without = ("fail",) if expects else ()
    write_baseline(path, make_baseline([open_(sample())], without))
    options = ["--baseline", str(path)]
    options += known(law, "fail", tmp_path=tmp_path) if expects else []
    code, told = gate(open_(sample()), tmp_path, capsys, *options)
    assert code == 0, told

    def drop(record: CaseRecord) -> CaseRecord:
        kept = tuple(v for v in record.verdicts if v.law != law)
        return replace(record, verdicts=kept, status="pass")

    gone = first(drop), 1, f"vanished: check {law} was not run in"
    change, due, words = gone if edit == "gone" else WORSE[edit]
    code, told = gate(change(open_(sample())), tmp_path, capsys, *options)
    assert code == due and words in told, told


def test_with_require_the_named_scalers_decide(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [replace(c, scaler="their:Scaler") for c in sample().cases]
    other[0] = with_verdict(other[0], verdict("scale.rule", "fail"))
    ended = {"status": "error", "problem": "killed", "verdicts": (), "curves": None}
    other[1] = replace(other[1], **ended)
    both = report_of([*sample().cases, *other], require=(SCALER,))
    code, told = gate(both, tmp_path, capsys)
    assert code == 0 and "not checked, as --require names others: their:Scaler" in told
    assert gate(report_of(both.cases), tmp_path, capsys)[0] == 3
    path = tmp_path / "baseline.jsonl"
    options = ["--baseline", str(path)]
    update = [*options, "--update-baseline", "--yes"]
    assert main([str(tmp_path / "report.jsonl"), *update]) == 3
    assert gate(both, tmp_path, capsys, *update)[0] == 0
    assert gate(both, tmp_path, capsys, *options)[0] == 0
    gone = report_of(other[1:], require=(SCALER,))
    assert gate(gone, tmp_path, capsys, *options)[0] == 1


def test_an_incomplete_report_without_a_reason_is_incomplete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    footer = sample().footer
    assert footer is not None
    cut = replace(sample(), footer=replace(footer, complete=False, reason=""))
    code, told = gate(cut, tmp_path, capsys)
    assert (code, "gives no reason" in told) == (3, True), told


STEPS = {"agreement.scale": 1, "scale.rule": 1, "parity.gradient": 2}


def worse(record: CaseRecord) -> CaseRecord:
    """Return a case in which ranks disagree: one cause and its consequences."""
    for law, step in STEPS.items():
        broken = replace(verdict(law, "fail", f"{law} in {record.topology}"), step=step)
        record = with_verdict(record, broken)
    record = with_verdict(record, verdict("agreement.skip", "inconclusive"))
    return with_curves(record, scale=[[8.0, 4.0, 4.0], [8.0, 8.0, 8.0]])


def test_equal_causes_of_many_cases_are_one_line(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(worse(c) for c in sample().cases)
    target = tmp_path / "gate.json"
    options = ("--baseline", str(baseline), "--json", str(target))
    code, told = gate(report, tmp_path, capsys, *options)
    assert code == 1
    head, line = told.splitlines()
    assert head == "gate: FAIL: 1 cause, 15 reasons, 3 cases, 27 checks"
    assert line == (
        "worse (3 cases, 12 consequences): agreement.scale pass -> fail in "
        "fsdp/2/fp32/sgd/none mine.amp:Scaler: step 1: agreement.scale in fsdp"
    )
    said = json.loads(target.read_text())
    assert len(said["reasons"]) == 15  # as data nothing is left out
    (cause,) = said["causes"]
    assert (cause["cases"], cause["consequences"]) == (3, 12)
    assert cause["line"] == line and cause["law"] == "agreement.scale"


def test_each_cause_is_one_line(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, *others = sample().cases
    raised = [
        replace(verdict("liveness.completes", "fail", f"{name}: no"), cause=name)
        for name in ("step raised ValueError", "step raised RuntimeError")
    ]
    cases = [with_verdict(c, v) for c, v in zip(others, raised, strict=True)]
    report = report_of([worse(one), *cases])
    _, told = gate(report, tmp_path, capsys, "--baseline", str(baseline))
    assert [line.partition(" in ")[0] for line in told.splitlines()[1:]] == [
        "worse (1 case, 4 consequences): agreement.scale pass -> fail",
        "worse: liveness.completes pass -> fail",
        "worse: liveness.completes pass -> fail",
    ]


def test_a_harness_that_broke_is_one_line_however_many_cases_it_lost(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = [
        replace(c, status="error", verdicts=(), curves=None, problem="rank 1: killed")
        for c in sample().cases
    ]
    code, told = gate(report_of(cases), tmp_path, capsys, "--baseline", str(baseline))
    (line,) = told.splitlines()[1:]
    assert code == 3
    assert (
        line.startswith("invalid: ")
        and "3 cases of 3 have no verdict; first harness: rank 1: killed" in line
    )


def test_an_incomplete_report_shows_what_ended_it_and_what_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A gate in CI hides the run's own output."""
    raised, failed, *_ = (worse(case) for case in sample().cases)
    problem, replay = "train_step: raised KeyError: 'x'", "gradparity replay X"
    raised = replace(
        raised, status="error", verdicts=(), curves=None, problem=problem, replay=replay
    )
    report, ended = report_of([raised, failed]), "2 of 3 cases ran"
    assert report.footer is not None
    report = replace(
        report, footer=replace(report.footer, complete=False, reason=ended)
    )
    code, told = gate(report, tmp_path, capsys)
    assert code == 3
    line, error, failing = told.splitlines()[1:]
    assert line == f"invalid: {ended}"
    assert (
        error
        == f"note: error: {raised.scenario} {raised.scaler}: {problem}; again: {replay}"
    )
    assert failing.startswith(
        f"note: failing: {failed.failures[0].law} in {failed.scenario}"
    )


def test_lost_scenarios_are_one_line(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(sample().cases[:1])
    _, told = gate(report, tmp_path, capsys, "--baseline", str(baseline))
    (line,) = told.splitlines()[1:]
    assert line.startswith("vanished (2 cases): scenario tp/2/bf16/sgd/none")


@pytest.mark.parametrize(
    ("cause", "others"),
    [
        ("agreement.scale", ["agreement.growth", "agreement.skip", "scale.rule"]),
        ("skip.all-ranks-skip", ["skip.no-side-effects", "parity.update"]),
        ("transparency.gradient", ["transparency.bitwise", "parity.gradient"]),
    ],
)
def test_one_cause_is_reported_for_checks_that_fail_at_one_step(
    cause: str, others: list[str]
) -> None:
    reasons = [
        Reason(kind="worse", text=law, scaler="m:S", scenario="a/b", law=law, step=1)
        for law in [*others, cause]
    ]
    (found,) = causes_of(reasons, ALL_LAWS)
    assert (found.reason.law, found.consequences) == (cause, len(others))
    earlier = Reason(
        kind="worse", text="e", scaler="m:S", scenario="a/b", law="parity.loss", step=0
    )
    (found,) = causes_of([*reasons, earlier], ALL_LAWS)
    assert found.reason is earlier


def test_notes_are_folded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failing = report_of(
        with_verdict(c, verdict("scale.rule", "fail")) for c in sample().cases
    )
    path = tmp_path / "b.jsonl"
    write_baseline(path, make_baseline([failing]))
    _, told = gate(sample(), tmp_path, capsys, "--baseline", str(path))
    (line,) = told.splitlines()[1:]
    assert line.startswith("note: better: scale.rule passes in fsdp/2/fp32/sgd/none")
    assert line.endswith("(and 2 more)")


def test_without_a_baseline_every_check_must_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gate(sample(), tmp_path, capsys)[0] == 0
    assert gate(relabel("scale.rule", "fail")(sample()), tmp_path, capsys)[0] == 1
    undecided = relabel("scale.rule", "inconclusive")(sample())
    assert gate(undecided, tmp_path, capsys)[0] == 4


def test_nothing_compared_is_inconclusive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = gate(report_of([]), tmp_path, capsys)
    assert code == 4
    assert "nothing: nothing was compared" in told


def test_a_scaler_that_ran_nothing_is_inconclusive(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = sample().cases[0]
    laws = tuple(verdict(v.law, "skipped", "it has no clip") for v in ran.verdicts)
    new = replace(ran, scaler="new:S", verdicts=laws, status="skipped", curves=None)
    report = report_of([*sample().cases, new])
    for options in ((), ("--baseline", str(baseline))):
        code, told = gate(report, tmp_path, capsys, *options)
        assert code == 4
        assert "nothing: nothing was compared with new:S: all its cases are" in told


def test_growth_within_the_noise_passes(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grown = errors(w=0.7, b=0.4)(sample())
    assert gate(grown, tmp_path, capsys, "--baseline", str(baseline))[0] == 0


def test_a_known_failure_is_accepted_and_a_fix_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = relabel("scale.rule", "fail")(sample())
    path = tmp_path / "b.jsonl"
    write_baseline(path, make_baseline([failing]))
    assert gate(failing, tmp_path, capsys, "--baseline", str(path))[0] == 0
    code, told = gate(sample(), tmp_path, capsys, "--baseline", str(path))
    assert code == 0 and "known" not in told
    assert "note: better: scale.rule passes in fsdp/2/fp32/sgd/none" in told


# regression: N24
def test_below_a_cause_stands_where_it_begins(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = Location(where="loss", text="the loss is 0.500 x\nthe truth")
    broken = [
        with_verdict(c, verdict("parity.gradient", "fail")) for c in sample().cases
    ]
    broken[1] = replace(broken[1], location=where)
    target = tmp_path / "gate.json"
    options = ("--baseline", str(baseline), "--json", str(target))
    code, told = gate(report_of(broken), tmp_path, capsys, *options)
    _, line, below = told.splitlines()
    assert code == 1 and line.startswith("worse (3 cases): parity.gradient")
    assert below.startswith("  where it begins: (in ")
    assert below.endswith(" the loss is 0.500 x the truth")
    said = json.loads(target.read_text())
    assert [r.get("where") for r in said["reasons"]].count(where.text) == 1
    assert said["causes"][0]["where"].endswith(where.text)
    code, told = gate(report_of(broken[1:2]), tmp_path, capsys)
    assert told.splitlines()[2] == "  where it begins: the loss is 0.500 x the truth"


# regression: N23
def test_a_pass_says_how_many_known_failures_it_passes_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two, three = sample().cases
    one = with_verdict(one, verdict("scale.rule", "fail", "off by two"))
    one = with_verdict(one, verdict("parity.gradient", "fail"))
    two = with_verdict(two, verdict("scale.rule", "fail", "off by two"))
    three = with_verdict(three, verdict("agreement.skip", "inconclusive", "no skip"))
    failing = report_of([one, two, three])
    path, target = tmp_path / "b.jsonl", tmp_path / "gate.json"
    write_baseline(path, make_baseline([failing]))
    options = ["--baseline", str(path), "--json", str(target)]
    for strict in ([], ["--strict"]):
        code, told = gate(failing, tmp_path, capsys, *options, *strict)
        head, *notes = told.splitlines()
        assert code == 0
        assert head.startswith("gate: PASS, with 2 known failures in the baseline: 3 ")
        assert len(notes) == 3 and notes[2] == (
            "note: known to the baseline: scale.rule fails in fsdp/2/fp32/sgd/none "
            "mine.amp:Scaler: off by two (and 1 more)"
        )
        assert json.loads(target.read_text())["known_failures"] == 2
    worse = relabel("agreement.scale", "fail")(failing)
    _, told = gate(worse, tmp_path, capsys, "--baseline", str(path))
    assert told.startswith("gate: FAIL, with 2 known failures in the baseline")


def test_too_few_cases_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gate(sample(), tmp_path, capsys, "--min-cases", "3")[0] == 0
    code, told = gate(sample(), tmp_path, capsys, "--min-cases", "4")
    assert code == 1
    assert "too-few: 3 cases decided a check, and --min-cases is 4" in told


def test_a_case_that_could_not_run_is_no_pass(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "not runnable here: needs 8 ranks, torchrun made 2"
    large = case("hsdp+tp/8/fp32/sgd/none")
    skipped = tuple(verdict(v.law, "skipped", words) for v in large.verdicts)
    large = replace(large, verdicts=skipped, status="inconclusive", curves=None)
    report = report_of([*sample().cases, large])
    line = f"undecided: no check was decided: {words} in hsdp+tp/8/fp32/sgd/none"
    for options in ((), ("--baseline", str(baseline))):
        code, told = gate(report, tmp_path, capsys, *options)
        assert code == 4 and line in told
    expected = tmp_path / "known.toml"
    expected.write_text(
        '[[expect]]\nlaw = "baseline.decided"\nstatus = "inconclusive"\n'
        'world_size = [8]\nreason = "two GPUs"\n'
    )
    code, told = gate(report, tmp_path, capsys, "--expect", str(expected), "--strict")
    assert code == 0 and "expected, two GPUs" in told
    path = tmp_path / "all.jsonl"
    write_baseline(path, make_baseline([report_of([case("hsdp+tp/8/fp32/sgd/none")])]))
    code, told = gate(report, tmp_path, capsys, "--baseline", str(path))
    assert (
        code == 1
        and "worse (1 case, 7 consequences): liveness.completes pass -> skipped" in told
    )


def test_a_scenario_that_a_workload_cannot_run_closes_no_gate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A skipped scenario fails the gate only if the baseline shows that it ran."""
    ran = case("dp2/2/fp32/own/none")
    laws = tuple(verdict(v.law, "skipped", "it has no no_sync()") for v in ran.verdicts)
    skipped = replace(ran, verdicts=laws, status="skipped", curves=None)
    report = report_of([*sample().cases, skipped])
    assert gate(report, tmp_path, capsys, "--strict")[0] == 0
    path = tmp_path / "ran.jsonl"
    for before, code in ((ran, 1), (skipped, 0)):
        write_baseline(path, make_baseline([report_of([*sample().cases, before])]))
        assert gate(report, tmp_path, capsys, "--baseline", str(path))[0] == code
    write_baseline(path, make_baseline([report]))
    painted = replace(ran, status="skipped")
    report = report_of([*sample().cases, painted])
    code, told = gate(report, tmp_path, capsys)
    assert (
        code == 3 and "the case has the status skipped, its verdicts give pass" in told
    )


def test_a_reason_names_check_topology_step_and_is_in_json(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = replace(
        verdict("scale.rule", "fail", "rank 1\nis off"), step=2, ranks=(1,)
    )
    edited = first(lambda c: with_verdict(c, broken))(sample())
    target = tmp_path / "gate.json"
    options = ("--baseline", str(baseline), "--json", str(target))
    code, told = gate(edited, tmp_path, capsys, *options)
    line = (
        "worse: scale.rule pass -> fail in fsdp/2/fp32/sgd/none mine.amp:Scaler: "
        "step 2: rank 1 is off"
    )
    assert told.splitlines()[1:] == [line]
    said = json.loads(target.read_text())
    assert (said["outcome"], said["exit_code"]) == ("fail", code)
    (reason,) = said["reasons"]
    assert reason["line"] == line
    where = (reason["law"], reason["scenario"])
    assert where == ("scale.rule", "fsdp/2/fp32/sgd/none")
    assert (reason["step"], reason["ranks"]) == (2, [1])
    assert reason["replay"].startswith("gradparity replay")


def test_an_invalid_report_has_its_json_too(tmp_path: Path) -> None:
    target = tmp_path / "gate.json"
    assert main([str(tmp_path / "none.jsonl"), "--json", str(target)]) == 3
    assert json.loads(target.read_text())["outcome"] == "invalid"


USAGE: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "REPORT"),
    "unknown option": (["R", "--loose"], "--loose"),
    "abbreviated option": (["R", "--base", "B"], "--base"),
    "no such baseline": (["R", "--baseline", "none.jsonl"], "none.jsonl"),
    "no such expectations": (["R", "--expect", "none.toml"], "none.toml"),
    "a report as baseline": (["R", "--baseline", "R"], "R: line 1: not the header of"),
    "a report as expectations": (["R", "--expect", "R"], "R"),
    "yes without update": (["R", "--yes"], "--update-baseline"),
    "repeat without update": (["R", "--repeat", "R"], "--update-baseline"),
    "JSON of an update": (
        ["R", "--json", "x", "--baseline", "b", "--update-baseline"],
        "--json has no effect with --update-baseline",
    ),
    "update of nothing": (["R", "--update-baseline"], "--baseline FILE"),
    "minimum no number": (["R", "--min-cases", "many"], "many"),
    "minimum negative": (["R", "--min-cases", "-1"], "-1"),
    "JSON into nowhere": (["R", "--json", "no/such/folder/x.json"], "no/such/folder"),
    "JSON over the report": (["R", "--json", "./R"], "--json R would replace"),
}


@pytest.mark.parametrize("name", USAGE)
def test_bad_usage_prints_one_line_and_exits_with_2(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write(sample(), Path("R"))
    arguments, words = USAGE[name]
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith("gradparity gate: ")
    assert words in told


def test_another_package_replaces_neither_the_gate_nor_a_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "other-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: other\nVersion: 1\n"
    )
    (package / "entry_points.txt").write_text(
        "[gradparity.commands]\ngate = builtins:len\n"
        "[gradparity.formats]\njunit = builtins:str\nhtml = builtins:str\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert command_line(["gate", str(tmp_path / "none.jsonl")]) == 3
    write(sample(), tmp_path / "R")
    capsys.readouterr()
    assert command_line(["report", str(tmp_path / "R"), "--junit"]) == 0
    assert capsys.readouterr().out.startswith("<?xml")


def test_help_names_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "4 inconclusive" in " ".join(capsys.readouterr().out.split())


def test_a_rank_without_a_decision_is_no_disagreement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank without parameters makes no decision, so it cannot disagree."""
    quiet = with_curves(case(), stepped=[curves().stepped[0], [None] * 3])
    assert gate(report_of([quiet]), tmp_path, capsys)[0] == 0
