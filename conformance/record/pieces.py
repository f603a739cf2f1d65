"""Pieces of a part of a tensor: rectangles of rows and of all other dims together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Piece", "pieces_of"]


class Piece(NamedTuple):
    """A rectangle of a part, in the view of rows and all other dims together."""

    at: int
    """Elements of the part before its first one."""
    pitch: int
    """Elements of the part from one row to the next."""
    rows: tuple[int, int]
    """First row in the whole, and number of rows."""
    columns: tuple[int, int]
    """The same of columns."""


def pieces_of(
    shape: tuple[int, ...], offsets: tuple[int, ...], local: tuple[int, ...]
) -> tuple[Piece, ...] | None:
    """Cut a part into rectangles; None if it is not made of few.

    Args:
        shape: shape of the whole tensor.
        offsets: place of the first element, in each dim or in the flattened whole.
        local: shape of the part.
    """
    columns = math.prod(shape[1:])
    size = math.prod(local)
    if len(offsets) != len(shape):
        return tuple(_of_range(offsets[0], size, columns)) if columns else ()
    inner = list(zip(shape[1:], offsets[1:], local[1:], strict=True))
    while inner and inner[-1][0] == inner[-1][2]:
        inner.pop()  # held whole: its elements follow each other
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
    """Yield the end of a row, whole rows, and the beginning of a row."""
    at = 0
    while at < size:
        row, column = divmod(start + at, columns)
        rows = (size - at) // columns if not column else 0
        width = columns if rows else min(columns - column, size - at)
        yield Piece(at, width, (row, max(1, rows)), (column, width))
        at += max(1, rows) * width
