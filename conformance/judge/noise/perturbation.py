"""Perturbation: one source of noise in a reference run."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from ....fixtures import Batch

if TYPE_CHECKING:
    from ..reference import ReferenceRun

__all__ = ["Perturbation"]


class Perturbation:
    """Changes a reference run as rounding may; the base class changes nothing.

    References are kept by their variants, so a perturbation is a frozen value. State
    that lasts from step to step belongs to the run.
    """

    shards = 1
    """Equal parts in which optimizers get a parameter whose shards nobody saw."""

    @property
    def moves_scores(self) -> bool:
        """True if scores of routers differ by more than their noise."""
        return False

    @property
    def seed(self) -> int:
        """Seed of the run's generator, if no other perturbation has a larger one."""
        return 0

    def rows(self, parts: list[Batch], run: ReferenceRun) -> list[Batch]:
        """Return the micro-batches of a step."""
        return parts

    def passes(self, run: ReferenceRun, step: int) -> AbstractContextManager[object]:
        """Return the context of forward and backward of a step."""
        return nullcontext()

    def gradients(self, run: ReferenceRun, step: int) -> None:
        """Change the gradients that the optimizers get, after they were recorded."""

    def optimizer(self, run: ReferenceRun, name: str) -> AbstractContextManager[object]:
        """Return the context in which the optimizer of one parameter steps."""
        return nullcontext()
