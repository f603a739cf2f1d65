"""Global settings that one call must not leave to the next."""

from __future__ import annotations

import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


def _determinism() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_determinism(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


# Typed loosely: each setter takes what its getter gave.
_SETTINGS: tuple[tuple[Callable[[], object], Callable[..., object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (_determinism, _set_determinism),
    (os.getcwd, os.chdir),
    (lambda: dict(os.environ), lambda env: _restore_environment(env)),
    (lambda: list(sys.path), lambda path: sys.path.__setitem__(slice(None), path)),
    (lambda: (sys.stdout, sys.stderr), lambda streams: _restore_streams(streams)),
)


@contextmanager
def restored_settings() -> Iterator[None]:
    """Put the process-wide settings back as they were before."""
    before = [get() for get, _ in _SETTINGS]
    with warnings.catch_warnings():
        try:
            yield
        finally:
            # An alarm that the call has set would strike in the next one.
            signal.alarm(0)
            torch.set_default_device(None)
            for (get, put), value in zip(_SETTINGS, before, strict=True):
                if get() != value:  # some setters cost more than a whole call
                    put(value)


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    # Not imported for this: a rank that does not use NumPy draws nothing from it.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _restore_environment(env: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


def _restore_streams(streams: tuple[object, object]) -> None:
    sys.stdout, sys.stderr = streams
