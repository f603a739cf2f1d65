"""Bundle: definitions of our modules in one text, each with all that it needs.

A standalone script is made so: it holds the functions that are linted, typed and tested
here, no others, and imports only what those import from elsewhere. They are trimmed for
the reader: annotations are removed, and from each ``if stack.FIELD:`` the branch that
is not taken, with the definitions that only it needs.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
import sys
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

__all__ = ["Bundle", "Code"]

OURS = __name__.partition(".")[0]
WIDTH = 88
Edit = tuple[tuple[int, int], tuple[int, int], str]
"""(line, column) of the first character and after the last one; new text."""


@dataclass(frozen=True)
class Code:
    """A name that the script imports from a module that is not ours."""

    module: str
    """The empty string: it is a name of the script itself."""
    name: str
    """A dotted name in it; ``()`` may follow."""
    late: bool = False
    """Also look for the module in the current folder of the script."""


class Bundle:
    """A function with all its dependencies, and the values of its arguments.

    Args:
        module: where the function is.
        name: its name.
        settings: variable -> dataclasses that are its values in the script.
    """

    def __init__(self, module: str, name: str, settings: dict[str, Any]) -> None:
        self._known = {
            (variable, field.name): bool(getattr(values[0], field.name))
            for variable, values in settings.items()
            for field in dataclasses.fields(values[0])
            if len({bool(getattr(each, field.name)) for each in values}) == 1
        }
        """Variable and field -> whether it is set, where all values agree."""
        self._trimmed: dict[str, _Trimmed] = {}
        """Name of a definition -> its trimmed source in the script."""
        self._uses: dict[str, dict[str, None]] = {}
        """Module -> modules of ours that its definitions here use."""
        self._imports = {("sys", "", "sys")}
        """(module, attribute, name in the script); no attribute: the module itself."""
        self._late: set[tuple[str, str, str]] = set()
        """The same for names of :class:`Code`."""
        self._here = False
        """Whether the current folder of the script is searched for modules."""
        self.need(module, name)
        for values in settings.values():
            self.expression(tuple(values))
        nodes = [n for each in self._trimmed.values() for n in ast.walk(each.node)]
        self._used = {n.attr for n in nodes if isinstance(n, ast.Attribute)}

    def need(self, module: str, name: str) -> str:
        """Add a definition and all its dependencies.

        Args:
            module: where it is, or where it is imported.
            name: its name there.

        Returns:
            The module of ours where it is defined, or the empty string.
        """
        if not _is_ours(module):
            self._imports.add((module, name, name))
            return ""
        source = _parsed(module)
        if name not in source.definitions:
            origin, attribute, alias = source.imports[name]
            if _is_ours(origin):
                assert attribute == alias, f"{module} renames {attribute}"
                return self.need(origin, attribute)
            self._imports.add((origin, attribute, alias))
            return ""
        if name not in self._trimmed:
            found = self._trimmed[name] = _Trimmed(module, name, self._known)
            self._uses.setdefault(module, {})
            self._need_all(found.node, module)
        known = self._trimmed[name].module
        assert known == module, f"{name} is in {known} and in {module}"
        return module

    def _need_all(self, tree: ast.AST, module: str) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id in _parsed(module):
                if home := self.need(module, node.id):
                    self._uses[module][home] = None

    def expression(self, value: Any, indent: int = 0) -> str:
        """The source of a value; adds what it needs.

        Args:
            value: of dataclasses (of which only what is no default is written),
                functions, classes, ``partial``, :class:`Code`, containers, and what
                ``repr`` is the source of.
            indent: of the line on which it begins.
        """
        if isinstance(value, Code):
            first = re.split("[.(]", value.name)[0]
            # a definition of ours may have the same name
            alias = first + "_" * (first in self._trimmed)
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
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            if _is_ours(type(value).__module__):
                self._imports.add(("types", "SimpleNamespace", "SimpleNamespace"))
                name, used = "SimpleNamespace", getattr(self, "_used", fields)
                parts = [(f"{key}=", v) for key, v in fields.items() if key in used]
            else:
                kind: Any = type(value)
                name, known = self.expression(kind), kind()
                parts = [
                    (f"{key}=", v)
                    for key, v in fields.items()
                    if v != getattr(known, key)
                ]
            return self._listed(f"{name}(", parts, ")", indent)
        return repr(value).replace("'", '"')

    def _listed(
        self, begin: str, parts: list[tuple[str, Any]], end: str, indent: int
    ) -> str:
        """On one line, or one part per line if that is too long."""
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
        """Imports and definitions."""
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
            self._trimmed[name].text()
            for module in order
            for name in _parsed(module).definitions
            if name in self._trimmed and self._trimmed[name].module == module
        ]
        standard = {i for i in self._imports if i[0].split(".")[0] in _STANDARD}
        groups = [standard, self._imports - standard, self._late]
        imports = ["\n".join(_import_lines(group)) for group in groups]
        if self._here:
            imports[-1] = f"{_HERE}\n{imports[-1]}"
        return "\n\n".join(i for i in imports if i) + "\n\n\n" + "\n\n\n".join(blocks)


_STANDARD = sys.stdlib_module_names
_HERE = 'sys.path.insert(0, "")  # modules are looked for where this is run'


class _Trimmed(ast.NodeTransformer):
    """A definition without annotations, and without branches of unset fields."""

    def __init__(
        self, module: str, name: str, known: dict[tuple[str, str], bool]
    ) -> None:
        self.module = module
        self._known = known
        self._edits: list[Edit] = []
        self._lines = _parsed(module).lines
        original = _parsed(module).definitions[name]
        self.node: ast.AST = self.visit(deepcopy(original))
        decorators = getattr(original, "decorator_list", [])
        self._first = min(n.lineno for n in (original, *decorators)) - 1
        # comments right above a definition belong to it
        while self._lines[self._first - 1].startswith("# "):
            self._first -= 1
        self._end = original.end_lineno

    def text(self) -> str:
        """Its lines."""
        lines = [*self._lines]
        # from the end, so that earlier positions stay valid
        for (line, column), (end, behind), new in sorted(self._edits, reverse=True):
            rest = lines[end - 1][behind:] if end <= len(lines) else ""
            lines[line - 1 : end] = [lines[line - 1][:column] + new + rest]
        removed = len(self._lines) - len(lines)
        assert self._end is not None
        found = lines[self._first : self._end - removed]
        found = [line.partition("  # type: ignore")[0] for line in found]
        return "\n".join(line for line in found if "\0" not in line)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        """Shorten it; a script has no classes of settings, so there are no fields."""
        self._shorten(node)
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Write a new head without annotations."""
        node.returns = None
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        space, arguments = " " * node.col_offset, ast.unparse(node.args)
        head = f"def {node.name}({arguments}):"
        if len(space + head) > WIDTH:
            head = f"def {node.name}(\n{space}    {arguments}\n{space}):"
        last = node.body[0].lineno - 1
        place = (node.lineno, node.col_offset), (last, len(self._lines[last - 1]))
        self._edits.append((*place, head))
        self._shorten(node)
        return self.generic_visit(node)

    def _shorten(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        """Keep the first line of the docstring."""
        text = node.body[0]
        if ast.get_docstring(node) and text.end_lineno != text.lineno:
            begin, end = text.lineno, text.end_lineno or 0
            place = (
                (begin, len(self._lines[begin - 1])),
                (end, len(self._lines[end - 1])),
            )
            self._edits.append((*place, '"""'))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """An assignment without its type."""
        target, value = node.target, node.value
        assert value is not None
        begin, end = (
            (target.end_lineno or 0, target.end_col_offset or 0),
            (value.lineno, value.col_offset),
        )
        self._edits.append((begin, end, " = "))
        return self.generic_visit(
            ast.copy_location(ast.Assign([target], value, lineno=node.lineno), node)
        )

    def visit_If(self, node: ast.If) -> Any:
        """If the test is known, keep only the branch that is taken."""
        tests = [node.test]
        if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And):
            tests = node.test.values
        known = [self._is_set(test) for test in tests]
        if False in known:
            taken, other = node.orelse, node.body
        elif None not in known:
            taken, other = node.body, node.orelse
        else:
            return self.generic_visit(node)
        if not taken:
            self._remove(node.lineno, node.end_lineno or 0)
            return None
        first, last = taken[0].lineno, taken[-1].end_lineno or 0
        self._remove(node.lineno, first - 1)
        # the branch moves out of its if: four columns to the left
        self._edits += [((line, 0), (line, 4), "") for line in range(first, last + 1)]
        if other and other[0].lineno > last:
            self._remove(last + 1, node.end_lineno or 0)
        return [found for each in taken if (found := self.visit(each)) is not None]

    def _is_set(self, test: ast.AST) -> bool | None:
        """None: it is no known field."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            known = self._is_set(test.operand)
            return None if known is None else not known
        if not isinstance(test, ast.Attribute):
            return None
        owner = test.value
        variable = getattr(owner, "id", getattr(owner, "attr", ""))
        return self._known.get((variable, test.attr))

    def _remove(self, first: int, last: int) -> None:
        place = (first, 0), (last, len(self._lines[last - 1]))
        self._edits.append((*place, _GONE))


_GONE = "\0" * 80  # deeper than the dedent below removes


class _Module:
    """The top-level definitions and imports of a module."""

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

    def __contains__(self, name: str) -> bool:
        return name in self.definitions or name in self.imports


_parsed = cache(_Module)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == OURS


def _public(module: str) -> str:
    """The public module of a name that torch and others define in private modules."""
    return module.partition("._")[0]


def _import_lines(imports: set[tuple[str, str, str]]) -> list[str]:
    modules, names = set(), dict[str, list[str]]()
    for module, attribute, alias in sorted(imports):
        if attribute:
            known = attribute if attribute == alias else f"{attribute} as {alias}"
            names.setdefault(module, []).append(known)
        else:
            modules.add(module if module == alias else f"{module} as {alias}")
    lines = [f"import {module}" for module in sorted(modules)]
    for module, found in names.items():
        line = f"from {module} import {', '.join(found)}"
        if len(line) > WIDTH:
            listed = "".join(f"    {name},\n" for name in found)
            line = f"from {module} import (\n{listed})"
        lines.append(line)
    return lines
