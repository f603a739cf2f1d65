"""Docstrings begin with their verb or noun, and names say what they hold."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from gradparity.tests.docs_blocks import ROOT

ROOMS = ("scaler", "multiprocess", "fixtures", "conformance", "ci")
BESIDE = ("benchmarks", "docs", "examples")
BEGINNINGS = {
    *("What", "Whose", "Whether", "Of", "In", "By", "As", "Those", "That"),
}
EMPTY = {*"found known held made some given there kept told said".split()}
AT_MOST = 60
"""Empty names that may be left; lower it when there are fewer."""


@cache
def sources(*rooms: str) -> list[tuple[Path, ast.Module]]:
    paths = [path for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]
    return [(path, ast.parse(path.read_text())) for path in paths]


def decoded(tree: ast.Module) -> Iterator[str]:
    """First lines of docstrings that have to be decoded, also of attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))) if text.strip():
                if text.split()[0] in BEGINNINGS:
                    yield text.strip().partition("\n")[0]


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


def test_names_say_what_they_hold() -> None:
    wrong = [f"{path}:{n}" for path, tree in sources(*ROOMS) for n in empty_names(tree)]
    assert len(wrong) <= AT_MOST, "\n".join(wrong)


def test_both_would_be_seen() -> None:
    tree = ast.parse(
        'def f():\n    "What it is."\n    found = 1\n    return found\nA = 1\n"Of it."'
    )
    assert sorted(decoded(tree)) == ["Of it.", "What it is."]
    assert [*empty_names(tree)] == [3]
