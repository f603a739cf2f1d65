"""Errors of the harness.

RuntimeError
+-- HarnessError            the harness itself failed
|   +-- ForkserverError     the server that forks the ranks is gone or did not start
+-- WorldError            a call failed on at least one rank
TypeError
+-- NotPicklableError       a function, argument or result cannot be pickled
BaseException
+-- CallEnded             raised on a rank when the call has failed on another one
"""

from __future__ import annotations

from .outcomes import RankOutcome
from .report import render_failure


class HarnessError(RuntimeError):
    """The harness itself failed; this says nothing about the function under test."""


class ForkserverError(HarnessError):
    """The server that forks the ranks is gone or did not start."""


class CallEnded(BaseException):
    """Raised on a rank when the call has failed on another rank.

    The rank leaves the function through ``finally`` and teardown. The error is a
    ``BaseException``, so that tests do not catch it by ``except Exception``.
    """


class NotPicklableError(TypeError):
    """A function, an argument or a result cannot be pickled."""


class WorldError(RuntimeError):
    """A call failed on at least one rank.

    Attributes:
        outcomes: Outcome of each rank, in rank order.
        root: The outcome of the rank that failed first.
    """

    def __init__(self, outcomes: tuple[RankOutcome, ...], root: RankOutcome) -> None:
        super().__init__(outcomes, root)
        self.outcomes = outcomes
        self.root = root

    def __str__(self) -> str:
        return render_failure(self.outcomes, self.root)
