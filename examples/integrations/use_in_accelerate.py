"""Our scaler in Accelerate, and with it in transformers' Trainer: copy this file.

    use_scaler(accelerator, GradScaler("cuda"))  # before accelerator.prepare

Needs no more than gradparity; ``accelerate_step.py`` beside it runs it in a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from gradparity.scaler import GradScaler


def use_scaler(accelerator: Any, scaler: GradScaler) -> None:
    """Use ``scaler``, and keep its state through ``save_state`` and ``load_state``.

    Under FSDP2 both methods step an optimizer that has no state, with gradients of
    zero. That step would change the scaler that is being saved or was just loaded. So
    both run without a scaler.
    """
    accelerator.scaler = scaler
    accelerator.native_amp = True  # also on a CPU, where Accelerate has no fp16
    for name in ("save_state", "load_state"):
        bare = without_scaler(accelerator, getattr(accelerator, name))
        setattr(accelerator, name, bare)


def without_scaler(accelerator: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``call`` with the scaler taken out of each prepared optimizer."""

    @wraps(call)
    def bare(*args: Any, **settings: Any) -> Any:
        scalers = [(each, each.scaler) for each in accelerator._optimizers]
        for optimizer, _ in scalers:
            optimizer.scaler = None
        try:
            return call(*args, **settings)
        finally:
            for optimizer, scaler in scalers:
                optimizer.scaler = scaler

    return bare
