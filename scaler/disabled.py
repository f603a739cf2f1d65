"""Clips of a disabled scaler.

Its other methods are one line each in ``grad_scaler.py``, as torch has them, so that a
program may still read and set ``_enabled``. A clip is not: gradients without a scale
have the same global norm over all ranks.
"""

from __future__ import annotations

import torch

from .clip_norm import norm_tensor, not_finite
from .config import Policy
from .core import ScalerCore
from .grads import clip_
from .row import CLIP


class Disabled(ScalerCore):
    """Clips gradients that carry no scale, and skips no step.

    Nothing lasts until an `update`: each clip is an iteration.

    Args:
        scaler: the disabled one, whose ranks sync.
    """

    _steps_without_gradients = True

    def __init__(self, scaler: ScalerCore) -> None:
        device, group, history = scaler._device, scaler._sync.group, scaler._history
        self._begin(device, group, history, "in_place", Policy())
        self._growth_factor, self._backoff_factor, self._growth_interval = 2.0, 0.5, 1
        self._was_scaled = True  # by one

    def _clip(
        self,
        optimizer: torch.optim.Optimizer | None,
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        *,
        steps: bool,
    ) -> torch.Tensor:
        method = "clip_and_step" if steps else "clip_grad_norm_"
        states, exchanges = self._per_optimizer_states, self._sync.exchanges
        part = self._iteration.lacking(states)
        if optimizer is not None:
            part = self._part_of(optimizer)
        try:
            measured = self._measure(
                part, method, max_norm, norm_type, refuses=error_if_nonfinite
            )
            if not measured.is_refused:
                clip_(measured.grads.values(), measured.factor, measured.carried)
                if steps and optimizer is not None:
                    optimizer.step()
        except BaseException as error:
            self._fail(error, part, method, CLIP, exchanges)
            raise
        finally:
            self._end_iteration()
        norm = norm_tensor(measured.norm, self._scale_or_one().device)
        if measured.is_refused and error_if_nonfinite:
            raise not_finite(norm, norm_type)
        return norm
