"""Variants: the reference runs, each as a list of perturbations."""

from __future__ import annotations

from dataclasses import dataclass

from .noise.optimizers import EvenShards, LongerSteps, RoundedMatrices
from .noise.perturbation import Perturbation
from .noise.rows import Rows
from .noise.sides import Sides
from .noise.ties import StateTies
from .noise.weights import RoundedWeights

__all__ = [
    "NOISY",
    "PLAIN",
    "TRUTH",
    "Variant",
    "in_shards",
    "longer",
    "on_sides",
    "reordered",
]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A reference run: its precision and its perturbations."""

    double: bool = False
    """True to compute in fp64, False in the scenario's precision."""
    noise: tuple[Perturbation, ...] = ()
    """Perturbations of this run; their contexts are entered in this order."""


def _in_order(*noise: Perturbation) -> tuple[Perturbation, ...]:
    """Return perturbations of a run in the usual row order: given and common ones."""
    return RoundedWeights(only_ties=True), RoundedMatrices(), *noise, StateTies()


def reordered(*, parts: int = 1, reverse: bool = False) -> Variant:
    """Return a run that takes rows in another order, or in parts."""
    rows = Rows(parts=parts, reverse=reverse)
    noise = (rows, RoundedWeights(), RoundedMatrices(), StateTies())
    return Variant(noise=noise)


TRUTH = Variant(double=True)
PLAIN = Variant(noise=(RoundedWeights(only_ties=True), StateTies()))
"""Run with the rows in order. Noise is added only if a workload declares ``rounds_to``
or ``rounds_state``."""
NOISY = (
    PLAIN,
    reordered(reverse=True),
    reordered(parts=2),
    reordered(parts=2, reverse=True),
    reordered(parts=4),
)
"""Correct runs from which the noise of a scenario is measured."""


def longer(share: float) -> Variant:
    """Return a run with steps longer by a fraction of a bias correction's error."""
    return Variant(
        double=True, noise=(RoundedMatrices(), LongerSteps(share), StateTies())
    )


def in_shards(count: int) -> Variant:
    """Return a run whose optimizers get parameters in ``count`` parts."""
    return Variant(noise=_in_order(EvenShards(count)))


def on_sides(sides: Sides) -> Variant:
    """Return a run in which the choices that rounding decides are flipped."""
    return Variant(noise=_in_order(sides))
