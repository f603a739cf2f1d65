"""Names that a user can select, with their texts, read from source files.

The names are keys of tables in Python modules.

Importing a table imports torch, which takes seconds. Reading its source makes ``list``
and ``explain`` fast, and a misspelt name is reported before anything is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["TABLES", "LawText", "law_texts", "names_of", "rows_of"]

_ROOT = Path(__file__).parents[2]
_LAWS = _ROOT / "conformance" / "comparison" / "laws"
TABLES = {
    "topology": ("fixtures/topologies.py", "TOPOLOGIES"),
    "model": ("fixtures/models.py", "MODELS"),
    "precision": ("fixtures/precisions.py", "PRECISIONS"),
    "optimizer": ("fixtures/optimizers.py", "OPTIMIZERS"),
    "recipe": ("conformance/space/recipes.py", "RECIPES"),
    "preset": ("conformance/space/catalogue.py", "PRESETS"),
    "fault": ("fixtures/faults.py", "KINDS"),
    "scaler": ("fixtures/peers.py", "PEERS"),
}
"""Kind of choice -> (source file, name of the table in it). The table's keys are the
values to choose from."""
Row = Mapping[str, object]
"""Literal fields of a table's entry."""


class LawText(NamedTuple):
    """Id, text and reason of a check."""

    id: str
    text: str
    reason: str


def names_of(what: str) -> list[str]:
    """Return the keys of a table."""
    return [*rows_of(what)]


@cache
def rows_of(what: str) -> dict[str, Row]:
    """Return the keys of a table, each with the fields of its entry that are literals.

    If an entry is a function, the first line of its docstring becomes ``text``.
    """
    file, table = TABLES[what]
    tree = ast.parse((_ROOT / file).read_text(encoding="utf-8"))
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == table
    )
    rows = dict(_entries(value, _functions(tree)))
    for node in tree.body:  # TABLE["name"] = ...
        if (
            isinstance(node, ast.Assign)
            and isinstance(added := node.targets[0], ast.Subscript)
            and isinstance(added.value, ast.Name)
            and added.value.id == table
        ):
            rows[_text(added.slice)] = _fields(node.value)
    return rows


@cache
def law_texts() -> tuple[LawText, ...]:
    """Return all checks, in the order in which they are applied."""
    chapters = ast.parse((_LAWS / "__init__.py").read_text(encoding="utf-8"))
    modules = [n.names[0].name for n in chapters.body if isinstance(n, ast.ImportFrom)]
    return tuple(law for module in modules for law in _laws_of(f"{module}.py"))


def _laws_of(file: str) -> Iterator[LawText]:
    """Read the decorators ``@law(id, sentence, reason)`` of one file."""
    tree = ast.parse((_LAWS / file).read_text(encoding="utf-8"))
    constants = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for function in _functions(tree).values():
        for call in function.decorator_list:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "law":
                yield LawText(*(_joined(each, constants) for each in call.args))


def _joined(node: ast.expr, constants: Mapping[str, ast.expr]) -> str:
    """Evaluate a literal or constant string, or a sum or an f-string of these."""
    if isinstance(node, ast.Name):
        return _joined(constants[node.id], constants)
    if isinstance(node, ast.BinOp):
        return _joined(node.left, constants) + _joined(node.right, constants)
    if isinstance(node, ast.JoinedStr):
        return "".join(_joined(each, constants) for each in node.values)
    if isinstance(node, ast.FormattedValue):
        return _joined(node.value, constants)
    return _text(node)


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def _entries(
    table: ast.expr | None, functions: Mapping[str, ast.FunctionDef]
) -> Iterator[tuple[str, Row]]:
    """Yield (key, row) of a table, which is a dict display or a dict comprehension.

    The display has the form ``{"a": ...}``, the comprehension the form ``{t.name: t for
    t in (T(...),)}``.
    """
    if isinstance(table, ast.Dict):
        for key, value in zip(table.keys, table.values, strict=True):
            function = functions.get(value.id) if isinstance(value, ast.Name) else None
            if function is None:
                yield _text(key), _fields(value)
            else:
                doc = ast.get_docstring(function) or ""
                yield _text(key), {"text": doc.partition("\n")[0]}
        return
    assert isinstance(table, ast.DictComp)
    (items,) = (generator.iter for generator in table.generators)
    assert isinstance(items, ast.Tuple)
    for call in items.elts:
        if isinstance(call, ast.Call):
            row = _fields(call)
            yield str(row["name"]), row


def _fields(value: ast.expr) -> Row:
    words = value.keywords if isinstance(value, ast.Call) else []
    return {
        word.arg: word.value.value
        for word in words
        if word.arg and isinstance(word.value, ast.Constant)
    }


def _text(node: ast.expr | None) -> str:
    assert isinstance(node, ast.Constant)
    return str(node.value)
