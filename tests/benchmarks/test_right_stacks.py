"""The corpus of right workloads exists, and a wrong workload in it fails."""

import json
from pathlib import Path

import pytest

from gradparity.benchmarks.validation import right_stacks
from gradparity.benchmarks.validation.right_stacks import PAGE, RESULTS, corpus, main
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
    seconds = {"gan:Gan": 7.9, "stacks.a:X": 11.2, "stacks.a:Y": 12.6, "b:Z": 0.0}
    entries = {
        f"examples.{name}": {"first_s": first_s, "not_run": "" if first_s else "no"}
        for name, first_s in seconds.items()
    }
    assert right_stacks.first_verdicts(entries).splitlines()[2:] == [
        "| `gan` | `Gan` 8 s |",
        "| `stacks.a` | `X` 11 s, `Y` 13 s |",
    ]


def test_the_record_is_of_the_corpus_and_on_the_page() -> None:
    entries = json.loads(RESULTS.read_text())["entries"]
    assert {*entries} == {*corpus()}
    assert [spec for spec, entry in entries.items() if entry["failed"]] == []
    assert right_stacks.first_verdicts(entries) in PAGE.read_text()


def test_a_part_that_is_run_again_leaves_the_rest_of_the_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old = {"commit": "a" * 40, "started": "2026-01-01", "not_run": "", "first_s": 1.0}
    name, other = [*corpus()][:2]
    record, page = tmp_path / "record.json", tmp_path / "page.md"
    record.write_text(json.dumps({"entries": {name: old, other: old, "gone": old}}))
    page.write_text("<!-- recorded: made -->\n\nnone\n\n<!-- end -->\n")
    monkeypatch.setattr(right_stacks, "RESULTS", record)
    monkeypatch.setattr(right_stacks, "PAGE", page)
    right_stacks.write_record(1, 2, {other: right_stacks.Found(largest=0.5)})
    entries = json.loads(record.read_text())["entries"]
    assert [*entries] == [name, other]
    assert entries[name] == old
    assert (entries[other]["largest"], entries[other]["seeds"]) == (0.5, 1)
    assert "aaaaaaa, " in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "code", "told"),
    [
        ("RightOnTwo", 0, "0 of 1 right setups failed"),
        ("SumsOnTwo", 1, "1 of 1 right setups failed"),
        # a run that checked nothing is no pass
        ("NoMeshes", 1, "0 of 0 right setups failed over 1 seeds; 1 could not"),
    ],
)
def test_the_exit_code_shows_a_false_positive_or_an_empty_run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spec: str,
    code: int,
    told: str,
) -> None:
    entry = f"gradparity.tests.workloads.stacks:{spec}"
    monkeypatch.setattr(right_stacks, "corpus", lambda: {entry: "once failed"})
    assert main(["--seeds", "1"]) == code
    assert told in capsys.readouterr().out
