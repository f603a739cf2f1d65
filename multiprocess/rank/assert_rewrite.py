"""Import in a rank the modules whose asserts pytest rewrote in the parent, likewise.

Without this a failing assert on a rank would say "AssertionError" and no numbers, and a
test module that only pytest knows how to find could not be imported at all.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType


class _Loader(SourceFileLoader):
    """Compiles a module with pytest's own assert."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        tree = ast.parse(source, filename=self.path)
        _rewrite(tree, source, self.path)
        code: CodeType = compile(tree, self.path, "exec", dont_inherit=True)
        return code


class _Finder:
    """Finds modules by the files in which the parent has them."""

    def __init__(self) -> None:
        self.files: Mapping[str, str] = {}

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        file = self.files.get(name)
        if file is None:
            return None
        loader = _Loader(name, file)
        return importlib.util.spec_from_file_location(name, file, loader=loader)


_finder = _Finder()


def take_modules(files: Mapping[str, str]) -> None:
    """From now on import these modules from these files, with pytest's assert."""
    _finder.files = files
    if files and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _rewrite(tree: ast.Module, source: bytes, path: str) -> None:
    try:
        from _pytest.assertion.rewrite import rewrite_asserts
    except ImportError:
        return  # plain asserts do
    rewrite_asserts(tree, source, path)
