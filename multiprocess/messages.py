"""Messages between parent and ranks: values, pickling and framing.

A message is an eight-byte length and that many bytes of pickle. Values of the user
(functions, arguments, results, exceptions) are pickled separately, by cloudpickle. So
lambdas and closures work, and an error about a value that cannot be pickled can name
the value.
"""

from __future__ import annotations

import enum
import io
import marshal
import pickle
import socket
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]  # it ships no types

from .spec import WorldSpec

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Context:
    """Settings that a rank copies from the parent, such as the import path."""

    cwd: str
    path: tuple[str, ...]
    env: dict[str, str]
    modules: dict[str, str] = field(default_factory=dict)
    """Name -> file of modules whose asserts pytest rewrote."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Address at which ranks with different parents meet."""

    host: str
    port: int
    prefix: str
    """Prefix of this world's keys in the store at ``port``."""

    local_rank: int
    """Index among the ranks of this machine; selects the device."""

    local_size: int

    one_host: bool
    """True if all ranks are on one host and can use the loopback."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """First message to a rank: join the world."""

    spec: WorldSpec
    rank: int
    context: Context
    rendezvous: Rendezvous | None = None
    """Address at which the ranks meet; None if one parent has all ranks. They then meet
    in a file."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Message to a rank: run one call."""

    payload: bytes
    """Pickled ``(fn, args, kwargs)``."""

    fresh_group: bool
    """True to create the default process group anew first."""

    context: Context | None
    """Settings of the parent if they changed since the last message, else None."""

    is_test: bool = False
    """True for a test; see ``CallOptions.is_test``."""


class Kind(enum.Enum):
    """Kind of a reply."""

    READY = "ready"
    BEGUN = "begun"
    OK = "ok"
    RAISED = "raised"


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A rank's answer: to ``Start`` when it has joined, to ``Run`` when it is done.

    If the call is a test, the rank also replies when the test is imported and begins.
    """

    kind: Kind
    ended_at_s: float
    value: bytes = b""
    exception: bytes | None = None
    error_type: str | None = None
    message: str | None = None
    traceback: str | None = None
    left_a_wait: bool = False
    """True if the exception was raised by a wait for other ranks, so that another rank
    caused it."""

    tears_down: bool = False
    """True if the rank has failed and still runs its teardown: another reply
    follows."""

    part: str = ""
    """Name of a part of the call that raised, such as a subtest, while the call goes
    on: another reply follows. Empty for other replies."""

    reusable: bool = True
    """True if the next call may use the process with its current process group."""

    @property
    def is_last(self) -> bool:
        """True if no other reply to the same message follows."""
        return self.kind is not Kind.BEGUN and not (self.part or self.tears_down)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # it ships no types
    """cloudpickle's pickler, except that code keeps the name of its file.

    Since 3.1.3 cloudpickle drops the name, and errors of ranks would show no lines.
    """

    def reducer_override(self, obj: Any) -> Any:
        """Return how to pickle code; leave all else to cloudpickle."""
        if isinstance(obj, CodeType):
            return marshal.loads, (marshal.dumps(obj),)
        return super().reducer_override(obj)


def pickled(value: object) -> bytes:
    """Pickle a value by cloudpickle, which supports lambdas and closures."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


def packed(message: object) -> bytes:
    """Pickle a message of this module."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


class Channel:
    """Messages over a socket, in both directions.

    A rank waits for each message. The parent does not wait: a slow rank must not keep
    the parent from the other ranks.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.closed = False
        """True once the other side is gone."""

        self._sock = sock
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()

    @property
    def pending(self) -> bool:
        """True if part of a message has not been sent yet."""
        return bool(self._unsent)

    def send(self, payload: bytes, *, wait: bool = False) -> None:
        """Send a packed message; without ``wait`` as much as the socket accepts."""
        # Sent apart, because joining them would copy a large payload.
        self._unsent += memoryview(_LENGTH.pack(len(payload))), memoryview(payload)
        self.flush(wait=wait)

    def flush(self, *, wait: bool = False) -> None:
        """Send the part that is still pending; drop it if the other side is gone."""
        while self._unsent:
            try:
                count = self._sock.send(self._unsent[0], _flags(wait))
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()  # the exit pipe tells why the rank ended
                return
            self._unsent[0] = self._unsent[0][count:]
            if not self._unsent[0]:
                self._unsent.popleft()

    def receive(self, *, wait: bool = False) -> list[Any]:
        """Return the messages that have arrived completely.

        Args:
            wait: True to wait for at least one. The result is then empty only if the
                other side is gone.
        """
        complete: list[Any] = []
        while not self.closed and not (wait and complete):
            try:
                part = self._sock.recv(_CHUNK, _flags(wait))
            except BlockingIOError:
                break
            except ConnectionError:
                # The connection is reset if a rank ended with unread messages.
                part = b""
            self.closed = not part
            self._received += part
            complete += self._unpacked()
        return complete

    def _unpacked(self) -> Iterator[Any]:
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            with memoryview(self._received) as all_, all_[_LENGTH.size : end] as body:
                message = pickle.loads(body)
            del self._received[:end]
            yield message


def _flags(wait: bool) -> int:
    # One flag for each operation: the socket itself blocks for both sides.
    return 0 if wait else socket.MSG_DONTWAIT
