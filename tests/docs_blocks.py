"""Blocks, inline commands, links and headings of the documentation.

Blocks are found by a Markdown parser. A comment right before a block says that it does
not run as it stands; CONTRIBUTING.md documents both forms:

    <!-- tested: tests/test_x.py -->     that test runs it
    <!-- not run: needs a GPU -->        nothing does, for this reason
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

import gradparity

ROOT = Path(gradparity.__file__).parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
]
COMMANDS = tuple(
    "gradparity make pip python pytest torchrun sh cp export "
    "sbatch srun kubectl torchx helm docker OMP_NUM_THREADS=1".split()
)
"""First words of command lines; a block without a language may consist of them."""
_MARK = re.compile(r"<!-- (tested|not run): (.+?) -->")
_PARSER = MarkdownIt("commonmark").enable("table")


@dataclass(frozen=True, kw_only=True)
class Block:
    """One block of code."""

    page: Path
    line: int
    """First line of the block in the page, from 1."""
    language: str
    """``python``, ``sh``, ``toml``...; ``text`` for pictures and output."""
    text: str
    tested: str = ""
    """The test that runs it."""
    not_run: str = ""
    """Reason why no test runs the block; else empty."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Command lines of the block, without comments, continuation lines joined."""
        joined = self.text.replace("\\\n", " ")
        lines = (re.split(r"\s#\s", line)[0].strip() for line in joined.splitlines())
        return [line for line in lines if line and not line.startswith("#")]


def blocks(page: Path) -> Iterator[Block]:
    """Yield every block of code of a page, in order."""
    mark = ""
    for token in _tokens(page):
        if token.type in ("fence", "code_block"):
            yield _block(page, token, mark)
        if token.type not in ("paragraph_open", "inline"):
            mark = token.content if token.type == "html_block" else ""


def _block(page: Path, token: Token, mark: str) -> Block:
    named = {kind: text for kind, text in _MARK.findall(mark)}
    words = [line.split(" ")[0] for line in token.content.splitlines()]
    commands = any(word in COMMANDS for word in words)
    return Block(
        page=page,
        line=(token.map or [0])[0] + 1,
        language=token.info or ("sh" if commands else "text"),
        text=token.content,
        tested=named.get("tested", ""),
        not_run=named.get("not run", ""),
    )


def inline_commands(page: Path) -> Iterator[str]:
    """Return inline code of a page that is a command, like `gradparity list laws`."""
    for token in _inline(page):
        if token.type == "code_inline":
            content = " ".join(token.content.split())
            if content.startswith(("gradparity ", "make ")):
                yield content


def links(page: Path) -> Iterator[str]:
    """Return the targets of links within this repository."""
    for token in _inline(page):
        target = str(token.attrs.get("href") or token.attrs.get("src") or "")
        if target and not re.match(r"[a-z]+:", target):
            yield target


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub creates for the headings of a page."""
    tokens = _tokens(page)
    heads = [tokens[i + 1] for i, t in enumerate(tokens) if t.type == "heading_open"]
    return {_slug(_plain(token)) for token in heads}


def _plain(token: Token) -> str:
    kinds = ("text", "code_inline")
    return "".join(c.content for c in token.children or [] if c.type in kinds)


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _inline(page: Path) -> Iterator[Token]:
    for token in _tokens(page):
        yield from token.children or []


def _tokens(page: Path) -> list[Token]:
    return _PARSER.parse(page.read_text(encoding="utf-8"))
