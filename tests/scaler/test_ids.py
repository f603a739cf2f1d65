"""Every defect of torch's scalers that we list has a test that bears its id."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# All that were found in torch 2.13; those without a letter have one case.
DEFECTS = (
    "B01a B01b B01c B01d B02 B03a B03b B03c B03d B04a B04b B05a B05b B05c B05d B06a "
    "B06b B07 B08b B08c B08d B09 B10a B10b B10c B10d B10e B10f B10g B11a B11b "
    "B11c B11d B11e B13 B14a B14b B14c B15a B15b B16a B16b B16c B17 B20 B21"
).split()


def named_by_tests() -> set[str]:
    found: set[str] = set()
    for path in (ROOT / "tests/scaler").glob("test_*.py"):
        for name in re.findall(r"^def (test_b\d\w*)", path.read_text(), re.MULTILINE):
            found.update(
                x.capitalize() for x in re.findall(r"b\d\d[a-g]?(?=_|$)", name)
            )
    return found


def test_every_defect_has_a_test() -> None:
    assert sorted(set(DEFECTS) - named_by_tests()) == []


def test_every_defect_is_in_the_document() -> None:
    told = set(
        re.findall(r"\bB\d\d[a-g]?\b", (ROOT / "docs/deviations.md").read_text())
    )
    assert sorted(set(DEFECTS) ^ told) == []


def test_the_document_names_tests_where_they_are() -> None:
    document = (ROOT / "docs/deviations.md").read_text()
    tests = {
        path.stem.removeprefix("test_"): path.read_text()
        for path in (ROOT / "tests/scaler").glob("test_*.py")
    }
    told = re.findall(r"((?:`test_[\w.]+`(?:, )?)+) \(([\w, ]+)\)", document)
    named = [
        (name, set(files.split(", ")))
        for names, files in told
        for name in re.findall(r"`(test_\w+?)(?:\.\.\.)?`", names)
    ]
    assert len(named) == document.count("`test_") > 10
    for name, files in named:
        assert {file for file in tests if f"def {name}" in tests[file]} == files, name
