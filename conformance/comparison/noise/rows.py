"""Noise from the order of sums over rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....fixtures import Batch
from .perturbation import Perturbation

if TYPE_CHECKING:
    from ..reference_run import ReferenceRun

__all__ = ["Rows"]


@dataclass(frozen=True, kw_only=True)
class Rows(Perturbation):
    """Takes the rows of each batch in another order, or in parts.

    Ranks sum over rows in their own order. If rows depend on each other, whole
    micro-batches are reordered instead.
    """

    parts: int = 1
    """Number of parts of each micro-batch, each with its own forward and backward."""
    reverse: bool = False

    @property
    def seed(self) -> int:
        """Seed that differs for each order of rows."""
        return 2 * self.parts + self.reverse

    def rows(self, parts: list[Batch], run: ReferenceRun) -> list[Batch]:
        """Reverse and cut rows, or reorder whole micro-batches."""
        if self.reverse:
            parts = parts[::-1]
        if not run.rows_may_be_cut():
            firsts = range(self.parts)
            return [part for first in firsts for part in parts[first :: self.parts]]
        if self.reverse:
            parts = [part.map(lambda t: t.flip(0)) for part in parts]
        return [rows for part in parts for rows in part.in_parts(self.parts)]
