"""Outcome of one rank in one call, with its last collectives."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

LOST = 256
"""Exit code of a rank whose forkserver ended before it could report one. No process
ends with this code."""


@dataclass(frozen=True)
class Collective:
    """Record of one collective that a rank issued."""

    group: str
    """Name of the process group."""

    number: int
    """Number among this rank's collectives of ``group``, from 1. Sends and receives
    are counted separately, since only some ranks of a group take part in them."""

    op: str
    """Name of the operation."""

    tensors: str
    """Type and shape of the first tensor, and the number of further tensors."""

    where: str
    """File and line of the caller outside torch."""

    ranks: tuple[int, ...] = ()
    """Ranks of the group; of a send or receive only the peer. Empty if unknown."""

    position: int = 0
    """Index among all of this rank's records in this call, from 0."""

    def __str__(self) -> str:
        return f"#{self.number} {self.op} {self.tensors} in {self.group}, {self.where}"


class Place(enum.Enum):
    """State of a rank's main thread, noted by the rank: what it runs or waits for."""

    BODY = 0
    """The function runs, and the rank waits for nothing."""

    COLLECTIVE = 1
    """A collective, or a wait for an earlier one."""

    JOINING = 2
    """The creation of a process group, which waits for its other ranks."""

    STORE = 3
    """A wait for a key of a store."""

    DONE = 4
    """The wait for other ranks after the end of the rank's own test."""

    DEBUGGER = 5
    """A debugger, which waits for its user."""

    IMPORTING = 6
    """The import of the test, before its function. The parent sets this state, not the
    rank."""

    @property
    def waits(self) -> bool:
        """True if a rank waits for other ranks at this place."""
        return self not in (Place.BODY, Place.DEBUGGER, Place.IMPORTING)


@dataclass(frozen=True)
class Left:
    """Early end of a test on one rank that is not a failure: a skip, for example.

    The test counts as skipped (or xfailed, ...) only if it ends in this way on all
    ranks.
    """

    kind: str
    """Meaning of the exception for pytest: a constant of ``rank.endings``."""

    name: str
    """Qualified name of the exception's type."""

    reason: str
    """Text of the exception."""


@dataclass(frozen=True)
class Failed:
    """Value that a function returns to report a failure with more than an exception."""

    error: BaseException
    """Exception of the failure."""

    value: Any
    """Becomes ``RankOutcome.value`` of the failed rank."""

    traceback: str = ""
    """Text to show instead of the exception's own traceback."""

    followed: bool = False
    """True if this failure is only a consequence of a failure on another rank."""

    part: str = ""
    """Name of the part of the test that ended here, such as a subtest; the test goes
    on. Empty if the test itself failed."""


class RankState(enum.Enum):
    """State of a rank at the end of a call."""

    OK = "ok"
    """The function returned."""

    RAISED = "raised"
    """The function raised an exception of its own."""

    EXITED = "exited"
    """The process ended before it could report (``os._exit``, a lost forkserver)."""

    KILLED = "killed"
    """A signal that the harness did not send ended the process."""

    HUNG = "hung"
    """The time limit passed, and no other rank had failed."""

    VICTIM = "victim"
    """Another rank failed first: this rank waited for it or lost its connection."""


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """Outcome of one call on one rank."""

    rank: int
    """Rank in the world."""

    state: RankState
    """State of the rank at the end of the call."""

    value: Any = None
    """Return value of the function (``OK`` only), a ``Left``, or the ``value`` of a
    ``Failed``."""

    late: Any = None
    """Value that a rank returned after its teardown, if the rank was ended because
    another rank had failed."""

    exception: BaseException | None = None
    """Exception object, if it could be pickled."""

    error_type: str | None = None
    """Qualified name of the exception's type."""

    message: str | None = None
    """Text of the exception, or a description of how the rank ended."""

    traceback: str | None = None
    """Traceback on the rank."""

    exit_code: int | None = None
    """Exit code of a process that exited; ``LOST`` if only its forkserver knew it."""

    signal: str | None = None
    """Name of the signal that ended or stopped the process."""

    output: str = ""
    """Text that the rank wrote to stdout and stderr in this call."""

    place: Place = Place.BODY
    """State of the rank's main thread when the call ended."""

    stacks: str = ""
    """Python stacks of all threads, dumped from outside."""

    collectives: tuple[Collective, ...] = ()
    """Last collectives that the rank issued in this call, oldest first."""

    ended_at_s: float = 0.0
    """Time when the rank ended, on the machine's monotonic clock."""

    @property
    def ok(self) -> bool:
        """True if the function returned on this rank."""
        return self.state is RankState.OK

    @property
    def headline(self) -> str:
        """Description of the outcome in one line."""
        return f"rank {self.rank}: {_HEADLINES[self.state](self)}"


_LONGEST = 1000
"""Number of characters of an exception's text in a headline; its traceback has all."""


def _raised(outcome: RankOutcome) -> str:
    first = (outcome.message or "").strip().split("\n", 1)[0]
    if (more := len(first) - _LONGEST) > 0:
        first = f"{first[:_LONGEST]} [... {more} more characters]"
    return f"{outcome.error_type}: {first}" if first else str(outcome.error_type)


def _exited(outcome: RankOutcome) -> str:
    if outcome.exit_code == LOST:
        return f"lost, because {outcome.message}"
    return f"exited with code {outcome.exit_code}"


def _victim(outcome: RankOutcome) -> str:
    if outcome.error_type is not None:
        return f"raised {_raised(outcome)}"
    return str(outcome.message)


_HEADLINES = {
    RankState.OK: lambda outcome: "ok",
    RankState.RAISED: lambda outcome: f"raised {_raised(outcome)}",
    RankState.EXITED: _exited,
    RankState.KILLED: lambda outcome: f"killed by {outcome.signal}",
    RankState.HUNG: lambda outcome: f"hung, {outcome.message}",
    RankState.VICTIM: _victim,
}
