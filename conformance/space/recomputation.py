"""Activation checkpointing: parts of a model whose forward runs again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

from ...fixtures import (
    Batch,
    ResolvedWorkload,
    WorkloadError,
    is_workload,
    resolve_workload,
)
from .random_layers import turn_off_random_layers

__all__ = ["Recomputed", "recompute_in_backward", "why_not_recomputed"]

_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)
_ROUNDING = 1024 * 2.0**-24
"""Relative to the largest element: far above rounding, far below a wrong pass."""


def _nothing(_: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(kw_only=True)
class Recomputed:
    """The parts of one model that are computed again."""

    parts: dict[str, nn.Module]
    """By their names in the full model."""
    again: int = 0
    """Forwards that ran a second time."""
    around: Callable[[nn.Module], AbstractContextManager[None]] = _nothing
    """Entered around every forward of a part, the first one and those that follow:
    the hooks of the part itself run only once."""

    def add(self, name: str, part: nn.Module) -> None:
        """Make one part drop its activations."""
        if "forward" not in vars(part):  # else the method is another library's wrapper
            self.parts[name] = part
            part.forward = MethodType(_checkpointed(type(part), self), part)


def recompute_in_backward(model: nn.Module) -> Recomputed:
    """Make the parts of a model drop their activations and recompute in backward.

    Parts are the members of lists of modules, and beside these the smallest modules
    that hold no list. Only their ``forward`` is replaced: names, types and hooks stay,
    so that any layout can follow. Its hooks then run outside of the recomputation, as
    in ``fully_shard(checkpoint(block))``.

    Args:
        model: not laid out yet.

    Returns:
        The parts, with a count of recomputed forwards.
    """
    counted, parts = Recomputed(parts={}), {*_parts(model)}
    for name, module in model.named_modules():
        if module in parts:
            counted.add(name, module)
    return counted


def _checkpointed(kind: type[nn.Module], counted: Recomputed) -> Any:
    # A method: a deep copy binds it to the copy. It reads the class when called,
    # because fully_shard replaces the class.
    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # a part that the user compiles is not recomputed
        if torch.compiler.is_compiling():
            return type(self).forward(self, *args, **kwargs)
        runs = 0

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal runs
            counted.again += runs > 0
            runs += 1
            with counted.around(self):
                return type(self).forward(self, *args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    return forward


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not any(True for _ in child.parameters()):
            continue
        member = isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS)
        if member or not any(isinstance(m, _CONTAINERS) for m in child.modules()):
            yield child
        else:
            yield from _parts(child)


@cache
def why_not_recomputed(name: str) -> str:
    """Why a user's own model cannot run again in backward, or the empty string.

    Tested on one process, so that an error on ranks is the layout's. Also the empty
    string if the model cannot be called: ``check_workload`` reports that.
    """
    if not is_workload(name):
        return ""
    workload, calls = resolve_workload(name), 0

    def call(*_: Any) -> None:
        nonlocal calls
        calls += 1

    try:
        part, model = _first_pass(workload)
        value = _objective(workload, model, part)
        hook = register_module_forward_pre_hook(call)
        try:
            plain = _gradients(workload, model, value)
        finally:
            hook.remove()
    except WorkloadError:
        return ""
    if calls:
        return "its model recomputes by itself, in every recipe"
    part, model = _first_pass(workload)
    counted = recompute_in_backward(model)
    try:
        found = _gradients(workload, model, _objective(workload, model, part))
    except WorkloadError as error:
        return f"on one process its model cannot run again in backward: {error}"
    if not counted.again:
        return "its model calls no module of its own that has parameters"
    sizes = (float(g.abs().max()) for g in plain.values() if g.numel())
    largest = max(sizes, default=0.0)
    for parameter, gradient in plain.items():
        again = found.get(parameter)
        off = gradient if again is None else gradient - again
        if not bool((off.abs() <= _ROUNDING * largest).all()):
            return (
                f"on one process the gradient of {parameter} is another one where "
                "forward runs again: it depends on more than its inputs"
            )
    return ""


def _first_pass(workload: ResolvedWorkload) -> tuple[Batch, nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = workload.model()
    turn_off_random_layers(model)
    batch, own = workload.batch(0, 0), workload.micro_batches
    return (batch if own is None else own(batch)[0]), model


def _objective(workload: ResolvedWorkload, model: nn.Module, part: Batch) -> Tensor:
    with workload.calling("forward"):
        output = model(part.inputs)
    return workload.objective(output, part.targets)[0]


def _gradients(
    workload: ResolvedWorkload, model: nn.Module, value: Tensor
) -> dict[str, Tensor]:
    with workload.calling("backward"):
        value.backward()
    named = model.named_parameters()
    return {name: p.grad.to_dense() for name, p in named if p.grad is not None}
