"""``gradparity bench``: each tool has a line in the table and can be imported."""

from pathlib import Path

import pytest

from gradparity import benchmarks
from gradparity.benchmarks import record
from gradparity.benchmarks.__main__ import PAGES, SPEED, VALIDATION
from gradparity.benchmarks.validation import sessions
from gradparity.conformance.__main__ import main

FOLDER = Path(next(iter(benchmarks.__path__)))
JOBS = {"foreign_jobs", "megatron_jobs"}
"""Programs that a tool runs."""


def tools_of(folder: Path) -> set[str]:
    files = {path.stem: path for path in folder.glob("[a-z]*.py")}
    files |= {path.parent.name: path for path in folder.glob("[a-z]*/__main__.py")}
    return {name for name, path in files.items() if "\ndef main(" in path.read_text()}


def test_each_tool_is_in_the_table_of_its_folder() -> None:
    assert tools_of(FOLDER) == {*SPEED, *PAGES}
    own = {name for name in VALIDATION if hasattr(sessions, name)}
    assert tools_of(FOLDER / "validation") - JOBS == {*VALIDATION} - own
    assert own == {*sessions.__all__}


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 0
    shown = capsys.readouterr().out
    for name in (*SPEED, *VALIDATION, *PAGES):
        assert f"  {name.replace('_', '-')} " in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["scalr"], "did you mean scaler?"),
        (["under-load", "often"], "expected one whole number, got often"),
        (["baseline", "x"], "baseline takes no argument, got x"),
    ],
)
def test_bad_usage_is_reported_in_one_line(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert told in capsys.readouterr().err


def test_options_of_a_tool_are_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "right-stacks", "--help"])
    assert ended.value.code == 0
    assert "--seeds" in capsys.readouterr().out


def test_the_two_runs_of_the_record_of_speed_are_comparable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(record, "TENSORS", 20)
    assert record.comparison()["tensors"] == 20  # raises if they are not the same
