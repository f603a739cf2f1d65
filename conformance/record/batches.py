"""Compute which input rows the models of a run's ranks got, by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from .files import Recording

__all__ = [
    "WORD",
    "bags_of_inputs",
    "by_row",
    "every_row",
    "inputs_of",
    "repeated_rows",
    "rows_of_blocks",
]

WORD = 1 << 64
"""Digests and bags are sums modulo this number."""
Inputs = Mapping[int, Mapping[int, Sequence[Sequence[int]]]]
"""Digests of the rows of each input of the model, by step and rank."""


def inputs_of(ranks: Mapping[int, Recording]) -> Inputs:
    """Return digests of token rows, or of floating-point rows if no rank has tokens.

    Ranks whose model got activations (later pipeline stages) are left out, unless all
    ranks are such. See ``_with_data``.
    """
    by_step: dict[int, dict[int, Sequence[Sequence[int]]]] = {}
    for step in sorted({step for each in ranks.values() for step in _steps(each)}):
        by_step[step] = {
            rank: each.rows.get(step) or each.rows_of_floats[step]
            for rank, each in _with_data(ranks, step).items()
        }
    return by_step


def _steps(recording: Recording) -> set[int]:
    """Return the steps in which a rank's model got rows."""
    return {*recording.rows, *recording.rows_of_floats}


def _with_data(ranks: Mapping[int, Recording], step: int) -> dict[int, Recording]:
    """Return the ranks whose model got data at a step, rather than activations.

    If some ranks got tokens, only these ranks are returned. Else rows in ``received``
    count as activations, unless another rank that trains the same parameters got rows
    that are not in ``received``: a job may compute gradients of some ranks' data.
    If no rank is left, all ranks with rows are returned.
    """
    rows = {rank: each for rank, each in ranks.items() if step in _steps(each)}
    tokens = {rank: each for rank, each in rows.items() if step in each.rows}
    if tokens or not any(step in each.received for each in rows.values()):
        return tokens or rows
    data = [_trained(each) for each in rows.values() if step not in each.received]
    return {r: each for r, each in rows.items() if _trained(each) in data} or rows


def _trained(recording: Recording) -> set[str]:
    """Return the names of the parameters that a rank trains."""
    keys = (key.split("/", 4) for key in recording.tensors)
    return {name for _, _, kind, _, name in keys if kind == "weight"}


def by_row(
    ranks: Iterable[tuple[Mapping[int, Sequence[Any]], Mapping[int, Sequence[Any]]]],
) -> dict[int, dict[int, Any]]:
    """Return further numbers of each row, such as its sums, by step and digest.

    Args:
        ranks: for each rank: step -> digests of rows, and step -> numbers of the same
            rows.
    """
    by_step: dict[int, dict[int, Any]] = {}
    for rows, numbers in ranks:
        for step, inputs in numbers.items():
            for digests, others in zip(rows[step], inputs, strict=True):
                by_step.setdefault(step, {}).update(zip(digests, others, strict=True))
    return by_step


def rows_of_blocks(
    ranks: Mapping[int, Recording], step: int
) -> dict[int, frozenset[int]]:
    """Return the digests of the blocks' rows, for each rank whose model got data."""
    return {
        rank: every_row(each.rows_of_blocks.get(step, ()))
        for rank, each in _with_data(ranks, step).items()
    }


def repeated_rows(ranks: Mapping[int, Recording], inputs: Inputs) -> dict[int, int]:
    """Count the rows that occur in several different sets of rows, by step.

    Ranks with the same set of rows count as one: they hold shards of one replica.
    Inputs that are equal on all ranks are ignored. If several inputs differ, the
    smallest count is returned, because rows of a mask are often equal.
    """
    repeated: dict[int, int] = {}
    for step, by_rank in inputs.items():
        counts = list[int]()
        for of_ranks in _by_input(ranks, by_rank, step):
            sets = {*of_ranks.values()}
            rows = Counter(row for each in sets for row in each)
            if len(sets) > 1:
                counts.append(sum(number > 1 for number in rows.values()))
        repeated[step] = min(counts, default=0)
    return repeated


def bags_of_inputs(
    ranks: Mapping[int, Recording], inputs: Inputs
) -> dict[int, list[int]]:
    """Return the bag of each input by step, summed over ranks modulo ``WORD``.

    Ranks with the same set of rows of an input count once.
    """
    bags_by_step: dict[int, list[int]] = {}
    for step, by_rank in inputs.items():
        bags_by_step[step] = []
        for number, of_ranks in enumerate(_by_input(ranks, by_rank, step)):
            bags = {
                rows: sum(call[number] for call in ranks[rank].bags.get(step, ()))
                for rank, rows in of_ranks.items()
            }
            bags_by_step[step].append(sum(bags.values()) % WORD)
    return bags_by_step


def _by_input(
    ranks: Mapping[int, Recording],
    by_rank: Mapping[int, Sequence[Sequence[int]]],
    step: int,
) -> list[dict[int, frozenset[int]]]:
    """Return row digests by rank, for each input that all calls of a step have."""
    sizes = {
        rank: [len(call) for call in ranks[rank].bags.get(step, ())] for rank in by_rank
    }
    count = min((size for of_rank in sizes.values() for size in of_rank), default=0)
    firsts = {rank: [0, *accumulate(of_rank)][:-1] for rank, of_rank in sizes.items()}
    return [
        {
            rank: every_row(rows[first + number] for first in firsts[rank])
            for rank, rows in by_rank.items()
        }
        for number in range(count)
    ]


def every_row(rows_of_inputs: Iterable[Iterable[int]]) -> frozenset[int]:
    """Return the digests of all rows, each once."""
    return frozenset(row for rows in rows_of_inputs for row in rows)
