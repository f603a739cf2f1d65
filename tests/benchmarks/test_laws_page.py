"""The page of laws is what the laws say."""

from pathlib import Path

import pytest

import gradparity
from gradparity.benchmarks.laws_page import main, render
from gradparity.conformance import LAWS

PAGE = Path(gradparity.__file__).parent / "docs" / "laws.md"


def test_the_page_in_the_docs_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: make docs"


def test_each_law_is_there_with_its_words() -> None:
    page = render()
    for law in LAWS.values():
        assert f"### {law.id}\n\n{law.text}\n\n*Why:* {law.reason}\n" in page


def test_the_page_of_laws_is_written_to_the_given_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "laws.md"
    assert main(["--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == render()
    assert main(["--out", str(tmp_path / "no" / "laws.md")]) == 2
    assert main(["--nonsense"]) == 2
    assert "Traceback" not in capsys.readouterr().err
