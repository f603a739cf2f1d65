"""Fused optimizers: they divide by the scale and skip in their kernel."""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from typing import Any

import torch

from .grads import any_of, is_true
from .iteration import Part


def is_fused(optimizer: Any) -> bool:
    """Return whether the optimizer divides by ``grad_scale`` and skips by itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_fused(
    part: Part,
    grad_scale: torch.Tensor | None,
    device: torch.device,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Step a fused optimizer, unless the host sees that it would skip.

    Args:
        part: of the optimizer.
        grad_scale: what the kernel is still to divide by.
        device: of the scale.
        args: handed to ``optimizer.step``.
        kwargs: likewise.
    """
    optimizer, record = part.optimizer, part.record
    assert record is not None
    own = getattr(optimizer, "grad_scale", None)  # torch's: the user's own
    # What an interrupted step has left there is not the user's.
    if own is not None and own is not record.grad_scale:
        grad_scale = own if grad_scale is None else grad_scale * own
    # An object of its own: the user may set one tensor before each step.
    if isinstance(grad_scale, torch.Tensor):
        grad_scale = grad_scale.detach()
    flags = part.found.values()
    # The int 0, as torch's sum, where nothing was checked: a kernel that finds
    # gradients made since raises, where a tensor would let it step on scaled ones.
    found_inf: Any = any_of(flags, device) if flags else 0
    record.grad_scale = grad_scale
    try:
        optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
        # bool synchronises, until an SGD with momentum has taken its first step.
        if flags and (
            is_true(found_inf) or (makes_momentum(optimizer) and bool(found_inf))
        ):
            return None
        return optimizer.step(*args, **kwargs)
    finally:
        for name in ("grad_scale", "found_inf"):
            with contextlib.suppress(AttributeError):  # interrupted before it was
                delattr(optimizer, name)


def takes_scaler(optimizer: Any, *, stacklevel: int) -> bool:
    """Return whether ``step`` asks for the scaler itself, the old contract.

    Warns then, as torch does, of the line ``stacklevel`` frames above.
    """
    step: Any = getattr(optimizer.step, "__func__", optimizer.step)
    try:
        takes_it = _TAKES_SCALER.get(step)
    except TypeError:  # a callable that cannot be a key
        takes_it = None
    if takes_it is None:  # reading a signature takes longer than a small step
        takes_it = "grad_scaler" in inspect.signature(step).parameters
        with contextlib.suppress(TypeError):
            _TAKES_SCALER[step] = takes_it
    if takes_it:
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the "
            "passed optimizer. It sets `grad_scale` and `found_inf` on it instead.",
            FutureWarning,
            stacklevel=stacklevel,
        )
    return takes_it


_TAKES_SCALER: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def makes_momentum(optimizer: Any) -> bool:
    """Return whether the next step makes the momentum of torch's SGD, in any group.

    torch's fused SGD makes it of uninitialised memory for the kernel to fill, for a
    whole group at once. A kernel that is to skip does not fill it, and the next step
    takes what lay there (B21).
    """
    try:
        for group in optimizer.param_groups:
            if group["momentum"]:
                firsts = (p for p in group["params"] if p.grad is not None)
                first = next(firsts, None)
                state = optimizer.state.get(first, {})
                if first is not None and state.get("momentum_buffer") is None:
                    return True
    except Exception:  # an optimizer that keeps no momentum as SGD does
        return False
    return False
