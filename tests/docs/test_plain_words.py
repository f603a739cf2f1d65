"""Docstrings begin with their verb or noun, and names say what they hold."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

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
"""Empty names that may be left; lower it when there are fewer."""


@cache
def sources(*rooms: str) -> list[tuple[Path, ast.Module]]:
    paths = [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]
    return [(path, ast.parse(path.read_text())) for path in paths]


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Docstrings of a module, also those of attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))) if text.strip():
                yield text


def decoded(tree: ast.Module) -> Iterator[str]:
    """First lines of docstrings that have to be decoded."""
    for text in docstrings(tree):
        if text.split()[0] in BEGINNINGS:
            yield text.strip().partition("\n")[0]


def decoded_entries(tree: ast.Module) -> Iterator[str]:
    """Entries of ``Args:``, ``Attributes:``, ``Returns:`` that have to be decoded."""
    for text in docstrings(tree):
        for line, word in RETURNS.findall(text):
            if word in BEGINNINGS:
                yield line.strip()
        for section in SECTION.finditer(text):
            for line, word in ENTRY.findall(section["entries"]):
                if word.capitalize() in BEGINNINGS:
                    yield line.strip()


def empty_names(tree: ast.Module) -> Iterator[int]:
    """Lines in which a name that says nothing gets a value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            if node.id in EMPTY:
                yield node.lineno


def test_docstrings_begin_with_their_verb_or_noun() -> None:
    trees = sources(*ROOMS, *BESIDE)
    wrong = [f"{path}: {line}" for path, tree in trees for line in decoded(tree)]
    assert wrong == []


def test_entries_of_arguments_begin_with_their_noun() -> None:
    trees = sources(*ROOMS, *BESIDE)
    wrong = [
        f"{path}: {each}" for path, tree in trees for each in decoded_entries(tree)
    ]
    assert wrong == []


def test_names_say_what_they_hold() -> None:
    wrong = [f"{path}:{n}" for path, tree in sources(*ROOMS) for n in empty_names(tree)]
    assert len(wrong) <= AT_MOST, "\n".join(wrong)


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
    tree = ast.parse(MADE_UP)
    assert sorted(decoded(tree)) == ["Of it.", "What it is."]
    assert sorted(decoded_entries(tree)) == [
        "Whether it is: of y.",
        "a: whether it is.",
    ]
    assert [*empty_names(tree)] == [11]
