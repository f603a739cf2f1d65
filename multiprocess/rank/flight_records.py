"""The last collectives of each rank, in memory that outlives the rank.

A rank writes, the parent reads whenever it wants: also from a rank that hangs, was
killed or stopped. Layout of a rank's region: number of records, then a ring of records.
"""

from __future__ import annotations

import json
import mmap
import os
import struct

from ..outcomes import Collective

SLOTS = 16
_SLOT = 256
_COUNT = struct.Struct("!Q")
_HEAD = 16
REGION = _HEAD + SLOTS * _SLOT


def create(size: int) -> int:
    """Make the memory for ``size`` ranks; return its descriptor."""
    fd = os.memfd_create("gradparity-flight-records", os.MFD_CLOEXEC)
    os.ftruncate(fd, size * REGION)
    return fd


class RecordWriter:
    """A rank's end."""

    def __init__(self, fd: int, rank: int, size: int) -> None:
        self._memory = mmap.mmap(fd, size * REGION)
        self._start = rank * REGION
        self._count = 0
        self._numbers: dict[str, int] = {}

    def clear(self) -> None:
        """Forget the records of earlier calls."""
        self._count = 0
        self._numbers.clear()
        _COUNT.pack_into(self._memory, self._start, 0)

    def record(self, group: str, op: str, tensors: str, where: str) -> None:
        """Add one collective."""
        number = self._numbers[group] = self._numbers.get(group, 0) + 1
        fields = (group[:48], number, op[:40], tensors[:48], where[-80:])
        text = json.dumps(fields).encode()[:_SLOT]
        at = self._start + _HEAD + self._count % SLOTS * _SLOT
        self._memory[at : at + _SLOT] = text.ljust(_SLOT)
        # The count last: a reader that comes between finds the records before this one.
        self._count += 1
        _COUNT.pack_into(self._memory, self._start, self._count)


def read(fd: int, rank: int) -> tuple[Collective, ...]:
    """Return a rank's last collectives, oldest first."""
    region = os.pread(fd, REGION, rank * REGION)
    (count,) = _COUNT.unpack_from(region)
    found = []
    for index in range(max(0, count - SLOTS), count):
        at = _HEAD + index % SLOTS * _SLOT
        try:
            found.append(Collective(*json.loads(region[at : at + _SLOT])))
        except (ValueError, TypeError):
            continue  # the rank is writing just now
    return tuple(found)
