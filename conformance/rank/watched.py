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

from ...fixtures import REFERENCE_LINE, ResolvedWorkload
from .torch_internals import nodes_made

__all__ = ["OptimizerCalls", "WatchedScaler", "parameters_of"]


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
        self._last: dict[int, Any] = {}
        """Optimizers in the midst of a step -> the hook that is called last."""
        self._evaluated_again = False
        self._nodes: int | None = None
        """Nodes of the autograd graph when the first one had stepped."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within it a parameter may be stepped once."""
        self.seen = 0
        self._depth.clear()
        self._stepped.clear()
        self._evaluated_again, self._nodes = False, None
        hooks = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]
        try:
            yield
        finally:
            # of an optimizer that raised in its step, _after was not called
            for hook in [*hooks, *self._last.values()]:
                hook.remove()
            self._last.clear()

    @property
    def is_late(self) -> bool:
        """Whether a forward ran after one has stepped: with other weights.

        Seen by the nodes of the autograd graph, which a forward creates: a hook on all
        modules would be traced into what a user compiles.
        """
        if self._evaluated_again:
            return True
        return self._nodes is not None and nodes_made() != self._nodes

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth[id(optimizer)] += 1
        if self._depth[id(optimizer)] > 1:
            return  # its class calls the step of its base class
        self.seen += 1
        used = {id(p) for p in parameters_of(optimizer) if p.grad is not None}
        # a container of optimizers steps those in it
        inside = self.is_inside(optimizer)
        # a step trace has one gradient and one decision for each parameter
        if used & self._stepped and not inside and not self.workload.one_rank:
            text = f"stepped twice in one call: {type(optimizer).__name__}.step() came"
            raise self.workload.refuse(
                "train_step", f"{text} again for the same parameters; {REFERENCE_LINE}"
            )
        self._stepped |= used
        # a hook of the stack's own may wait for gradients that are still on their way
        last = optimizer.register_step_pre_hook(self._about_to_step)
        self._last[id(optimizer)] = last

    def is_inside(self, optimizer: Optimizer) -> bool:
        """Whether another optimizer is in the midst of its step."""
        return any(self._depth[key] for key in self._depth if key != id(optimizer))

    def _about_to_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Have ``before_step`` called, where a closure makes the gradients in there."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self.before_step(optimizer)
            return None

        calls = 0

        def observed() -> Any:
            nonlocal calls
            calls += 1
            # it evaluates the loss again, after it has moved the weights
            self._evaluated_again |= calls > 1
            found = closure()
            self.before_step(optimizer)
            return found

        if "closure" in kwargs:
            return args, {**kwargs, "closure": observed}
        return (args[0], observed, *args[2:]), kwargs

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth[id(optimizer)] -= 1
        if not self._depth[id(optimizer)] and id(optimizer) in self._last:
            self._last.pop(id(optimizer)).remove()
        if self._nodes is None:
            self._nodes = nodes_made()


def parameters_of(optimizer: Any) -> list[Tensor]:
    """All that an optimizer steps, or nothing where it does not say."""
    groups = getattr(optimizer, "param_groups", ())
    return [p for group in groups for p in group["params"]]


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
        self._before_call(optimizer)
        with self._watch("clip_grad_norm_"):
            return clip(optimizer, *args, **kwargs)
