"""CPU slots and GPUs, shared by xdist workers and concurrent runs on one machine.

A slot is a file lock, which the kernel releases when its owner dies. A world takes as
many slots as it has ranks. A world larger than the machine takes all slots, and so runs
alone. One world at a time takes slots, while it holds a lock. So two worlds that each
wait for the rest of their slots cannot block each other.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from .. import linux
from ..environment import WORLD_VARIABLE, cache_folder, cores
from ..errors import HarnessError

# A file lock can be tried or waited for, but not waited for with a limit.
_POLL_S = 0.01

SLOTS_VARIABLE = "GRADPARITY_CPU_SLOTS"
"""Environment variable with the number of CPU slots of this machine; 0 switches slots
off."""

_RANKS_PER_CORE = 4
"""Number of ranks on a core: ranks of tests mostly wait for each other."""


@dataclass(frozen=True, kw_only=True)
class SlotPool:
    """Named slots, shared by every process with the same folder."""

    names: Sequence[str]
    """Name of each slot."""

    kind: str = ""
    """Prefix of the names of the lock files."""

    folder: Path = field(default_factory=lambda: default_folder())
    """Folder of the lock files."""

    optional: bool = False
    """True to continue without slots if no lock file can be made."""

    way_out: str = "run again later"
    """Advice for the message if other runs hold the slots."""

    @contextlib.contextmanager
    def hold(self, wanted: int, limit_s: float = 600.0) -> Iterator[tuple[str, ...]]:
        """Hold ``wanted`` slots, or all if there are fewer.

        If a rank starts a world of its own, this world takes no slots: it runs in the
        slots of the rank.

        Args:
            wanted: Number of slots.
            limit_s: Longest wait for them.

        Yields:
            The names of the slots.

        Raises:
            HarnessError: Other runs held the slots for too long, or no lock file can
                be made.
        """
        # A world larger than the number of slots takes all of them, and so runs alone.
        count = min(wanted, len(self.names))
        if WORLD_VARIABLE in os.environ:
            # The outer world waits for this one, so its slots would never be free.
            yield tuple(self.names[:count])
            return
        with contextlib.ExitStack() as locks:
            try:
                names = self._take(locks, count, limit_s) if count else ()
            except OSError as error:
                if not self.optional:
                    raise self._unwritable(error) from error
                names = ()
            yield names

    def _take(
        self, locks: contextlib.ExitStack, count: int, limit_s: float
    ) -> tuple[str, ...]:
        deadline = linux.now_s() + limit_s
        taken: list[str] = []
        self.folder.mkdir(parents=True, exist_ok=True)
        # Held while waiting: two worlds that each hold half of the slots would wait for
        # each other.
        gate = FileLock(self.folder / "gate.lock")
        try:
            gated = gate.acquire(timeout=limit_s, poll_interval=_POLL_S)
        except Timeout:
            raise self._starved(1, limit_s) from None
        with gated:
            while True:
                for name in self.names:
                    if name in taken or len(taken) == count:
                        continue
                    lock = FileLock(self.folder / f"{self.kind}{name}.lock")
                    with contextlib.suppress(Timeout):  # another world has this slot
                        locks.enter_context(lock.acquire(timeout=0))
                        taken.append(name)
                if len(taken) == count:
                    return tuple(taken)
                if linux.now_s() > deadline:
                    raise self._starved(count, limit_s)
                linux.sleep(_POLL_S)

    def _starved(self, count: int, limit_s: float) -> HarnessError:
        return HarnessError(
            f"waited {limit_s:g} s for {count} of the {len(self.names)} slots in "
            f"{self.folder}; other runs hold them, `fuser -v {self.folder}/*.lock` "
            f"shows which. End those, or {self.way_out}."
        )

    def _unwritable(self, error: OSError) -> HarnessError:
        return HarnessError(
            f"no lock can be made in {self.folder}: {error}; set XDG_CACHE_HOME to a "
            "folder that can be written."
        )


def cpu_slots() -> SlotPool:
    """Return this machine's CPU slots.

    Slots only make runs faster. If no lock file can be written, as on a full disk,
    tests run without slots.

    Raises:
        HarnessError: The environment variable for their number is not a number.
    """
    wanted = os.environ.get(SLOTS_VARIABLE, str(cores() * _RANKS_PER_CORE))
    if not wanted.strip().isdecimal():
        raise HarnessError(
            f"{SLOTS_VARIABLE} must be a number of slots, or 0 for none; it is "
            f"{wanted!r}"
        )
    count = int(wanted)
    return SlotPool(
        names=[f"cpu{index}" for index in range(count)],
        optional=True,
        way_out=f"do without slots by {SLOTS_VARIABLE}=0",
    )


def gpu_slots(visible: Sequence[str]) -> SlotPool:
    """Return the slots of the GPUs that the caller may use.

    Args:
        visible: Names of the GPUs, as in ``CUDA_VISIBLE_DEVICES``: a slot is a device,
            and not an index in one caller's list.
    """
    return SlotPool(
        names=tuple(visible),
        kind="gpu-",
        way_out="choose free devices by CUDA_VISIBLE_DEVICES",
    )


def visible_gpus(count: int | None = None) -> list[str]:
    """Return the devices that the caller may use, in the caller's order.

    CUDA ignores all devices after a wrong name, such as -1, and all devices if one
    comes twice.

    Args:
        count: Number of devices of the machine; found without torch by default.
    """
    count = _installed_gpus() if count is None else count
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is None:
        return [str(index) for index in range(count)]
    listed = [name.strip() for name in allowed.split(",")]
    names = list(itertools.takewhile(lambda name: _is_gpu(name, count), listed))
    return [] if len(set(names)) < len(names) else names[:count]


def default_folder() -> Path:
    """Return the folder that all runs of this user on this host share.

    The path contains the host's name: hosts may share the home folder, but not cores or
    GPUs. Lock files stay after a run, so they do not belong in the temporary folder.
    """
    return cache_folder() / "slots" / socket.gethostname()


def _is_gpu(name: str, count: int) -> bool:
    """Return True for the UUID of a device, or an index below ``count``."""
    return name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < count)


def _installed_gpus() -> int:
    try:
        return len(os.listdir("/proc/driver/nvidia/gpus"))
    except OSError:
        return 0
