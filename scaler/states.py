"""What is remembered of an optimizer between two calls of update()."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.amp.grad_scaler import OptState

from .unscale import parameters_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = [
    "Divided",
    "divided_before",
    "fresh_state",
    "real_optimizer",
    "refuse_closure",
]

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
        if inner is None or inner is optimizer:
            continue
        groups = getattr(inner, "param_groups", None)
        if groups is not None and groups is getattr(optimizer, "param_groups", None):
            return real_optimizer(inner)
    return optimizer


Divided = dict[int, tuple[Any, Any]]
"""By id of a parameter: the parameter, and what a fused kernel found before it divided
the gradient, (), fp32; None if it was divided without condition."""


def divided_before(optimizer: Optimizer, others: Iterable[dict[str, Any]]) -> Divided:
    """Return the parameters of ``optimizer`` whose gradients were divided already.

    Args:
        optimizer: it is about to be looked at.
        others: states of the other optimizers of this iteration.
    """
    divided: Divided = {}
    for state in others:
        if state["stage"] is not OptState.READY and "optimizer" in state:
            for parameter in parameters_of(state["optimizer"]):
                divided[id(parameter)] = parameter, state.get("by_kernel")
    if not divided:
        return divided
    mine = {id(parameter) for parameter in parameters_of(optimizer)}
    return {key: divided[key] for key in mine & divided.keys()}


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
