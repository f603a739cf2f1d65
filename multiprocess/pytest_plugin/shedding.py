"""Fork this process into a forkserver, which sheds what was the session's.

The fork never returns: what the frames below it hold stays as it is, and none of it is
unwound, closed or ended a second time. What else there is:

1. Signals are blocked around the fork; handlers, wakeup and stack dumps are put back.
2. Each descriptor but the server's socket becomes one that cannot be used. Its number
   stays taken: who still holds it closes nothing of ours, and an accidental read or
   write fails rather than reaching the session.
3. Exit handlers and finalizers are forgotten: they are the session's to call.
4. Streams, hooks, warnings, `__main__` and the finders of pytest are as in a fresh
   interpreter; logs that went to captured output go to a rank's own.
5. Modules of the project are forgotten: each rank imports them itself, after it has
   joined, as it does from a fresh server.
"""

from __future__ import annotations

import _warnings
import atexit
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable
from typing import NoReturn

from . import forkable

_NAP_S = 0.002
_OURS = __name__.removesuffix("pytest_plugin.shedding")


class ForkedServer:
    """The child, with the part of ``Popen`` that its client needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else has waited for it
                self.returncode = 0
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("forkserver", timeout or 0.0)
            time.sleep(_NAP_S)
        return code

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)


def fork_server(
    scene: forkable.Scene,
    serve: Callable[[int], None],
    sock: socket.socket,
    errors_fd: int,
) -> ForkedServer:
    """Fork this process; the child serves the other end of ``sock`` and nothing else.

    Args:
        scene: How things were before torch was loaded.
        serve: What the child does, given the socket's descriptor.
        sock: Its end of the connection.
        errors_fd: Where its stderr goes.

    Raises:
        OSError: There is no memory or no process left.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become_server(scene, serve, sock.fileno(), errors_fd)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return ForkedServer(pid)


def _become_server(
    scene: forkable.Scene, serve: Callable[[int], None], sock_fd: int, errors_fd: int
) -> NoReturn:
    try:
        os.setsid()  # ctrl-C is for the session alone
        gc.freeze()  # shared with the session and all ranks: leave its pages alone
        _shed_descriptors(sock_fd, errors_fd)
        _shed_signals()
        _shed_endings(scene)
        _shed_streams()
        _shed_hooks(scene)
        _shed_modules(scene)
        forkable.use_one_openblas_thread()
        serve(sock_fd)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _shed_descriptors(sock_fd: int, errors_fd: int) -> None:
    null, dead = os.open(os.devnull, os.O_RDWR), os.open("/", os.O_PATH)
    for fd, source in ((0, null), (1, null), (2, errors_fd)):
        os.dup2(source, fd, inheritable=True)
    for name in os.listdir("/proc/self/fd"):
        if (fd := int(name)) not in (0, 1, 2, dead, sock_fd):
            os.dup2(dead, fd, inheritable=False)


def _shed_signals() -> None:
    faulthandler.disable()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if handler is None or callable(handler):
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):
                continue  # the C library's own
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _shed_endings(scene: forkable.Scene) -> None:
    atexit._clear()
    gc.callbacks.clear()
    for finalizer in scene.finalizers:
        # The object may still go; what it ends is the session's.
        finalizer.detach()  # type: ignore[attr-defined]


def _shed_streams() -> None:
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(fd, "w" if fd else "r", buffering=1, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    root = logging.getLogger()
    root.handlers[:] = [h for h in root.handlers if not _is_pytests(h)]
    for reference in logging._handlerList:  # type: ignore[attr-defined]
        handler = reference()
        if isinstance(handler, logging.StreamHandler) and _is_pytests(handler.stream):
            handler.setStream(sys.stderr)


def _shed_hooks(scene: forkable.Scene) -> None:
    for name in ("displayhook", "excepthook", "unraisablehook", "breakpointhook"):
        setattr(sys, name, getattr(sys, f"__{name}__"))
    threading.excepthook = threading.__excepthook__
    warnings.showwarning = warnings._showwarning_orig  # type: ignore[attr-defined]
    warnings._showwarnmsg_impl = _show_warning  # type: ignore[attr-defined]
    # torch's and the interpreter's, not those of pytest's catch_warnings around us.
    added = warnings.filters[: len(warnings.filters) - scene.filters]
    warnings.filters = [*added, *_warnings.filters]  # type: ignore[list-item]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_pytests(finder)]


def _shed_modules(scene: forkable.Scene) -> None:
    sys.argv[:] = ["gradparity-rank"]
    gone = {
        name: sys.modules[name]
        for name in scene.modules & sys.modules.keys()
        if forkable.is_of_the_project(sys.modules[name]) and not _is_ours(name)
    }
    gone["__main__"] = sys.modules["__main__"]
    _kept.append(gone)  # what they hold must not end here
    for name in gone:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")
    spec = sys.modules["torch"].__spec__
    spec._initializing = False  # type: ignore[union-attr]  # we are in its loader


_kept: list[object] = []


def _is_pytests(thing: object) -> bool:
    return type(thing).__module__.startswith("_pytest.")


def _is_ours(name: str) -> bool:
    return f"{name}.".startswith(_OURS) or f"{name}." in _OURS


def _show_warning(message: warnings.WarningMessage) -> None:
    sys.stderr.write(warnings._formatwarnmsg(message))  # type: ignore[attr-defined]
