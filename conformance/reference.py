"""Reference training: the same model and batches on one process, without a scaler.

A reference follows the skip decisions that the *rule* demands (any non-finite gradient
anywhere skips the step), never those that the judged scaler took. Variants permute the
order of reductions; their distance from the fp64 run is the noise that a correct run
may show, and the bounds of ``parity`` are made of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call

from ..fixtures import (
    PRECISIONS,
    Batch,
    Precision,
    kit_of,
)
from .engine import initial_model
from .recipes import CLIP_NORM, CLIP_VALUE, LR_DECAY, Training
from .scenario import Scenario

__all__ = ["Limits", "Reference", "Schedule", "Variant", "train_reference"]

Doubles = NDArray[np.float64]
Limits = tuple[tuple[tuple[str, float], ...], ...]
"""Per step: (parameter, size of a gradient's element); hashable, as runs are kept."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What the sharded run did that the reference must follow."""

    skipped: tuple[frozenset[str], ...]
    """Per step: the parameters that the rule demands to be left as they are."""
    scales: tuple[float, ...]
    """Per step: the scale of the loss; only half precision feels it."""


@dataclass(frozen=True)
class Reference:
    """One reference run: per step, flat arrays in fp64 by parameter name."""

    losses: tuple[float, ...]
    gradients: tuple[dict[str, Doubles], ...]
    updates: tuple[dict[str, Doubles], ...]
    """Parameter minus its initial value, after the step."""
    start: dict[str, Doubles]
    """Parameters before the first step."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a reference run departs from the plain fp64 one."""

    double: bool = False
    """Compute in fp64; else in the scenario's precision."""
    reverse_rows: bool = False
    """Reverse the rows of each batch: another order of reduction."""
    parts: int = 1
    """Split each batch into so many accumulated parts."""
    contrary: Limits = ()
    """The optimizer is given elements below these limits with the other sign."""


TRUTH = Variant(double=True)
NOISY = (
    Variant(),
    Variant(reverse_rows=True),
    Variant(parts=2),
    Variant(parts=2, reverse_rows=True),
    Variant(parts=4),
)
"""Correct runs whose error against the truth is the noise of the scenario."""
KEPT = 16
"""References kept: those of two schedules of the scenario at hand, which its scalers
share. Of the default preset a cache of 256 held a gigabyte and spared 5 % of the
trainings."""


def train_reference(
    scenario: Scenario, schedule: Schedule, variant: Variant
) -> Reference:
    """Train on this process and return every step.

    fp32 scaling by a power of two is exact, so there the scales do not matter and are
    left out of the cache key.
    """
    precision = scenario.parsed_precision
    half = precision.compute_dtype != torch.float32 and not variant.double
    scales = schedule.scales if half else (1.0,) * scenario.steps
    key = _Key(
        data=scenario.data,
        optimizer=scenario.optimizer,
        steps=scenario.steps,
        seed=scenario.seed,
        magnitude=scenario.magnitude,
        training=scenario.parsed_recipe.training,
    )
    return _train(
        key, precision.name if half else "fp32", schedule.skipped, scales, variant
    )


@dataclass(frozen=True, kw_only=True)
class _Key:
    """What of a scenario a reference depends on."""

    data: str
    optimizer: str
    steps: int
    seed: int
    magnitude: float
    training: Training


@lru_cache(maxsize=KEPT)
def _train(
    key: _Key,
    precision_name: str,
    skipped: tuple[frozenset[str], ...],
    scales: tuple[float, ...],
    variant: Variant,
) -> Reference:
    run = _Run(key, precision_name, variant)
    for step in range(key.steps):
        run.step(step, skipped[step], scales[step])
    return Reference(
        tuple(run.losses), tuple(run.gradients), tuple(run.updates), run.start
    )


class _Run:
    """One reference training in progress."""

    def __init__(self, key: _Key, precision: str, variant: Variant) -> None:
        self.key = key
        self.variant = variant
        self.precision: Precision = PRECISIONS[precision]
        dtype = torch.float64 if variant.double else torch.float32
        self.kit = kit_of(key.data)
        self.model = initial_model(key.data, key.seed, key.training).to(dtype)
        # one a parameter: the schedule tells parameters and not optimizers apart
        self.optimizers = {
            name: self.kit.optimizers[key.optimizer]([(name, parameter)])
            for name, parameter in self.model.named_parameters()
        }
        self.start = self._flat({n: p for n, p in self.model.named_parameters()})
        self.losses: list[float] = []
        self.gradients: list[dict[str, Doubles]] = []
        self.updates: list[dict[str, Doubles]] = []

    def step(self, step: int, skipped: frozenset[str], scale: float) -> None:
        batch = self._batch(step)
        self.model.zero_grad()
        parts = self.variant.parts
        losses = [
            self._pass(batch.shard(i, parts), scale / parts) for i in range(parts)
        ]
        self._unscale(scale)
        self._clip()
        self.losses.append(sum(losses) / parts)
        named = dict(self.model.named_parameters())
        self.gradients.append(
            self._flat({n: p.grad for n, p in named.items() if p.grad is not None})
        )
        self._contradict(named, step)
        for name, optimizer in self.optimizers.items():
            if name not in skipped:
                optimizer.step()
            if self.key.training.decay:  # as ExponentialLR, also after a skip
                for group in optimizer.param_groups:
                    group["lr"] *= LR_DECAY
        now = self._flat(named)
        self.updates.append({n: now[n] - self.start[n] for n in now})

    def _contradict(self, named: dict[str, nn.Parameter], step: int) -> None:
        for name, limit in self.variant.contrary[step] if self.variant.contrary else ():
            gradient = named[name].grad
            if gradient is not None:
                gradient[gradient.abs() <= limit] *= -1

    def _clip(self) -> None:
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if self.key.training.clip == "value":
            torch.nn.utils.clip_grad_value_(parameters, CLIP_VALUE)
        elif self.key.training.clip == "norm":
            torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)

    def _batch(self, step: int) -> Batch:
        batch = self.kit.batch(step, self.key.seed)
        if self.variant.double:
            batch = batch.map(lambda t: t.double() if t.is_floating_point() else t)
        if self.variant.reverse_rows:
            batch = batch.map(lambda t: t.flip(0))
        return batch

    def _pass(self, batch: Batch, factor: float) -> float:
        with self.precision.autocast("cpu"):
            output = self._forward(batch.inputs)
            losses = self.key.training.losses_of(self.kit.loss, output, batch.targets)
        value = torch.stack(losses).sum() * self.key.magnitude
        (value * factor).backward()
        return value.item()

    def _forward(self, inputs: Any) -> Any:
        dtype = self.precision.parameter_dtype
        if dtype is None:
            return self.model(inputs)
        narrow = {n: p.to(dtype) for n, p in self.model.named_parameters()}
        batch = Batch(inputs=inputs, targets=())
        narrowed = batch.map(lambda t: t.to(dtype) if t.is_floating_point() else t)
        return functional_call(self.model, narrow, (narrowed.inputs,))

    def _unscale(self, scale: float) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad /= scale

    def _flat(
        self, tensors: dict[str, Tensor] | dict[str, nn.Parameter]
    ) -> dict[str, Doubles]:
        return {
            n: t.detach().double().reshape(-1).numpy().copy()
            for n, t in tensors.items()
        }
