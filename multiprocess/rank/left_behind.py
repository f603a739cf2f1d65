"""Threads, collectives, process groups and streams that a call leaves when it ends.

They may interfere with the next call on the same ranks, so that a correct test fails.
"""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import multiprocessing
import os
import sys
import threading
from types import FrameType

import torch
import torch.distributed as dist

from . import flight_recorder
from .frames import ROOM, line_outside, outwards

_LOOKS, _LOOK_S = 3, 0.01
_TORCH = os.path.dirname(torch.__file__) + os.sep
_POOL = concurrent.futures.thread.__file__
_DISTRIBUTED = _TORCH + "distributed" + os.sep
_BETWEEN = (threading.__file__, _TORCH, ROOM)
_KEPT = (
    os.path.dirname(multiprocessing.__file__) + os.sep,
    os.sep + "tqdm" + os.sep,
    _TORCH,
)
"""Packages that keep threads which issue no collectives."""


_allowed: set[int] = set()
"""Ids of the threads that may be running when the call ends."""

_allowed_group: dist.ProcessGroup | None = None
"""Default process group that may exist when the call ends."""

_STANDARD = {1: "standard output", 2: "standard error"}

_files: dict[int, tuple[int, int]] = {}
"""Descriptor of an open standard stream -> its file when the call began."""


def allow_present(*, only: bool = False) -> None:
    """Do not report the current default process group and the running threads.

    Only threads that run Python code count. Threads allowed earlier stay allowed.

    Args:
        only: True at the start of a call: forget the threads allowed before, and note
            the files of stdout and stderr.
    """
    global _allowed_group, _files
    if only:
        _allowed.clear()
        _files = _standard_files()
    _allowed.update(sys._current_frames())
    _allowed_group = _default_group()


def describe() -> str:
    """Describe what the call left behind; return "" if it left nothing."""
    left = _threads_left()
    for _ in range(_LOOKS):
        if not left:
            break
        threading.Event().wait(_LOOK_S)  # the thread may be about to end
        left = _threads_left()
    left += [
        f"an asynchronous collective that it never waited for ({op}, {where})"
        for op, where in flight_recorder.unwaited()
    ]
    if (group := _default_group()) is not None and group is not _allowed_group:
        left.append("a default process group that it made")
    files = _standard_files()
    left += [
        f"a {_STANDARD[number]} that it {'replaced' if number in files else 'closed'}"
        for number, file in _files.items()
        if files.get(number) != file
    ]
    return ", ".join(left)


def _standard_files() -> dict[int, tuple[int, int]]:
    files = {}
    for number in _STANDARD:
        with contextlib.suppress(OSError):
            status = os.fstat(number)
            files[number] = status.st_dev, status.st_ino
    return files


def _default_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def _threads_left() -> list[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        f"a thread ({names.get(number, number)}, in {line_outside(frame, _BETWEEN)})"
        for number, frame in sys._current_frames().items()
        if number not in _allowed and not _issues_nothing(frame)
    ]


def _issues_nothing(frame: FrameType) -> bool:
    files = [each.f_code.co_filename for each in outwards(frame)]
    owner = next((f for f in reversed(files) if f != threading.__file__), "")
    if owner == _POOL:  # a pool's thread that waits for work
        return files[0] == _POOL and frame.f_code.co_name == "_worker"
    is_harmless = any(each in owner for each in _KEPT)
    return is_harmless and not owner.startswith(_DISTRIBUTED)
