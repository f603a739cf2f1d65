"""Locate: the file and line of a scaler by its spec, without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Place", "locate"]

_HOPS = 5  # how often a package may hand a name on


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a class or function begins."""

    file: str
    """Relative to the root that was searched."""
    line: int


def locate(spec: str, root: Path) -> Place | None:
    """Find ``package.module:attribute`` in the source tree at ``root``, if there."""
    module, _, attribute = spec.partition(":")
    parts = module.split(".")
    if not all(part.isidentifier() for part in [*parts, attribute]):
        return None
    for tail in _layouts(parts):
        file = _module_file(root, tail)
        if file is not None:
            return _follow(root, file, attribute, _HOPS)
    return None


def _layouts(parts: list[str]) -> Iterator[list[str]]:
    """The package lies in the root, under ``src``, or is the root itself."""
    yield parts
    yield ["src", *parts]
    yield parts[1:]


def _module_file(root: Path, parts: list[str]) -> Path | None:
    base = root.joinpath(*parts)
    files = [base / "__init__.py"]
    if parts:
        files.append(base.with_name(f"{base.name}.py"))
    return next((file for file in files if file.is_file()), None)


def _follow(root: Path, file: Path, name: str, hops: int) -> Place | None:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    # Read, not imported: CI annotates where torch need not be installed.
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return Place(file=file.relative_to(root).as_posix(), line=node.lineno)
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            given = {alias.asname or alias.name: alias.name for alias in node.names}
            target = _module_file(file.parent, node.module.split("."))
            if name in given and target is not None and hops:
                return _follow(root, target, given[name], hops - 1)
    return None
