"""Files of a recording: ``rank-N.safetensors``, one for each rank, without pickle.

The folder of a run has one file for each rank with a recorded optimizer step. A file
is written under a temporary name and renamed, so a file that exists is complete.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from .kept import Box, Kept
from .orders import VERSION, idle_ranks

__all__ = [
    "Call",
    "Recording",
    "Settings",
    "Stored",
    "as_numbers",
    "copied",
    "read_run",
    "this_rank",
    "write_rank",
]


class Settings(msgspec.Struct):
    """One param group: names of its parameters, and its settings, such as ``lr``."""

    names: list[str]
    values: dict[str, Any]

    @classmethod
    def of(cls, names: list[str], group: Mapping[str, Any]) -> Settings:
        """Copy the numbers of a param group; tensors stay on their device."""
        values: dict[str, Any] = {}
        for key, value in group.items():
            if key == "params":
                continue
            if value is None or _is_number(value):
                values[key] = copied(value)
            elif isinstance(value, tuple | list) and all(map(_is_number, value)):
                values[key] = [copied(each) for each in value]
        return cls(names=names, values=values)

    def read(self) -> Settings:
        """Return a copy in which tensors are replaced by numbers."""
        return Settings(names=self.names, values=as_numbers(self.values))


def is_muon(kind: str, group: Mapping[str, Any]) -> bool:
    """Return True if a group is stepped by Muon, of torch or of another package.

    Args:
        kind: type name of the optimizer.
        group: a param group, or its settings.
    """
    if "ns_steps" in group:
        return True
    return "muon" in kind.lower() and bool(group.get("use_muon", True))


def copied(value: Any) -> Any:
    """Copy a tensor, convert a number to Python's; return other values as they are."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    # a number of numpy may be a subclass of Python's, and is no JSON
    return int(value) if isinstance(value, Integral) else float(value)


def as_numbers(value: Any) -> Any:
    """Convert the tensors in a value to numbers, also inside dicts and lists."""
    if isinstance(value, Tensor):
        return float(value)
    if isinstance(value, dict):
        return {key: as_numbers(each) for key, each in value.items()}
    return [as_numbers(each) for each in value] if isinstance(value, list) else value


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, Real)


class Call(msgspec.Struct):
    """One call of an optimizer's ``step``."""

    optimizer: int
    """Number of the optimizer, in the order of first calls."""
    kind: str
    step: int
    """Step number of this call of the optimizer."""
    settings: list[Settings]
    scale: Any = None
    """``grad_scale`` of the optimizer, by which its kernel divides gradients."""
    found_inf: Any = None
    evaluations: int = 1
    """Number of times that gradients were computed: a closure may be called again."""
    unnamed: int = 0
    """Number of parameters that belong to no known module."""
    without_gradient: list[str] = []


class Stored(msgspec.Struct):
    """Numbers stored for one rank's part of a tensor."""

    place: Box
    digest: int
    rounded: int
    square: float
    """Sum of squares. For an update: the sum of squared units in the last place."""
    largest: float
    bad: int
    sketch: NDArray[np.float32] | None
    """Sketch of shape (SLOTS,), or all elements of a tensor with fewer. Stored in
    float32: this rounding is the smallest noise that a comparison assumes."""

    @classmethod
    def of(cls, box: Box, kept: Kept) -> Stored:
        """Read the numbers of a part from its device."""
        square, largest, bad = kept.numbers.tolist()
        return cls(
            place=box,
            digest=int(kept.digest),
            rounded=int(kept.rounded),
            square=square,
            largest=largest,
            bad=int(bad),
            sketch=None if kept.sketch is None else kept.sketch.float().cpu().numpy(),
        )


class Recording(msgspec.Struct):
    """Everything that one rank recorded."""

    world_size: int = 1
    calls: list[Call] = []
    rows: dict[int, list[Any]] = {}
    """Step -> digests of the rows of each integer input of the model."""
    rows_of_floats: dict[int, list[Any]] = {}
    """Step -> digests of the rows of each floating-point input of the model."""
    unpadded: dict[int, list[Any]] = {}
    """Step -> two digests of each integer row: one without padding at the end, one
    without padding at the start."""
    sums_of_rows: dict[int, list[Any]] = {}
    """Step -> sums of each floating-point row; they identify a row up to rounding."""
    rows_of_blocks: dict[int, list[Any]] = {}
    """Step -> digests of the rows of the model's first input, for each call, to
    identify the rows of block outputs."""
    bags: dict[int, list[Any]] = {}
    """Step -> for each call of the model: a hash of each input, whatever the order of
    its elements."""
    shares: dict[int, list[Any]] = {}
    """Step -> for each call of the model: the number of rows, and two numbers for each
    integer input. These count the elements that are not ``rows.IGNORED``, and the
    elements that are."""
    losses: dict[int, list[Any]] = {}
    norms: dict[int, list[Any]] = {}
    """Step -> for each call of torch's clipping by norm: norm of the gradients, limit,
    and unit in the last place of 1 in the norm's dtype. The norm is nan if ranks have
    yet to sum it."""
    drew: set[int] = set()
    """Steps whose forward drew random numbers."""
    received: set[int] = set()
    """Steps in which the model got inputs with gradients, as a later stage of a
    pipeline does."""
    drops: list[str] = []
    """Names of modules whose ``p`` is between 0 and 1, such as dropout."""
    outputs: set[str] = set()
    """Dtypes of the model's outputs."""
    in_16_bits: dict[str, list[str]] = {}
    """Dtype of 16 bits -> parameters whose own module returned this dtype."""
    unstepped: list[str] = []
    """Parameters that require a gradient and are in no optimizer."""
    notes: list[str] = []
    """Errors inside the recorder."""
    tensors: dict[str, Stored] = {}
    """Numbers of each part, by the key ``optimizer/step/kind/number/name``."""

    def forget_rows(self) -> None:
        """Drop the digests and sums of rows, and the losses, of all steps."""
        rows = self.rows, self.rows_of_floats, self.unpadded, self.sums_of_rows
        for by_step in (*rows, self.bags, self.shares, self.losses):
            by_step.clear()
        self.received.clear()


class _Header(msgspec.Struct):
    """Everything except the arrays, as JSON text in the metadata of the file."""

    version: int
    world_size: int
    torch: str
    calls: list[Call]
    rows: dict[int, list[list[int]]]
    rows_of_floats: dict[int, list[list[int]]]
    unpadded: dict[int, list[list[list[int]]]]
    sums_of_rows: dict[int, list[list[list[float | None]]]]
    rows_of_blocks: dict[int, list[list[int]]]
    bags: dict[int, list[list[int]]]
    shares: dict[int, list[list[int]]]
    losses: dict[int, list[float | None]]
    norms: dict[int, list[list[float | None]]]
    drew: list[int]
    received: list[int]
    drops: list[str]
    outputs: list[str]
    in_16_bits: dict[str, list[str]]
    unstepped: list[str]
    notes: list[str]
    places: list[Box]
    numbers: list[
        tuple[str, int, int | None, int, int, float | None, float | None, int]
    ]
    """(key, index of its box, sketch length, digest, rounded digest, square, largest,
    number of non-finite elements) of each part. Sketches are concatenated in one array.
    JSON has no inf or nan: they are written as null."""


def this_rank() -> int:
    """Return the rank of this process; without a group, that which torchrun gave it."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def write_rank(folder: Path, rank: int, recording: Recording) -> None:
    """Write the recording of a rank atomically.

    Raises:
        FileExistsError: if another process has already recorded as this rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank}.safetensors"
    if path.exists():
        raise FileExistsError(f"another process has recorded as rank {rank}: {path}")
    places: dict[Box, int] = {}
    numbers: list[Any] = []
    sketches: list[NDArray[np.float32]] = []
    for key, each in recording.tensors.items():
        where = places.setdefault(each.place, len(places))
        values = (each.digest, each.rounded, each.square, each.largest, each.bad)
        length = None if each.sketch is None else len(each.sketch)
        numbers.append((key, where, length, *values))
        if each.sketch is not None:
            sketches.append(each.sketch)
    header = _Header(
        version=VERSION,
        world_size=recording.world_size,
        torch=str(torch.__version__),
        calls=recording.calls,
        rows=_listed(recording.rows),
        rows_of_floats=_listed(recording.rows_of_floats),
        unpadded=_listed(recording.unpadded),
        sums_of_rows=_listed(recording.sums_of_rows),
        rows_of_blocks=_listed(recording.rows_of_blocks),
        bags=recording.bags,
        shares=recording.shares,
        losses={step: [*losses] for step, losses in recording.losses.items()},
        norms=recording.norms,
        drew=sorted(recording.drew),
        received=sorted(recording.received),
        drops=recording.drops,
        outputs=sorted(recording.outputs),
        in_16_bits=recording.in_16_bits,
        unstepped=recording.unstepped,
        notes=recording.notes,
        places=[*places],
        numbers=numbers,
    )
    draft = folder / f".rank-{rank}.{os.getpid()}.draft"
    arrays = {"sketches": np.concatenate(sketches)} if sketches else {}
    try:
        save_file(arrays, draft, {"gradparity": msgspec.json.encode(header).decode()})
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _number(stored: float | None) -> float:
    return math.nan if stored is None else stored


def _listed(rows: dict[int, list[Any]]) -> dict[int, list[Any]]:
    return {step: [each.tolist() for each in inputs] for step, inputs in rows.items()}


def read_run(*folders: Path) -> Iterator[tuple[int, Recording]]:
    """Read the recording of each rank of a run.

    Args:
        folders: folder of the run; several if each host wrote its own.

    Yields:
        (rank, recording), in the order of ranks.

    Raises:
        ValueError: if a file is missing, is of another version or is broken; the
            message names it.
    """
    listed = ", ".join(map(str, folders))
    paths = [path for each in folders for path in each.glob("rank-*.safetensors")]
    if not paths:
        raise ValueError(
            f"{listed}: has no recording, because no optimizer of torch ran"
        )
    recordings: dict[int, Recording] = {}
    for path in paths:
        if _rank_of(path) in recordings:
            raise ValueError(f"{path}: another folder also has this rank")
        recordings[_rank_of(path)] = _read(path)
    sizes = {recording.world_size for recording in recordings.values()}
    size = max(sizes)
    # without a process group each rank is a job of one
    fits = size == 1 or {*recordings} <= {*range(size)}
    if len(sizes) > 1 or not fits:
        text = "has files of several jobs, of other numbers of ranks: record it again"
        raise ValueError(f"{listed}: {text}")
    missing = sorted({*range(size)} - {*recordings})
    if missing:
        ranks = ", ".join(map(str, missing))
        text = f"{listed}: these of {size} ranks wrote nothing: {ranks}"
        raise ValueError(". ".join([text, *idle_ranks(*folders)]))
    yield from sorted(recordings.items())


def _rank_of(path: Path) -> int:
    number = path.stem.removeprefix("rank-")
    return int(number) if number.isdigit() else -1


def _read(path: Path) -> Recording:
    if path.is_symlink() or path.parent.is_symlink() or not path.is_file():
        raise ValueError(f"{path}: is not a regular file")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            raw = metadata.get("gradparity", "{}").encode()
            version = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get(
                "version"
            )
            if version is None or bytes(version) != str(VERSION).encode():
                text = "nothing" if version is None else bytes(version).decode()
                raise ValueError(f"{path}: has version {text}, expected {VERSION}")
            header = msgspec.json.decode(raw, type=_Header)
            names = list(file.keys())
            sketches = (
                file.get_tensor("sketches")
                if "sketches" in names
                else np.empty(0, np.float32)
            )
    except (SafetensorError, msgspec.DecodeError, OSError) as error:
        raise ValueError(f"{path} is not a recording: {error}") from error
    sizes = [length or 0 for _, _, length, *_ in header.numbers]
    if sum(sizes) != len(sketches):
        raise ValueError(
            f"{path} is damaged: it holds {len(sketches)} numbers, and its header says "
            f"{sum(sizes)}. Record it again"
        )
    ends = itertools.accumulate(sizes)
    return Recording(
        world_size=header.world_size,
        calls=header.calls,
        rows=dict(header.rows),
        rows_of_floats=dict(header.rows_of_floats),
        unpadded=dict(header.unpadded),
        sums_of_rows=dict(header.sums_of_rows),
        rows_of_blocks=dict(header.rows_of_blocks),
        bags=dict(header.bags),
        shares=dict(header.shares),
        losses={
            step: [_number(loss) for loss in losses]
            for step, losses in header.losses.items()
        },
        norms={
            step: [[*map(_number, call)] for call in calls]
            for step, calls in header.norms.items()
        },
        drew=set(header.drew),
        received=set(header.received),
        drops=header.drops,
        outputs=set(header.outputs),
        in_16_bits=dict(header.in_16_bits),
        unstepped=header.unstepped,
        notes=header.notes,
        tensors={
            key: Stored(
                place=header.places[where],
                digest=digest,
                rounded=rounded,
                square=_number(square),
                largest=_number(largest),
                bad=bad,
                sketch=None if length is None else sketches[end - length : end],
            )
            for (key, where, length, digest, rounded, square, largest, bad), end in zip(
                header.numbers, ends, strict=True
            )
        },
    )
