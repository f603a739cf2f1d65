"""Observe calls of a ``train_step`` to torch optimizers and to the tested scaler."""

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
    """Call ``note`` with each event of any torch optimizer in this context.

    Kinds are ``BEGINS``, ``USES`` and ``STEPPED``. ``USES`` comes once the gradients
    are computed: after the optimizer's own hooks, and after each call of a closure.
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
    """Stand-in for an optimizer that this rank lacks but other ranks have."""


@cache
def lacking(place: int) -> NoOptimizer:
    """Return the stand-in for this rank's missing optimizer number ``place``."""
    return NoOptimizer()


class WatchedScaler:
    """The tested scaler, as ``train_step`` receives it.

    Every method is forwarded in the same way. A method that takes optimizers may read
    and write their gradients, so ``handing`` surrounds it. If a method gets None in
    place of an optimizer, ``handing`` gets a :class:`NoOptimizer`: this rank lacks an
    optimizer that other ranks have. Only ``scale`` and ``update`` are changed: faults
    go into losses, and a recipe may set the scale.
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
        """Take the scaler and the functions that surround its calls.

        Args:
            scaler: the tested scaler.
            watch: method name -> context for a call; an error in it is the scaler's
                fault.
            inject: makes a loss non-finite, before scaling, if a fault is planned.
            handing: optimizer -> context for a call that takes the optimizer.
            new_scale: argument for ``update`` if it is called without one.
        """
        self._scaler = scaler
        self._watch = watch
        self._inject = inject
        self._handing = handing
        self._new_scale = new_scale
        self._lacked: Counter[str] = Counter()
        """Method -> number of calls without an optimizer in this step."""

    def scale(self, outputs: Any) -> Any:
        """Multiply a loss, or each of several, by the scale."""
        if isinstance(outputs, Tensor):
            outputs = self._inject(outputs)
        elif isinstance(outputs, Iterable):
            first, *others = outputs
            outputs = [self._inject(first), *others]
        with self._watch("scale"):
            return self._scaler.scale(outputs)

    def update(self, new_scale: Any = None) -> None:
        """Adjust the scale, or set it to ``new_scale`` or to the recipe's scale."""
        if new_scale is None:
            new_scale = self._new_scale
        with self._watch("update"):
            # without a new scale call update(): a scaler need not accept None
            self._scaler.update(*[new_scale] * (new_scale is not None))

    # Two methods, because torch's checkpoints save an object by its state only if its
    # class defines both; __getattr__ does not count.

    def state_dict(self) -> Any:
        """Return the scaler's state."""
        return self._call("state_dict", self._scaler.state_dict)

    def load_state_dict(self, state_dict: Any) -> Any:
        """Load a saved state."""
        return self._call("load_state_dict", self._scaler.load_state_dict, state_dict)

    def __getattr__(self, name: str) -> Any:
        # a copy asks for these names before there is a scaler
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._scaler, name)
        if callable(value) and not isinstance(value, type):
            return partial(self._call, name, value)
        return value

    def _call(
        self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a method of the scaler, and observe the call."""
        with ExitStack() as around:
            for optimizer in self._optimizers(name, [*args, *kwargs.values()]):
                around.enter_context(self._handing(optimizer))
            around.enter_context(self._watch(name))
            return method(*args, **kwargs)

    def _optimizers(self, name: str, given: Sequence[Any]) -> list[Any]:
        """Return the optimizers among the arguments of a method."""
        optimizers = [each for value in given for each in _flat(value)]
        optimizers = [each for each in optimizers if hasattr(each, "param_groups")]
        lacks = name in TAKES_AN_OPTIMIZER and given[:1] == [None]
        if lacks and not optimizers:
            optimizers.append(lacking(self._lacked[name]))
            self._lacked[name] += 1
        return optimizers


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else [value]
