"""docs/laws.md equals the text generated from the checks."""

from pathlib import Path

import pytest

import gradparity
from gradparity.benchmarks.laws_page import WIDTH, main, render
from gradparity.conformance import LAWS

PAGE = Path(gradparity.__file__).parent / "docs" / "laws.md"


def test_the_page_in_the_docs_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "gradparity bench laws-page"


def test_each_law_is_there_with_its_words() -> None:
    page = render()
    assert max(map(len, page.splitlines())) <= WIDTH
    entries = [" ".join(part.split()) for part in page.split("\n### ")]
    for law in LAWS.values():
        words = f"{law.id} {law.text} *Why:* {law.reason}"
        assert any(each.startswith(" ".join(words.split())) for each in entries)


def test_the_page_of_laws_is_written_to_the_given_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "laws.md"
    assert main(["--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8") == render()
    assert main(["--out", str(tmp_path / "no" / "laws.md")]) == 2
    assert main(["--nonsense"]) == 2
    assert "Traceback" not in capsys.readouterr().err
