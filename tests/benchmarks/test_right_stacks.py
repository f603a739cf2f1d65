"""The corpus of right stacks is there, and a stack in it that is wrong is accused."""

import json

import pytest

from gradparity.benchmarks import right_stacks
from gradparity.benchmarks.right_stacks import PAGE, RESULTS, corpus, main
from gradparity.fixtures import resolve_workload
from gradparity.tests.docs_blocks import ROOT


def test_every_entry_is_a_workload_or_a_scaler() -> None:
    for spec, source in corpus().items():
        module, _, name = spec.partition(":")
        if source == "example":  # importing one may need a package that is not here
            path = ROOT / f"{module.replace('.', '/')}.py"
            assert name in path.read_text(), spec
        elif source != "right scaler":
            assert resolve_workload(spec).name == spec


def test_every_example_is_in_the_corpus() -> None:
    paths = [*ROOT.glob("examples/*.py"), *ROOT.glob("examples/stacks/*.py")]
    files = {path for path in paths if "def parallelize" in path.read_text()}
    known = {ROOT / f"{s.partition(':')[0].replace('.', '/')}.py" for s in corpus()}
    shared = {ROOT / "examples/stacks/shared.py"}
    assert files - shared <= known


def test_first_verdicts_have_a_row_for_each_file() -> None:
    seconds = {"examples.gan:Gan": 7.9, "examples.stacks.a:X": 11.2}
    table = right_stacks.first_verdicts(seconds | {"examples.stacks.a:Y": 12.6})
    assert table.splitlines()[2:] == [
        "| `gan` | `Gan` 8 s |",
        "| `stacks.a` | `X` 11 s, `Y` 13 s |",
    ]


def test_the_page_shows_the_record() -> None:
    record = json.loads(RESULTS.read_text())
    assert right_stacks.first_verdicts(record["first_s"]) in PAGE.read_text()
    assert record["commit"][:7] in PAGE.read_text()
    examples = {spec for spec, source in corpus().items() if source == "example"}
    assert examples == {*record["first_s"], *record["not_run"]}


def test_a_part_of_the_corpus_is_not_recorded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--record", "--only", "gan:Gan"])
    assert ended.value.code == 2
    assert "leave --only out" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "code", "told"),
    [
        ("gradparity.tests.stacks:Right", 0, "0 of 1 right stacks accused"),
        ("gradparity.tests.stacks:SumsForMean", 1, "1 of 1 right stacks accused"),
        # a run that judged nothing is no pass
        ("gradparity.tests.stacks:NoMeshes", 1, "0 of 0 right stacks accused"),
    ],
)
def test_the_exit_code_says_whether_any_was_accused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spec: str,
    code: int,
    told: str,
) -> None:
    monkeypatch.setattr(right_stacks, "corpus", lambda: {spec: "once accused"})
    assert main(["--seeds", "1"]) == code
    assert told in capsys.readouterr().out
