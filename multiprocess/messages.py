"""Messages between parent and ranks: values, pickling and framing.

A message is an eight-byte length and that many bytes of pickle. Inside it, values of
the user (functions, arguments, results, exceptions) are pickled by cloudpickle, so
lambdas and closures work. An error about a value that cannot be pickled can name the
value.
"""

from __future__ import annotations

import enum
import io
import marshal
import pickle
import socket
import struct
from collections import deque
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
    """None if one parent has all ranks: they then meet in a file."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Message to a rank: run one call."""

    payload: bytes
    """Pickled ``(fn, args, kwargs)``."""

    number: int
    """Number of this call in its world."""

    fresh_group: bool
    """True to create the default process group anew first."""

    context: Context | None
    """Settings of the parent, if they changed since the last message."""

    is_test: bool = False
    """Option of ``CallOptions``."""


class Kind(enum.Enum):
    """Kind of a reply."""

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
    left_a_wait: bool = False
    """True if the exception came out of a wait for other ranks, and so is about
    them."""

    tears_down: bool = False
    """True if the rank has failed and still runs its teardown: another reply
    follows."""

    reusable: bool = True
    """True if the next call may use the process with its current process group."""


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


def send(sock: socket.socket, message: object) -> None:
    """Send one message; block until the socket has accepted it."""
    payload = packed(message)
    sock.sendall(_LENGTH.pack(len(payload)))
    sock.sendall(payload)  # sent apart, because joining them would copy a large payload


def receive(sock: socket.socket) -> Any:
    """Block until one message arrives; return None if the other side is gone."""
    head = _read(sock, _LENGTH.size)
    if head is None:
        return None
    body = _read(sock, _LENGTH.unpack(head)[0])
    return None if body is None else pickle.loads(body)


def _read(sock: socket.socket, count: int) -> bytearray | None:
    parts = bytearray()
    while len(parts) < count:
        # In parts, because recv allocates the whole buffer before a byte has come.
        part = sock.recv(min(_CHUNK, count - len(parts)))
        if not part:
            return None
        parts += part
    return parts


class Outbox:
    """Sends messages over a socket without blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._parts: deque[memoryview] = deque()

    @property
    def pending(self) -> bool:
        """True if part of a message has not been sent yet."""
        return bool(self._parts)

    def put(self, payload: bytes) -> None:
        """Queue a packed message, and send as much as possible."""
        self._parts += memoryview(_LENGTH.pack(len(payload))), memoryview(payload)
        self.flush()

    def flush(self) -> None:
        """Send as much as possible; drop the rest if the other side is gone."""
        while self._parts:
            try:
                count = self._sock.send(self._parts[0], socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._parts.clear()  # the exit pipe tells why the rank ended
                return
            self._parts[0] = self._parts[0][count:]
            if not self._parts[0]:
                self._parts.popleft()


class Inbox:
    """Collects messages from a socket without blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self.closed = False

    def poll(self) -> list[Any]:
        """Read available data; return the messages that are complete."""
        # With MSG_DONTWAIT, so that only this read does not block: sending must block,
        # up to the socket's limit.
        while not self.closed:
            try:
                part = self._sock.recv(_CHUNK, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionError:
                # The connection is reset if a rank ended with unread messages.
                part = b""
            self.closed = not part
            self._buffer += part
        complete = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            complete.append(pickle.loads(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return complete
