"""Whether this process may be forked to become the forkserver, checked when it is due.

A fork copies one thread and all memory. It is safe where nobody else runs in this
process, nothing is shared with another one, and nothing has begun that a copy would
end a second time. Each check below names what it has found; one is enough.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import sysconfig
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..environment import opened

_HARMLESS = re.compile(r"/dev/(null|tty|u?random|pts/\d+)$|.* \(deleted\)$")
"""Devices without state, and files without a name: pytest's captured output."""

_INSTALLED = re.compile(r"/(site|dist)-packages/")

_OPENBLAS_SETTERS = (
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
)


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What was there when torch began to be loaded."""

    opened: frozenset[str]
    """What the descriptors led to when the session began, before that."""

    modules: frozenset[str] = field(default_factory=lambda: frozenset(sys.modules))
    """Names of all modules, also of those that were on their way."""

    filters: int = field(default_factory=lambda: len(warnings.filters))
    """How many warning filters there were."""

    finalizers: tuple[object, ...] = field(default_factory=lambda: _finalizers())
    """Those of objects that were there."""


def obstacles(scene: Scene) -> list[str]:
    """Return why this process should not be forked; empty where it may be.

    Args:
        scene: How things were before torch was loaded.
    """
    try:
        _end_openblas_threads()
        return [why for check in _CHECKS if (why := check(scene))]
    except OSError as error:
        return [f"it cannot be looked at: {error}"]


def use_one_openblas_thread() -> None:
    """In a fork: N ranks must not fight for the cores."""
    for library in _openblas():
        for name in _OPENBLAS_SETTERS:
            if hasattr(library, name):
                getattr(library, name)(1)


def is_of_the_project(module: object) -> bool:
    """Whether a module is neither built in nor installed."""
    file = getattr(module, "__file__", None)
    if file is None:
        return False
    path = os.path.abspath(file)
    return not (path.startswith(_STDLIB) or _INSTALLED.search(path))


def _finalizers() -> tuple[object, ...]:
    return tuple(getattr(weakref.finalize, "_registry", ()))


def _threads(scene: Scene) -> str:
    count = len(os.listdir("/proc/self/task"))
    return "" if count == 1 else f"it has {count} native threads"


def _main_thread(scene: Scene) -> str:
    main = threading.current_thread() is threading.main_thread()
    return "" if main else "this is not its main thread"


def _children(scene: Scene) -> str:
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return f"it has child processes: {text.strip()}" if text.strip() else ""


def _tracing(scene: Scene) -> str:
    coverage = sys.modules.get("coverage")
    current = coverage and coverage.Coverage.current()
    traced = sys.gettrace() or sys.getprofile() or current or _monitored()
    return "it is traced, profiled or measured" if traced else ""


def _monitored() -> bool:
    monitoring = getattr(sys, "monitoring", None)
    return bool(monitoring and any(map(monitoring.get_tool, range(6))))


def _descriptors(scene: Scene) -> str:
    own = sorted(t for t in opened() - scene.opened if not _HARMLESS.match(t))
    return f"it has opened {', '.join(own)}" if own else ""


def _shared_memory(scene: Scene) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if "w" in fields[1] and fields[1].endswith("s"):
            return f"it shares memory: {fields[-1]}"
    return ""


def _devices(scene: Scene) -> str:
    torch = sys.modules["torch"]
    used = torch.cuda.is_initialized() or torch.distributed.is_initialized()
    return "it uses CUDA or a process group" if used else ""


def _in_progress(scene: Scene) -> str:
    found = {name: sys.modules.get(name) for name in scene.modules}
    names = sorted(
        name
        for name in found
        if getattr(getattr(found[name], "__spec__", None), "_initializing", False)
        and not is_of_the_project(found[name])
    )
    return f"{names[0]} is being imported" if names else ""


_CHECKS: tuple[Callable[[Scene], str], ...] = (
    _threads,
    _main_thread,
    _children,
    _tracing,
    _descriptors,
    _shared_memory,
    _devices,
    _in_progress,
)


def _end_openblas_threads() -> None:
    # As it does by itself before each fork; it starts them again when it needs them.
    for library in _openblas():
        if hasattr(library, "blas_thread_shutdown_"):
            library.blas_thread_shutdown_()


def _openblas() -> Iterator[ctypes.CDLL]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[-1] for line in lines if "openblas" in line}
    for path in sorted(paths):
        yield ctypes.CDLL(path)


_STDLIB = tuple(
    os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib")
)
