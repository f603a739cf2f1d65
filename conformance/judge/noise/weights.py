"""Weights: moved within their rounding while a step computes."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...formulas import FP32_UNIT
from ...space.workload_checks import coarseness
from .perturbation import Perturbation
from .ties import near_one, of_ties

if TYPE_CHECKING:
    from ..reference import ReferenceRun

__all__ = ["MOVED", "RoundedWeights", "jittered"]

MOVED = 1 / 8
"""Share of a unit roundoff by which weights move before they are rounded to 16 bits.
One of 32 is then rounded to its other neighbour, and none is off by more than 9/8 of a
roundoff: such a run errs as much as the plain one, in its own way
(docs/decisions/bounds.md)."""


@dataclass(frozen=True, kw_only=True)
class RoundedWeights(Perturbation):
    """Changes every weight by a random part of its rounding.

    In any order of rows each row is rounded alike, so runs that differ in rows alone
    are nearly one draw of their noise.
    """

    only_ties: bool = False
    """Move weights only where the workload rounds them to 8 bits. A weight beside a tie
    of 8 bits is rounded to the other side by any noise, which five runs may all miss:
    so some are, in each run."""

    def passes(self, run: ReferenceRun, step: int) -> AbstractContextManager[object]:
        """Move the weights, and restore their values before the optimizer steps."""
        return jittered(run.parameters.values(), self._size(run), run.generator)

    def _size(self, run: ReferenceRun) -> float:
        rounds_to = run.workload.rounds_to
        if rounds_to is None and self.only_ties:
            return 0.0
        # weights are stored in fp32, where nothing smaller would move them
        size = max(MOVED * run.precision.roundoff, FP32_UNIT)
        if rounds_to is None:
            return size
        count = sum(p.numel() for p in run.parameters.values())
        return max(size, of_ties(coarseness(rounds_to), count))


@contextmanager
def jittered(
    weights: Collection[Tensor], size: float, generator: torch.Generator
) -> Iterator[None]:
    """Change every weight inside by a random part of its rounding.

    Args:
        weights: weights of a model; they have their values back afterwards.
        size: largest relative change; 0 changes nothing.
        generator: generator of the random numbers.
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
