"""What a ``train_step`` calls, watched: optimizers of torch, and the judged scaler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .trace import Kind

__all__ = ["WatchedScaler", "watching_optimizers"]


@contextmanager
def watching_optimizers(note: Callable[[Kind, Optimizer], None]) -> Iterator[None]:
    """Within it ``note`` is called with what happens to any optimizer of torch.

    Kinds are ``BEGINS``, ``USES`` (once the gradients are there: after the optimizer's
    own hooks, and each time that a closure has made them) and ``STEPPED``.
    """
    depth: Counter[int] = Counter()
    last: dict[int, Any] = {}  # of those in the midst of a step

    def begins(optimizer: Optimizer, *_: Any) -> None:
        depth[id(optimizer)] += 1
        if depth[id(optimizer)] > 1:
            return  # its class calls the step of its base class
        note(Kind.BEGINS, optimizer)
        # a hook of the stack's own may wait for gradients that are still on their way
        last[id(optimizer)] = optimizer.register_step_pre_hook(about_to_step)

    def about_to_step(
        optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            note(Kind.USES, optimizer)
            return None

        def observed() -> Any:
            found = closure()
            note(Kind.USES, optimizer)
            return found

        if "closure" in kwargs:
            return args, {**kwargs, "closure": observed}
        return (args[0], observed, *args[2:]), kwargs

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        depth[id(optimizer)] -= 1
        if not depth[id(optimizer)]:
            last.pop(id(optimizer)).remove()
            note(Kind.STEPPED, optimizer)

    hooks = [
        register_optimizer_step_pre_hook(begins),
        register_optimizer_step_post_hook(stepped),
    ]
    try:
        yield
    finally:
        # of an optimizer that raised in its step, the second was not called
        for hook in [*hooks, *last.values()]:
            hook.remove()


class WatchedScaler:
    """The judged scaler, as ``train_step`` receives it.

    The judge watches the calls that all scalers have; any other goes straight through.
    """

    def __init__(
        self,
        scaler: Any,
        *,
        watch: Callable[[str], AbstractContextManager[None]],
        inject: Callable[[Tensor], Tensor],
        handing: Callable[[Any], AbstractContextManager[None]],
        new_scale: float | None,
    ) -> None:
        """Take the scaler and what to do around its calls.

        Args:
            scaler: the judged one.
            watch: a context for a call; what that raises is the scaler's fault.
            inject: makes a loss bad where a fault is due, before it is scaled.
            handing: optimizer -> a context for a call that unscales, clips or steps it.
            new_scale: what ``update`` is given where it is given nothing.
        """
        self._scaler = scaler
        self._watch = watch
        self._inject = inject
        self._handing = handing
        self._new_scale = new_scale

    def scale(self, outputs: Any) -> Any:
        """A loss, or each of several, times the scale."""
        if isinstance(outputs, Tensor):
            outputs = self._inject(outputs)
        elif isinstance(outputs, Iterable):
            first, *others = outputs
            outputs = [self._inject(first), *others]
        with self._watch("scale"):
            return self._scaler.scale(outputs)

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients of an optimizer by the scale."""
        with self._handing(optimizer), self._watch("unscale_"):
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer or skip."""
        with self._handing(optimizer), self._watch("step"):
            return self._scaler.step(optimizer, *args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        """Move the scale, or set it."""
        if new_scale is None:
            new_scale = self._new_scale
        with self._watch("update"):
            # no argument at all without a new scale: a scaler need not take None
            self._scaler.update(*[new_scale] * (new_scale is not None))

    def get_scale(self) -> float:
        """The scale as a number."""
        with self._watch("get_scale"):
            return float(self._scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """The scaler's state."""
        with self._watch("state_dict"):
            state: dict[str, Any] = self._scaler.state_dict()
            return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        with self._watch("load_state_dict"):
            self._scaler.load_state_dict(state_dict)

    def is_enabled(self) -> bool:
        """Whether it scales at all."""
        with self._watch("is_enabled"):
            return bool(self._scaler.is_enabled())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for before there is a scaler, by a copy
            raise AttributeError(name)
        if name == "clip_grad_norm_":  # not all scalers have it
            return partial(self._clip, self._scaler.clip_grad_norm_)
        return getattr(self._scaler, name)

    def _clip(
        self, clip: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        with self._handing(optimizer), self._watch("clip_grad_norm_"):
            return clip(optimizer, *args, **kwargs)
