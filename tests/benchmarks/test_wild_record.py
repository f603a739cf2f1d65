"""Findings of docs/wild: scripts have the common frame, and pages show the record."""

import ast
import json
import shutil
import sys
from pathlib import Path

import pytest

from gradparity.benchmarks.validation.wild import (
    BESIDE,
    PACKAGES,
    PAGES,
    README,
    RECORDS,
    SURVEYED,
    ScriptError,
    frame,
    main,
    package_of,
    run_script,
    stand_in,
    told_by_page,
    write_pages,
)

SCRIPTS = sorted(PAGES.glob("*.py"))
OWN = [script for script in SCRIPTS if not script.stem.startswith(SURVEYED)]
LINES = 80
"""Largest number of lines of a script, without the frame that all scripts have."""
KEYS = {
    "id",
    "package",
    "version",
    "what",
    "parameter",
    "relative_error",
    "reference",
    "where",
    "thread",
    "script",
    "date",
    "command",
}


def named(paths: list[Path]) -> list[str]:
    return [path.stem for path in paths]


def imported(tree: ast.Module) -> set[str]:
    found = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    found |= {
        node.module or "."
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    }
    return {name.split(".")[0] for name in found}


def test_a_finding_is_a_script_a_page_and_a_record() -> None:
    for folder, ending in ((PAGES, "md"), (RECORDS, "json")):
        found = {p.stem for p in folder.glob(f"*.{ending}")} - {
            "README",
            "transformers",
        }
        assert {n for n in found if not n.startswith(SURVEYED)} == set(named(OWN))
    assert len({package_of(script.stem) for script in OWN}) >= 3


@pytest.mark.parametrize("script", SCRIPTS, ids=named(SCRIPTS))
def test_a_script_is_short_and_needs_torch_and_the_package_alone(script: Path) -> None:
    source = script.read_text()
    tree = ast.parse(source)
    assert source.count(frame()) == 1, "gradparity bench wild --frame"
    asks_for_cuda = "# - The stand-in for CUDA" in source
    assert source.count(stand_in()) == asks_for_cuda
    own = source.replace(frame(), "").replace(stand_in(), "")
    assert len(own.splitlines()) <= LINES
    package = package_of(script.stem)
    allowed = {"torch", PACKAGES[package], *BESIDE.get(package, ())}
    assert imported(tree) <= allowed | sys.stdlib_module_names


@pytest.mark.parametrize("script", OWN, ids=named(OWN))
def test_the_record_of_each_script_is_a_bug_and_equals_its_page(script: Path) -> None:
    record = json.loads((RECORDS / f"{script.stem}.json").read_text())
    told = told_by_page(script.with_suffix(".md"))
    assert record["id"] == script.stem
    assert record["package"] == package_of(script.stem)
    assert {key: record[key] for key in told} == told
    assert all(record[key] for key in KEYS)
    assert record["verdict"] == "bug"
    assert PAGES.parents[1] / record["script"] == script
    page = script.with_suffix(".md").read_text()
    assert f"[{script.name}]({script.name}): bug. Parameter: " in page


def test_the_pages_show_the_record(tmp_path: Path) -> None:
    shutil.copytree(PAGES, tmp_path / "wild")
    write_pages(tmp_path / "wild" / README.name, RECORDS)
    for page in PAGES.glob("*.md"):
        assert (tmp_path / "wild" / page.name).read_text() == page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch-norm-sum", "megatron-core-label-smoothing"])
def test_a_script_shows_its_bug(name: str) -> None:
    script = PAGES / f"{name}.py"
    told, lines = run_script(script)
    assert told["verdict"] == "bug"
    assert lines[-1] == "verdict: bug"


def test_a_script_without_its_package_is_named_and_shows_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "megatron-fsdp-no-units"
    record = (RECORDS / f"{name}.json").read_text()
    monkeypatch.setitem(PACKAGES, "megatron-fsdp", "no_such_package_anywhere")
    monkeypatch.setattr(
        "gradparity.benchmarks.validation.wild.write_pages", lambda: None
    )
    assert main([name]) == 1
    out = capsys.readouterr().out.splitlines()
    text = "not run, megatron-fsdp is not installed: make setup-all"
    assert out[0] == f"{name}: {text}"
    assert out[-1] == "0 of 1 findings show"
    assert (RECORDS / f"{name}.json").read_text() == record


CRASHES = {
    "an import": "import no_such_package_anywhere",
    "a rank that raises": """
def rank_main(rank):
    if rank == 1:
        raise ValueError("no verdict")
    dist.barrier()

if __name__ == "__main__":
    on_ranks(rank_main)
""",
    "a rank that dies": """
def rank_main(rank):
    os.abort() if rank == 1 else dist.barrier()

if __name__ == "__main__":
    on_ranks(rank_main)
""",
}


# The frame of all scripts starts ranks of its own, which takes ten seconds.
@pytest.mark.slow
@pytest.mark.parametrize("crash", CRASHES)
def test_exit_code_1_is_a_verdict_and_no_crash(
    crash: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # torch leaves a file of each error
    script = tmp_path / "crash.py"
    script.write_text(frame() + CRASHES[crash])
    with pytest.raises(ScriptError, match="exit code 3") as caught:
        run_script(script)
    first, printed = str(caught.value).split("\n", 1)
    assert first.startswith("crash.py: verdict 'none' and exit code 3")
    assert "Traceback" in printed and "verdict: " not in printed


SEEN = """
def rank_main(rank, by):
    whole = torch.full((2,), float(rank))
    dist.all_reduce(whole)
    return {"sum": whole, "none": None, "text": "x" * by}

if __name__ == "__main__":
    first, second, third = on_ranks(rank_main, 2, ranks=3)
    assert first["sum"].tolist() == third["sum"].tolist() == [3.0, 3.0]
    assert second["text"] == "xx" and off(second["none"], torch.ones(3)) == 1.0
    tell(True, "torch", parameter="a", relative_error="1", reference="b")
"""
NOT_SEEN = 'tell(False, "torch", parameter="a", relative_error="1", reference="b")'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "verdict"), [(SEEN, "bug"), (NOT_SEEN, "no bug")], ids=["bug", "no bug"]
)
def test_a_script_tells_its_verdict(body: str, verdict: str, tmp_path: Path) -> None:
    script = tmp_path / "seen.py"
    script.write_text(frame() + body)
    told, _ = run_script(script)
    assert told == {
        "parameter": "a",
        "relative error": "1",
        "reference": "b",
        "verdict": verdict,
    }
