"""Parts of a standalone script that only some runs or workloads need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...fixtures import mapped
from ...fixtures.datasets import corpus
from ..rank.local_parts import full_name
from .template import Training

__all__ = [
    "BATCHES",
    "BuiltIn",
    "halves",
    "micro_batches",
    "placed",
]


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """A workload of a built-in model, its data and its layout."""

    model: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Tensor, Tensor]]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    layout: Callable[..., nn.Module]

    def parallelize(
        self, model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy
    ) -> nn.Module:
        """Lay the model out over the mesh."""
        return self.layout(model, mesh, policy)


def digits_batch(step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return random pixels and labels."""
    source = torch.Generator().manual_seed(1000 * seed + step)
    pixels = torch.randn(32, 64, generator=source)
    return pixels, torch.randint(10, (32,), generator=source)


def text_batch(step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return eight pieces of the text, and the byte that follows each byte."""
    text = torch.from_numpy(corpus().copy())
    starts = np.random.default_rng([seed, step]).integers(0, len(text) - 33, 8)
    rows = torch.stack([text[start : start + 33] for start in starts])
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


BATCHES = {"digits": digits_batch, "text": text_batch}
"""Data set -> its batches; a script has no file of digits, so it draws random ones."""


def halves(batch: Any) -> list[Any]:
    """Cut a batch into two micro-batches of equal size."""
    return [mapped(batch, partial(share, number=n, of=2)) for n in range(2)]


def share(rows: Tensor, number: int, of: int) -> Tensor:
    """Cut rows into ``of`` equal parts, and return part ``number``."""
    return rows.chunk(of)[number]


def elements(pair: Any) -> float:
    """Return the number of targets, or else of inputs, over which a mean is taken."""
    counts: list[int] = []
    for tree in pair[::-1]:
        if not counts:
            mapped(tree, lambda t: counts.append(t.numel()))
    return float(sum(counts))


def micro_batches(
    training: Training,
    step: int,
    start: Callable[..., Any],
    *,
    unsynced: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
    counted: bool = False,
) -> None:
    """Run backward on ``start(loss, index, count)`` for each micro-batch.

    Args:
        training: training of this rank.
        step: number of the step.
        start: scales the loss of micro-batch ``index`` of ``count``.
        unsynced: context of every micro-batch except the last.
        counted: true if the loss is (sum, count).
    """
    run, work, module = training.run, training.work, training.module
    parts = training.micro_batches(step)
    counts = [elements(part) for part in parts]
    total = elements(work.batch(step, run.seed))
    if counted:
        with torch.no_grad():
            counts = [float(work.loss(module(x), y)[1]) for x, y in parts]
        of_all = torch.tensor(sum(counts), dtype=torch.float64)
        for axis in run.data_axes if training.mesh else ():
            dist.all_reduce(of_all, group=training.mesh.get_group(axis))
        total = float(of_all)
    for index, ((x, y), count) in enumerate(zip(parts, counts, strict=True)):
        with nullcontext() if index == len(parts) - 1 else unsynced(module):
            with training.autocast():
                loss = work.loss(module(x), y)
            # Gradients are averaged over the ranks that have different rows.
            weight = run.loss_factor * training.shares / total
            loss = loss[0] * weight if counted else loss * (weight * count)
            start(loss, index, len(parts)).backward()


def placed(
    values: Mapping[str, Any], shapes: Mapping[str, torch.Size]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the values of ``weights`` or ``gradients``, and their positions."""
    values_by_name = {}
    for key, value in values.items():
        name = full_name(key, shapes)
        numbers = torch.arange(shapes[name].numel())
        if isinstance(value, tuple | list):
            value, at = value
            at = (at,) if isinstance(at, slice) else tuple(at)
            # One slice may be of the flat tensor.
            if len(at) > 1 or numbers[at].numel() != value.numel():
                numbers = numbers.view(shapes[name])
            numbers = numbers[at].flatten()
        if value is not None:
            values_by_name[name] = value, numbers
    return values_by_name
