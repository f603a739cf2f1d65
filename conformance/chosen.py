"""Selection options of the command line and the pytest plugin, not yet checked.

This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import msgspec

__all__ = ["Chosen"]

_PLURALS = {
    "scaler": "scalers",
    "scenario": "scenarios",
    "topology": "topologies",
    "model": "models",
    "precision": "precisions",
    "optimizer": "optimizers",
}
"""Option that may be repeated -> field that holds all of its values."""
_LISTS = {*_PLURALS.values()}


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """Selected scalers and scenarios; an empty field means all, or the default."""

    scalers: tuple[str, ...] = ()
    preset: str = "default"
    scenarios: tuple[str, ...] = ()
    """Ids of scenarios to run instead of a preset."""
    workload: str = ""
    topologies: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    world_size: int | None = None
    seed: int = 0
    timeout_s: float = 120.0

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """Create the selection from option names and values; options may be missing."""
        named = {name.replace("-", "_"): value for name, value in options.items()}
        value_by_field = {
            _PLURALS.get(name, name): value for name, value in named.items()
        }
        fields: dict[str, Any] = {
            field: value_by_field[field]
            for field in cls.__struct_fields__
            if value_by_field.get(field) is not None
        }
        lists = {name: tuple(fields[name]) for name in fields.keys() & _LISTS}
        return cls(**fields | lists)
