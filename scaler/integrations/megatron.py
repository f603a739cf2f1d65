"""Megatron-Core: one scale and one decision for all optimizers of a chain.

Megatron gives each optimizer of a ``ChainedOptimizer`` (dense, experts) a scaler of its
own, and scales the loss by the first one's. An overflow in one of them moves its scale
alone; from then on the others divide by a scale that the loss did not have.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from ..grad_scaler import GradScaler


class _SharedScale:
    """Object that an optimizer of the chain holds for its ``grad_scaler``."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler

    @property
    def scale(self) -> torch.Tensor:
        return self._scaler.scale(torch.ones((1,), device=self._scaler._device))

    @property
    def inv_scale(self) -> torch.Tensor:
        return self.scale.double().reciprocal().float()

    def update(self, found_inf: bool) -> None:
        """Nothing: the chain updates once for all."""

    def state_dict(self) -> dict[str, Any]:
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._scaler.load_state_dict(state_dict)


class _AllGradients:
    """All gradients of the chain as one optimizer, whose step is taken later."""

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        self.param_groups = param_groups

    def step(self) -> bool:
        """Return True, so that the caller sees that the scaler has called it."""
        return True


def share_scaler(optimizer: Any, scaler: GradScaler) -> None:
    """Let all optimizers of a chain have one scaler, and agree in one collective.

    Call it once, after ``get_megatron_optimizer`` and before a checkpoint is loaded.
    Each optimizer saves the scaler's state where it saved its own.

    Args:
        optimizer: what ``get_megatron_optimizer`` returned.
        scaler: for example ``GradScaler(init_scale=2.0**32, policy=Policy(
            min_scale=1.0, hysteresis=2))``, Megatron's defaults.

    Raises:
        TypeError: an optimizer keeps its gradients apart from its parameters
            (``use_precision_aware_optimizer``), where no scaler finds them.
    """
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    for each in chain:
        if getattr(each.config, "use_precision_aware_optimizer", False):
            raise TypeError(
                "share_scaler: use_precision_aware_optimizer keeps gradients in "
                "decoupled_grad, where no scaler finds them; switch it off."
            )
    for each in chain:
        each.grad_scaler = _SharedScale(scaler)
        # It copies gradients to the main ones and leaves check and division to us.
        each._unscale_main_grads_and_check_for_nan = lambda: False
    copy_gradients = optimizer.prepare_grads

    def prepare_grads(self: Any) -> bool:
        copy_gradients()
        return not _agree(scaler, optimizer.param_groups)

    optimizer.prepare_grads = MethodType(prepare_grads, optimizer)


def _agree(scaler: GradScaler, groups: list[dict[str, Any]]) -> bool:
    gradients = _AllGradients(groups)
    step: Callable[[Any], Any] = scaler.step
    taken = step(gradients)
    scaler.update()
    return bool(taken)
