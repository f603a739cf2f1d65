"""All private names of Python's standard library that the harness uses."""

from __future__ import annotations

import atexit
import subprocess
import weakref


def interpreter_options() -> list[str]:
    """Return this interpreter's own options, such as ``-O`` and ``-W error``.

    multiprocessing passes the same ones to its processes.
    """
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # private
    return options


def drop_exit_handlers() -> None:
    """Drop the exit handlers and finalizers that a fork has inherited from its parent.

    A finalizer still runs if its object is garbage-collected.
    """
    atexit._clear()
    finalizers = weakref.finalize
    for finalizer in finalizers._registry:  # type: ignore[attr-defined]  # private
        finalizer.atexit = False
    # The next finalizer then registers the handler that runs finalizers at exit.
    finalizers._registered_with_atexit = False  # type: ignore[attr-defined]  # private


def run_exit_handlers() -> None:
    """Run the exit handlers and finalizers, as at the end of a Python process."""
    atexit._run_exitfuncs()
