"""Whole tensors, merged from the parts of all ranks.

[Note: Parts by box]
Parts are identified by their box, that is, their position in the whole tensor. Ranks
with the same box hold replicas, whatever their mesh: a DTensor on a part of the mesh
does not know that other ranks hold the same elements. One replica counts, and the
others must have its digest. For a tensor that is still to be summed, only the sketches
of its parts add up.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from .batches import WORD
from .files import Stored
from .kept import Box

__all__ = ["Key", "Whole", "merge", "merge_outputs"]

Key = tuple[int, str, str]
"""(step, kind, name)."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A whole tensor, merged from the parts of all ranks."""

    shape: tuple[int, ...]
    digest: int | None
    """Digest of the bits; None if the tensor is still to be summed, so that no rank
    holds its values."""
    rounded: int | None
    sketch: NDArray[np.float32] | None
    """Sketch; None if only digests were kept, as for weights."""
    square: float
    largest: float
    bad: int
    held: int
    """Number of elements that some rank holds."""
    unlike: tuple[int, ...] = ()
    """Ranks whose replica differs in its bits from that of the first rank."""
    odd: frozenset[int] = frozenset()
    """Digests of the replicas of the ranks in ``unlike``."""
    apart: float = 0.0
    """Largest distance of a replica from the first rank's, relative to the norm of the
    first rank's."""
    parts: tuple[tuple[int, Box], ...] = ()
    """(rank, box of its part); empty for outputs of blocks and if only bits were
    kept."""

    @property
    def size(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """True if every element is held by some rank."""
        return self.held == self.size

    @property
    def is_summed(self) -> bool:
        """True if ranks hold values; False if they hold parts of a sum."""
        return self.digest is not None

    @property
    def is_finite(self) -> bool:
        """True if the tensor has no inf or nan."""
        sketch = self.sketch
        return not self.bad and (sketch is None or bool(np.isfinite(sketch).all()))

    @property
    def is_rounded(self) -> bool:
        """True if each element is exactly a bf16 number."""
        return self.has_rounded_bits_of(self)

    def has_rounded_bits_of(self, other: Whole) -> bool:
        """Return True if this tensor is another one rounded to bf16.

        The fp32 form of a bf16 number is its bf16 form followed by 16 zero bits.
        """
        return other.rounded is not None and self.digest in (
            other.rounded,
            (other.rounded << 16) % WORD,
        )

    @property
    def norm(self) -> float:
        """Estimate of the norm, from the sketch."""
        return 0.0 if self.sketch is None else _norm(self.sketch.astype(np.float64))

    def difference(self, other: Whole) -> NDArray[np.float64]:
        """Return the sketch of the difference of two tensors, from their sketches."""
        assert self.sketch is not None and other.sketch is not None
        return self.sketch.astype(np.float64) - other.sketch

    def distance(self, other: Whole) -> float:
        """Estimate the norm of the difference of two tensors, from their sketches."""
        return _norm(self.difference(other))


def _norm(sketch: NDArray[np.float64]) -> float:
    return math.sqrt(sketch @ sketch)


def merge(parts: Iterable[tuple[int, Stored]], *, averages: bool = False) -> Whole:
    """Merge the parts of one tensor; see [Note: Parts by box].

    Args:
        parts: (rank, numbers of its part).
        averages: true to use the mean of all replicas.
    """
    by_rank = sorted(parts, key=lambda part: part[0])
    boxes: dict[tuple[Any, ...], Stored] = {}
    unlike: list[int] = []
    odd: set[int] = set()
    apart = 0.0
    if averages:
        replicas = Counter(part.place for _, part in by_rank)
        by_rank = [
            (rank, _share_of(part, rank, replicas[part.place]))
            for rank, part in by_rank
        ]
    for rank, part in by_rank:
        where = part.place
        if not math.prod(where.local):
            continue
        key = (where.offsets, where.local, where.summand)
        first = boxes.setdefault(key, part)
        if first.digest != part.digest:
            unlike.append(rank)
            odd.add(part.digest)
            apart = max(apart, _distance(first, part))
    counted = [*boxes.values()] or [by_rank[0][1]]
    summed = not any(part.place.summand for part in counted)
    elements_by_box = {
        (p.place.offsets, p.place.local): math.prod(p.place.local) for p in counted
    }
    return Whole(
        shape=counted[0].place.shape,
        digest=sum(p.digest for p in counted) % WORD if summed else None,
        rounded=sum(p.rounded for p in counted) % WORD if summed else None,
        sketch=_added(part.sketch for part in counted),
        square=sum(p.square for p in counted) if summed else math.nan,
        largest=max(p.largest for p in counted) if summed else math.nan,
        bad=sum(p.bad for p in counted),
        held=sum(elements_by_box.values()),
        unlike=tuple(unlike),
        odd=frozenset(odd),
        apart=apart,
        parts=tuple((r, p.place) for r, p in by_rank if p.sketch is not None),
    )


def _distance(first: Stored, other: Stored) -> float:
    """Return the distance of two replicas, divided by the norm of the first.

    Returns 0 if no sketches were recorded, and inf if a sketch is not finite.
    """
    if first.sketch is None or other.sketch is None:
        return 0.0
    mine, its = first.sketch.astype(np.float64), other.sketch.astype(np.float64)
    if not (np.isfinite(mine).all() and np.isfinite(its).all()):
        return math.inf
    return _norm(its - mine) / (_norm(mine) or 1.0)


def _share_of(part: Stored, rank: int, replicas: int) -> Stored:
    """Return a replica divided by ``replicas``, marked as a summand of the mean."""
    where = replace(part.place, summand=(rank,))
    sketch = None if part.sketch is None else part.sketch / np.float32(replicas)
    return msgspec.structs.replace(part, place=where, sketch=sketch)


def merge_outputs(
    parts: Iterable[tuple[int, Stored]],
    rows: Mapping[int, frozenset[int]],
) -> Whole:
    """Merge the outputs of one block; outputs of different rows add up.

    Ranks with the same rows must hold replicas, or parts that make up the whole output.

    Args:
        parts: (rank, numbers of its part).
        rows: rank -> digests of the rows that its model was called with.

    Returns:
        The merged output. Its ``held`` is 0, so it is not compared, in three cases:

        - Ranks with the same rows have unequal or missing parts.
        - Rows have no output, or two ranks share only some of their rows.
        - Ranks with different rows have equal outputs, which cannot depend on rows.
    """
    of_rows: dict[frozenset[int], list[tuple[int, Stored]]] = {}
    for rank, part in parts:
        of_rows.setdefault(rows.get(rank, frozenset()), []).append((rank, part))
    every = frozenset[int]().union(*rows.values())
    wholes = [merge(each) for each in of_rows.values()]
    shapes = {whole.shape[1:] for whole in wholes}
    is_covered = len(shapes) == 1 and sum(map(len, of_rows)) == len(every)
    is_covered &= frozenset[int]().union(*of_rows) == every
    is_covered &= all(whole.is_whole and not whole.unlike for whole in wholes)
    sizes = [(whole.square, whole.largest) for whole in wholes if whole.largest]
    is_covered &= len({*sizes}) == len(sizes)
    shape = (sum(whole.shape[0] for whole in wholes), *wholes[0].shape[1:])
    return Whole(
        shape=shape,
        digest=sum(whole.digest or 0 for whole in wholes) % WORD,
        rounded=None,
        sketch=_added(whole.sketch for whole in wholes),
        square=sum(whole.square for whole in wholes),
        largest=max(whole.largest for whole in wholes),
        bad=sum(whole.bad for whole in wholes),
        held=math.prod(shape) if is_covered else 0,
    )


def _added(
    sketches: Iterable[NDArray[np.float32] | None],
) -> NDArray[np.float32] | None:
    sketches_there = [sketch for sketch in sketches if sketch is not None]
    if len(sketches_there) < 2:
        return sketches_there[0] if sketches_there else None
    return np.asarray(
        np.sum(sketches_there, axis=0, dtype=np.float64), dtype=np.float32
    )
