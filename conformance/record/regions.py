"""Region of a tensor in which two sides differ, and the ranks that hold it.

Each tile of the whole tensor has its own buckets in a sketch, so the distance of two
sketches is known for each tile. Noise is known for the whole tensor only: the bound of
a tile is proportional to its number of elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..status import rank_list
from .kept import BUCKETS, GRID, SLOTS, Box
from .pieces import pieces_of

__all__ = ["Region", "region_of"]


class _Tile(NamedTuple):
    """Rectangle of the whole tensor: a range of dim 0, and one of all other dims."""

    rows: range
    columns: range

    @property
    def size(self) -> int:
        return len(self.rows) * len(self.columns)


@dataclass(frozen=True, kw_only=True)
class Region:
    """Region in which one tensor differs."""

    text: str
    """Rows and columns that differ, in words; empty if all tiles do."""
    holders: tuple[int, ...]
    """Ranks that hold elements of the differing tiles; empty if all ranks do."""
    shares: dict[int, float]
    """Rank -> norm of the difference in the tiles of which the rank holds elements,
    divided by the norm in all tiles."""

    def __str__(self) -> str:
        """Describe the region; empty if the whole tensor differs."""
        if not self.holders:
            return self.text
        return f"{self.text or 'a part of it'}, held by {rank_list(self.holders)}"


def region_of(
    shape: tuple[int, ...],
    difference: NDArray[np.float64],
    bound: float,
    parts: Sequence[tuple[int, Box]],
) -> Region:
    """Find the tiles whose difference is beyond their share of the bound.

    Args:
        shape: shape of the whole tensor.
        difference: difference of the two sketches.
        bound: largest norm of the difference that noise explains. If the difference has
            non-finite elements, only tiles with such elements are found.
        parts: (rank, box of a part that the rank holds).
    """
    tiles = _tiles(shape)
    squares = _squares(shape, difference)
    if not np.isfinite(squares).all():
        bound, squares = 0.0, (~np.isfinite(squares)).astype(float)
    size = math.prod(shape)
    wrong = [
        number
        for number, tile in enumerate(tiles)
        if squares[number] > bound**2 * tile.size / size
    ]
    tiles_by_rank: dict[int, set[int]] = {}
    for rank, box in parts:
        tiles_by_rank.setdefault(rank, set()).update(_touched(box))
    holders = [rank for rank, own in tiles_by_rank.items() if not own.isdisjoint(wrong)]
    occupied = [number for number, tile in enumerate(tiles) if tile.size]
    return Region(
        text=_text(shape, [tiles[n] for n in wrong]) if wrong != occupied else "",
        holders=tuple(sorted(holders)) if len(holders) < len(tiles_by_rank) else (),
        shares={
            rank: math.sqrt(squares[[*own]].sum() / (squares.sum() or 1.0))
            for rank, own in sorted(tiles_by_rank.items())
        },
    )


def _text(shape: tuple[int, ...], tiles: Sequence[_Tile]) -> str:
    if not tiles:
        return ""
    spans = []
    for name, whole, ranges in (
        ("row" if shape[1:] else "element", shape[0], [t.rows for t in tiles]),
        ("column", math.prod(shape[1:]), [t.columns for t in tiles]),
    ):
        first, last = min(r.start for r in ranges), max(r.stop for r in ranges) - 1
        if last - first + 1 < whole:
            span = f"{name}s {first} to {last}" if last > first else f"{name} {first}"
            spans.append(f"{span} of {whole}")
    return " and ".join(spans)


@lru_cache(maxsize=10_000)
def _tiles(shape: tuple[int, ...]) -> tuple[_Tile, ...]:
    """Return the tiles of a tensor, numbered as in ``kept.py``; some may be empty."""
    rows, columns = shape[0] if shape else 1, max(1, math.prod(shape[1:]))
    down, over = (GRID * GRID, 1) if columns == 1 else (GRID, GRID)
    return tuple(
        _Tile(_span(i, down, rows), _span(j, over, columns))
        for i in range(down)
        for j in range(over)
    )


def _span(number: int, count: int, size: int) -> range:
    """Return the positions whose ``position * count // size`` equals ``number``."""
    return range(-(-number * size // count), -(-(number + 1) * size // count))


def _squares(
    shape: tuple[int, ...], difference: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the squared norm of the difference in each tile."""
    squares = difference**2
    if math.prod(shape) > SLOTS:
        return np.asarray(squares.reshape(GRID * GRID, BUCKETS).sum(1))
    whole = squares.reshape(shape[0] if shape else 1, -1)
    tiles = _tiles(shape)
    return np.array([whole[_of(t.rows), _of(t.columns)].sum() for t in tiles])


def _of(span: range) -> slice:
    return slice(span.start, span.stop)


@lru_cache(maxsize=100_000)
def _touched(box: Box) -> frozenset[int]:
    """Return the tiles in which a part has elements; all if it has too many pieces."""
    tiles = _tiles(box.shape)
    pieces = pieces_of(box.shape, box.offsets, box.local)
    if pieces is None:
        return frozenset(range(len(tiles)))
    spans = [
        (range(r, r + high), range(c, c + wide))
        for _, _, (r, high), (c, wide) in pieces
    ]
    return frozenset(
        number
        for number, tile in enumerate(tiles)
        for rows, columns in spans
        if _overlap(tile.rows, rows) and _overlap(tile.columns, columns)
    )


def _overlap(one: range, other: range) -> bool:
    return max(one.start, other.start) < min(one.stop, other.stop)
