"""The contract with optimizers that divide by the scale and skip by themselves."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["step_with", "wants_scaler"]


def wants_scaler(optimizer: Optimizer) -> bool:
    """Return whether ``step`` asks for the scaler itself, the old contract."""
    if "grad_scaler" not in inspect.signature(optimizer.step).parameters:
        return False
    warnings.warn(
        "GradScaler is going to stop passing itself as a keyword argument to the "
        "passed optimizer. It sets `grad_scale` and `found_inf` on it instead.",
        FutureWarning,
        stacklevel=4,
    )
    return True


def step_with(optimizer: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Step with ``grad_scale`` and ``found_inf`` set, and remove them again.

    Args:
        optimizer: its step reads both attributes.
        state: holds both, () fp32 each, and gives them up.
        *args: handed to ``optimizer.step``.
        **kwargs: handed to ``optimizer.step``.
    """
    optimizer.grad_scale = state.pop("grad_scale")
    optimizer.found_inf = state.pop("found_inf")
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf
