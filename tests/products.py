"""Products of test parameters: ``make test`` runs some cases, the rest are slow."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from gradparity.conformance.space.covering import cover, subsets


def in_turn(rows: Sequence[Any], columns: Sequence[Any], *, each: int = 2) -> list[Any]:
    """Return every pair of a row and a column, all slow except ``each`` of a row.

    The columns that are not slow move by one from row to row, so that each column is
    among them equally often.
    """

    def slow(row: int, column: int) -> list[pytest.MarkDecorator]:
        chosen = (column - row) % len(columns) < each
        return [] if chosen else [pytest.mark.slow]

    return [
        pytest.param(row, column, marks=slow(i, j))
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
    ]


def pairs(*columns: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Join several ``parametrize`` into one, with most of the cases marked slow.

    The other cases cover all pairs: each value of a column occurs together with each
    value of every other column.
    """
    names = [name for column in columns for name in _names(column)]
    values = {str(i): _cases(column) for i, column in enumerate(columns)}
    choices = {i: [str(k) for k in range(len(v))] for i, v in values.items()}
    rows = cover(choices, lambda _: True, subsets(choices, 2))
    chosen = {tuple(row[i] for i in choices) for row in rows}
    cases = []
    for row in itertools.product(*choices.values()):
        parts = [values[i][int(k)] for i, k in zip(choices, row, strict=True)]
        case = [value for part in parts for value in part[1]]
        slow = [] if row in chosen else [pytest.mark.slow]
        id = "-".join(part[0] for part in parts)
        cases.append(pytest.param(*case, marks=slow, id=id))
    return pytest.mark.parametrize(names, cases)


def _names(column: pytest.MarkDecorator) -> list[str]:
    names = column.args[0]
    return [n.strip() for n in names.split(",")] if isinstance(names, str) else [*names]


def _cases(column: pytest.MarkDecorator) -> list[tuple[str, Sequence[Any]]]:
    """Return id and values of each case of a ``parametrize``; cases have no marks."""
    names, ids = _names(column), column.kwargs.get("ids")
    found = []
    for number, value in enumerate(column.args[1]):
        values = [value] if len(names) == 1 else value
        if ids is None:
            id = "-".join(_name(v, f"{names[0]}{number}") for v in values)
        else:
            id = str(ids(value) if callable(ids) else ids[number])
        found.append((id, values))
    return found


def _name(value: object, other: str) -> str:
    if value is None or isinstance(value, str | int | float | bool):
        return str(value)
    return str(getattr(value, "__name__", other))
