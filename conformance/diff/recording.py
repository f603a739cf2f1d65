"""Recording: the result of one side of a diff, as JSON and arrays; no pickle.

Each side runs in a separate interpreter and writes its results into a folder:
``recording.json`` says what each rank held at each step and what its error may be,
``N.npz`` holds the arrays of scenario N under digests, so that replicas are written
once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..chosen import Chosen
from ..files import write_whole
from ..status import Number, UsageError

__all__ = [
    "Arrays",
    "ArraysOf",
    "Part",
    "Recording",
    "RecordingError",
    "Request",
    "Run",
    "Step",
    "Tensor",
    "add_array",
    "read_arrays",
    "read_recording",
    "write_arrays",
    "write_recording",
]

Pair = tuple[Number, Number]
"""Norm and largest element."""
Arrays = dict[str, NDArray[np.generic]]
"""Digest -> array."""
ArraysOf = Mapping[str, NDArray[np.generic]]


class RecordingError(UsageError):
    """A side wrote a recording that cannot be read."""


class Request(Chosen, frozen=True, kw_only=True):
    """What one side runs; it has one scaler."""

    out: str
    """Folder for the recording."""

    @property
    def scaler(self) -> str:
        """The scaler with which it trains, or ``none``."""
        (scaler,) = self.scalers
        return scaler


class Part(msgspec.Struct, frozen=True):
    """What a rank held of a tensor."""

    rank: int
    values: str
    """Digest of the values, flattened; equal digests are bitwise equal values."""
    places: str
    """Digest of the place of each of them in the flat full tensor."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of one step on all ranks that had one; a number has one element."""

    parts: tuple[Part, ...]
    elements: int
    """Of the full tensor."""
    size: Pair = (0.0, 0.0)
    """Of the full tensor in the fp64 reference."""
    bound: Pair = ("inf", "inf")
    """Error that a correct run may have against it; infinite: not known."""
    weights: str = ""
    """Digest of the weights of an update's elements; empty: all are 1."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of all ranks."""

    batch: str
    """Digest of the global batch."""
    scale: list[Number] = []
    """Per rank: the scale after the step."""
    stepped: list[bool | None] = []
    """Per rank: whether the local parameters changed."""
    tensors: dict[str, dict[str, Tensor]] = {}
    """Kind -> name -> tensor.

    ``loss``: the mean of the ranks that have one, by their weights; ``gradient``;
    ``norm``: of the whole gradient, as the stack reports it; ``update``.
    """


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario on one side."""

    scenario: str
    pairs_with: str
    """The id without the workload: equal on both sides."""
    problem: str = ""
    """What ended it early: a call that raised or did not return; else empty."""
    broken: str = ""
    """Why the harness broke; then there is nothing else."""
    unsteady: str = ""
    """Where a second run was further from the first than the noise; else empty."""
    start: dict[str, Tensor] = {}
    """Parameters before the first step."""
    steps: tuple[Step, ...] = ()


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one side observed."""

    torch: str
    python: str
    packages: dict[str, str]
    """Version of each distribution that the interpreter of this side finds."""
    runs: tuple[Run, ...]


def add_array(arrays: Arrays, values: NDArray[np.generic]) -> str:
    """Keep an array; returns its digest, which is its name."""
    # the dtype, too: equal bytes of two dtypes are different values
    values = np.ascontiguousarray(values)
    made = hashlib.blake2b(str(values.dtype).encode(), digest_size=12)
    made.update(values.view(np.uint8).data)
    name = made.hexdigest()
    arrays.setdefault(name, values)
    return name


def write_arrays(folder: Path, number: int, arrays: ArraysOf) -> None:
    """Write the arrays of scenario ``number``."""
    np.savez(folder / f"{number}.npz", allow_pickle=False, **arrays)


def write_recording(folder: Path, runs: tuple[Run, ...], torch: str) -> None:
    """Write the rest, last: a folder without this file is no recording."""
    # here: only the side that records needs them, not the process that compares
    import platform
    from importlib.metadata import distributions

    # of two versions the first on the path counts, as in an import
    found = reversed([(d.metadata["Name"], d.version) for d in distributions()])

    recording = Recording(
        torch=torch,
        python=platform.python_version(),
        packages={name.lower(): number for name, number in found if name},
        runs=runs,
    )
    write_whole(folder / "recording.json", msgspec.json.encode(recording))


def read_recording(folder: Path) -> Recording:
    """Read the recording of a side.

    Raises:
        RecordingError: if it is no recording.
    """
    path = folder / "recording.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Recording)
    except (OSError, msgspec.MsgspecError) as error:
        raise RecordingError(f"{path}: {error}") from error


def read_arrays(folder: Path, number: int) -> Arrays:
    """The arrays of scenario ``number``.

    Raises:
        RecordingError: if they cannot be read.
    """
    path = folder / f"{number}.npz"
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError) as error:
        raise RecordingError(f"{path}: {error}") from error
