"""Stack frames: files of the harness, and the nearest line outside of some folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from types import FrameType

ROOM = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""Folder of the harness."""

_HARNESS = re.compile(
    r".*/(multiprocess/(rank/(worker|forkserver|endings|unittests)|testcase"
    r"|pytest_plugin/\w+)|(_pytest|pluggy)/[\w/]+)\.py"
)

# Limits the cost of a record on a deep stack that has only torch's frames.
_MAX_FRAMES = 80


def is_of_harness(file: str) -> bool:
    """Return True for a file whose code calls the tests on a rank."""
    return _HARNESS.fullmatch(file) is not None


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def line_outside(frame: FrameType, files: tuple[str, ...]) -> str:
    """Return file and line of the innermost frame outside of these files.

    Args:
        frame: Innermost frame; its own line is returned if all frames are inside.
        files: Folders, or files.
    """
    outside = (
        each
        for each in islice(outwards(frame), _MAX_FRAMES)
        if not each.f_code.co_filename.startswith(files)
    )
    nearest = next(outside, frame)
    return f"{os.path.basename(nearest.f_code.co_filename)}:{nearest.f_lineno}"
