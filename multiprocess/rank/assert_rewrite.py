"""Import modules on ranks with pytest's rewritten asserts, as in the parent.

Without this, a failing assert on a rank would show "AssertionError" and no values. A
test module that only pytest can find could not be imported at all.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType


class _Loader(SourceFileLoader):
    """Compiles a module with pytest's rewritten asserts."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        tree = ast.parse(source, filename=self.path)
        try:
            from _pytest.assertion.rewrite import rewrite_asserts
        except ImportError:
            pass  # plain asserts do
        else:
            rewrite_asserts(tree, source, self.path)
        # dont_inherit: this file's `from __future__` imports must not hold in that
        # module.
        code: CodeType = compile(tree, self.path, "exec", dont_inherit=True)
        return code


class _Finder:
    """Finds modules at the files from which the parent imported them."""

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
        if not file.endswith(".py"):  # the folder of a package without a file
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [file]
            return spec
        loader = _Loader(name, file)
        return importlib.util.spec_from_file_location(name, file, loader=loader)


_finder = _Finder()


def import_rewritten(files: Mapping[str, str]) -> None:
    """Make this rank import these modules from these files, with rewritten asserts."""
    _finder.files = files
    if files and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


_rewritten: dict[str, str] = {}
_seen_modules: tuple[object, ...] = ()
"""Length of ``sys.modules`` at the last search, with id and file of the last module."""


def rewritten_modules() -> dict[str, str]:
    """Return the files, by module name, that pytest has rewritten in this process."""
    global _seen_modules, _rewritten
    # Called before each call on ranks: a search through some thousand modules takes
    # longer than that, so it is made only after a module was added.
    latest = next(reversed(sys.modules.values()))
    seen = len(sys.modules), id(latest), getattr(latest, "__file__", None)
    if "_pytest.assertion.rewrite" in sys.modules and _seen_modules != seen:
        _seen_modules = seen
        _rewritten = {
            name: module.__file__
            for name, module in list(sys.modules.items())
            if _is_rewritten(module) and module.__file__
        }
        for name in list(_rewritten):
            _rewritten.update(_packages_only_here(name))
    return _rewritten


def _packages_only_here(name: str) -> Iterator[tuple[str, str]]:
    """Yield name and file of a module's packages that are not on the import path.

    With ``--import-mode=importlib`` the folder above a package is not on the path. A
    package without ``__init__.py`` has its folder in place of a file.
    """
    package = name.rpartition(".")[0]
    if not package or PathFinder.find_spec(package.partition(".")[0]) is not None:
        return
    while package:
        module = sys.modules.get(package)
        file = getattr(module, "__file__", None)
        places = [file] if file else list(getattr(module, "__path__", ()))
        if places:
            yield package, places[0]
        package = package.rpartition(".")[0]


def _is_rewritten(module: object) -> bool:
    loader = getattr(getattr(module, "__spec__", None), "loader", None)
    return type(loader).__name__ == "AssertionRewritingHook"
