"""What the ranks take over from the parent: folder, import path, environment."""

from __future__ import annotations

import os
import sys

from ..messages import Context
from ..rank.coverage import settings_here

_PRIVATE = ("PYTEST_CURRENT_TEST",)
"""Changes with each test, and says nothing to a rank."""

_rewritten: dict[str, str] = {}
_seen_modules: tuple[object, ...] = ()
"""How many modules there were, and the latest one, when they were looked through."""


def current_context() -> Context:
    """Return the parent's context as it is now."""
    cwd = os.getcwd()
    env = {name: value for name, value in os.environ.items() if name not in _PRIVATE}
    path = tuple(entry or cwd for entry in sys.path if isinstance(entry, str))
    return Context(
        cwd=cwd,
        path=path,
        env=env,
        modules=_rewritten_modules(),
        measured=settings_here(),
    )


def _rewritten_modules() -> dict[str, str]:
    """Modules that pytest imported with its own assert: the ranks must do so too."""
    global _seen_modules, _rewritten
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
