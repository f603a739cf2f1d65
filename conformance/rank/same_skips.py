"""Scaler of a reference on one rank: it skips the steps that the ranks must skip.

It has the methods of torch's ``GradScaler``, and those that other scalers add: a
workload's ``train_step`` makes the same calls on one rank and on the mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from ...fixtures import local
from ..formulas import clip_factor
from ..space.scenario import Scenario
from .variation import Alone

__all__ = ["SameSkips"]


class SameSkips:
    """A scaler that uses given scales and makes given skips."""

    def __init__(
        self, alone: Alone, scenario: Scenario, names_of: Callable[[Any], set[str]]
    ) -> None:
        """Take the scales and skips.

        Args:
            alone: scale and skips of each step.
            scenario: growth and backoff factors that getters return.
            names_of: optimizer -> names of the parameters that it steps, if known.
        """
        self.skips = alone.skipped
        self.scales = [*alone.scales, alone.scales[-1]]
        self.scenario = scenario
        self.names_of = names_of
        self.at = 0
        self.unscaled: set[int] = set()
        self.skipped: dict[int, bool] = {}
        """Maps the id of an optimizer to True if its last step was skipped."""

    def scale(self, outputs: Any) -> Any:
        """Multiply losses by the scale, also in nested iterables, as torch does."""
        if isinstance(outputs, Tensor):
            return outputs * self.get_scale()
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients by the scale."""
        if optimizer is None:
            return
        self.unscaled.add(id(optimizer))
        for parameter in _with_gradients(optimizer):
            parameter.grad /= self.get_scale()

    def clip_grad_norm_(
        self,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Unscale and clip; one rank holds the whole gradient."""
        if optimizer is None:
            return torch.zeros(())
        if id(optimizer) not in self.unscaled:
            self.unscale_(optimizer)
        gradients = [local(p.grad) for p in _with_gradients(optimizer)]
        norm = get_total_norm(gradients, norm_type, error_if_nonfinite)
        for gradient in gradients:
            gradient *= clip_factor(float(norm), max_norm)
        return norm

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, unless it must skip this step."""
        if optimizer is None:
            return None
        if id(optimizer) not in self.unscaled:
            self.unscale_(optimizer)
        due = self.skips[self.at] if self.at < len(self.skips) else frozenset()
        names = self.names_of(optimizer)
        # without names, it may step copies of any parameter, so it makes each skip
        skip = bool(due) and (not names or bool(due & names))
        self.skipped[id(optimizer)] = skip
        return None if skip else optimizer.step(*args, **kwargs)

    def clip_and_step(
        self,
        optimizer: Any,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clip, then step the optimizer, unless it must skip this step."""
        norm = self.clip_grad_norm_(optimizer, max_norm, norm_type, error_if_nonfinite)
        self.step(optimizer)
        return norm

    def step_was_skipped(self, optimizer: Any) -> bool:
        """Return True if the last step of this optimizer was skipped."""
        return self.skipped[id(optimizer)]

    def step_scheduler(self, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
        """Step a schedule unless its optimizer was skipped; return True if stepped."""
        if self.skipped.get(id(scheduler.optimizer), False):
            return False
        scheduler.step(*args, **kwargs)
        return True

    def update(self, new_scale: Any = None) -> None:
        """Go to the scale of the next step."""
        self.at = min(self.at + 1, len(self.scales) - 1)
        self.unscaled.clear()

    def get_scale(self) -> float:
        """Return the scale of this step."""
        return self.scales[self.at]

    def get_growth_factor(self) -> float:
        """Return the scenario's growth factor."""
        return self.scenario.growth_factor

    def get_backoff_factor(self) -> float:
        """Return the scenario's backoff factor."""
        return self.scenario.backoff_factor

    def get_growth_interval(self) -> int:
        """Return the scenario's growth interval."""
        return self.scenario.growth_interval

    def set_growth_factor(self, new_factor: float) -> None:
        """Do nothing: the scales of all steps are given."""

    def set_backoff_factor(self, new_factor: float) -> None:
        """Do nothing: the scales of all steps are given."""

    def set_growth_interval(self, new_interval: int) -> None:
        """Do nothing: the scales of all steps are given."""

    def state_dict(self) -> dict[str, Any]:
        """Return the entries of a scaler's checkpoint."""
        return {"scale": self.get_scale(), "_growth_tracker": 0}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: the scales of all steps are given."""

    def is_enabled(self) -> bool:
        """Return True: this scaler is always enabled."""
        return True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the scaler of the reference on one rank has no {name!r}: train_step may "
            f"use it only if hasattr(scaler, {name!r})",
            name=name,
            obj=self,
        )


def _with_gradients(optimizer: Any) -> list[Any]:
    each = [p for group in optimizer.param_groups for p in group["params"]]
    return [p for p in each if p.grad is not None]
