"""Cut a part of a tensor into rectangles: dim 0 by all other dims, flattened."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Piece", "pieces_of"]


class Piece(NamedTuple):
    """Rectangle of a part; rows are dim 0, columns all other dims flattened."""

    at: int
    """Offset of its first element in the flattened part."""
    pitch: int
    """Distance between two rows in the flattened part."""
    rows: tuple[int, int]
    """First row in the whole tensor, and number of rows."""
    columns: tuple[int, int]
    """First column in the whole tensor, and number of columns."""


def pieces_of(
    shape: tuple[int, ...], offsets: tuple[int, ...], local: tuple[int, ...]
) -> tuple[Piece, ...] | None:
    """Cut a part into rectangles; return None if that takes too many.

    A part of a flat range gives at most three rectangles. Any other part gives one, or
    None if one rectangle cannot hold it.

    Args:
        shape: shape of the whole tensor.
        offsets: position of the first element: one number for each dim, or
            one number in the flattened tensor.
        local: shape of the part.
    """
    columns = math.prod(shape[1:])
    size = math.prod(local)
    if len(offsets) != len(shape):
        return tuple(_of_range(offsets[0], size, columns)) if columns else ()
    inner = list(zip(shape[1:], offsets[1:], local[1:], strict=True))
    while inner and inner[-1][0] == inner[-1][2]:
        # an inner dimension that is held whole: its elements follow each other
        inner.pop()
    if any(each != 1 for *_, each in inner[:-1]):
        return None
    first = 0
    for whole, offset, _ in inner:
        first = first * whole + offset
    row_size = math.prod(local[1:])
    first *= columns // max(1, math.prod(whole for whole, *_ in inner))
    start = offsets[0] if offsets else 0
    return (Piece(0, row_size, (start, local[0] if local else 1), (first, row_size)),)


def _of_range(start: int, size: int, columns: int) -> Iterator[Piece]:
    """Cut a flat range into the rest of a row, whole rows, and the start of a row."""
    at = 0
    while at < size:
        row, column = divmod(start + at, columns)
        rows = (size - at) // columns if not column else 0
        width = columns if rows else min(columns - column, size - at)
        yield Piece(at, width, (row, max(1, rows)), (column, width))
        at += max(1, rows) * width
