"""Passes: forward and backward of one step, as recipes and workloads make them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from ...space.recipes import Z_LOSS
from .ranks import Layout, Pair, Stack, mapped

__all__ = [
    "elements",
    "halves",
    "micro_batches",
    "objective",
    "one_pass",
    "parts_of",
    "pipeline",
    "three_unequal",
    "two_losses",
]

Start = Callable[[Any, int, int], Any]
# (loss, number of the micro-batch, how many there are) -> where backward starts


def objective(stack: Stack, model: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """The loss, and the count where it is a sum."""
    with stack.context():
        value, count = stack.workload.loss(model(x), y), None
    if stack.counted:
        value, count = value
    return value * stack.loss_factor, count


def one_pass(layout: Layout, step: int, start: Start) -> None:
    """One backward from one loss."""
    loss, _ = objective(layout.stack, layout.module, *layout.batch(step))
    start(loss, 0, 1).backward()


def two_losses(layout: Layout, step: int, start: Start) -> None:
    """One backward from the loss and the z-loss."""
    stack, (x, y) = layout.stack, layout.batch(step)
    with stack.context():
        output = layout.module(x)
        first = stack.workload.loss(output, y)
        second = Z_LOSS * output.float().logsumexp(-1).square().mean()
    both = [first * stack.loss_factor, second * stack.loss_factor]
    torch.autograd.backward(start(both, 0, 1))


def pipeline(layout: Layout, step: int, start: Start) -> None:
    """GPipe with two micro-batches."""
    stack, pp = layout.stack, layout.mesh["pp"]
    losses: list[Tensor] = []

    def started(output: Tensor, y: Tensor) -> Any:
        losses.append(stack.workload.loss(output, y) * stack.loss_factor)
        return start(losses[-1], len(losses) - 2, 2)  # the first call infers shapes

    rank, device, group = pp.get_local_rank(), torch.device("cpu"), pp.get_group()
    stage = PipelineStage(layout.module, rank, pp.size(), device, group=group)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=started)
    x, y = layout.batch(step)
    with stack.context():
        schedule.step(*([x] if rank == 0 else []), target=y)


def parts_of(layout: Layout, step: int) -> list[Pair]:
    """The micro-batches of this rank."""
    stack = layout.stack
    if stack.shard:
        whole = stack.workload.batch(step, stack.seed)
        share: Pair = stack.shard(whole, layout.mesh)
    else:
        share = layout.batch(step)
    parts = [share]
    if stack.micro_batches:
        parts = [*stack.micro_batches(share)]
    if stack.cut:
        rows: list[int] = []
        mapped(share, lambda t: rows.append(len(t)))
        ends = [*accumulate(stack.cut(rows[0]), initial=0)]
        parts = [between(share, first, end) for first, end in pairwise(ends)]
    return parts


def between(tree: Any, first: int, end: int) -> Any:
    """Some of the rows."""
    return mapped(tree, lambda t: t[first:end])


def halves(rows: int) -> list[int]:
    """Two parts of equal size."""
    return [rows // 2] * 2


def three_unequal(rows: int) -> list[int]:
    """Three parts of unequal sizes."""
    first, last = (rows + 1) // 2, max(1, rows // 6)
    return [first, rows - first - last, last]


def micro_batches(layout: Layout, step: int, start: Start) -> None:
    """A backward for each micro-batch, by its weight in the loss of the whole step."""
    stack, module, parts = layout.stack, layout.module, parts_of(layout, step)
    whole = elements(stack.workload.batch(step, stack.seed))
    if stack.counted:
        with torch.no_grad():
            total = sum(float(objective(stack, module, *part)[1]) for part in parts)
        count = torch.tensor(total, dtype=torch.float64)
        for axis in layout.phase.data_axes:
            dist.all_reduce(count, group=layout.mesh.get_group(axis))
        whole = float(count)
    for number, part in enumerate(parts):
        context: AbstractContextManager[Any] = nullcontext()
        if stack.unsynced and number < len(parts) - 1:
            context = stack.unsynced(module)
        with context:
            value, _ = objective(stack, module, *part)
            weight = (1 if stack.counted else elements(part)) / whole
            # gradients are averaged over the ranks that see different rows
            start(value * weight * layout.shares, number, len(parts)).backward()


def elements(pair: Pair) -> float:
    """Of the targets: what a mean over them counts in a mean over more."""
    sizes: list[int] = []
    mapped(pair[1], lambda t: sizes.append(t.numel()))
    if not sizes:
        mapped(pair[0], lambda t: sizes.append(t.numel()))
    return float(sum(sizes))
