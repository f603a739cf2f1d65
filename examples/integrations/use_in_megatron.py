"""One scale for all optimizers of Megatron-Core's ``ChainedOptimizer``: copy this file.

    optimizer = get_megatron_optimizer(...)
    policy = Policy(min_scale=1.0, hysteresis=2)  # Megatron's defaults
    share_scaler(optimizer, GradScaler("cuda", init_scale=2.0**32, policy=policy))

Call it before a checkpoint is loaded. Megatron gives each optimizer of a chain (dense,
experts) a scaler of its own, and scales the loss by the first scaler. An overflow in
one optimizer changes only its own scale; from then on the others divide by a scale that
the loss did not have. ``megatron_chained.py`` beside it runs both in half a minute.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from gradparity.scaler import GradScaler


class SharedScale:
    """Object that each optimizer of the chain has as its ``grad_scaler``."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self.state_dict = scaler.state_dict
        self.load_state_dict = scaler.load_state_dict

    @property
    def scale(self) -> torch.Tensor:
        """Scale by which the loss is multiplied, of shape (1,)."""
        return self._scaler.scale(torch.ones((1,), device=self._scaler._device))

    def update(self, found_inf: bool) -> None:
        """Do nothing: the chain updates the scale once for all optimizers."""


def share_scaler(optimizer: Any, scaler: GradScaler) -> None:
    """Let all optimizers of a chain share one scaler, with one sync collective."""
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(each.config, "use_precision_aware_optimizer", False):
            raise TypeError("share_scaler: switch use_precision_aware_optimizer off")
        each.grad_scaler = SharedScale(scaler)
        # It copies gradients to the main ones; check and division are ours.
        each._unscale_main_grads_and_check_for_nan = lambda: False
    prepare = optimizer.prepare_grads
    # All gradients as one optimizer, whose step is taken later.
    whole: Any = SimpleNamespace(step=lambda: True)

    def prepare_grads() -> bool:
        prepare()
        whole.param_groups = optimizer.param_groups
        has_stepped = scaler.step(whole)
        scaler.update()
        return not has_stepped

    optimizer.prepare_grads = prepare_grads
