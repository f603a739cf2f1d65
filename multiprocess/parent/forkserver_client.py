"""The parent's side of the forkserver: start it, request ranks, end it.

There is one forkserver for each parent process, started on first use.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

from .. import linux
from ..errors import ForkserverError
from ..python_internals import interpreter_options
from ..rank import forkserver as server
from ..rank.worker import COSTLY, PRELOAD

_LONGEST = 30_000
"""Longest variable for a new process, in characters; the kernel's limit is 128 KiB."""

# The import path first, since the package may be found only by it. In memory, since it
# may be longer than an argument.
_BOOT = """
import json, sys
path_fd, fd = map(int, sys.argv[1:])
with open(path_fd) as file:
    sys.path[:] = json.load(file)
sys.argv[:] = ["gradparity-rank"]
from {module} import main
main(fd)
"""

# Longer than the 3 s that the server takes to end its ranks.
_END_S = 5.0
_MAX_ERRORS = 64 * 1024
"""Number of bytes shown of the end of the server's output."""


def import_path() -> list[str]:
    """Return the entries of ``sys.path`` that are strings: Python ignores others."""
    return [entry for entry in sys.path if isinstance(entry, str)]


def _started(fd: int, errors_fd: int, *, fork: bool) -> subprocess.Popen[bytes]:
    """Start a server that reads socket ``fd`` and writes errors to ``errors_fd``."""
    boot = _BOOT.format(module=server.__name__)
    linux.flush_standard_streams()  # a fork would copy what is left in the buffers
    # One thread while preloading, because a server with threads cannot be forked
    # safely.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    with linux.in_memory(json.dumps(import_path()).encode()) as path_fd:
        return subprocess.Popen(
            # -P: files in the current folder must not hide installed packages.
            [
                *(sys.executable, *interpreter_options()),
                *("-P", "-c", boot, str(path_fd), str(fd)),
            ],
            pass_fds=(path_fd, fd),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors_fd,
            # The ranks get all variables, later by a message.
            env={n: v for n, v in env.items() if len(n) + len(v) < _LONGEST},
            start_new_session=True,  # Ctrl-C reaches only the parent
            # This function never returns, so there is no exec: the child is a fork of
            # this process.
            preexec_fn=partial(_serve_in_fork, fd) if fork else None,
            # Python ignores SIGPIPE, and restoring would change that
            restore_signals=not fork,
        )


def _serve_in_fork(fd: int) -> NoReturn:
    """Run the forkserver in this new fork of the parent; never returns."""
    global _client, _client_lock
    try:
        # Popen's own pipe is one of these: the parent waits until it is closed.
        for number in map(int, os.listdir("/proc/self/fd")):
            if number > 2 and number != fd:
                # the descriptor of the listing itself
                with contextlib.suppress(OSError):
                    os.close(number)
        gc.enable()  # Popen has switched it off
        sys.argv[:] = ["gradparity-rank"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        _client, _client_lock = None, threading.Lock()
        server.main(fd)
    finally:
        os._exit(1)  # neither exit handlers nor finalizers: they are the parent's


class ForkserverClient:
    """Connection to one forkserver."""

    def __init__(self, *, fork: bool = False) -> None:
        """Start the server.

        Args:
            fork: True to fork the server from this process, without an interpreter of
                its own.
        """
        linux.fill_standard_descriptors()
        self.owner = linux.getpid()
        self._lock = threading.Lock()
        self._imported: set[str] = set()
        self._serial = 0
        self._pending: tuple[int, list[str]] | None = None
        # In memory, since nobody reads it unless the server fails, and a writer to a
        # full pipe would wait.
        self._errors_fd = os.memfd_create("gradparity-errors", os.MFD_CLOEXEC)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, self._errors_fd)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._sock = undo.enter_context(ours)
            with theirs:
                self._process = _started(theirs.fileno(), self._errors_fd, fork=fork)
            undo.pop_all()
        self._send_import((*PRELOAD, *_costly_here()))

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """True if the server belongs to this process and is running."""
        # A fork of the parent has the socket, too, and two clients would take each
        # other's answers.
        return self.owner == linux.getpid() and self._process.poll() is None

    def preload(self, modules: Iterable[str], limit_s: float) -> None:
        """Import ``modules`` in the server, for ranks that are forked later.

        Args:
            modules: Names of modules; slow ones that the parent has imported are added.
            limit_s: Longest time that an earlier import may still take.

        Raises:
            ForkserverError: An earlier import failed, or the server did not answer.
        """
        with self._lock:
            wanted = dict.fromkeys((*modules, *_costly_here()))
            missing = [name for name in wanted if name not in self._imported]
            if missing:
                # Read the answer first: `_answer` drops one with another number, and
                # the import's error would be lost.
                self._await_import(limit_s)
                self._send_import(missing)

    def fork(self, fds: Sequence[int], limit_s: float) -> tuple[int, int | None]:
        """Fork one rank.

        Args:
            fds: Descriptors for the rank, the exit pipe first.
            limit_s: Time limit of the pending imports, and then of the fork.

        Returns:
            The rank's process id and, if the kernel supports it, a pidfd.

        Raises:
            ForkserverError: The server failed to fork, or did not answer.
        """
        with self._lock:
            self._await_import(limit_s)
            serial = self._send("fork", fds)
            answer, pidfds = self._answer(serial, limit_s, "forking a rank")
        if "error" in answer:
            raise ForkserverError(answer["error"])
        return int(answer["pid"]), next(iter(pidfds), None)

    def close(self) -> None:
        """End the server and with it every rank."""
        # End of file orders the server to end.
        self._sock.close()
        if self.owner == linux.getpid():  # a forked copy of the parent owns nothing
            self._wait()
        os.close(self._errors_fd)

    def _wait(self) -> None:
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def _errors(self) -> str:
        size = os.fstat(self._errors_fd).st_size
        start = max(0, size - _MAX_ERRORS)
        written = os.pread(self._errors_fd, _MAX_ERRORS, start)
        return written.decode("utf-8", "backslashreplace").rstrip()

    def _send_import(self, modules: Iterable[str]) -> None:
        names = list(modules)
        request = json.dumps({"path": import_path(), "modules": names}).encode()
        with linux.in_memory(request) as fd:  # longer than a message may be
            self._pending = self._send("import", [fd]), names
        # Counted from the request on, so that no module is requested twice; a failed
        # import is removed again.
        self._imported.update(names)

    def _await_import(self, limit_s: float) -> None:
        # Wait as late as possible, since the parent works while the server imports.
        if self._pending is None:
            return
        serial, names = self._pending
        answer, _ = self._answer(serial, limit_s, f"importing {', '.join(names)}")
        self._pending = None  # the answer has come, so nobody waits for it again
        if "error" in answer:
            self._imported.difference_update(names)
            raise ForkserverError(answer["error"])

    def _send(self, do: str, fds: Sequence[int]) -> int:
        self._serial += 1
        message = json.dumps({"do": do, "serial": self._serial}).encode()
        try:
            socket.send_fds(self._sock, [message], list(fds))
        except OSError as error:
            raise ForkserverError(
                f"the forkserver is gone: {error}; the next call starts a new one"
            ) from error
        return self._serial

    def _answer(
        self, serial: int, limit_s: float, doing: str
    ) -> tuple[dict[str, Any], list[int]]:
        deadline = linux.now_s() + limit_s
        arrival = select.poll()
        arrival.register(self._sock, select.POLLIN)
        while True:
            # Not by a timeout of the socket: a signal handler of the caller may also
            # raise TimeoutError.
            left_s = max(0.0, deadline - linux.now_s())
            if not arrival.poll(min(left_s, linux.LONGEST_WAIT_S) * 1000):
                if linux.now_s() < deadline:
                    continue
                raise self._late(limit_s, doing)
            try:
                message, fds, _, _ = socket.recv_fds(self._sock, 1 << 20, 1)
            except ConnectionError:
                message, fds = b"", []
            if not message:
                raise self._ended()
            answer: dict[str, Any] = json.loads(message)
            if answer["serial"] == serial:
                return answer, fds
            # An answer to a call that Ctrl-C or a timeout has cut short.
            for fd in fds:
                os.close(fd)

    def _late(self, limit_s: float, doing: str) -> ForkserverError:
        self._process.send_signal(signal.SIGTERM)  # it writes its stack and ends
        self._wait()
        return ForkserverError(
            f"the forkserver gave no answer for {limit_s:g} s while {doing}, and was "
            f"ended; start_timeout_s of the world sets the limit\n{self._errors()}"
        )

    def _ended(self) -> ForkserverError:
        self._wait()
        code = self._process.returncode
        return ForkserverError(
            f"the forkserver ended with code {code}\n{self._errors()}"
        )


_client: ForkserverClient | None = None
_client_lock = threading.Lock()


def forkserver() -> ForkserverClient:
    """Return this process's forkserver; start one if none is running."""
    global _client
    with _client_lock:
        if _client is None or not _client.usable:
            if _client is not None:
                _client.close()
            _client = ForkserverClient()
        return _client


def fork_forkserver() -> bool:
    """Fork this process's forkserver from this process, to share its imports.

    Use it in a program that has only imported the modules of its ranks: a fork copies
    all memory, but only one thread.

    Returns:
        True on success; False if a forkserver exists, or if there are other threads.
    """
    global _client
    with _client_lock:
        if _client is not None or len(os.listdir("/proc/self/task")) > 1:
            return False
        _client = ForkserverClient(fork=True)
        return True


def stop_forkserver() -> None:
    """End this process's forkserver, if there is one, and all its ranks."""
    global _client
    with _client_lock:
        if _client is not None:
            _client.close()
            _client = None


_wanted: dict[str, None] = {}


def want_preloaded(modules: Iterable[str]) -> None:
    """Add modules that the next forkserver imports.

    A module is left out if this process has not imported it.
    """
    _wanted.update(dict.fromkeys(modules))


def _costly_here() -> tuple[str, ...]:
    return tuple(name for name in (*COSTLY, *_wanted) if name in sys.modules)


atexit.register(stop_forkserver)
