"""Noise from weights that are moved within their rounding during a step."""

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
    from ..reference_run import ReferenceRun

__all__ = ["MOVED", "RoundedWeights", "jittered"]

MOVED = 1 / 8
"""Fraction of a unit roundoff by which weights move before they are rounded to 16 bits.
One weight in 32 is then rounded to its other neighbour, and no weight is off by more
than 9/8 of a roundoff. Such a run has errors as large as the plain one, but different
ones (docs/decisions/bounds.md)."""


@dataclass(frozen=True, kw_only=True)
class RoundedWeights(Perturbation):
    """Changes every weight by a random fraction of its rounding error.

    A row is rounded in the same way wherever it stands in the batch. So the noise of
    runs that differ only in the order of rows is almost equal. Other weights give other
    noise.
    """

    only_ties: bool = False
    """True to move weights only if the workload rounds them to 8 bits. The smallest
    error rounds a weight at an 8-bit tie to the other side, and five runs may all miss
    such a weight. So each run moves a few weights past a tie."""

    def passes(self, run: ReferenceRun, step: int) -> AbstractContextManager[object]:
        """Move the weights, and restore them before the optimizer steps."""
        return jittered(run.parameters.values(), self._size(run), run.generator)

    def _size(self, run: ReferenceRun) -> float:
        rounds_to = run.workload.rounds_to
        if rounds_to is None and self.only_ties:
            return 0.0
        # weights are stored in fp32, where a smaller move would change nothing
        size = max(MOVED * run.precision.roundoff, FP32_UNIT)
        if rounds_to is None:
            return size
        count = sum(p.numel() for p in run.parameters.values())
        return max(size, of_ties(coarseness(rounds_to), count))


@contextmanager
def jittered(
    weights: Collection[Tensor], size: float, generator: torch.Generator
) -> Iterator[None]:
    """Change every weight in this context by a random part of its rounding error.

    Args:
        weights: weights of a model; restored at the end of the context.
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
