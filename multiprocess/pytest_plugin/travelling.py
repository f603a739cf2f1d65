"""Values that ranks send to the parent, where their classes may be unknown."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from .. import messages
from . import internals


class Travelling:
    """A value that the parent unpickles separately: its class may be unknown there.

    Args:
        value: Value to send.
        instead: Value to send in its place if it cannot be pickled, or unpickled.
    """

    def __init__(self, value: Any, instead: Any) -> None:
        self._instead = instead
        try:
            self._data = messages.pickled(value)
        except Exception:  # any class may refuse in its own way
            self._data = messages.pickled(instead)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self._data, self._instead)


def _arrived(data: bytes, instead: Any) -> Any:
    try:
        return pickle.loads(data)
    except (Exception, SystemExit):
        return instead


def travelling(value: Any) -> Any:
    """Wrap a value for the parent, which gets its text if it cannot be unpickled."""
    return value if is_plain(value) else Travelling(value, internals.saferepr(value))


def is_plain(value: object) -> bool:
    """Return True for values that consist of Python's own types and of paths.

    Each process has its own classes of test modules and conftests.
    """
    try:
        return _is_plain(value)
    except RecursionError:  # a list in itself, say
        return False


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return type(value).__module__ == "builtins" and all(map(_is_plain, value))
    if isinstance(value, dict):
        return type(value) is dict and all(map(_is_plain, (*value, *value.values())))
    return isinstance(value, Path) or type(value) in _PLAIN


_PLAIN = (type(None), bool, int, float, complex, str, bytes)
