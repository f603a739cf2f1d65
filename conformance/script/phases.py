"""A script of a training that moves: what its two runs have each of their own.

The run where it begins and the one where it goes on are one text; where they differ
``MOVED`` tells the script in which of them it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..space.scenario import Scenario

__all__ = ["chosen", "lines"]


def lines(scenario: Scenario, made: Callable[[Scenario], Sequence[str]]) -> list[str]:
    """Lines that ``made`` makes of each run; under an ``if`` where the runs differ."""
    first, *moved = (list(made(phase)) for phase in scenario.phases)
    if moved in ([], [first]):
        return first
    blocks = {"if MOVED:": moved[0], "if not MOVED:": first}
    return [
        line
        for condition, block in blocks.items()
        if block
        for line in (condition, *(f"    {line}" for line in block))
    ]


def chosen(scenario: Scenario, made: Callable[[Scenario], object]) -> str:
    """The expression for what ``made`` makes of each run."""
    first, *moved = (str(made(phase)) for phase in scenario.phases)
    return first if moved in ([], [first]) else f"({moved[0]} if MOVED else {first})"
