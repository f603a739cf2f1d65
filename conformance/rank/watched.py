"""Calls of a ``train_step``, watched: optimizers of torch, and the judged scaler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..record.steps import StepHooks
from .methods import TAKES_AN_OPTIMIZER
from .trace import Kind

__all__ = ["NoOptimizer", "WatchedScaler", "watching_optimizers"]


@contextmanager
def watching_optimizers(note: Callable[[Kind, Optimizer], None]) -> Iterator[None]:
    """Inside, ``note`` is called with each event of any torch optimizer.

    Kinds are ``BEGINS``, ``USES`` (once the gradients are there: after the optimizer's
    own hooks, and each time that a closure has made them) and ``STEPPED``.
    """
    hooks = StepHooks(
        begins=partial(note, Kind.BEGINS),
        uses=partial(note, Kind.USES),
        ended=partial(note, Kind.STEPPED),
    )
    hooks.install()
    try:
        yield
    finally:
        hooks.remove()


class NoOptimizer:
    """Stands for an optimizer that a rank lacks, in the order of the program."""


@cache
def lacking(place: int) -> NoOptimizer:
    """Stand-in for the optimizer number ``place`` (from 0), which this rank lacks."""
    return NoOptimizer()


class WatchedScaler:
    """The judged scaler, as ``train_step`` receives it.

    Every method is forwarded in one way: whatever it is called, a method that is handed
    optimizers may read and write their gradients, so ``handing`` surrounds it. A method
    that is handed None in place of an optimizer is handed a :class:`NoOptimizer`, for a
    rank that lacks the optimizer which others have there. Only ``scale`` and ``update``
    are changed: faults go into losses, and a recipe may set the scale.
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
            watch: a context for a call; its errors are the scaler's fault.
            inject: makes a loss bad where a fault is due, before it is scaled.
            handing: optimizer -> a context for a call that is handed it.
            new_scale: argument for ``update`` where it is given nothing.
        """
        self._scaler = scaler
        self._watch = watch
        self._inject = inject
        self._handing = handing
        self._new_scale = new_scale
        self._lacked: Counter[str] = Counter()
        """Method -> how often it was called without an optimizer in this step."""

    def scale(self, outputs: Any) -> Any:
        """A loss, or each of several, times the scale."""
        if isinstance(outputs, Tensor):
            outputs = self._inject(outputs)
        elif isinstance(outputs, Iterable):
            first, *others = outputs
            outputs = [self._inject(first), *others]
        with self._watch("scale"):
            return self._scaler.scale(outputs)

    def update(self, new_scale: Any = None) -> None:
        """Move the scale, or set it."""
        if new_scale is None:
            new_scale = self._new_scale
        with self._watch("update"):
            # no argument at all without a new scale: a scaler need not take None
            self._scaler.update(*[new_scale] * (new_scale is not None))

    # Methods of the class and not of __getattr__: torch's checkpoints save an object by
    # its state only if its class has both.

    def state_dict(self) -> Any:
        """The scaler's state."""
        return self._call("state_dict", self._scaler.state_dict)

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go on from a saved state."""
        return self._call("load_state_dict", self._scaler.load_state_dict, state_dict)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for before there is a scaler, by a copy
            raise AttributeError(name)
        value = getattr(self._scaler, name)
        if callable(value) and not isinstance(value, type):
            return partial(self._call, name, value)
        return value

    def _call(
        self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method of the scaler with the given arguments."""
        with ExitStack() as around:
            for optimizer in self._optimizers(name, [*args, *kwargs.values()]):
                around.enter_context(self._handing(optimizer))
            around.enter_context(self._watch(name))
            return method(*args, **kwargs)

    def _optimizers(self, name: str, given: Sequence[Any]) -> list[Any]:
        """The optimizers among the arguments of a method."""
        optimizers = [each for value in given for each in _flat(value)]
        optimizers = [each for each in optimizers if hasattr(each, "param_groups")]
        lacks = name in TAKES_AN_OPTIMIZER and given[:1] == [None]
        if lacks and not optimizers:
            optimizers.append(lacking(self._lacked[name]))
            self._lacked[name] += 1
        return optimizers


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]
