"""Check names of tables before torch is imported, which takes seconds.

Values that need an import are checked later.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ..status import UsageError, did_you_mean, id_parts, unknown
from .tables import law_texts, names_of

__all__ = ["check_alone", "check_values"]

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
