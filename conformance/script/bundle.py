"""Bundle definitions of our modules, with all that they need, into one text.

A standalone script is such a text: source of functions and classes that are linted,
typed and tested here. The script imports only what these import from other packages.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from ..status import UsageError

__all__ = ["Bundle", "Code"]

OURS = __name__.partition(".")[0]
WIDTH = 88


@dataclass(frozen=True)
class Code:
    """A name that the script imports from another package, or a name of its own."""

    module: str
    """Module of the name; empty for a name of the script itself."""
    name: str
    """Dotted name in the module; ``()`` may follow."""
    late: bool = False
    """True to also look for the module in the current folder of the script."""


class Bundle:
    """Definitions with all their dependencies, and values as source text."""

    def __init__(self) -> None:
        self._sources: dict[str, tuple[str, str]] = {}
        """Name of a definition -> its module and its source."""
        self._uses: dict[str, dict[str, None]] = {}
        """Module -> our modules that its bundled definitions use."""
        self._imports = {("sys", "", "sys")}
        """(module, attribute, name in the script); without attribute: the module
        itself."""
        self._late: set[tuple[str, str, str]] = set()
        """Imports like those in ``_imports``, of :class:`Code` names with ``late``."""
        self._here = False
        """True if the current folder of the script is searched for modules."""

    def need(self, module: str, name: str) -> str:
        """Add a definition and all its dependencies.

        Args:
            module: module that defines or imports the name.
            name: name of the definition there.

        Returns:
            Our module that defines the name; empty if another package does.
        """
        if not _is_ours(module):
            self._imports.add((module, name, name))
            return ""
        source = _parsed(module)
        if name not in source.definitions:
            origin, attribute, alias = source.imports[name]
            if _is_ours(origin):
                if attribute != alias:
                    raise UsageError(f"no script: {module} renames {attribute}")
                return self.need(origin, attribute)
            self._imports.add((origin, attribute, alias))
            return ""
        if name not in self._sources:
            node = source.definitions[name]
            self._sources[name] = module, source.text(node)
            self._uses.setdefault(module, {})
            for each in ast.walk(node):
                if isinstance(each, ast.Name) and each.id in source:
                    if home := self.need(module, each.id):
                        self._uses[module][home] = None
        module_there, _ = self._sources[name]
        if module_there != module:
            raise UsageError(f"no script: {name} is in {module_there} and in {module}")
        return module

    def expression(self, value: Any, indent: int = 0) -> str:
        """Return the source text of a value; add the definitions that it needs.

        Args:
            value: a dataclass (defaults are not written), function, class, ``partial``,
                :class:`Code`, container, or a value whose ``repr`` is its source.
            indent: indent of the line on which the text begins.
        """
        if isinstance(value, Code):
            first = re.split("[.(]", value.name)[0]
            # Another definition may have the same name.
            alias = first + "_" * (first in self._sources)
            self._here |= value.late
            if value.module:
                self._late.add((value.module, first, alias))
            return alias + value.name.removeprefix(first)
        if isinstance(value, type) or inspect.isfunction(value):
            if value.__module__ != "builtins":
                self.need(_public(value.__module__), value.__name__)
            return value.__name__
        if isinstance(value, torch.dtype):
            self._imports.add(("torch", "", "torch"))
        if isinstance(value, dict):
            parts = [(f'"{key}": ', each) for key, each in value.items()]
            return self._listed("{", parts, "}", indent)
        if isinstance(value, tuple):
            parts = [("", each) for each in value]
            return self._listed("(", parts, ",)" if len(value) == 1 else ")", indent)
        if isinstance(value, partial):
            self._imports.add(("functools", "partial", "partial"))
            parts = [("", each) for each in (value.func, *value.args)]
            parts += [(f"{key}=", each) for key, each in value.keywords.items()]
            return self._listed("partial(", parts, ")", indent)
        if dataclasses.is_dataclass(value):
            fields = dataclasses.fields(value)
            parts = [
                (f"{f.name}=", source)
                for f in fields
                if (source := getattr(value, f.name)) != f.default
            ]
            return self._listed(f"{self.expression(type(value))}(", parts, ")", indent)
        return repr(value).replace("'", '"')

    def _listed(
        self, begin: str, parts: list[tuple[str, Any]], end: str, indent: int
    ) -> str:
        """Join parts on one line, or on one line each if that is too long."""
        line = ", ".join(name + self.expression(each) for name, each in parts)
        line = f"{begin}{line}{end}"
        # the name of a variable or of an argument may stand before it
        if len(line) + indent < WIDTH - 10 or not parts:
            return line
        space = " " * (indent + 4)
        lines = [
            f"{space}{name}{self.expression(each, indent + 4)},\n"
            for name, each in parts
        ]
        return f"{begin}\n{''.join(lines)}{' ' * indent}{end.lstrip(',')}"

    def text(self) -> str:
        """Return imports and definitions as text."""
        order: dict[str, None] = {}

        def visit(module: str) -> None:
            for other in self._uses[module]:
                if other != module and other not in order:
                    visit(other)
            order[module] = None

        for module in self._uses:
            if module not in order:
                visit(module)
        blocks = [
            self._sources[name][1]
            for module in order
            for name in _parsed(module).definitions
            if name in self._sources and self._sources[name][0] == module
        ]
        standard = {i for i in self._imports if i[0].split(".")[0] in _STANDARD}
        groups = [standard, self._imports - standard, self._late]
        imports = ["\n".join(_import_lines(group)) for group in groups]
        if self._here:
            imports[-1] = f"{_HERE}\n{imports[-1]}"
        return "\n\n".join(i for i in imports if i) + "\n\n\n" + "\n\n\n".join(blocks)


_STANDARD = sys.stdlib_module_names
_HERE = 'sys.path.append("")  # modules are looked for where this is run'


class _Module:
    """Top-level definitions and imports of a module."""

    def __init__(self, name: str) -> None:
        source = inspect.getsource(importlib.import_module(name))
        spec = importlib.util.find_spec(name)
        assert spec is not None
        package = spec.name if spec.submodule_search_locations else spec.parent
        self.lines = source.splitlines()
        self.definitions: dict[str, ast.stmt] = {}
        self.imports: dict[str, tuple[str, str, str]] = {}
        for node in ast.parse(source).body:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    local = alias.asname or alias.name.partition(".")[0]
                    self.imports[local] = alias.name, "", alias.asname or alias.name
            elif isinstance(node, ast.ImportFrom):
                dots = "." * node.level + (node.module or "")
                origin = importlib.util.resolve_name(dots, package)
                for alias in node.names:
                    local = alias.asname or alias.name
                    self.imports[local] = origin, alias.name, local
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                self.definitions[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = (
                    [node.target] if isinstance(node, ast.AnnAssign) else node.targets
                )
                for target in targets:
                    if isinstance(target, ast.Name):
                        self.definitions[target.id] = node

    def text(self, node: ast.stmt) -> str:
        """Return the source of a definition, with the comments directly above it."""
        decorators = getattr(node, "decorator_list", [])
        first = min(each.lineno for each in (node, *decorators)) - 1
        while self.lines[first - 1].startswith("# "):
            first -= 1
        source_lines = self.lines[first : node.end_lineno]
        return "\n".join(line.partition("  # type: ignore")[0] for line in source_lines)

    def __contains__(self, name: str) -> bool:
        return name in self.definitions or name in self.imports


_parsed = cache(_Module)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == OURS


def _public(module: str) -> str:
    """Return the public module of a name that is defined in a private one."""
    return module.partition("._")[0]


def _import_lines(imports: set[tuple[str, str, str]]) -> list[str]:
    modules, names = set(), dict[str, list[str]]()
    for module, attribute, alias in sorted(imports):
        if attribute:
            name_or_alias = (
                attribute if attribute == alias else f"{attribute} as {alias}"
            )
            names.setdefault(module, []).append(name_or_alias)
        else:
            modules.add(module if module == alias else f"{module} as {alias}")
    lines = [f"import {module}" for module in sorted(modules)]
    for module, imported in names.items():
        line = f"from {module} import {', '.join(imported)}"
        if len(line) > WIDTH:
            listed = "".join(f"    {name},\n" for name in imported)
            line = f"from {module} import (\n{listed})"
        lines.append(line)
    return lines
