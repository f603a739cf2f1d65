"""Values that are checked before torch is imported, which takes seconds.

The names are read from the sources of their tables, since importing those imports
torch. What cannot be read there is checked later, by the tables themselves.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from ..status import UsageError, did_you_mean, id_parts, unknown

__all__ = ["TABLES", "check_spec", "check_values", "names_of"]

_ROOT = Path(__file__).parents[2]
TABLES = {
    "topology": ("fixtures/topologies.py", "TOPOLOGIES"),
    "model": ("fixtures/models.py", "MODELS"),
    "precision": ("fixtures/precisions.py", "PRECISIONS"),
    "optimizer": ("fixtures/optimizers.py", "OPTIMIZERS"),
    "preset": ("conformance/space/catalogue.py", "PRESETS"),
}
"""Option -> the file and the table of its values."""
_LAWS = _ROOT / "conformance" / "judge" / "laws"
_OF_A_WORKLOAD = ("topology", "optimizer")
"""Options whose values come from the workload, if one is given."""


def names_of(what: str) -> list[str]:
    """The keys of a table as its source states them."""
    file, table = TABLES[what]
    tree = ast.parse((_ROOT / file).read_text(encoding="utf-8"))
    (value,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.target.id == table
    )
    added = [  # TABLE["name"] = ...
        node.targets[0].slice
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Subscript)
        and isinstance(node.targets[0].value, ast.Name)
        and node.targets[0].value.id == table
    ]
    return [*_keys(value), *map(_text, added)]


def _keys(table: ast.expr | None) -> Iterator[str]:
    """The keys of ``{"a": ...}``, the names of ``{t.name: t for t in (T(...),)}``."""
    if isinstance(table, ast.Dict):
        nodes = list(table.keys)
    else:
        assert isinstance(table, ast.DictComp)
        (items,) = (generator.iter for generator in table.generators)
        assert isinstance(items, ast.Tuple)
        calls = [each for each in items.elts if isinstance(each, ast.Call)]
        words = [word for call in calls for word in call.keywords]
        nodes = [word.value for word in words if word.arg == "name"]
    for node in nodes:
        yield _text(node)


def _text(node: ast.expr | None) -> str:
    assert isinstance(node, ast.Constant)
    return str(node.value)


def check_values(parsed: argparse.Namespace) -> None:
    """Refuse an unknown name before anything is imported for it.

    Raises:
        UsageError: names the value and the known ones.
    """
    workload = getattr(parsed, "workload", "")
    for what in TABLES:
        values = getattr(parsed, what, None) or ()
        if not (workload and what in _OF_A_WORKLOAD):
            _check(what, [values] if isinstance(values, str) else list(values))
    for text in getattr(parsed, "scenario", ()):
        _check_id(text)
    if parsed.command == "explain" and "/" not in parsed.what:
        _check_law(parsed.what)
    for spec in [workload, *(getattr(parsed, "scaler", None) or ())]:
        if ":" in spec:
            check_spec(spec)


def _check(what: str, given: list[str]) -> None:
    names = names_of(what) if given else []
    for name in given:
        if name not in names:
            raise UsageError(unknown(what, name, names))


def _check_law(name: str) -> None:
    laws = [law for chapter in sorted(_LAWS.glob("*.py")) for law in _laws_of(chapter)]
    chapters = list(dict.fromkeys(law.partition(".")[0] for law in laws))
    if name not in (*laws, *chapters, "report.jsonl"):
        raise UsageError(
            f"{name!r} is neither a check (see gradparity list laws), a group of them "
            f"({', '.join(chapters)}), a scenario id nor report.jsonl"
            f"{did_you_mean(name, [*laws, *chapters])}"
        )


def _laws_of(chapter: Path) -> list[str]:
    """The first arguments of the decorators ``@law("chapter.name", ...)``."""
    return re.findall(r'^@law\(\s*"([^"]+)"', chapter.read_text(encoding="utf-8"), re.M)


def _check_id(text: str) -> None:
    parts = id_parts(text)
    # a model with a colon is a workload, which defines topologies and optimizers itself
    if ":" not in "".join(parts[5:]):
        topology, _, precision, optimizer, *_ = parts
        _check("topology", [topology])
        _check("precision", [precision])
        _check("optimizer", [optimizer])


def check_spec(spec: str) -> None:
    """Refuse a missing module, or an attribute that its source never mentions."""
    module, _, attribute = spec.partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), attribute]):
        return
    module_spec, here = _find(module), Path.cwd()
    if module_spec is None:
        top = module.partition(".")[0]
        if _find(top) is None:
            near = did_you_mean(top, [path.stem for path in here.glob("*.py")])
            raise UsageError(f"cannot import {spec}: there is no module {top}{near}")
        return  # a package may create modules when it is imported
    if not module_spec.origin or not module_spec.origin.endswith(".py"):
        return
    source = Path(module_spec.origin).read_text(encoding="utf-8", errors="replace")
    words = set(re.findall(r"\w+", source))
    # a module may define names dynamically
    if attribute in words or words & _DYNAMIC or "import *" in source:
        return
    raise UsageError(
        f"{spec}: module {module} has no attribute {attribute!r}"
        f"{did_you_mean(attribute, words)}"
    )


_DYNAMIC = {"__getattr__", "__dict__", "exec", "globals", "modules", "setattr", "vars"}


def _find(module: str) -> ModuleSpec | None:
    """The spec of a module, found without importing its packages."""
    top, *inner = module.split(".")
    module_spec = PathFinder.find_spec(top, [os.getcwd()])
    with suppress(ValueError):  # __main__ has no spec
        module_spec = module_spec or find_spec(top)
    for part in inner:
        if module_spec is None or module_spec.submodule_search_locations is None:
            return None
        # by its last name alone: with its whole name, a namespace package would be
        # looked up in sys.modules, where it is not yet
        module_spec = PathFinder.find_spec(part, module_spec.submodule_search_locations)
    return module_spec
