"""Variation: how a reference run on one rank differs from the tested run.

The reference of a workload with ``reference = "one rank"`` is its own ``train_step`` on
a mesh of size 1. Its rank has all rows. For the truth it trains in fp64. For the noise
it trains in the scenario's precision. Rows are then permuted, micro-batches cut
differently, and initial weights moved by one unit roundoff of the compute dtype. A
smaller move would leave half-precision weights unchanged after rounding, so the run
would show no new noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...fixtures import Batch, compared_parameters, local
from ..space.facts import NewTensorsInFp64

if TYPE_CHECKING:
    from ..space.scenario import Scenario

__all__ = ["Alone", "Reduction", "Variation"]


@dataclass(frozen=True, kw_only=True)
class Variation:
    """Differences of a reference run on one rank from the tested run."""

    double: bool = False
    """True if the model and the floating tensors of batches are in fp64."""
    widens: bool = False
    """True if new tensors without an explicit dtype are in fp64 too."""
    permuted: bool = False
    """True if the rows of each micro-batch are permuted."""
    parts: int = 1
    """Number of parts into which each micro-batch is cut."""
    moved: int = 0
    """Seed of the signs by which weights are moved by one unit; 0: not moved."""
    halved: bool = False
    """True if only the first half of each micro-batch's rows is used."""
    redrawn: int = 0
    """Seed of torch's generator before each step; 0: not seeded."""

    @property
    def seed(self) -> int:
        """Seed of the reduction's noise; 0 (no noise) for the truth and plain run."""
        drawn = 4 * self.moved + self.parts - 1 + 32 * self.permuted
        return 0 if self.double else drawn

    @property
    def words(self) -> Sequence[str]:
        """Descriptions of the changes."""
        changes = {
            "rows permuted": self.permuted,
            "micro-batches cut again": self.parts > 1,
            "weights moved by a unit roundoff": self.moved > 0,
            "random numbers drawn anew": self.redrawn > 0,
        }
        return [words for words, does in changes.items() if does]

    def new_tensors(self) -> AbstractContextManager[Any]:
        """Return the context in which the model is laid out and trained."""
        return NewTensorsInFp64() if self.widens else nullcontext()

    def scenario(self, scenario: Scenario) -> Scenario:
        """Return the scenario of the one rank: no faults and no resume.

        A recipe that recomputes keeps its micro-batches, and the one rank recomputes
        nothing.
        """
        name = "plain" if scenario.parsed_recipe.resume else scenario.recipe
        # the run in fp64 has no half precision
        precision = "fp32" if self.double else scenario.precision
        return replace(scenario, faults="none", recipe=name, precision=precision)

    def change_weights(self, model: nn.Module, unit: float) -> nn.Module:
        """Change the initial weights in place and return the model.

        Args:
            model: model to change.
            unit: unit roundoff of the compute dtype.
        """
        generator = torch.Generator().manual_seed(self.moved)
        for parameter in compared_parameters(model).values() if self.moved else ():
            signs = torch.randint(2, parameter.shape, generator=generator) * 2.0 - 1.0
            # in fp64, since 1 + 2^-24 is 1 in fp32 and would move nothing
            wide = parameter.detach().double() * (1.0 + unit * signs.double())
            parameter.data.copy_(wide)
        return model.double() if self.double else model

    def micro_batches(self, batch: Batch, scenario: Scenario) -> list[Batch]:
        """Return the micro-batches of the one rank.

        If a recipe cuts the rows of each rank, the n-th micro-batch holds the rows of
        the n-th micro-batches of all ranks. So a workload that steps in each
        micro-batch does the same here.

        Args:
            batch: the whole batch.
            scenario: scenario that the ranks trained.
        """
        workload, parts = scenario.workload, [batch]
        if workload.micro_batches is not None:
            parts = workload.micro_batches(batch)
        elif scenario.parts > 1:
            shares = scenario.parsed_topology.shares(scenario.world_size)
            if workload.shard is not None or batch.rows % shares:
                shares = 1
            sizes = scenario.sizes(batch.rows // shares)
            cut = [batch.shard(i, shares).cut(sizes) for i in range(shares)]
            parts = [_joined(of_ranks) for of_ranks in zip(*cut, strict=True)]
        if workload.micro_batches is None:
            parts = [piece for part in parts for piece in part.in_parts(self.parts)]
        return [self._changed(part) for part in parts]

    def _changed(self, part: Batch) -> Batch:
        if self.halved:
            part = part.in_parts(2)[0]
        if self.permuted:
            part = part.map(lambda t: t.flip(0).roll(1, 0))
        if self.double:
            part = part.map(lambda t: t.double() if t.is_floating_point() else t)
        return part


class Reduction:
    """Rounding of a promised reduction, as noise on one rank.

    One rank has no partial gradients to round, or rounds the same whole gradient in all
    runs. So a noisy run changes each element at random, by up to a unit roundoff of the
    promised dtype. The roundoff is relative to the element and to the root mean square
    of the tensor, because large parts may cancel in a small element. A gradient is
    changed after backward has added to it, or when an optimizer of copies uses it.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], dtype: torch.dtype, seed: int
    ) -> None:
        self.unit = torch.finfo(dtype).eps / 2
        self.generator = torch.Generator().manual_seed(seed)
        self.reached: set[int] = set()
        """ids of the parameters that backward reaches."""
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def change_rest(self, optimizer: Optimizer) -> None:
        """Change an optimizer's gradients, unless backward already did."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in self.reached:
                    self._change(parameter)

    def _accumulated(self, parameter: Tensor) -> None:
        self.reached.add(id(parameter))
        self._change(parameter)

    def _change(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            part = local(parameter.grad)
            noise = 2.0 * torch.rand(part.shape, generator=self.generator) - 1.0
            typical = part.square().mean().sqrt() * (part != 0)
            part += self.unit * noise.to(part) * (part.abs() + typical)


def _joined(parts: Sequence[Batch]) -> Batch:
    """Concatenate the rows of all parts."""
    columns = zip(*(part.tensors for part in parts), strict=True)
    joined = iter([torch.cat(column) for column in columns])
    return parts[0].map(lambda _: next(joined))


@dataclass(frozen=True, kw_only=True)
class Alone:
    """One training on one rank: its variation, and the skips and scales to follow."""

    variation: Variation
    skipped: Sequence[frozenset[str]]
    """For each step: parameters that must not change, because a gradient is not
    finite."""
    scales: Sequence[float]
    """For each step: the loss scale."""

    @property
    def scaled(self) -> bool:
        """True if ``train_step`` gets a scaler that has an effect."""
        return any(self.skipped) or any(scale != 1.0 for scale in self.scales)
