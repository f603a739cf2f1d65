"""Check values before torch is imported, which takes seconds.

Values that need an import are checked later.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..status import UsageError, did_you_mean, id_parts, unknown
from .tables import law_texts, names_of

__all__ = ["check_alone", "check_spec", "check_values"]

_OPTIONS = ("topology", "model", "precision", "optimizer", "preset")
"""Options whose values are names of a table."""
_OF_A_WORKLOAD = ("topology", "optimizer")
"""Options whose values come from the workload, if one is given."""


def check_alone(
    parsed: argparse.Namespace, options: Mapping[str, Mapping[str, Any]]
) -> None:
    """Raise if ``--scenario`` is given together with an option that it overrides.

    Args:
        parsed: parsed command line of ``run``.
        options: option that ``--scenario`` overrides -> its settings.

    Raises:
        UsageError: names the option.
    """
    for name, how in options.items():
        if getattr(parsed, name.replace("-", "_")) != how.get("default"):
            raise UsageError(
                "the id of a scenario names its model, topology and all else: give no "
                f"--{name} beside --scenario"
            )


def check_values(parsed: argparse.Namespace) -> None:
    """Raise for an unknown name before anything is imported.

    Raises:
        UsageError: names the value and the known ones.
    """
    workload = getattr(parsed, "workload", "")
    for what in _OPTIONS:
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
    laws = [law.id for law in law_texts()]
    chapters = list(dict.fromkeys(law.partition(".")[0] for law in laws))
    if name not in (*laws, *chapters, "report.jsonl"):
        raise UsageError(
            f"{name!r} is neither a check (see gradparity list laws), a group of them "
            f"({', '.join(chapters)}), a scenario id nor report.jsonl"
            f"{did_you_mean(name, [*laws, *chapters])}"
        )


def _check_id(text: str) -> None:
    parts = id_parts(text)
    # A model with a colon is a workload, which defines topologies and optimizers
    # itself.
    if ":" not in "".join(parts[5:]):
        topology, _, precision, optimizer, *_ = parts
        _check("topology", [topology])
        _check("precision", [precision])
        _check("optimizer", [optimizer])


def check_spec(spec: str) -> None:
    """Raise for a missing module, or an attribute that its source never mentions."""
    module, _, attribute = spec.partition(":")
    parts = [*module.split("."), attribute]
    if parts[-2:-1] == ["py"] or not all(part.isidentifier() for part in parts):
        return  # a file, which is refused where it would be imported
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
    # A module may define names dynamically.
    if attribute in words or words & _DYNAMIC or "import *" in source:
        return
    raise UsageError(
        f"{spec}: module {module} has no attribute {attribute!r}"
        f"{did_you_mean(attribute, words)}"
    )


_DYNAMIC = {"__getattr__", "__dict__", "exec", "globals", "modules", "setattr", "vars"}


def _find(module: str) -> ModuleSpec | None:
    """Return the spec of a module, or None, without importing its packages."""
    top, *inner = module.split(".")
    module_spec = PathFinder.find_spec(top, [os.getcwd()])
    with suppress(ValueError):  # __main__ has no spec
        module_spec = module_spec or find_spec(top)
    for part in inner:
        if module_spec is None or module_spec.submodule_search_locations is None:
            return None
        # Use the last part of the name: for its whole name a namespace package would be
        # looked up in sys.modules, which lacks it.
        module_spec = PathFinder.find_spec(part, module_spec.submodule_search_locations)
    return module_spec
