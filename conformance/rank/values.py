"""Convert a user's objects to text that is equal if their content is equal."""

from __future__ import annotations

from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .observe import digest

__all__ = ["by_value"]

SHOWN = 8
"""Largest number of elements that are written out; more become a digest."""


def by_value(value: object, around: tuple[int, ...] = ()) -> str:
    """Return ``value`` as text, without addresses and without truncation.

    An object is written as its ``state_dict()``, or as its attributes, so two
    schedulers with equal state have equal texts.

    Args:
        value: any value.
        around: ids of the values that contain it.
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if id(value) in around:
        return "..."
    around = (*around, id(value))
    if isinstance(value, np.ndarray | np.generic):
        value = torch.as_tensor(value)
    if isinstance(value, Tensor):
        few = value.numel() <= SHOWN
        content = value.detach().tolist() if few else digest(value)
        return f"tensor({content}, {value.dtype}, {list(value.shape)})"
    if isinstance(value, FunctionType | BuiltinFunctionType | MethodType | type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Mapping):
        pairs = [
            f"{by_value(k, around)}: {by_value(v, around)}" for k, v in value.items()
        ]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(by_value(v, around) for v in value))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(by_value(v, around) for v in value)}]"
    return f"{type(value).__qualname__}({by_value(_state(value), around)})"


def _state(value: Any) -> Mapping[str, Any]:
    state_dict = getattr(value, "state_dict", None)
    if callable(state_dict):
        state: Mapping[str, Any] = state_dict()
        return state
    slots = [
        name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())
    ]
    slot_values = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    return slot_values | getattr(value, "__dict__", {})
