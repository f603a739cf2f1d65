"""pdb on a rank, at the terminal of the session.

A rank has no terminal of its own, but it may open the session's. Ranks take turns
there. The time at a prompt does not count for the limit of the call.
"""

from __future__ import annotations

import bdb
import contextlib
import fcntl
import os
import pdb
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TextIO

from ..messages import NO_TERMINAL, Kind


class RankDebugger(pdb.Pdb):
    """pdb that says when it has the terminal, and keeps other ranks off it."""

    def __init__(
        self, rank: int, terminal: tuple[TextIO, TextIO], say: Callable[[Kind], None]
    ) -> None:
        """Make one.

        Args:
            rank: Shown in the prompt.
            terminal: Where it reads from and writes to.
            say: Tells the parent.
        """
        # nosigint: ctrl-C at the terminal is the parent's; a rank is in a session of
        # its own.
        super().__init__(stdin=terminal[0], stdout=terminal[1], nosigint=True)
        self.prompt = f"(rank {rank}) "
        self.use_rawinput = False
        self._terminal = terminal[0]
        self._say = say

    def interaction(self, frame: Any, traceback: Any) -> None:
        """Hold the terminal, and the clock of the call, while at the prompt."""
        self._say(Kind.DEBUGGING)
        try:
            with contextlib.suppress(OSError):  # a terminal that cannot be locked
                fcntl.flock(self._terminal, fcntl.LOCK_EX)
            super().interaction(frame, traceback)
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(self._terminal, fcntl.LOCK_UN)
            self._say(Kind.RESUMED)


def stop(
    rank: int,
    path: str,
    say: Callable[[Kind], None],
    frame: FrameType,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Stop in ``frame``, for ``breakpoint()``.

    Raises:
        RuntimeError: There is no terminal at ``path``.
    """
    if os.environ.get("PYTHONBREAKPOINT") is not None:
        sys.__breakpointhook__(*args, **kwargs)
        return
    if not path:
        raise RuntimeError(NO_TERMINAL)
    # Left open: pdb goes on to use it, from line to line.
    terminal = open(path, encoding="utf-8"), open(path, "w", encoding="utf-8")
    RankDebugger(rank, terminal, say).set_trace(frame)


def post_mortem(
    rank: int, error: BaseException, path: str, say: Callable[[Kind], None]
) -> None:
    """Look at where ``error`` was raised, at the terminal ``path``."""
    with _opened(path) as terminal:
        debugger = RankDebugger(rank, terminal, say)
        kind = f"{type(error).__name__}: {error}"
        print(f"\n>>> rank {rank} raised {kind}", file=terminal[1], flush=True)
        debugger.reset()
        with contextlib.suppress(bdb.BdbQuit):
            debugger.interaction(None, error.__traceback__)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[TextIO, TextIO]]:
    with open(path, encoding="utf-8") as stdin, open(path, "w") as stdout:
        yield stdin, stdout
