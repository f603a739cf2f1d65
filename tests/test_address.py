"""A release carries the address of its repository: .ci/address.py writes it."""

import re
import runpy
import shutil
import tomllib
from pathlib import Path

import pytest

import gradparity

ROOT = Path(gradparity.__file__).parent
WRITE = runpy.run_path(str(ROOT / ".ci" / "address.py"))
WITH_ADDRESS = ("pyproject.toml", "README.md", *WRITE["NAMES_THE_ACTION"])
URL = "https://git.example.org/me/gradparity"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Copy the files that get the address."""
    for name in WITH_ADDRESS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_release_names_its_repository_everywhere(sources: Path) -> None:
    WRITE["main"](f"{URL}.git", sources)
    before = tomllib.loads((ROOT / "pyproject.toml").read_text())
    after = tomllib.loads((sources / "pyproject.toml").read_text())
    urls = after["project"].pop("urls")
    assert after == before
    assert urls["Repository"] == URL and urls["Issues"] == f"{URL}/issues"
    for name in WRITE["NAMES_THE_ACTION"]:
        text = (sources / name).read_text()
        assert "OWNER" not in text and "uses: me/gradparity@v" in text


def test_links_of_the_readme_lead_to_files_of_the_tag(sources: Path) -> None:
    WRITE["main"](URL, sources)
    at_tag = f"{URL}/blob/v{gradparity.__version__}/"
    links = re.findall(r"\]\(([^)]+)\)", (sources / "README.md").read_text())
    assert len(links) > 20
    for link in links:
        path = link.removeprefix(at_tag)
        assert path != link and (ROOT / path).is_file(), link


@pytest.mark.parametrize("url", ["me/gradparity", "http://h.org/a/b", "https://h.org/"])
def test_an_address_that_is_none_changes_nothing(sources: Path, url: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(repr(url.rstrip("/")))):
        WRITE["main"](url, sources)
    for name in WITH_ADDRESS:
        assert (sources / name).read_text() == (ROOT / name).read_text()


def test_a_second_address_is_refused(sources: Path) -> None:
    WRITE["main"](URL, sources)
    with pytest.raises(SystemExit, match="has project URLs already"):
        WRITE["main"](URL, sources)
