"""The outcome of one rank in one call, with its last collectives."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Collective:
    """One collective as a rank issued it."""

    group: str
    """Name of the process group."""

    number: int
    """Position among this rank's collectives of that group, from 1; sends and receives
    count apart, since not all ranks of a group take part in them."""

    op: str
    """Name of the operation."""

    tensors: str
    """Type and shape of the first tensor, and how many more there are."""

    where: str
    """File and line of the caller outside torch."""

    ranks: tuple[int, ...] = ()
    """Ranks of the group; empty where they are not known."""

    position: int = 0
    """Position among all of this rank's records in this call, from 0."""

    def __str__(self) -> str:
        return f"#{self.number} {self.op} {self.tensors} in {self.group}, {self.where}"


class Place(enum.Enum):
    """Where the main thread of a rank is, as the rank itself notes it."""

    BODY = 0
    """The function; also before its first wait and after its last."""

    COLLECTIVE = 1
    """A collective, or a wait for one that was issued before."""

    JOINING = 2
    """The making of a process group, which waits for its other ranks."""

    STORE = 3
    """Waiting for a key of a store."""

    DONE = 4
    """Done with its test, and waiting until the others are."""

    DEBUGGER = 5
    """A debugger, which waits for its user."""

    @property
    def waits(self) -> bool:
        """True if a rank waits for other ranks at this place."""
        return self not in (Place.BODY, Place.DEBUGGER)


@dataclass(frozen=True)
class Left:
    """Early end of a test on one rank that is no failure: a skip, for example.

    The test counts as skipped (or xfailed, ...) if all ranks end it alike.
    """

    kind: str
    """Meaning of the exception for pytest: see ``rank.endings``."""

    name: str
    """Qualified name of the exception's type."""

    reason: str
    """The exception's text."""


@dataclass(frozen=True)
class Failed:
    """Result of a function that failed, and has more to report than its exception."""

    error: BaseException
    """Its failure."""

    value: Any
    """``RankOutcome.value`` of the failed rank."""

    traceback: str = ""
    """Shown in place of the exception's own traceback."""

    followed: bool = False
    """True if only the failure of another rank made this one fail."""


class RankState(enum.Enum):
    """How a call ended on one rank; each member says when it is entered."""

    OK = "ok"
    """The function returned."""

    RAISED = "raised"
    """The function raised an exception of its own."""

    EXITED = "exited"
    """The process ended before it could report (``os._exit``, a lost forkserver)."""

    KILLED = "killed"
    """A signal that the harness did not send ended the process."""

    HUNG = "hung"
    """The limit passed, and no other rank had failed."""

    VICTIM = "victim"
    """Another rank failed first: this one waited for it or lost its connection."""


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """How one call ended on one rank."""

    rank: int
    """Rank in the world."""

    state: RankState
    """How the call ended."""

    value: Any = None
    """Value that the function returned (``OK`` only), a ``Left``, or the ``value`` of
    its ``Failed``."""

    exception: BaseException | None = None
    """The exception itself, where it could be pickled."""

    error_type: str | None = None
    """Qualified name of the exception's type."""

    message: str | None = None
    """The exception's text, or what the harness knows about the end."""

    traceback: str | None = None
    """The rank's own traceback."""

    exit_code: int | None = None
    """Exit code of a process that exited."""

    signal: str | None = None
    """Name of the signal that ended or stopped the process."""

    output: str = ""
    """Text that the rank wrote to stdout and stderr in this call."""

    place: Place = Place.BODY
    """Where the rank was when the call ended."""

    stacks: str = ""
    """Python stacks of all threads, dumped from outside."""

    collectives: tuple[Collective, ...] = ()
    """The last collectives that the rank issued in this call, oldest first."""

    ended_at_s: float = 0.0
    """When the rank ended, in seconds of the machine's monotonic clock."""

    @property
    def ok(self) -> bool:
        """True if the function returned on this rank."""
        return self.state is RankState.OK

    @property
    def headline(self) -> str:
        """One line on the outcome."""
        return f"rank {self.rank}: {_HEADLINES[self.state](self)}"


def _raised(outcome: RankOutcome) -> str:
    first = (outcome.message or "").strip().split("\n", 1)[0]
    return f"{outcome.error_type}: {first}" if first else str(outcome.error_type)


def _victim(outcome: RankOutcome) -> str:
    if outcome.error_type is not None:
        return f"raised {_raised(outcome)}"
    return str(outcome.message)


_HEADLINES = {
    RankState.OK: lambda outcome: "ok",
    RankState.RAISED: lambda outcome: f"raised {_raised(outcome)}",
    RankState.EXITED: lambda outcome: f"exited with code {outcome.exit_code}",
    RankState.KILLED: lambda outcome: f"killed by {outcome.signal}",
    RankState.HUNG: lambda outcome: f"hung, {outcome.message}",
    RankState.VICTIM: _victim,
}
