"""Queue of cases whose checks run while the next cases train."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

__all__ = ["Waiting"]

S = TypeVar("S")
"""Type of a case that has trained."""
C = TypeVar("C")
"""Type of a case that has been checked."""


class Waiting(Generic[S, C]):
    """Cases that a second thread checks, and that end in order.

    Localising a failure needs the ranks, which are training another case by then. So
    a case with a failure to localise waits, with all cases after it. When the ranks
    are free, :meth:`catch_up` ends these cases in the thread that uses the ranks. A
    lock ensures that one thread at a time ends a case.
    """

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        compare: Callable[[S], C],
        needs_ranks: Callable[[C], bool],
        complete: Callable[[C], C],
        end: Callable[[C], bool],
    ) -> None:
        """Begin with no cases.

        Args:
            thread: executor with one worker, which checks the cases.
            compare: takes a case that has trained and returns the checked case.
            needs_ranks: checked case -> true if ``complete`` needs free ranks for it.
            complete: completes a checked case; called while the ranks are free.
            end: called with each case; True ends the run.
        """
        self._thread, self._compare, self._needs_ranks = thread, compare, needs_ranks
        self._complete, self._end = complete, end
        self._cases: deque[tuple[int, Future[C | None]]] = deque()
        """(size, future of the case); its result is None if the case was ended by the
        second thread."""
        self._lock = threading.Lock()
        self._keeps = False
        self._stopped = False

    def add(self, seen: S, size: int) -> None:
        """Submit a case to be checked.

        Args:
            seen: case that has trained.
            size: memory that the case uses while it waits, in the same unit as the
                limit of ``catch_up``.
        """
        self._cases.append((size, self._thread.submit(self._checked, seen)))

    def _checked(self, seen: S) -> C | None:
        if self._stopped:
            return None
        case = self._compare(seen)
        with self._lock:
            self._keeps = self._keeps or self._needs_ranks(case)
            if self._keeps:
                return case
            self._stopped = self._end(case)
        return None

    def catch_up(self, most: int) -> bool:
        """End waiting cases while the ranks are free; return True to end the run.

        Args:
            most: largest sum of sizes that may go on waiting.
        """
        while self._cases:
            waiting = sum(size for size, _ in self._cases)
            if not (self._keeps or waiting > most or self._cases[0][1].done()):
                break
            self._end_next(self._complete)
        with self._lock:
            # no case waits, so none is overtaken
            self._keeps = self._keeps and bool(self._cases)
        return self._stopped

    def end_all(self) -> None:
        """End all waiting cases, without localising them."""
        while self._cases:
            self._end_next(lambda case: case)

    def _end_next(self, complete: Callable[[C], C]) -> None:
        case = self._cases.popleft()[1].result()
        with self._lock:
            if case is not None and not self._stopped:
                self._stopped = self._end(complete(case))
