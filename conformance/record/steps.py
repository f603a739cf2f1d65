"""Hooks for the steps of torch's optimizers: begin, gradients computed, end."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

__all__ = ["StepHooks", "parameters_of"]


@dataclass
class _Running:
    """A running step of an optimizer."""

    optimizer: Optimizer
    height: int
    """Depth of the call stack at the outermost call of ``step``."""
    last: Any
    """Handle of our hook, which runs after the optimizer's own hooks."""
    depth: int = 1
    """Number of nested calls of ``step``: a class may call the ``step`` of its base."""


@dataclass
class StepHooks:
    """Calls three functions at each step of any torch optimizer.

    If a step raises an error, ``ended`` is not called for it. The optimizer may then
    begin another step.
    """

    begins: Callable[[Optimizer], object]
    uses: Callable[[Optimizer], object]
    """Called once the gradients are computed: after the optimizer's own hooks, and each
    time that a closure has computed them."""
    ended: Callable[[Optimizer], object]
    only_plain: bool = False
    """True to ignore compiled steps, whose graph a hook would change, and to ignore a
    step inside the step of an optimizer with the same parameters, as in torch's
    ``ZeroRedundancyOptimizer``."""
    _running: dict[int, _Running] = field(default_factory=dict)
    """id of an optimizer -> its running step."""
    _handles: list[Any] = field(default_factory=list)

    def install(self) -> None:
        """Register the hooks."""
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in [*self._handles, *(each.last for each in self._running.values())]:
            handle.remove()
        self._running.clear()

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self.only_plain and torch.compiler.is_compiling():
            return
        outer = self._running.get(id(optimizer))
        height = _height()
        if outer is not None and height > outer.height:
            outer.depth += 1
            return
        # the previous step raised an error, which the job has caught
        if outer is not None:
            outer.last.remove()
        if self.only_plain and self._is_part(optimizer, height):
            return
        self.begins(optimizer)
        # hooks of the job may wait for gradients, so this hook runs last
        last = optimizer.register_step_pre_hook(self._uses)
        self._running[id(optimizer)] = _Running(optimizer, height, last)

    def _is_part(self, optimizer: Optimizer, height: int) -> bool:
        """Return True if an outer step trains all parameters of this optimizer."""
        outers = [each for each in self._running.values() if each.height < height]
        if not outers:  # true for nearly every step of a job
            return False
        own = parameters_of(optimizer)
        return any(own <= parameters_of(outer.optimizer) for outer in outers)

    def _uses(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self.uses(optimizer)
            return None

        def evaluated() -> Any:  # a trainer may compute gradients in the closure
            loss = closure()
            self.uses(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": evaluated}
        return (args[0], evaluated, *args[2:]), kwargs

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if self.only_plain and torch.compiler.is_compiling():
            return
        running = self._running.get(id(optimizer))
        if running is None:
            return
        running.depth -= 1
        if not running.depth:
            del self._running[id(optimizer)]
            running.last.remove()
            self.ended(optimizer)


def parameters_of(optimizer: Any) -> set[int]:
    """Return the ids of an optimizer's parameters that require gradients."""
    groups = getattr(optimizer, "param_groups", ())  # a wrapper may have none
    every = (p for group in groups for p in group["params"])
    return {id(p) for p in every if p.requires_grad}


def _height() -> int:
    """Return the depth of the call stack at the caller's caller."""
    frame: Any = sys._getframe(2)
    height = 0
    while frame is not None:
        frame, height = frame.f_back, height + 1
    return height
