"""Optimizers outside of torch's classes, for tests of the scaler."""

from typing import Any

import torch


class Duck:
    """Optimizer with groups and a step, but without ``state`` or torch's base class."""

    def __init__(self, *params: Any) -> None:
        self.param_groups: Any = [{"params": list(params), "lr": 1.0}]

    def step(self) -> Any:
        return move(self)


def move(optimizer: Any, divisor: Any = None) -> str:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad if divisor is None else p.grad / divisor)
    return "stepped"


class Slotted:
    """Optimizer without ``__dict__`` and weak references."""

    __slots__ = ("param_groups",)

    def __init__(self, *params: Any) -> None:
        self.param_groups = [{"params": list(params)}]

    def step(self) -> str:
        return move(self)


class Unhashable(Duck):
    """Optimizer that equals all others of its class, and cannot be hashed."""

    __hash__: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unhashable)


class Group:
    """Parameter group that offers only ``[]``."""

    def __init__(self, params: Any) -> None:
        self.params = params

    def __getitem__(self, name: str) -> Any:
        return {"params": self.params}[name]


class Wrapper:
    """Wraps an optimizer, and keeps the groups that it has at the time of wrapping."""

    def __init__(self, inner: Any) -> None:
        self.optimizer = inner
        self.param_groups = inner.param_groups

    def step(self) -> Any:
        return self.optimizer.step()


class Follower:
    """Wraps an optimizer, and returns its current groups, like accelerate's wrapper."""

    def __init__(self, inner: Any) -> None:
        self.optimizer = inner

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step()


def knows_its_wrapper(inner: Any) -> Any:
    """Return a wrapper; the optimizer inside refers to it."""
    inner.wrapper = wrapper = Wrapper(inner)
    return wrapper


class Delegating:
    """Wrapper that looks up every attribute in its optimizer."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


class Refusing:
    """Optimizer whose ``param_groups`` raises."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    @property
    def param_groups(self) -> Any:
        raise self.error


class Fused(Duck):
    """Divides and skips by itself."""

    _step_supports_amp_scaling: Any = True
    grad_scale: Any
    found_inf: Any

    def step(self) -> Any:
        if float(self.found_inf):
            return None
        return move(self, self.grad_scale)


class TakesScaler(Duck):
    """Fused optimizer of the old contract: ``step`` gets the scaler as an argument."""

    _step_supports_amp_scaling = True

    def step(self, *, grad_scaler: Any = None) -> Any:
        found = grad_scaler._check_inf_per_device(self)
        if any(float(flag) for flag in found.values()):
            return None
        return move(self, grad_scaler._get_scale_async())
