"""Last collectives of each rank, in memory that outlives the rank.

A rank writes, and the parent can read at any time, also from a rank that hangs, was
killed or stopped. Layout of a rank's region: number of records; the rank's place, and
the record of its current collective; a ring of records.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import threading
from collections.abc import Sequence

from ..outcomes import Collective, Place
from ..report import TWO_SIDED

SLOTS = 64
_SLOT = 512
_COUNT = struct.Struct("!Q")
_PLACE = struct.Struct("!II")
_NO_RECORD = 2**32 - 1
_HEAD = _COUNT.size + _PLACE.size
REGION = _HEAD + SLOTS * _SLOT


def create(size: int) -> int:
    """Create the memory for ``size`` ranks; return its descriptor."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    fd = os.memfd_create("gradparity-flight-records", flags)
    os.ftruncate(fd, size * REGION)
    # Without the seals, a test that truncates open files would take it from all ranks.
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


class RecordWriter:
    """Writes a rank's records and its place into the memory."""

    def __init__(self, fd: int, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._memory = mmap.mmap(fd, size * REGION)
        self._start = rank * REGION
        self._count = 0
        self._calls = 0
        self._numbers: dict[str, int] = {}
        self._thread = threading.get_ident()
        self._now = Place.BODY.value, _NO_RECORD
        # A child of the rank is no rank: its collectives and waits are not the rank's.
        os.register_at_fork(after_in_child=self._leave)

    def _leave(self) -> None:
        """Write into memory of this process only, from now on."""
        self._memory = mmap.mmap(-1, self.size * REGION)

    def clear(self) -> None:
        """Remove the records of earlier calls."""
        self._count = 0
        self._calls += 1
        self._numbers.clear()
        _COUNT.pack_into(self._memory, self._start, 0)
        self._put((Place.BODY.value, _NO_RECORD))

    @property
    def last(self) -> tuple[int, int] | None:
        """Latest record of this call, as :meth:`record` returned it, or None."""
        return (self._calls, self._count - 1) if self._count else None

    def enter(
        self, place: Place, record: tuple[int, int] | None = None
    ) -> tuple[int, int]:
        """Note the :class:`Place` at which the rank is from now on.

        Args:
            place: Place of the thread that made this writer; calls on other threads
                have no effect.
            record: Collective that the rank is in, as :meth:`record` returned it.

        Returns:
            The previous place, for :meth:`leave`.
        """
        before = self._now
        is_of_this_call = record is not None and record[0] == self._calls
        index = record[1] if record is not None and is_of_this_call else _NO_RECORD
        self._put((place.value, index))
        return before

    @property
    def waits(self) -> bool:
        """True if the rank is already in a wait for others."""
        return self._now[0] != Place.BODY.value

    def leave(self, before: tuple[int, int]) -> None:
        """Restore the place that the rank had before :meth:`enter`."""
        self._put(before)

    def _put(self, now: tuple[int, int]) -> None:
        if threading.get_ident() == self._thread:
            self._now = now
            _PLACE.pack_into(self._memory, self._start + _COUNT.size, *now)

    def record(
        self,
        group: str,
        op: str,
        tensors: str,
        where: str,
        ranks: Sequence[int] = (),
    ) -> tuple[int, int]:
        """Add one collective; return its record, for :meth:`enter`."""
        counted = f"{group}, two ranks" if op in TWO_SIDED else group
        number = self._numbers[counted] = self._numbers.get(counted, 0) + 1
        fields = (group[:48], number, op[:40], tensors[:48], where[-80:])
        text = json.dumps((*fields, _as_range(ranks))).encode()
        if len(text) > _SLOT:  # ranks of a large group without a pattern do not fit
            text = json.dumps((*fields, [])).encode()
        if len(text) > _SLOT:  # JSON takes six bytes for a letter that is not ASCII
            fields = (group[:16], *fields[1:4], where[-24:])
            text = json.dumps((*fields, [])).encode()
        at = self._start + _HEAD + self._count % SLOTS * _SLOT
        self._memory[at : at + _SLOT] = text.ljust(_SLOT)
        # The count last, so that a reader that comes between finds all earlier records.
        self._count += 1
        _COUNT.pack_into(self._memory, self._start, self._count)
        return self._calls, self._count - 1


def read(fd: int, rank: int) -> tuple[Collective, ...]:
    """Return a rank's last collectives, oldest first."""
    # Work on a copy, because a live rank goes on writing.
    region = os.pread(fd, REGION, rank * REGION)
    (count,) = _COUNT.unpack_from(region)
    collectives = []
    for index in range(max(0, count - SLOTS), count):
        at = _HEAD + index % SLOTS * _SLOT
        try:
            collectives.append(_collective(region[at : at + _SLOT], index))
        except (ValueError, TypeError):
            continue  # the rank is writing this record
    return tuple(collectives)


def read_place(fd: int, rank: int) -> tuple[Place, int | None]:
    """Return a rank's noted place, and the position of its collective or None."""
    place, index = _PLACE.unpack(os.pread(fd, _PLACE.size, rank * REGION + _COUNT.size))
    return Place(place), None if index == _NO_RECORD else index


def read_current(fd: int, rank: int) -> Collective | None:
    """Return the collective that a rank runs or waits for now, or None."""
    _, position = read_place(fd, rank)
    collectives = () if position is None else read(fd, rank)
    return next((call for call in collectives if call.position == position), None)


def _collective(slot: bytes, position: int) -> Collective:
    group, number, op, tensors, where, ranks = json.loads(slot)
    members = tuple(range(*ranks) if ranks[2:] else ranks[0]) if ranks else ()
    return Collective(group, number, op, tensors, where, members, position)


def _as_range(ranks: Sequence[int]) -> Sequence[object]:
    """Return (start, stop, step) of evenly spaced ranks, else [list of ranks]."""
    # Most groups are regular: three numbers fit the slot where a list of a thousand
    # does not.
    if len(ranks) < 2:
        return [list(ranks)] if ranks else []
    step = ranks[1] - ranks[0]
    row = range(ranks[0], ranks[-1] + step, step) if step > 0 else range(0)
    return (
        [row.start, row.stop, row.step] if list(row) == list(ranks) else [list(ranks)]
    )
