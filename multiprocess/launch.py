"""The parent's end of the forkserver: start it, have ranks forked, end it.

There is one forkserver per parent process, started on first use.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Protocol

from .errors import ForkserverError
from .preloads import COSTLY, PRELOAD

if TYPE_CHECKING:
    from .forkable import Scene

# The import path comes first: the parent may find this package by it alone.
_BOOT = """
import json, sys
fd = int(sys.argv.pop())
sys.path[:] = json.loads(sys.argv.pop())
sys.argv[:] = ["gradparity-rank"]
from {package}.forkserver import main
main(fd)
"""

_END_S = 5.0


class Server(Protocol):
    """The forkserver's process, as its parent has it."""

    pid: int
    stderr: IO[bytes] | None
    returncode: int | None

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""

    def kill(self) -> None:
        """Kill it."""


def fresh_server(sock: socket.socket) -> Server:
    """Start a server in an interpreter of its own."""
    return subprocess.Popen(
        _command(sock.fileno()),
        pass_fds=(sock.fileno(),),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,  # read only to explain its death
        env=_environment(),
        start_new_session=True,  # ctrl-C is for the parent alone
    )


class ForkserverClient:
    """One forkserver and the socket to it."""

    def __init__(self, start: Callable[[socket.socket], Server] = fresh_server) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._imported: set[str] = set()
        self._serial = 0
        self._pending: int | None = None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start(theirs)
        self._sock = ours
        self._send_import((*PRELOAD, *_costly_here()))

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether it belongs to this process and still runs."""
        return self.owner == os.getpid() and self._process.poll() is None

    def preload(self, modules: Iterable[str] = ()) -> None:
        """Import ``modules`` in the server, for ranks that are forked later.

        Args:
            modules: Their names; costly ones that the parent has are added.
        """
        with self._lock:
            wanted = dict.fromkeys((*modules, *_costly_here()))
            missing = [name for name in wanted if name not in self._imported]
            if missing:
                self._settle()
                self._send_import(missing)

    def fork(self, fds: Sequence[int]) -> int:
        """Fork one rank, hand it ``fds`` (exit pipe first), return its pid."""
        with self._lock:
            self._settle()
            serial = self._send({"do": "fork"}, fds)
            return int(self._answer(serial)["pid"])

    def close(self) -> None:
        """End the server and with it every rank."""
        self._sock.close()
        if self.owner == os.getpid():  # a forked copy of the parent owns nothing
            self._wait()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _wait(self) -> None:
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _epitaph(self) -> str:
        self._wait()
        said = b"" if self._process.stderr is None else self._process.stderr.read()
        code = self._process.returncode
        return f"the forkserver ended with code {code}\n{said.decode()}".rstrip()

    def _send_import(self, modules: Iterable[str]) -> None:
        names = list(modules)
        request = {"do": "import", "path": sys.path, "modules": names}
        self._pending = self._send(request)
        self._imported.update(names)

    def _settle(self) -> None:
        # Awaited as late as possible: the parent works while the server imports.
        if self._pending is not None:
            self._answer(self._pending)
            self._pending = None

    def _send(self, request: Mapping[str, Any], fds: Sequence[int] = ()) -> int:
        self._serial += 1
        message = json.dumps({**request, "serial": self._serial}).encode()
        try:
            socket.send_fds(self._sock, [message], list(fds))
        except OSError as error:
            raise ForkserverError(f"the forkserver is gone: {error}") from error
        return self._serial

    def _answer(self, serial: int) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        # Older answers belong to calls that ctrl-C or a timeout cut short.
        while answer.get("serial") != serial:
            try:
                message = self._sock.recv(1 << 20)
            except ConnectionError:
                message = b""
            if not message:
                raise ForkserverError(self._epitaph())
            answer = json.loads(message)
        if "error" in answer:
            raise ForkserverError(answer["error"])
        return answer


_client: ForkserverClient | None = None
_client_lock = threading.Lock()


def forkserver() -> ForkserverClient:
    """Return this process's forkserver; start it when there is none that works."""
    global _client
    with _client_lock:
        if _client is None or not _client.usable:
            if _client is not None:
                _client.close()
            _client = ForkserverClient()
        return _client


def inherit_forkserver(scene: Scene, *, must: bool = False) -> bool:
    """Make the forkserver a fork of this process, if that is safe and there is none.

    Args:
        scene: How things were before torch was loaded.
        must: Whether it is an error when it is not safe.

    Returns:
        Whether it was made.

    Raises:
        ForkserverError: It must be, and is not.
    """
    global _client
    with _client_lock:
        if _client is not None:
            return False
        from . import forkable, shedding

        found = forkable.obstacles(scene)
        if not found:
            try:
                _client = ForkserverClient(partial(shedding.fork_server, scene, _serve))
            except OSError as error:
                found = [str(error)]
    if found and must:
        raise ForkserverError(f"this process may not be forked: {'; '.join(found)}")
    return not found


def _serve(sock_fd: int) -> None:
    # In a copy of the parent, whose forkserver is not ours.
    global _client, _client_lock
    _client, _client_lock = None, threading.Lock()
    from . import forkserver

    forkserver.main(sock_fd)


def stop_forkserver() -> None:
    """End this process's forkserver, if there is one, and all its ranks."""
    global _client
    with _client_lock:
        if _client is not None:
            _client.close()
            _client = None


def _costly_here() -> tuple[str, ...]:
    return tuple(name for name in COSTLY if name in sys.modules)


def _command(fd: int) -> list[str]:
    boot = _BOOT.format(package=__package__)
    # -P: the current folder must not hide installed packages from the server.
    return [sys.executable, "-P", "-c", boot, json.dumps(sys.path), str(fd)]


def _environment() -> dict[str, str]:
    # One thread while preloading: a server with threads cannot be forked safely.
    return {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


atexit.register(stop_forkserver)
