"""What is remembered of an optimizer between two calls of update()."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.amp.grad_scaler import OptState

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["fresh_state", "real_optimizer", "refuse_closure"]

_WRAPPED = ("optimizer", "_optimizer", "base_optimizer")


def fresh_state() -> dict[str, Any]:
    """Return the state of an optimizer that was not seen in this iteration."""
    return {"stage": OptState.READY, "found_inf_per_device": {}}


def real_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside wrappers that share its parameter groups.

    ``unscale_(inner)`` and ``step(wrapper)`` then mean the same gradients, which are
    unscaled once.
    """
    for name in _WRAPPED:
        inner = getattr(optimizer, name, None)
        groups = getattr(inner, "param_groups", None)
        if inner is None or groups is None or inner is optimizer:
            continue
        if groups is getattr(optimizer, "param_groups", None):
            return real_optimizer(inner)
    return optimizer


def refuse_closure(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a closure however it is handed over.

    It would compute new, scaled gradients after the check, inside the optimizer.

    Raises:
        RuntimeError: there is one.
    """
    positional: Callable[..., Any] | None = next(filter(callable, args[:1]), None)
    if "closure" in kwargs or positional is not None:
        raise RuntimeError(
            "Closure use is not currently supported if GradScaler is enabled."
        )
