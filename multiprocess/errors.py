"""Errors of the harness.

RuntimeError
+-- HarnessError            the harness itself could not work
|   +-- ForkserverError     the server that forks the ranks is gone or would not start
+-- WorldError            a call failed on at least one rank
TypeError
+-- NotPicklableError       a function, argument or result that cannot travel
BaseException
+-- CallEnded             raised on a rank when the call has failed on another one
"""

from __future__ import annotations

from .outcomes import RankOutcome
from .report import render_failure


class HarnessError(RuntimeError):
    """The harness itself failed; the function was not judged."""


class ForkserverError(HarnessError):
    """The server that forks the ranks is gone or would not start."""


class CallEnded(BaseException):
    """The call has failed on another rank: leave it, through ``finally`` and teardown.

    Raised where the rank is. It is no ``Exception``, so that no test catches it.
    """


class NotPicklableError(TypeError):
    """A function, an argument or a result cannot travel between processes."""


class WorldError(RuntimeError):
    """A call failed on at least one rank.

    Attributes:
        outcomes: One outcome per rank, in rank order.
        root: The outcome of the rank that failed first.
    """

    def __init__(self, outcomes: tuple[RankOutcome, ...], root: RankOutcome) -> None:
        super().__init__(outcomes, root)
        self.outcomes = outcomes
        self.root = root

    def __str__(self) -> str:
        return render_failure(self.outcomes, self.root)
