"""How correct runs of a reference differ from the truth: in the order of reductions.

A variant takes the rows in another order or cuts them into parts, and then also moves
weights within their rounding; or it takes what rounding decides to the other side.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ...fixtures import Batch

__all__ = [
    "CODES",
    "FLIPPED",
    "MOVED",
    "NOISY",
    "SIDES",
    "STAY",
    "TRUTH",
    "Distances",
    "Limits",
    "Moves",
    "Variant",
    "jittered",
    "near_one",
    "of_ties",
]

SIDES = (1, -1)
"""Runs that take what rounding decides to the other side, each another half of it."""
Distances = tuple[tuple[tuple[float, bool], ...], ...]
"""Per step, input by input of functions whose derivative jumps, in the order of calls:
how far it moves, and whether elements that are zero move; see :mod:`.jumps`."""
Limits = tuple[tuple[tuple[str, float], ...], ...]
"""Per step: (parameter, size of a gradient's element); hashable, as runs are cached."""


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Inputs that a run takes to the other side; see [Note: Sides] in bounds."""

    side: int = SIDES[0]
    """One of two runs, in each of which another half is on the other side."""
    distances: Distances = ()
    """Inputs of functions whose derivative jumps; empty: none moves."""
    signs: Limits = ()
    """The signs of gradient elements that are no larger than this; empty: of none."""


STAY = Moves()
"""Nothing is on the other side."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a reference run differs from the plain fp64 one."""

    double: bool = False
    """Compute in fp64; else in the scenario's precision."""
    reverse_rows: bool = False
    """Reverse the rows of each batch, and the order of a workload's own micro-batches:
    another order of reduction."""
    parts: int = 1
    """Number of accumulated parts of each batch."""
    bias_errors: float = 0.0
    """Steps are longer by this multiple of what errors of bias corrections explain."""
    shards: int = 1
    """Number of parts, along dim 0, in which the optimizer gets each parameter of which
    no shards were seen."""
    moves: Moves = STAY
    """Inputs on the other side."""

    @property
    def in_order(self) -> bool:
        """True if rows are taken in the order of the truth."""
        return self.parts == 1 and not self.reverse_rows

    def in_rows(self, parts: list[Batch]) -> list[Batch]:
        """Micro-batches, with their rows reversed and cut."""
        if self.reverse_rows:
            parts = [part.map(lambda t: t.flip(0)) for part in parts[::-1]]
        return [rows for part in parts for rows in part.in_parts(self.parts)]

    def shuffled(self, parts: list[Batch]) -> list[Batch]:
        """Whole micro-batches, in another order for each variant."""
        if self.reverse_rows:
            parts = parts[::-1]
        return [
            part for first in range(self.parts) for part in parts[first :: self.parts]
        ]


TRUTH = Variant(double=True)
NOISY = (
    Variant(),
    Variant(reverse_rows=True),
    Variant(parts=2),
    Variant(parts=2, reverse_rows=True),
    Variant(parts=4),
)
"""Correct runs whose error against the truth is the noise of the scenario."""
MOVED = 1 / 8
"""Share of a unit roundoff by which weights move before they are rounded to 16 bits.
One of 32 is then rounded to its other neighbour, and none is off by more than 9/8 of a
roundoff: such a run errs as much as the plain one, in its own way (docs/parity.md)."""
FLIPPED = 4
"""Values that noise takes to the other side in each run, on average, so that runs show
what that does: the probability that a run has none is exp(-4), and that all five have
none exp(-20)."""
CODES = 2.0**-4
"""Half a spacing of codes of 4 bits, one of which is the sign: the coarsest state."""


def of_ties(roundoff: float, count: int) -> float:
    """The relative noise that takes ``FLIPPED`` of ``count`` values past a tie.

    Ties are two roundoffs apart, and the noise is half of its size on average.
    """
    return 4 * FLIPPED * roundoff / count


def near_one(like: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """A random factor for each element, up to ``size`` away from 1."""
    random = torch.empty(like.shape)
    return random.uniform_(-size, size, generator=generator).add_(1)


@contextmanager
def jittered(
    weights: Collection[Tensor], size: float, generator: torch.Generator
) -> Iterator[None]:
    """Change every weight inside by a random part of its rounding.

    Args:
        weights: those of a model; they have their values back afterwards.
        size: largest relative change; 0 changes nothing.
        generator: of the random numbers.
    """
    if not size:
        yield
        return
    before = [p.detach().clone() for p in weights]
    with torch.no_grad():
        for p in weights:
            p.mul_(near_one(p, size, generator))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, old in zip(weights, before, strict=True):
                p.copy_(old)
