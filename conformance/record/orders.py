"""Orders to the processes of a job, and how a recording was made; without torch."""

from __future__ import annotations

import msgspec

__all__ = [
    "ORDERS",
    "TWICE",
    "VERSION",
    "Manifest",
    "Orders",
    "Unrecorded",
]

ORDERS = "GRADPARITY_RECORD"
"""Name of the environment variable with the :class:`Orders` of a job, as JSON."""
TWICE = "twice-"
"""Start of the name of a file that says: another process has recorded as this rank."""
VERSION = 7
"""Version of ``run.json`` and of the files of ranks; another one is refused."""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """Orders to the processes of a job."""

    out: str = ""
    """Folder of the files of all ranks."""
    steps: tuple[int, int] = (0, 3)
    """First call of each optimizer that is recorded, and the first that is not."""
    first: int = 0
    """Number of the first call of each optimizer in this job."""
    nudge: int = 0
    """Seed that draws how weights are moved; 0 moves none."""
    stop: bool = False
    """True ends the job after the last recorded step."""
    modules: bool = False
    """True keeps the outputs of the model's blocks, and their gradients."""
    start: str = ""
    """Folder with the weights from which the job begins; empty: from its own."""
    keep_start: bool = False
    """True writes the weights from which the job begins."""


class Manifest(msgspec.Struct, kw_only=True):
    """``run.json``: how a recording was made."""

    version: int = VERSION
    command: list[str]
    steps: str
    runs: list[str]
    """Names of the folders of its runs, the plain one first."""
    complete: bool
    """True if all runs came to their end."""
    code: int = 0
    """Exit code of the command, run as it is."""
    twice: list[int] = []
    """Ranks as which several processes have recorded."""


class Unrecorded(msgspec.Struct, kw_only=True):
    """``unrecorded-RANK.json``: why a process has recorded no step."""

    calls: dict[str, int]
    """Kind of an optimizer -> its calls."""
    notes: list[str]
    """Errors of the recorder."""
