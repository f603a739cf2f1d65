"""What parent and ranks say to each other; plain values that any pickle can carry."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from .spec import WorldSpec

NO_TERMINAL = (
    "A rank has no terminal: print what you look for, or set PYTHONBREAKPOINT to a "
    "debugger that is reached over a socket (such as remote_pdb.set_trace), call "
    "breakpoint() on the rank, and raise timeout_s"
)
"""What to do for want of a debugger on a rank."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a rank takes over from the parent, where Python finds its modules."""

    cwd: str
    path: tuple[str, ...]
    env: dict[str, str]
    modules: dict[str, str] = field(default_factory=dict)
    """Modules whose asserts pytest rewrote: name to file."""

    measured: tuple[tuple[str, Any], ...] = ()
    """How coverage.py measures the parent; empty when it does not."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where ranks meet whose parents are several processes."""

    host: str
    port: int
    prefix: str
    """Of every key of this world in the store at that port."""

    local_rank: int
    """Position among the ranks of this machine: its device."""

    local_size: int

    one_host: bool
    """Whether all ranks can reach each other over the loopback."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """First message to a rank: join the world."""

    spec: WorldSpec
    rank: int
    context: Context
    meeting: Meeting | None = None
    """None where one parent has all ranks: they meet in a file of its own."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One call."""

    payload: bytes
    """Pickled ``(fn, args, kwargs)``."""

    number: int
    """How many calls this world had before."""

    fresh_group: bool
    """Whether the default process group is made anew first."""

    context: Context | None
    """What changed in the parent since the last message."""


class Kind(enum.Enum):
    """What a reply reports."""

    READY = "ready"
    OK = "ok"
    RAISED = "raised"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A rank's answer: to ``Start`` when it has joined, to ``Run`` when it is done."""

    kind: Kind
    ended_at_s: float
    value: bytes = b""
    exception: bytes | None = None
    error_type: str | None = None
    message: str | None = None
    traceback: str | None = None
    imported: tuple[str, ...] = ()
    """Costly modules that the rank had to import itself."""

    reusable: bool = True
    """Whether the next call may use the process group as it is now."""
