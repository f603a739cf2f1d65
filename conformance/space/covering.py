"""Covering sets: few rows of choices that contain every combination of some columns.

docs/architecture.md says why no library is used.

A row starts with a missing combination, and is filled column by column, each time with
the value that adds the most missing combinations. AETG (Cohen et al., IEEE TSE 23(7),
1997) does the same with random candidates; here equal arguments give equal rows.

:func:`most_new_first` sorts scenarios in the order in which they are run.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

__all__ = ["cover", "most_new_first", "subsets"]

Item = TypeVar("Item")
Row = dict[str, str]
Choices = Mapping[str, Sequence[str]]
Columns = tuple[str, ...]
Missing = dict[Columns, dict[tuple[str, ...], None]]
"""Combinations of values that no row contains yet, in order, by their columns."""


def subsets(columns: Iterable[str], strength: int) -> list[Columns]:
    """Return all sets of ``strength`` columns, each in the given order."""
    return list(itertools.combinations(columns, strength))


def cover(
    choices: Choices, fits: Callable[[Row], bool], wanted: Sequence[Columns]
) -> list[Row]:
    """Choose rows that contain every combination that can occur.

    Args:
        choices: values of each column.
        fits: returns True if the values chosen so far fit together; once False, it must
            stay False for every extension.
        wanted: sets of columns whose combinations must be covered. Pairs of other
            columns are covered only if that needs no further row.
    """
    asked = dict.fromkeys(tuple(c for c in choices if c in w) for w in wanted)
    missing: Missing = {
        columns: dict.fromkeys(itertools.product(*(choices[c] for c in columns)))
        for columns in asked | dict.fromkeys(subsets(choices, 2))
    }
    rows: list[Row] = []
    used: Counter[tuple[str, str]] = Counter()
    for columns in asked:
        while missing[columns]:
            seed = next(iter(missing[columns]))
            row = _fill(
                dict(zip(columns, seed, strict=True)), choices, fits, missing, used
            )
            if row is None:
                del missing[columns][seed]  # no scenario can contain this combination
                continue
            rows.append(row)
            used.update(row.items())
            for covered, values in missing.items():
                values.pop(tuple(row[c] for c in covered), None)
    return rows


def _fill(
    row: Row,
    choices: Choices,
    fits: Callable[[Row], bool],
    missing: Missing,
    used: Counter[tuple[str, str]],
) -> Row | None:
    """Complete a row with values for the other columns; return None if impossible."""
    if not fits(row):
        return None
    column = next((c for c in choices if c not in row), None)
    if column is None:
        return row
    gains = _gains(row, column, choices[column], missing)
    # at equal gain take the value used least so far, to spread values evenly
    order = sorted(choices[column], key=lambda v: (-gains[v], used[column, v]))
    filled = (_fill(row | {column: v}, choices, fits, missing, used) for v in order)
    return next((done for done in filled if done is not None), None)


def _gains(
    row: Row, column: str, values: Sequence[str], missing: Missing
) -> dict[str, int]:
    """Return the number of missing combinations that each value of a column adds."""
    gains = dict.fromkeys(values, 0)
    for columns, combinations in missing.items():
        if not combinations or column not in columns:
            continue
        if all(c == column or c in row for c in columns):
            at = columns.index(column)
            before = tuple(row[c] for c in columns[:at])
            after = tuple(row[c] for c in columns[at + 1 :])
            for value in values:
                gains[value] += (*before, value, *after) in combinations
    return gains


def most_new_first(
    items: Sequence[Item],
    words: Callable[[Item], Iterable[str]],
    cost: Callable[[Item], float],
) -> list[Item]:
    """Sort items: the next one adds the most new pairs of words for its cost.

    Args:
        items: items; their order decides ties.
        words: returns the words of an item.
        cost: returns the cost of an item, more than 0.
    """
    pairs = [set(itertools.combinations(sorted(set(words(i))), 2)) for i in items]
    costs = [cost(item) for item in items]
    heap = [(-len(pairs[i]) / costs[i], costs[i], i) for i in range(len(items))]
    heapq.heapify(heap)
    seen: set[tuple[str, str]] = set()
    ordered: list[Item] = []
    while heap:
        index = heapq.heappop(heap)[-1]
        # Gains only decrease, so old gains are upper bounds. An item whose new gain
        # exceeds all other old gains comes next.
        gain = len(pairs[index] - seen) / costs[index]
        entry = (-gain, costs[index], index)
        if heap and entry > heap[0]:
            heapq.heappush(heap, entry)
            continue
        seen |= pairs[index]
        ordered.append(items[index])
    return ordered
