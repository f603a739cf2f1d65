"""Global settings that are restored after each call."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from .torch_internals import default_device


def _determinism() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_determinism(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _autocast() -> list[tuple[bool, torch.dtype]]:
    return [
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in _AUTOCAST
    ]


def _set_autocast(value: list[tuple[bool, torch.dtype]]) -> None:
    for kind, (enabled, dtype) in zip(_AUTOCAST, value, strict=True):
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


def _current_gpu() -> int | None:
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _set_current_gpu(number: int | None) -> None:
    if number is not None:
        torch.cuda.set_device(number)


def _cudnn() -> list[bool]:
    return [getattr(_CUDNN, name) for name in _OF_CUDNN]


def _set_cudnn(values: list[bool]) -> None:
    for name, value in zip(_OF_CUDNN, values, strict=True):
        setattr(_CUDNN, name, value)


def _products() -> tuple[str, ...]:
    try:
        of_all = torch.get_float32_matmul_precision()
    except RuntimeError:  # the backends have different settings
        of_all = ""
    return of_all, *(kind.fp32_precision for kind in _PRODUCTS)


def _set_products(value: tuple[str, ...]) -> None:
    of_all, *each = value
    if of_all:
        torch.set_float32_matmul_precision(of_all)
    for kind, precision in zip(_PRODUCTS, each, strict=True):
        # torch.testing freezes some of them; a call cannot have changed those
        with suppress(RuntimeError):
            kind.fp32_precision = precision


_AUTOCAST = ("cpu", "cuda")
_OF_CUDNN = ("benchmark", "deterministic", "enabled")
_CUDA = torch.backends.cuda
_CUDNN: Any = torch.backends.cudnn
_MKLDNN: Any = torch.backends.mkldnn
_PRODUCTS: tuple[Any, ...] = (
    torch.backends,  # first, since others inherit from it
    torch.backends.cuda.matmul,
    *(_CUDNN, _CUDNN.conv, _CUDNN.rnn),
    *(_MKLDNN, _MKLDNN.matmul, _MKLDNN.conv, _MKLDNN.rnn),
)
"""Parts of torch that have a setting ``fp32_precision``, for matrix products."""


def _flushes_denormals() -> bool:
    # torch has no getter, but Python's own division shows the setting
    return sys.float_info.min / 2.0 == 0.0


def _handlers() -> list[Any]:
    return [signal.getsignal(number) for number in _SIGNALS]


def _set_handlers(handlers: list[Any]) -> None:
    for number, handler in zip(_SIGNALS, handlers, strict=True):
        signal.signal(number, handler)


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # the call has removed the folder
        return ""


def _set_folder(folder: str) -> None:
    try:
        os.chdir(folder)
    # the earlier folder is gone, too, and no other place is known
    except FileNotFoundError:
        os.chdir("/")


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals whose handlers are restored; reading the handlers of all 64 costs 10 us."""

# Typed loosely, because each setter takes what its getter returned.
_SETTINGS: tuple[tuple[Callable[[], object], Callable[..., object]], ...] = (
    (default_device, torch.set_default_device),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (_products, _set_products),
    (_determinism, _set_determinism),
    (_autocast, _set_autocast),
    (_cudnn, _set_cudnn),
    (_current_gpu, _set_current_gpu),
    (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
    (_flushes_denormals, torch.set_flush_denormal),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (gc.isenabled, lambda enabled: gc.enable() if enabled else gc.disable()),
    (_handlers, _set_handlers),
    (_folder, _set_folder),
    (lambda: dict(os.environ), lambda env: _restore_environment(env)),
    (lambda: list(sys.path), lambda path: sys.path.__setitem__(slice(None), path)),
    (lambda: (sys.stdout, sys.stderr), lambda streams: _restore_streams(streams)),
)


_given_back: list[Any] = []
"""Values of the settings that the current call restores when it ends."""


_ABSENT = object()


class Change(NamedTuple):
    """A change of a setting, or of one variable of the environment."""

    place: int
    """Index of the setting."""

    name: str | None
    """Name of the variable; None if the setting is no mapping."""

    before: Any
    after: Any


def settings() -> list[Any]:
    """Return the values of the settings."""
    return [get() for get, _ in _SETTINGS]


def keep_settings() -> None:
    """Let the current call restore the present values of all settings at its end."""
    _given_back[:] = settings()


def keep_changes(before: Sequence[Any]) -> list[Change]:
    """Let settings that have changed stay as they are when the current call ends.

    Args:
        before: Result of `settings`, before the changes.

    Returns:
        The changes.
    """
    changes = list(_changes(before, settings()))
    for place, name, _, after in changes:
        _replace(_given_back, place, name, after)
    return changes


def undo_changes(changes: Sequence[Change]) -> None:
    """Undo changes that `keep_changes` kept, now and at the end of the current call.

    A setting that has changed again since then stays as it is.
    """
    present = settings()
    for place, name, before, after in reversed(changes):
        for values in (_given_back, present):
            value = values[place]
            if (value if name is None else value.get(name, _ABSENT)) == after:
                _replace(values, place, name, before)
    _put(present)


def _changes(before: Sequence[Any], after: Sequence[Any]) -> Iterator[Change]:
    for place, (old, new) in enumerate(zip(before, after, strict=True)):
        if old == new:
            continue
        if not isinstance(new, dict):
            yield Change(place, None, old, new)
            continue
        for name in {**old, **new}:
            values = old.get(name, _ABSENT), new.get(name, _ABSENT)
            if values[0] != values[1]:
                yield Change(place, name, *values)


def _replace(values: list[Any], place: int, name: str | None, value: Any) -> None:
    if name is None:
        values[place] = value
    elif value is _ABSENT:
        values[place].pop(name, None)
    else:
        values[place][name] = value


def _put(values: Sequence[Any]) -> None:
    for (get, put), value in zip(_SETTINGS, values, strict=True):
        if get() != value:  # some setters cost more than a whole call
            put(value)


@contextmanager
def restored_settings() -> Iterator[None]:
    """Restore the process-wide settings at the end, and stop the signal timers.

    Changes that :func:`keep_changes` has let stay are not undone.
    """
    keep_settings()
    with warnings.catch_warnings():
        try:
            yield
        finally:
            # A timer that the call has set would strike in the next one.
            for timer in (
                signal.ITIMER_REAL,
                signal.ITIMER_VIRTUAL,
                signal.ITIMER_PROF,
            ):
                signal.setitimer(timer, 0)
            _put(_given_back)


def seed_everything(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    torch.manual_seed(seed)
    # Not imported for this: a rank without NumPy draws nothing from it.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        # NumPy accepts no larger seed.
        numpy.random.seed(seed % 2**32)


def _restore_environment(env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


def _restore_streams(streams: tuple[object, object]) -> None:
    sys.stdout, sys.stderr = streams


class WideSettings:
    """Settings of a fixture with a wider scope than a function."""

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._before: list[Any] = []
        self._before_its_end: list[Any] | None = None

    def set_up(self) -> None:
        """Note the settings before the fixture's setup, or before its next part."""
        self._before = settings()

    def keep(self) -> None:
        """Leave in force what the fixture's setup has changed since `set_up`."""
        self._changes += keep_changes(self._before)

    def begin_to_end(self) -> None:
        """Note the settings before the fixture's own teardown, which comes next."""
        self._before_its_end = settings()

    def end(self) -> None:
        """Keep what the fixture's teardown changed; undo what its setup changed."""
        if self._before_its_end is not None:
            keep_changes(self._before_its_end)
        undo_changes(self._changes)
