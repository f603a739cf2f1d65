"""Noise from rounding inside of optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...formulas import bias_error
from ...rank.elementwise import HalfNoise, not_elementwise
from .perturbation import Perturbation

if TYPE_CHECKING:
    from ..reference_run import ReferenceRun

__all__ = ["EvenShards", "LongerSteps", "RoundedMatrices"]


@dataclass(frozen=True)
class RoundedMatrices(Perturbation):
    """Rounds half-precision results of whole-matrix optimizers once more, at random.

    See [Note: Whole matrices] in bounds.
    """

    def optimizer(self, run: ReferenceRun, name: str) -> AbstractContextManager[object]:
        """Return a context that rounds at random, if the optimizer mixes elements."""
        if name not in not_elementwise(run.key.model, run.key.optimizer):
            return nullcontext()
        return HalfNoise(run.generator)


@dataclass(frozen=True)
class LongerSteps(Perturbation):
    """Makes Adam's steps longer, as rounded bias corrections in fp32 may.

    See [Note: Bias corrections] in bounds.
    """

    share: float
    """Fraction of the largest error of a bias correction, by which steps are longer."""

    @contextmanager
    def optimizer(self, run: ReferenceRun, name: str) -> Iterator[None]:
        """Lengthen the step that the optimizer makes inside this context."""
        groups = run.optimizers[name].param_groups
        betas = next((g.get("betas", ()) for g in groups if g["params"]), ())
        if not betas:
            yield
            return
        parameter = run.parameters[name]
        before = parameter.detach().clone()
        yield
        share = self.share * bias_error(betas, run.steps_made[name] + 1)
        with torch.no_grad():
            parameter.add_(parameter - before, alpha=share)


@dataclass(frozen=True)
class EvenShards(Perturbation):
    """Gives optimizers each parameter in equal parts along dim 0.

    Used for a rounded state with unknown shards; see [Note: Rounded state] in bounds.
    """

    shards: int
