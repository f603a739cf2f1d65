"""Messages over a socket: an eight-byte length, then that many bytes."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("!Q")
_CHUNK = 1 << 20


def send(sock: socket.socket, message: object) -> None:
    """Send one message; blocks as long as the socket's own timeout allows."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    sock.sendall(_LENGTH.pack(len(payload)) + payload)


def receive(sock: socket.socket) -> Any:
    """Wait for one message; ``None`` when the other side is gone."""
    head = _read(sock, _LENGTH.size)
    if head is None:
        return None
    body = _read(sock, _LENGTH.unpack(head)[0])
    return None if body is None else pickle.loads(body)


def _read(sock: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = sock.recv(min(_CHUNK, count - len(parts)))
        if not part:
            return None
        parts += part
    return bytes(parts)


class Inbox:
    """Collects messages from a socket without ever waiting for it."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self.closed = False

    def poll(self) -> list[Any]:
        """Read what is there; return the messages that are complete."""
        while not self.closed:
            try:
                part = self._sock.recv(_CHUNK, socket.MSG_DONTWAIT)
            except (BlockingIOError, InterruptedError):
                break
            except ConnectionError:
                part = b""
            self.closed = not part
            self._buffer += part
        return list(self._complete())

    def _complete(self) -> list[Any]:
        found = []
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            found.append(pickle.loads(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return found
