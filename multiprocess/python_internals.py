"""All private names of Python's standard library that the harness uses."""

from __future__ import annotations

import subprocess
import unittest
from typing import Any


def interpreter_options() -> list[str]:
    """Return this interpreter's own options, such as ``-O`` and ``-W error``.

    multiprocessing passes the same ones to its processes.
    """
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # private
    return options


def message_of(subtest: Any) -> str | None:
    """Return the message of a subtest as text; None if it has none."""
    case: Any = unittest.case
    message = subtest._message
    return None if message is case._subtest_msg_sentinel else str(message)
