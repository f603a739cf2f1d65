"""The one place where cloudpickle is called: lambdas and closures can travel."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it ships no types


def dumps(value: object) -> bytes:
    """Pickle anything that cloudpickle can."""
    return bytes(cloudpickle.dumps(value))


def loads(pickled: bytes) -> Any:
    """Undo ``dumps``."""
    return pickle.loads(pickled)
