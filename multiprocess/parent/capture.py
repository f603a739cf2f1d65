"""What a rank writes, read from a pipe, bounded in memory: its head and its tail.

A pipe and not a file: a full disk loses nothing, and nothing is left to clean up.
"""

from __future__ import annotations

import os

_CHUNK = 1 << 16


class Capture:
    """Reads one pipe without waiting; keeps the first and the last ``limit`` bytes."""

    def __init__(self, read_fd: int, limit: int) -> None:
        os.set_blocking(read_fd, False)
        self.fd = read_fd
        self._limit = limit
        self._head = bytearray()
        self._tail = bytearray()
        self._dropped = 0

    def drain(self, most: int = 1 << 24) -> bool:
        """Read what is there, about ``most`` bytes at most; False at the end."""
        while most > 0:
            try:
                part = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                return True
            if not part:
                return False
            most -= len(part)
            self._keep(part)
        return True

    def take(self) -> str:
        """Return what was kept and forget it."""
        middle = b""
        if self._dropped:
            middle = f"\n[... {self._dropped} bytes left out ...]\n".encode()
        text = bytes(self._head) + middle + bytes(self._tail)
        self._head, self._tail, self._dropped = bytearray(), bytearray(), 0
        return text.decode("utf-8", "backslashreplace")

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.fd)

    def _keep(self, part: bytes) -> None:
        room = self._limit - len(self._head)
        self._head += part[:room]
        self._tail += part[room:]
        excess = len(self._tail) - self._limit
        if excess > 0:
            del self._tail[:excess]
            self._dropped += excess
