"""Each private name of torch that recording and watching use, one function each.

``tests/conformance/test_private_names.py`` asserts that each name exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

__all__ = ["children_of", "in_join", "joinable"]


def children_of(module: nn.Module) -> Iterable[nn.Module | None]:
    """Return a module's children, without creating the object behind a lazy proxy."""
    children: dict[str, nn.Module | None] = module.__dict__["_modules"]
    return children.values()


def joinable(objects: Iterable[Any]) -> list[Any]:
    """Return the objects that torch's ``join()`` accepts and whose constructors ran."""
    return [each for each in objects if hasattr(each, "_join_config")]


def in_join(objects: Iterable[Any]) -> bool:
    """Return True within torch's ``join()`` of one of the given joinable objects."""
    return any(each._join_config.enable for each in objects)
