"""Parity: the training on ranks against the same training on one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median_high
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from ....fixtures import local
from ...rank.observe import gradient_places
from .passes import elements, objective
from .ranks import Rows, Stack, mapped

__all__ = ["departures", "flat", "local_values", "summed"]

SAFETY = 64  # one run measures the noise less well than several would
Values = dict[str, tuple[Any, Any]]  # name -> values and places of local elements


def local_values(
    grads: dict[str, Tensor], params: dict[str, Any], places: dict[str, Tensor]
) -> Values:
    """Gradients on this rank, each laid out as its parameter or otherwise."""
    found = {}
    for name, grad in grads.items():
        grad = summed(grad)
        where = gradient_places(grad, params[name], places[name].numpy())
        found[name] = flat(grad), where
    return found


def summed(grad: Tensor) -> Tensor:
    """Partial sums added up over their ranks."""
    if not isinstance(grad, DTensor):
        return grad
    whole = [Replicate() if p.is_partial() else p for p in grad.placements]
    return grad.redistribute(placements=whole)


def moved_settings(rows: Rows) -> list[dict[str, Any]]:
    """What the stack's schedules have moved, which is believed: by step and name."""
    seen = [
        {
            n: s
            for _, row in sorted(ranks.items())[::-1]
            for n, s in row["settings"].items()
        }
        for _, ranks in sorted(rows.items())
    ]
    values = defaultdict(set)
    for names in seen:
        for name, settings in names.items():
            for key, value in settings.items():
                values[name, key.removeprefix("initial_")].add(value)
    return [
        {
            n: {k: v for k, v in s.items() if len(values[n, k]) > 1}
            for n, s in names.items()
        }
        for names in seen
    ]


def alone(
    stack: Stack, double: bool, moved: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The training of one process on whole batches: by step, kind and name."""
    workload = stack.workload
    torch.manual_seed(stack.seed)
    model: nn.Module = workload.model()
    model = model.double() if double else model
    named = dict(model.named_parameters())
    optimizers = {"": workload.optimizer([*named.items()])}
    if stack.train_step:  # its groups may have other settings each
        trained = {n: p for n, p in named.items() if p.requires_grad}
        optimizers = {n: workload.optimizer([(n, p)]) for n, p in trained.items()}
    start = {n: p.detach().clone() for n, p in named.items()}
    idle: set[str] = set()
    for step, settings in enumerate(moved):
        batch = mapped(
            workload.batch(step, stack.seed),
            lambda t: t.double() if double and t.is_floating_point() else t,
        )
        parts = [batch]
        if stack.micro_batches:
            parts = [*stack.micro_batches(batch)]
        found = [objective(stack, model, *part) for part in parts]
        model.zero_grad()
        if stack.counted:
            total = float(sum(count for _, count in found))
            for value, _ in found:
                (value / total).backward()
        else:
            for (value, _), part in zip(found, parts, strict=True):
                (value * elements(part) / elements(batch)).backward()
        norm = torch.cat(
            [p.grad.flatten() for p in named.values() if p.grad is not None]
        )
        if stack.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), stack.clip_norm)
        grads = {n: flat(p.grad) for n, p in named.items() if p.grad is not None}
        # zeros and no gradient are both right, and weight decay acts on zeros only
        idle |= {n for n in named if n not in grads or not grads[n].any()}
        for name, optimizer in optimizers.items():
            for group in optimizer.param_groups:
                changed = settings.get(name, {})
                group.update({k: v for k, v in changed.items() if k in group})
            optimizer.step()
        steady = {n: p for n, p in named.items() if n not in idle}
        if type(optimizer) is not torch.optim.SGD:
            steady = {}  # other optimizers divide by values that may be only rounding
        yield {
            "gradient": grads,
            "norm": {"whole": flat(norm.norm())},
            "update": {n: flat(p - start[n]) for n, p in steady.items()},
            "rounding": {
                n: np.spacing(flat(p).astype("f")) / 2 for n, p in steady.items()
            },
        }


def flat(tensor: Tensor) -> Any:
    """A copy of the elements on this rank."""
    return local(tensor.detach()).double().flatten().numpy().copy()


def departures(rows: Rows, stack: Stack) -> Iterator[tuple[int, str]]:
    """Steps with the tensors whose error is far above that of one process in fp32."""
    noise: dict[tuple[str, str], float] = defaultdict(float)
    moved: list[dict[str, Any]] = [{} for _ in rows]
    if stack.train_step:
        moved = moved_settings(rows)
    runs = (alone(stack, double, moved) for double in (True, False))
    for step, (truth, plain) in enumerate(zip(*runs, strict=True)):
        hidden, usual = truth.pop("rounding"), 2.0**-24
        for kind, whole in truth.items():
            sizes = {n: float(np.linalg.norm(t)) for n, t in whole.items()}
            for name, size in sizes.items():
                errors = [plain[kind][name] - whole[name]]
                errors += [hidden[name]] if kind == "update" else []
                error = max(map(np.linalg.norm, errors)) / (size or 1)
                noise[kind, name] = max(noise[kind, name], float(error))
            usual = max(usual, median_high([noise[kind, n] for n in sizes] or [0.0]))
            for rank, row in sorted(rows[step].items()):
                wrong = {}
                for name in [n for n in row.get(kind, {}) if n in sizes]:
                    values, where = row[kind][name]
                    error = np.linalg.norm(values - whole[name][where])
                    limit = SAFETY * max(usual, noise[kind, name])
                    if not error <= limit * sizes[name]:
                        relative = error / (sizes[name] or 1)
                        wrong[name] = f"{relative:.2g} > {limit:.1g}"
                if wrong:
                    text = f"{kind}s are not those of one process: {[*wrong]}"
                    listed = ", ".join(wrong.values())
                    yield step, f"rank {rank}: {text}; relative errors {listed}"
