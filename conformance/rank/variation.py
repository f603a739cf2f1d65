"""Variation: how a run on one rank, which is a reference, differs from the judged one.

The reference of a workload with ``reference = "one rank"`` is the workload's own
``train_step`` on a mesh of size 1. Its rank sees all rows. It trains in fp64 for the
truth; for the noise it trains in the scenario's precision, with rows permuted,
micro-batches cut again, and initial weights moved by one unit roundoff of the dtype in
which the scenario computes: by less, a run in half precision rounds every weight as
before, and is no further draw of its noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...fixtures import Batch, judged_parameters

if TYPE_CHECKING:
    from ..space.scenario import Scenario

__all__ = ["Alone", "Variation"]


@dataclass(frozen=True, kw_only=True)
class Variation:
    """What one run on one rank changes."""

    double: bool = False
    """The model and the floating tensors of batches are in fp64."""
    permuted: bool = False
    """The rows of each micro-batch are in another order."""
    parts: int = 1
    """Each micro-batch is cut in so many."""
    moved: int = 0
    """If not 0, the seed of the signs by which weights are moved by one unit."""
    redrawn: int = 0
    """If not 0, torch's generator is seeded with it before each step."""

    @property
    def words(self) -> Sequence[str]:
        """What it changes, in words."""
        changes = {
            "rows permuted": self.permuted,
            "micro-batches cut again": self.parts > 1,
            "weights moved by a unit roundoff": self.moved > 0,
            "random numbers drawn anew": self.redrawn > 0,
        }
        return [words for words, does in changes.items() if does]

    def scenario(self, scenario: Scenario) -> Scenario:
        """What the one rank trains: no faults, no interruption."""
        recipe = scenario.parsed_recipe
        plain = recipe.resume or recipe.recompute
        name = "plain" if plain else scenario.recipe
        # a truth has no half precision
        precision = "fp32" if self.double else scenario.precision
        return replace(scenario, faults="none", recipe=name, precision=precision)

    def change_weights(self, model: nn.Module, unit: float) -> nn.Module:
        """The initial model of this run.

        Args:
            model: is changed in place.
            unit: unit roundoff of what is computed.
        """
        generator = torch.Generator().manual_seed(self.moved)
        for parameter in judged_parameters(model).values() if self.moved else ():
            signs = torch.randint(2, parameter.shape, generator=generator) * 2.0 - 1.0
            # 1 + 2^-24 is 1 in fp32, and the product is not the value itself
            wide = parameter.detach().double() * (1.0 + unit * signs.double())
            parameter.data.copy_(wide)
        return model.double() if self.double else model

    def micro_batches(self, batch: Batch, scenario: Scenario) -> list[Batch]:
        """The micro-batches of the one rank.

        Where a recipe cuts the rows of each rank, the n-th micro-batch holds the rows
        of the n-th of all ranks: a stack that steps in each micro-batch does the same
        here.

        Args:
            batch: the whole one.
            scenario: the one that is judged.
        """
        workload, recipe = scenario.workload, scenario.parsed_recipe
        parts = [batch]
        if workload.micro_batches is not None:
            parts = workload.micro_batches(batch)
        elif recipe.parts > 1:
            shares = scenario.parsed_topology.shares(scenario.world_size)
            if workload.shard is not None or batch.rows % shares:
                shares = 1
            sizes = recipe.sizes(batch.rows // shares)
            cut = [batch.shard(i, shares).cut(sizes) for i in range(shares)]
            parts = [_joined(of_ranks) for of_ranks in zip(*cut, strict=True)]
        if workload.micro_batches is None:
            parts = [piece for part in parts for piece in part.in_parts(self.parts)]
        return [self._changed(part) for part in parts]

    def _changed(self, part: Batch) -> Batch:
        if self.permuted:
            part = part.map(lambda t: t.flip(0).roll(1, 0))
        if self.double:
            part = part.map(lambda t: t.double() if t.is_floating_point() else t)
        return part


def _joined(parts: Sequence[Batch]) -> Batch:
    """The rows of all parts, one part after the other."""
    columns = zip(*(part.tensors for part in parts), strict=True)
    joined = iter([torch.cat(column) for column in columns])
    return parts[0].map(lambda _: next(joined))


@dataclass(frozen=True, kw_only=True)
class Alone:
    """One training on one rank, with the decisions that it must take."""

    variation: Variation
    skipped: Sequence[frozenset[str]]
    """Per step: the parameters that must not change by the rule."""
    scales: Sequence[float]
    """Per step: the scale of the loss."""

    @property
    def scaled(self) -> bool:
        """True if ``train_step`` gets a scaler: one that never acts is left out."""
        return any(self.skipped) or any(scale != 1.0 for scale in self.scales)
