"""The contract with optimizers that divide by the scale and skip by themselves."""

from __future__ import annotations

import inspect
import warnings
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["step_with", "wants_scaler"]


def wants_scaler(optimizer: Optimizer) -> bool:
    """Return whether ``step`` asks for the scaler itself, the old contract."""
    step: Any = optimizer.step
    if not _takes_scaler(getattr(step, "__func__", step)):
        return False
    warnings.warn(
        "GradScaler is going to stop passing itself as a keyword argument to the "
        "passed optimizer. It sets `grad_scale` and `found_inf` on it instead.",
        FutureWarning,
        stacklevel=4,
    )
    return True


def _takes_scaler(step: Any) -> bool:
    # Reading a signature takes longer than a small step.
    try:
        known = _TAKES_SCALER.get(step)
    except TypeError:  # a callable that cannot be a key
        return "grad_scaler" in inspect.signature(step).parameters
    if known is None:
        known = "grad_scaler" in inspect.signature(step).parameters
        _TAKES_SCALER[step] = known
    return known


_TAKES_SCALER: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


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
