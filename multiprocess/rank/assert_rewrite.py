"""A rank imports with pytest's assert the modules that the parent imported so.

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
        try:
            from _pytest.assertion.rewrite import rewrite_asserts
        except ImportError:
            pass  # plain asserts do
        else:
            rewrite_asserts(tree, source, self.path)
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


def import_rewritten(files: Mapping[str, str]) -> None:
    """In a rank: import these modules from these files, with pytest's assert."""
    _finder.files = files
    if files and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


_rewritten: dict[str, str] = {}
_seen_modules: tuple[object, ...] = ()
"""How many modules there were, and the latest one, when they were looked through."""


def rewritten_modules() -> dict[str, str]:
    """In the parent: return the modules that pytest has rewritten, name to file."""
    global _seen_modules, _rewritten
    # Asked before each call: looking through some thousand modules takes longer than a
    # call, so they are only when one has been added.
    latest = next(reversed(sys.modules.values()))
    seen = len(sys.modules), id(latest), getattr(latest, "__file__", None)
    if "_pytest.assertion.rewrite" in sys.modules and _seen_modules != seen:
        _seen_modules = seen
        _rewritten = {
            name: module.__file__
            for name, module in list(sys.modules.items())
            if _is_rewritten(module) and module.__file__
        }
    return _rewritten


def _is_rewritten(module: object) -> bool:
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    return type(loader).__name__ == "AssertionRewritingHook"
