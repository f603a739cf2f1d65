"""The contract with optimizers that divide by the scale and skip by themselves."""

from __future__ import annotations

import inspect
import warnings
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["makes_momentum", "step_with", "wants_scaler"]


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


def makes_momentum(optimizer: Any) -> bool:
    """Return whether the next step makes the momentum of an SGD, and must be taken.

    torch's fused SGD makes it of uninitialised memory for the kernel to fill. A kernel
    that is told to skip does not, and the next step takes what lay there (B21).
    """
    if not any(group.get("momentum") for group in optimizer.param_groups):
        return False
    states = optimizer.state.values()
    return not any(state.get("momentum_buffer") is not None for state in states)


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
