"""Noise from ties: values half way between two results of rounding.

The smallest error rounds a value at a tie to the other side. A correct run may do so
for a few of many values, and five noisy runs may miss exactly these. So each run moves
``FLIPPED`` values past a tie on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .perturbation import Perturbation

if TYPE_CHECKING:
    from ..reference_run import ReferenceRun

__all__ = ["CODES", "FLIPPED", "StateTies", "near_one", "of_ties"]

FLIPPED = 4
"""Mean number of values that noise rounds to the other side in each run. A run has no
such value with probability exp(-4), and all five have none with exp(-20)."""
CODES = 2.0**-4
"""Half a spacing of the coarsest state, relative to its largest value: codes have 4
bits, one of them for the sign."""


@dataclass(frozen=True)
class StateTies(Perturbation):
    """Moves some elements of an optimizer's rounded state past a tie.

    Acts only if the workload declares ``rounds_state``; see [Note: Rounded state] in
    bounds.
    """

    def gradients(self, run: ReferenceRun, step: int) -> None:
        """Change gradients just enough to move ``FLIPPED`` codes past a tie."""
        if not run.workload.rounds_state:
            return
        trained = [run.parameters[name] for name in run.optimizers]
        size = of_ties(CODES, sum(parameter.numel() for parameter in trained))
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad *= near_one(parameter.grad, size, run.generator)


def of_ties(roundoff: float, count: int) -> float:
    """Return the size of noise that moves ``FLIPPED`` of ``count`` values past a tie.

    Ties are two roundoffs apart, and the mean of uniform noise is half its size.
    """
    return 4 * FLIPPED * roundoff / count


def near_one(like: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Return a random factor for each element, at most ``size`` away from 1."""
    random = torch.empty(like.shape)
    return random.uniform_(-size, size, generator=generator).add_(1)
