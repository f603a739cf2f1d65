"""Accelerate, and with it transformers' Trainer: what ``accelerator.scaler`` leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from ..grad_scaler import GradScaler


def use_scaler(accelerator: Any, scaler: GradScaler) -> None:
    """Take ``scaler``, and keep its state through ``save_state`` and ``load_state``.

    Under FSDP2 both give an optimizer without state one, by a step of the prepared
    optimizer with gradients of zero. That step moves the scaler that is being saved or
    has just been loaded, so both run without it.
    On a CPU, where Accelerate has no fp16, its calls to the scaler are switched on.

    Args:
        accelerator: made with ``mixed_precision="fp16"``, before ``prepare``.
        scaler: of the accelerator's device.
    """
    accelerator.scaler = scaler
    accelerator.native_amp = True
    for name in ("save_state", "load_state"):
        own = getattr(accelerator, name)
        setattr(accelerator, name, _with_bare_optimizers(accelerator, own))


def _with_bare_optimizers(
    accelerator: Any, call: Callable[..., Any]
) -> Callable[..., Any]:
    @wraps(call)
    def bare(*args: Any, **settings: Any) -> Any:
        held = [(optimizer, optimizer.scaler) for optimizer in accelerator._optimizers]
        for optimizer, _ in held:
            optimizer.scaler = None
        try:
            return call(*args, **settings)
        finally:
            for optimizer, scaler in held:
                optimizer.scaler = scaler

    return bare
