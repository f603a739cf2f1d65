"""Options of a recording, passed to its processes, and its manifest; without torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from ..status import rank_list

__all__ = [
    "LATE",
    "ORDERS",
    "TWICE",
    "VERSION",
    "Manifest",
    "Orders",
    "Unrecorded",
    "idle_ranks",
    "unrecorded",
]

ORDERS = "GRADPARITY_RECORD"
"""Name of the environment variable that holds :class:`Orders` as JSON."""
TWICE = "twice-"
"""Prefix of marker files: another process has already recorded as this rank."""
LATE = "late-"
"""Prefix of marker files: an optimizer with other parameters stepped after all steps
were recorded. The file names it."""
VERSION = 12
"""Version of ``run.json`` and of the files of ranks; other versions are rejected."""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a recording, passed to each process of the job."""

    out: str = ""
    """Folder into which all ranks write."""
    steps: tuple[int, int] = (0, 3)
    """Range of recorded calls of each optimizer: (first, end), without the end."""
    first: int = 0
    """Number that the first optimizer call of this job gets."""
    nudge: int = 0
    """Seed of the random moves of weights; 0 leaves the weights unchanged."""
    stop: bool = False
    """True to end the job after the last recorded step."""
    modules: bool = False
    """True to record the outputs of the model's blocks, and their gradients."""
    start: str = ""
    """Folder with the initial weights to load; empty to keep the job's own."""
    keep_start: bool = False
    """True to write the initial weights."""

    @property
    def rounds(self) -> bool:
        """True to change rounding errors of backward: if ``nudge`` is even, not 0."""
        # the first nudged run must show that gradients depend on the moved weights
        return self.nudge > 0 and self.nudge % 2 == 0


class Manifest(msgspec.Struct, kw_only=True):
    """Content of ``run.json``: how a recording was made."""

    version: int = VERSION
    command: list[str]
    steps: str
    runs: list[str]
    """Folder names of the runs, the plain one first."""
    complete: bool
    """True if all runs finished."""
    code: int = 0
    """Exit code of the command in the plain run."""
    twice: list[int] = []
    """Ranks under which more than one process recorded."""
    late: str = ""
    """An optimizer that first stepped after all recorded steps; may be empty."""


class Unrecorded(msgspec.Struct, kw_only=True):
    """Content of ``unrecorded-RANK.json``: why a process recorded no step."""

    calls: dict[str, int]
    """Type name of an optimizer -> number of its calls."""
    notes: list[str]
    """Errors inside the recorder."""


def unrecorded(*folders: Path) -> dict[int, Unrecorded]:
    """Read why ranks recorded no step, by rank; empty reasons if a file is broken."""
    reasons = dict[int, Unrecorded]()
    for path in (path for each in folders for path in each.glob("unrecorded-*.json")):
        rank = int(path.stem.rpartition("-")[2])
        reasons[rank] = Unrecorded(calls={}, notes=[])
        with suppress(msgspec.DecodeError):
            reasons[rank] = msgspec.json.decode(path.read_bytes(), type=Unrecorded)
    return dict(sorted(reasons.items()))


def idle_ranks(*folders: Path) -> Iterator[str]:
    """Yield one sentence if ranks recorded no step: an error, or the list of ranks."""
    reasons = unrecorded(*folders)
    for rank, why in reasons.items():
        if why.notes:
            yield f"Nothing was recorded on rank {rank}: {why.notes[0]}"
            return
    if reasons:
        yield (
            f"{rank_list([*reasons]).capitalize()} called a model, and no step of an "
            "optimizer was recorded there. All ranks must step, also if each gets the "
            "weights of one rank later"
        )
