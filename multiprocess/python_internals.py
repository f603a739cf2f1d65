"""All private names of Python's standard library that the harness uses."""

from __future__ import annotations

import subprocess


def interpreter_options() -> list[str]:
    """Return this interpreter's own options, such as ``-O`` and ``-W error``.

    multiprocessing passes the same ones to its processes.
    """
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # private
    return options
