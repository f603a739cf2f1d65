"""Products of parameters of which ``make test`` runs a part, and the rest is slow."""

from collections.abc import Sequence
from typing import Any

import pytest


def in_turn(rows: Sequence[Any], columns: Sequence[Any], *, each: int = 2) -> list[Any]:
    """Return every pair of a row and a column; ``each`` pairs of a row are not slow.

    The chosen columns move on by one from row to row, so that each column is among
    them as often as the others.
    """

    def slow(row: int, column: int) -> list[pytest.MarkDecorator]:
        chosen = (column - row) % len(columns) < each
        return [] if chosen else [pytest.mark.slow]

    return [
        pytest.param(row, column, marks=slow(i, j))
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]
