"""The forkserver as a fork of the pytest session: one import of torch for both.

torch takes more than a second of CPU to import. A session with world tests imports it
because their modules do; a server that is forked off at that moment need not do so
again. docs/architecture.md has the figures and why this stays; it is here whole, so
that it can go whole.

1. pytest is about to collect a module whose text speaks of ``mark.world``; nothing has
   imported torch yet. Then the loader of torch is watched.
2. When torch has been loaded, with those slow parts of torch that the module imports
   at its top, this process is checked. A fork copies one thread and all memory. That is
   safe where nothing else runs in this process, nothing is shared with another one, and
   nothing has begun that a copy would end a second time. No test module has come
   further than its import of torch.
3. The fork resets what was the session's: signals, descriptors, exit handlers,
   streams, hooks, the project's modules. It never returns: what the frames below it
   hold stays as it is, and none of it is unwound, closed or ended a second time.

Where it is not safe a fresh server is started when the tests have been collected.
"""

from __future__ import annotations

import _warnings
import ast
import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import types
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

VARIABLE = "GRADPARITY_FORKSERVER"
"""Environment variable: "auto", "fresh" (never a fork of the session), or "fork" (an
error that says why, where a fork of the session is not safe)."""

_MODES = ("auto", "fresh", "fork")

_HARMLESS = re.compile(r"/dev/(null|tty|u?random|pts/\d+)$|.* \(deleted\)$")
"""Devices without state, and files without a name: pytest's captured output."""

INSTALLED = re.compile(r"/(site|dist)-packages/")
"""In the path of each file that an installation has put there."""

_STDLIB = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")
)
_OURS = __name__.removesuffix("pytest_plugin.session_fork")

_OPENBLAS_SETTERS = (
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
)

_SLEEP_S = 0.002


def mode() -> str:
    """Return what the environment asks for.

    Raises:
        ValueError: It is no known word.
    """
    found = os.environ.get(VARIABLE, _MODES[0])
    if found not in _MODES:
        raise ValueError(
            f"{VARIABLE} must be one of {', '.join(_MODES)}; got {found!r}"
        )
    return found


def open_targets() -> frozenset[str]:
    """Return what this process's descriptors lead to; nothing without ``/proc``.

    Called when the plugin is imported, which must not fail on any system.
    """
    try:
        entries = os.listdir("/proc/self/fd")
    except OSError:
        return frozenset()
    found = []
    for entry in entries:
        try:
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue  # the one that listed them
    return frozenset(found)


class TorchImportHook:
    """A finder that waits for torch to be imported, and then forks the server."""

    def __init__(self, opened: frozenset[str], words: Sequence[bytes]) -> None:
        """Prepare.

        Args:
            opened: What this process's descriptors led to when the session began.
            words: One of them is in each module whose tests may need ranks.
        """
        self._words = tuple(words)
        self._opened = opened
        self._paths: set[str] = set()
        self._forked = False

    def watch_module(self, path: Path) -> None:
        """Wait for torch from now on if the module at ``path`` speaks of worlds."""
        self._paths.add(str(path))
        if self in sys.meta_path or "torch" in sys.modules or mode() == "fresh":
            return
        try:
            text = path.read_bytes()
        except OSError:
            return  # pytest says so
        if any(word in text for word in self._words):
            sys.meta_path.insert(0, self)

    def stop(self, *, expected: bool = False) -> None:
        """Wait no more.

        Args:
            expected: Whether there are tests for the server; else it is ended.

        Raises:
            ForkserverError: It had to be a fork, and there was no occasion.
        """
        self._unhook()
        if expected and mode() == "fork" and not self._forked:
            from ..errors import ForkserverError

            raise ForkserverError(
                f"{VARIABLE}=fork: torch was there before any world test was found; "
                f"import it in test modules only, or set {VARIABLE}=auto"
            )
        if self._forked and not expected:
            from ..parent.forkserver_client import stop_forkserver

            stop_forkserver()
            self._forked = False

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find torch where it always is, with a loader that reports when it is done."""
        if name != "torch":
            return None
        self._unhook()
        spec = PathFinder.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            load, before = loader.exec_module, Snapshot(opened=self._opened)
            # torch's test classes take longer to import than torch itself
            needed = self._costly_parts()

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                load(module)
                for name in needed:
                    # What it raises, the test module shows.
                    with contextlib.suppress(Exception):
                        importlib.import_module(name)
                self._forked = fork_server_off(before, must=mode() == "fork")

            loader.exec_module = exec_module
        return spec

    def _costly_parts(self) -> list[str]:
        """Slow parts of torch that the module which imports torch now needs, too."""
        from ..rank.worker import COSTLY

        frame: types.FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_filename not in self._paths:
            frame = frame.f_back
        if frame is None:
            return []
        needed: set[str] = set()
        for node in ast.parse(Path(frame.f_code.co_filename).read_bytes()).body:
            if isinstance(node, ast.Import):
                needed |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                needed |= {f"{node.module}.{alias.name}" for alias in node.names}
                needed.add(node.module)
        return [n for n in COSTLY if n.startswith("torch.") and n in needed]

    def _unhook(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What was there when torch began to be loaded."""

    opened: frozenset[str]
    """What the descriptors led to when the session began, before that."""

    modules: frozenset[str] = field(default_factory=lambda: frozenset(sys.modules))
    """Names of all modules, also of those that were on their way."""

    filters: int = field(default_factory=lambda: len(warnings.filters))
    """How many warning filters there were."""

    finalizers: tuple[object, ...] = field(
        default_factory=lambda: tuple(getattr(weakref.finalize, "_registry", ()))
    )
    """Those of objects that were there."""


def fork_server_off(before: Snapshot, *, must: bool = False) -> bool:
    """Make the forkserver a fork of this process, if that is safe and there is none.

    Args:
        before: How things were before torch was loaded.
        must: Whether it is an error when it is not safe.

    Returns:
        Whether it was made.

    Raises:
        ForkserverError: It must be, and is not.
    """
    from ..errors import ForkserverError
    from ..parent.forkserver_client import start_forkserver

    found = obstacles(before)
    if not found:
        try:
            return start_forkserver(partial(_fork_server, before))
        except OSError as error:  # no memory or no process is left
            found = [str(error)]
    if must:
        raise ForkserverError(
            f"this process may not be forked: {'; '.join(found)}. {VARIABLE}=auto "
            "starts a fresh server instead"
        )
    return False


# -- before: is it safe?


def obstacles(before: Snapshot) -> list[str]:
    """Return why this process should not be forked; empty where it may be.

    Args:
        before: How things were before torch was loaded.
    """
    try:
        # OpenBLAS's threads are idle. It ends them by itself before each fork, and
        # starts them again when it needs them.
        for library in _openblas():
            if hasattr(library, "blas_thread_shutdown_"):
                library.blas_thread_shutdown_()
        return list(_obstacles(before))
    except OSError as error:
        return [f"it cannot be looked at: {error}"]


def _obstacles(before: Snapshot) -> Iterator[str]:
    # A lock that another thread holds would never be given back in the copy.
    if (count := len(os.listdir("/proc/self/task"))) > 1:
        yield f"it has {count} native threads"
    # The copy's only thread must be the one that handles signals.
    if threading.current_thread() is not threading.main_thread():
        yield "this is not its main thread"
    # They are not the copy's to wait for, but it would believe so.
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().strip()
    if children:
        yield f"it has child processes: {children}"
    # Would go on in the copy, and write what it saw over the session's.
    coverage, monitoring = sys.modules.get("coverage"), getattr(sys, "monitoring", None)
    if (
        sys.gettrace()
        or sys.getprofile()
        or (coverage and coverage.Coverage.current())
        or (monitoring and any(map(monitoring.get_tool, range(6))))
    ):
        yield "it is traced, profiled or measured"
    # A file's position, a socket's stream and a mapping are one for both processes.
    opened = open_targets() - before.opened
    if own := sorted(target for target in opened if not _HARMLESS.match(target)):
        yield f"it has opened {', '.join(own)}"
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if "w" in fields[1] and fields[1].endswith("s"):
            yield f"it shares memory: {fields[-1]}"
            break
    # CUDA cannot be used in a fork of a process that has used it.
    torch = sys.modules["torch"]
    if torch.cuda.is_initialized() or torch.distributed.is_initialized():
        yield "it uses CUDA or a process group"
    # The frame that imports it exists in the session only: in the copy, and so in all
    # ranks, it would stay half imported. The project's modules are forgotten anyway.
    for name in sorted(before.modules):
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if getattr(spec, "_initializing", False) and not _is_of_the_project(module):
            yield f"{name} is being imported"
            break


def _is_of_the_project(module: object) -> bool:
    """Whether a module is neither built in nor installed."""
    file = getattr(module, "__file__", None)
    if file is None:
        return False
    path = os.path.abspath(file)
    return not (path.startswith(_STDLIB) or INSTALLED.search(path))


def _openblas() -> Iterator[ctypes.CDLL]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "openblas" in line}
    for path in sorted(paths):
        yield ctypes.CDLL(path)


# -- the fork


class _ForkedServer:
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
            time.sleep(_SLEEP_S)
        return code

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)


def _fork_server(
    before: Snapshot, sock: socket.socket, errors_fd: int
) -> _ForkedServer:
    """Fork this process; the child serves the other end of ``sock`` and nothing else.

    Args:
        before: How things were before torch was loaded.
        sock: Its end of the connection.
        errors_fd: Where its stderr goes.
    """
    # What is in a buffer at the fork would be written by both.
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
    # A signal between the fork and the reset would run the session's handler in the
    # copy, and raise KeyboardInterrupt through the session's frames.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _become_server(before, sock.fileno(), errors_fd)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return _ForkedServer(pid)


def _become_server(before: Snapshot, sock_fd: int, errors_fd: int) -> NoReturn:
    from ..parent.forkserver_client import serve_in_fork

    try:
        os.setsid()  # ctrl-C is for the session alone
        gc.freeze()  # shared with the session and all ranks: leave its pages alone
        _reset_descriptors(sock_fd, errors_fd)
        _reset_signals()
        # Exit handlers and finalizers are the session's to call. An object may still
        # go; what it ends is the session's.
        atexit._clear()
        gc.callbacks.clear()
        gc.enable()  # a session may do without while it collects its tests
        for finalizer in before.finalizers:
            finalizer.detach()  # type: ignore[attr-defined]
        _reset_streams()
        _reset_hooks(before)
        _reset_modules(before)
        for library in _openblas():  # N ranks must not fight for the cores
            for name in _OPENBLAS_SETTERS:
                if hasattr(library, name):
                    getattr(library, name)(1)
        serve_in_fork(sock_fd)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _reset_descriptors(sock_fd: int, errors_fd: int) -> None:
    # Each but the server's socket becomes one that cannot be used. Its number stays
    # taken: an object that still holds it closes nothing of ours, and an accidental
    # read or write fails rather than reaching the session.
    null, dead = os.open(os.devnull, os.O_RDWR), os.open("/", os.O_PATH)
    for fd, source in ((0, null), (1, null), (2, errors_fd)):
        os.dup2(source, fd, inheritable=True)
    for name in os.listdir("/proc/self/fd"):
        if (fd := int(name)) not in (0, 1, 2, dead, sock_fd):
            os.dup2(dead, fd, inheritable=False)


def _reset_signals() -> None:
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


def _reset_streams() -> None:
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(fd, "w" if fd else "r", buffering=1, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    # Logs that went to captured output go to a rank's own.
    root = logging.getLogger()
    root.handlers[:] = [h for h in root.handlers if not _is_pytests(h)]
    for reference in logging._handlerList:  # type: ignore[attr-defined]
        handler = reference()
        if isinstance(handler, logging.StreamHandler) and _is_pytests(handler.stream):
            handler.setStream(sys.stderr)


def _reset_hooks(before: Snapshot) -> None:
    for name in ("displayhook", "excepthook", "unraisablehook", "breakpointhook"):
        setattr(sys, name, getattr(sys, f"__{name}__"))
    threading.excepthook = threading.__excepthook__
    warnings.showwarning = warnings._showwarning_orig  # type: ignore[attr-defined]
    warnings._showwarnmsg_impl = _show_warning  # type: ignore[attr-defined]
    # torch's and the interpreter's, not those of pytest's catch_warnings around us.
    added = warnings.filters[: len(warnings.filters) - before.filters]
    warnings.filters = [*added, *_warnings.filters]  # type: ignore[list-item]
    sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_pytests(finder)]


def _reset_modules(before: Snapshot) -> None:
    # Modules of the project are forgotten: each rank imports them itself, after it has
    # joined, as it does from a fresh server.
    sys.argv[:] = ["gradparity-rank"]
    gone = {
        name: sys.modules[name]
        for name in before.modules & sys.modules.keys()
        if _is_of_the_project(sys.modules[name])
        and not f"{name}.".startswith(_OURS)
        and not _OURS.startswith(f"{name}.")
    }
    gone["__main__"] = sys.modules["__main__"]
    _kept.append(gone)  # what they hold must not end here
    for name in gone:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")
    spec = sys.modules["torch"].__spec__
    spec._initializing = False  # type: ignore[union-attr]  # we are in its loader
    # Of torch and of the test module that imports it: frames that are never unwound
    # hold them, and another thread of a rank would wait for them forever.
    importlib._bootstrap._module_locks.clear()  # type: ignore[attr-defined]


_kept: list[object] = []


def _is_pytests(thing: object) -> bool:
    return type(thing).__module__.startswith("_pytest.")


def _show_warning(message: warnings.WarningMessage) -> None:
    sys.stderr.write(warnings._formatwarnmsg(message))  # type: ignore[attr-defined]
