"""Links between pages, and to files and headings, lead somewhere."""

from pathlib import Path

import pytest

from gradparity.tests.docs_blocks import PAGES, ROOT, anchors, links


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), f"{target}: no such file"
        assert file.is_relative_to(ROOT.resolve()), f"{target} leaves the repository"
        if anchor:
            assert anchor in anchors(file), f"{target}: no such heading"


def test_every_page_is_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    todo = [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            files = (target.partition("#")[0] for target in links(page))
            todo += [(page.parent / name).resolve() for name in files if name]
    missed = {page.resolve() for page in PAGES} - {page.resolve() for page in seen}
    assert missed == set()
