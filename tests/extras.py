"""Mark of tests that import optional packages, and its meaning.

``make test`` leaves these tests out, and installs none of the packages. ``make
test-all`` installs all that the extras of pyproject.toml name: a package of them that
is missing fails its tests.
"""

import importlib.util
import sys

import pytest

IN_NO_EXTRA = ("fairseq2", "lerobot", "rlinf", "verl")
"""Packages that no extra installs, because they conflict with other packages."""


def needs(module: str) -> list[pytest.MarkDecorator]:
    """Return marks for tests that import ``module``; no marks for torch itself."""
    if module == "torch":
        return []
    if module in IN_NO_EXTRA:
        missing = importlib.util.find_spec(module) is None
        reason = f"{module} is in no extra: see docs/integrations"
        return [pytest.mark.extras, pytest.mark.skipif(missing, reason=reason)]
    return [pytest.mark.extras(module)]


def fail_without(item: pytest.Item) -> None:
    """Fail a test that needs a package that is missing."""
    for mark in item.iter_markers("extras"):
        for name in mark.args:
            if sys.modules.get(name, item) is None:  # hidden by an example of a test
                del sys.modules[name]
        lost = [name for name in mark.args if importlib.util.find_spec(name) is None]
        if lost:
            pytest.fail(f"not installed: {', '.join(lost)}; run make setup-all", False)
