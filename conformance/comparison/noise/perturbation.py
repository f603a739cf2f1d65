"""Perturbation: one source of noise in a reference run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from ....fixtures import Batch

if TYPE_CHECKING:
    from ..reference_run import ReferenceRun

__all__ = ["Perturbation"]


class Perturbation:
    """Base class of a source of noise; by itself it changes nothing.

    A perturbation is a frozen value, because reference runs are cached by their
    variants. State that lasts from step to step belongs to the run.
    """

    shards = 1
    """Number of equal parts in which optimizers get a parameter with unknown shards."""

    @property
    def moves_scores(self) -> bool:
        """True if scores of routers change by more than their noise."""
        return False

    @property
    def seed(self) -> int:
        """Seed of the run's generator; the largest one of all perturbations is used."""
        return 0

    def rows(self, parts: list[Batch], run: ReferenceRun) -> list[Batch]:
        """Return the micro-batches of a step, perhaps reordered or cut."""
        return parts

    def passes(self, run: ReferenceRun, step: int) -> AbstractContextManager[object]:
        """Return the context in which forward and backward of a step run."""
        return nullcontext()

    def gradients(self, run: ReferenceRun, step: int) -> None:
        """Change the gradients in place before the optimizers use them.

        The gradients were recorded before this call.
        """

    def optimizer(self, run: ReferenceRun, name: str) -> AbstractContextManager[object]:
        """Return the context in which the optimizer of one parameter steps."""
        return nullcontext()
