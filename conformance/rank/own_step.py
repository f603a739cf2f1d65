"""The step of a workload that trains by itself, observed from outside.

``train_step`` owns the passes, the clipping and the step. What the judge does between
two calls of its own loop it does here inside of them: a scaler is handed over behind a
thin object that watches its calls and plants faults, and hooks that torch calls for
every optimizer show which gradients are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...fixtures import ResolvedWorkload

__all__ = ["OptimizerCalls", "WatchedScaler", "as_number", "parameters_of"]


def as_number(workload: ResolvedWorkload, what: str, value: Any) -> float | None:
    """A loss or a norm that ``train_step`` returned.

    Raises:
        WorkloadError: if it is no number.
    """
    if value is None:
        return None
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.detach()
        value = (value.full_tensor() if isinstance(value, DTensor) else value).item()
    if not isinstance(value, int | float):
        text = f"returned {value!r:.80} as the {what}, expected a number or None"
        raise workload.refuse("train_step", text)
    return float(value)


class OptimizerCalls:
    """Sees every optimizer of torch that is called while it is active."""

    def __init__(
        self, workload: ResolvedWorkload, before_step: Callable[[Optimizer], None]
    ) -> None:
        """Take what is to be done before each call.

        Args:
            workload: the workload.
            before_step: called with an optimizer that is about to step.
        """
        self.workload = workload
        self.before_step = before_step
        self.seen = 0
        self._depth: Counter[int] = Counter()
        self._stepped: set[int] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it a parameter may be stepped once."""
        self.seen = 0
        self._depth.clear()
        self._stepped.clear()
        hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth[id(optimizer)] += 1
        if self._depth[id(optimizer)] > 1:
            return  # its class calls the step of its base class
        self.seen += 1
        used = {id(p) for p in parameters_of(optimizer) if p.grad is not None}
        if used & self._stepped:
            text = f"stepped twice in one call: {type(optimizer).__name__}.step() came"
            raise self.workload.refuse(
                "train_step", f"{text} again for the same parameters"
            )
        self._stepped |= used
        self.before_step(optimizer)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth[id(optimizer)] -= 1


def parameters_of(optimizer: Any) -> list[Tensor]:
    """All that an optimizer steps, or nothing where it does not say."""
    groups = getattr(optimizer, "param_groups", ())
    return [p for group in groups for p in group["params"]]


class WatchedScaler:
    """The judged scaler, as ``train_step`` is handed it.

    The judge watches the calls that all scalers have; any other goes straight through.
    """

    def __init__(
        self,
        scaler: Any,
        *,
        watch: Callable[[str], AbstractContextManager[None]],
        inject: Callable[[Tensor], Tensor],
        before: Callable[[Any], None],
        new_scale: float | None,
    ) -> None:
        """Take the scaler and what to do around its calls.

        Args:
            scaler: the judged one.
            watch: a context for a call; what that raises is the scaler's fault.
            inject: makes a loss bad where a fault is due, before it is scaled.
            before: called with an optimizer before the scaler unscales or steps it.
            new_scale: what ``update`` is given where it is given nothing.
        """
        self._scaler = scaler
        self._watch = watch
        self._inject = inject
        self._before_call = before
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
        self._before_call(optimizer)
        with self._watch("unscale_"):
            self._scaler.unscale_(optimizer)

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer or skip."""
        self._before_call(optimizer)
        with self._watch("step"):
            return self._scaler.step(optimizer, *args, **kwargs)

    def update(self, new_scale: Any = None) -> None:
        """Move the scale, or set it."""
        if new_scale is None:
            new_scale = self._new_scale
        with self._watch("update"):
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
        return getattr(self._scaler, name)
