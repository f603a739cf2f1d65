"""The site builds without warnings, is complete, and loads from no other host."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from gradparity import conformance, multiprocess, scaler
from gradparity.tests.docs_blocks import PAGES, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.extras("mkdocs", "mkdocstrings")]


@dataclass
class Page(HTMLParser):
    """Anchors, links and loaded files of a page."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value for name, value in attrs if value}
        self.ids |= {found[name] for name in ("id", "name") if name in found}
        if "src" in found or tag == "link":
            self.loads.append(found.get("src") or found["href"])
        elif "href" in found:
            self.links.append(found["href"])


def test_the_site_is_whole(tmp_path: Path) -> None:
    """One test for everything, because a build takes half a minute."""
    done = subprocess.run(
        [sys.executable, "-m", "gradparity.benchmarks.site", str(tmp_path)],
        env=os.environ | {"COLUMNS": "88"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    check_links(tmp_path)
    check_reference(tmp_path)


def check_links(built: Path) -> None:
    """Check that every link has a target, and that pages load no foreign files."""
    pages: dict[Path, Page] = {}
    for file in built.rglob("*.html"):
        if file.name != "404.html":  # its links begin at the root of a server
            pages[file] = Page()
            pages[file].feed(file.read_text())
    lost, outside = set(), set()
    for file, page in pages.items():
        for link in [*page.links, *page.loads]:
            if re.match(r"[a-z]+:", link):
                outside |= {link} if link in page.loads else set()
                continue
            name, _, anchor = link.partition("#")
            target = (file.parent / unquote(name)).resolve() if name else file
            if target.is_dir():
                target /= "index.html"
            there = target.is_file()
            if there and anchor and target.suffix == ".html":
                there = unquote(anchor) in pages[target].ids
            lost |= set() if there else {(str(file.relative_to(built)), link)}
    assert lost == set()
    assert {link for link in outside if not link.startswith("data:")} == set()
    assert "https://fonts" not in (built / "index.html").read_text()
    made = {file.relative_to(built).with_suffix(".md") for file in pages}
    missed = {page.relative_to(ROOT) for page in PAGES} - made
    assert {page.name for page in missed} <= {"README.md"}  # those are index.html


def check_reference(built: Path) -> None:
    """Check that the reference and the search index have every public name."""
    index = json.loads((built / "search" / "search_index.json").read_text())
    places = {entry["location"] for entry in index["docs"]}
    for package in (scaler, multiprocess, conformance):
        page = f"reference/{package.__name__.rpartition('.')[2]}.html"
        text = (built / page).read_text()
        for name in package.__all__:
            assert f"{page}#{package.__name__}.{name}" in places, name
        # docstrings were read as docstrings, and refer to nothing in other markup
        assert "Source code in" in text and ".typing" not in text
        assert not re.search(r":(class|meth|func|attr|data|mod):", text)
    assert "Raises:" in text
    told = (built / "reference" / "command.html").read_text()
    assert "gradparity localise" in told and "--share-gpus" in told


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    """A copy of the tree with a broken link is built."""
    broken = (
        "import sys, logging\n"
        "logging.basicConfig(level=logging.WARNING)\n"
        "from pathlib import Path\n"
        "from gradparity.benchmarks import site\n"
        "gather = site.gather\n"
        "def broken(staged):\n"
        "    gather(staged)\n"
        "    for page in staged.glob('reference/*.md'): page.write_text('# page')\n"
        "    page = staged / 'docs' / 'gpu.md'\n"
        "    page.write_text(page.read_text() + '\\n[lost](nowhere.md)\\n')\n"
        "site.gather = broken\n"
        "site.build_site(Path(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", broken, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "nowhere.md" in done.stderr
