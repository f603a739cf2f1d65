"""A stack without a scaler: gradients, updates, replicas and stray collectives."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...rank.local_parts import full_name
from ...rank.observe import numbers_laid_out_as, scheduled
from .parity import departures, flat, local_values, summed
from .passes import parts_of
from .ranks import (
    Layout,
    Phase,
    Row,
    Rows,
    Stack,
    checksum,
    differing_replicas,
    train_on_ranks,
)

__all__ = ["main"]


def given(values: Any, shapes: dict[str, torch.Size]) -> dict[str, tuple[Any, Tensor]]:
    """The result of ``weights`` or ``gradients``, with the places of its elements."""
    found = {}
    for key, value in values.items():
        name = full_name(key, shapes)
        numbers = torch.arange(shapes[name].numel())
        if isinstance(value, DTensor):
            numbers = torch.from_numpy(numbers_laid_out_as(value))
        elif isinstance(value, (tuple, list)):
            value, at = value
            at = (at,) if isinstance(at, slice) else tuple(at)
            # one slice may be of the flat tensor
            if len(at) > 1 or numbers[at].numel() != value.numel():
                numbers = numbers.view(shapes[name])
            numbers = numbers[at]
        if value is not None:
            found[name] = value, numbers.flatten()
    return found


def train(stack: Stack, phase: Phase, folder: str) -> Iterator[Row]:
    """Train on this rank; yield its observations, step by step."""
    warnings.simplefilter("ignore")  # fully_shard warns of views
    layout = Layout(stack, phase)
    module, shapes = layout.module, layout.shapes
    if stack.weights:
        held = given(stack.weights(module), shapes)
        params = {n: tensor for n, (tensor, _) in held.items()}
        places = {n: where for n, (_, where) in held.items()}
    else:
        params, places = layout.parameters()
    start = {n: flat(p) for n, p in params.items()}
    if not stack.gradients:
        used = watched(params)
    if stack.train_step:
        settings = watched_settings(params)
    if not stack.train_step:
        optimizer = stack.workload.optimizer([*params.items()])
    for step in phase.steps:
        if not stack.gradients:
            used.clear()
        row: Row = {"norm": {}}
        if stack.train_step:
            returned = stack.train_step(module, parts_of(layout, step), None)
            if isinstance(returned, tuple):
                row["norm"]["whole"] = np.array([float(returned[1])]), [0]
            row["settings"] = {**settings}
        else:
            optimizer.zero_grad()
            phase.passes(layout, step, lambda loss, *_: loss)
            optimizer.step()
        total = torch.ones(())
        dist.all_reduce(total)  # a stray collective would pair with it
        row["total"] = float(total)
        if stack.gradients:
            found = given(stack.gradients(module), shapes)
            row["gradient"] = {
                n: (flat(summed(g)), where.numpy()) for n, (g, where) in found.items()
            }
        else:
            row["gradient"] = local_values(used, params, places)
        if stack.weights:
            params = {
                n: p for n, (p, _) in given(stack.weights(module), shapes).items()
            }
        row["update"] = {
            n: (flat(p) - start[n], places[n].numpy()) for n, p in params.items()
        }
        row["replicas"] = {
            (n, checksum(places[n])): checksum(p)
            for n, p in params.items()
            if places[n].numel()
        }
        yield row


def watched(params: dict[str, Any]) -> dict[str, Tensor]:
    """Collects the gradients of every optimizer call."""
    used: dict[str, Tensor] = {}
    names = {id(p): n for n, p in params.items()}

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for p in [p for group in optimizer.param_groups for p in group["params"]]:
            if id(p) in names and p.grad is not None:
                # once: a container and the optimizer inside it use one gradient
                used.setdefault(names[id(p)], p.grad.detach().clone())

    register_optimizer_step_pre_hook(look)
    return used


def watched_settings(params: dict[str, Any]) -> dict[str, Any]:
    """Collects what schedules move, as every optimizer has it when it is called."""
    found: dict[str, Any] = {}
    names = {id(p): n for n, p in params.items()}

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for p in [p for p in group["params"] if id(p) in names]:
                found[names[id(p)]] = scheduled(group)

    register_optimizer_step_pre_hook(look)
    return found


def violations(stack: Stack, rows: Rows) -> Iterator[str]:
    """All violations; those after the first bad step may be its consequences."""
    departed = [*departures(rows, stack)]
    for step, ranks in sorted(rows.items()):
        totals = {rank: row["total"] for rank, row in sorted(ranks.items())}
        if {*totals.values()} != {len(ranks)}:
            text = f"a later all-reduce returned {totals}, not {len(ranks)}"
            yield f"step {step}: {text}"
        for text in [text for at, text in departed if at == step]:
            yield f"step {step}: {text}"
        if torn := differing_replicas(ranks):
            yield f"step {step}: replicas differ: {', '.join(torn)}"


def main(stack: Stack, phases: Sequence[Phase]) -> int:
    """Train, and print one line a violation."""
    with tempfile.TemporaryDirectory() as folder:
        rows, errors = train_on_ranks(train, stack, phases[0], folder)
    found = [*violations(stack, rows), *errors]
    if not found and not any(
        row["gradient"] for r in rows.values() for row in r.values()
    ):
        print("nothing was compared: no optimizer of torch was handed a gradient")
        return 2
    print("\n".join(found) or "no violation")
    return 1 if found else 0
