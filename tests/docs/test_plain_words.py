"""Docstrings begin with a verb or noun, names have content, guides stay short."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from gradparity.tests.docs_blocks import ROOT

ROOMS = ("scaler", "multiprocess", "fixtures", "conformance", "ci")
BESIDE = ("benchmarks", "docs", "examples", "tests")
BEGINNINGS = {
    *("What", "Whose", "Whether", "Of", "In", "By", "As", "Those", "That"),
}
EMPTY = {*"found known held made some given there kept told said".split()}
SECTION = re.compile(
    r"^ *(Args|Attributes):\n(?P<entries>.*?)(?=^ *$|\Z)", re.MULTILINE | re.DOTALL
)
ENTRY = re.compile(r"^( +[\w*`]+: (\w+).*)$", re.MULTILINE)
RETURNS = re.compile(r"^ *(?:Returns|Yields):\n( +(\w+).*)$", re.MULTILINE)
AT_MOST = 20
"""Number of empty names that may remain; lower it when there are fewer."""


BUDGETS = {
    "README.md": 450,
    "docs/start.md": 700,
    "docs/record.md": 900,
    "docs/workload.md": 1500,
    "docs/read-a-failure.md": 700,
    "docs/gate.md": 700,
    "docs/scaler.md": 1100,
    "docs/harness.md": 900,
    "docs/clusters.md": 550,
    "docs/gpu.md": 400,
    "docs/catalogue.md": 700,
    "docs/report.md": 400,
    "docs/deviations.md": 900,
    "docs/parity.md": 900,
    "docs/results.md": 600,
    "docs/architecture.md": 1500,
    "CONTRIBUTING.md": 900,
}
"""Words that a page may have outside of code: all guides take half an hour to read."""
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
CODE = re.compile(r"^```.*?^```|^    [^\n]*$", re.DOTALL | re.MULTILINE)
WORD = re.compile(r"\S*\w\S*")


class Words(NamedTuple):
    """Words of a module: its docstrings, also of attributes, and its empty names."""

    docstrings: list[str]
    empty: list[int]
    """Lines that assign to a name without content."""


def words_of(source: str) -> Words:
    words = Words([], [])
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))) if text.strip():
                words.docstrings.append(text)
            case ast.Name(id=name, ctx=ast.Store()) if name in EMPTY:
                words.empty.append(node.lineno)
    return words


@cache
def modules(*rooms: str) -> list[tuple[Path, Words]]:
    paths = [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]
    return [(path, words_of(path.read_text())) for path in paths]


def decoded(docstrings: list[str]) -> Iterator[str]:
    """Yield the first line of each docstring that begins with a forbidden word."""
    for text in docstrings:
        if text.split()[0] in BEGINNINGS:
            yield text.strip().partition("\n")[0]


def decoded_entries(docstrings: list[str]) -> Iterator[str]:
    """Yield entries of sections like ``Args:`` that begin with a forbidden word."""
    for text in docstrings:
        for line, word in RETURNS.findall(text):
            if word in BEGINNINGS:
                yield line.strip()
        for section in SECTION.finditer(text):
            for line, word in ENTRY.findall(section["entries"]):
                if word.capitalize() in BEGINNINGS:
                    yield line.strip()


def test_docstrings_begin_with_their_verb_or_noun() -> None:
    wrong = [
        f"{path}: {line}"
        for path, words in modules(*ROOMS, *BESIDE)
        for line in (*decoded(words.docstrings), *decoded_entries(words.docstrings))
    ]
    assert wrong == []


def test_names_say_what_they_hold() -> None:
    wrong = [f"{path}:{n}" for path, words in modules(*ROOMS) for n in words.empty]
    assert len(wrong) <= AT_MOST, "\n".join(wrong)


def words_of_page(text: str) -> int:
    """Return the number of words outside of code, comments and a table's bars."""
    return len(WORD.findall(CODE.sub("", COMMENT.sub("", text))))


def test_pages_keep_their_budgets() -> None:
    words = {page: words_of_page((ROOT / page).read_text()) for page in BUDGETS}
    assert {page: n for page, n in words.items() if n > BUDGETS[page]} == {}


def test_code_and_comments_are_no_words() -> None:
    page = "# A <!-- not\nthis -->\n\n    nor this\n| two | *three* |\n```\nnor\n```\n"
    assert words_of_page(page) == 3


MADE_UP = '''def f(a, b):
    """What it is.

    Args:
        a: whether it is.
        b: number of some.

    Returns:
        Whether it is: of y.
    """
    found = 1
    return found
A = 1
"Of it."
'''


def test_all_would_be_seen() -> None:
    words = words_of(MADE_UP)
    assert sorted(decoded(words.docstrings)) == ["Of it.", "What it is."]
    assert sorted(decoded_entries(words.docstrings)) == [
        "Whether it is: of y.",
        "a: whether it is.",
    ]
    assert words.empty == [11]
