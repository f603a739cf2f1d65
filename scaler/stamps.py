"""Which scale the gradients carry: the one that their backward used.

[Note: Scale stamps]
The scale may move between a backward and the division of what it made: `update` comes
early, or a gradient is accumulated across it. So `scale()` puts a stamp on what it
returns, a hook on that tells when a backward starts from it, and gradients are divided
by the stamp of the last backward, never by a scale that came later.

When a backward starts with another stamp than the gradients carry, those of every
optimizer that has not stepped since are first brought to the new scale (exact for
powers of two), so that all of them carry one scale at any time. An optimizer that this
scaler has never seen cannot be found: if its gradients must be mixed, `step` raises. So
it does when a backward has added to gradients that were unscaled already.

As long as no backward has started from what `scale()` returned (gradients written by
hand, stages of a pipeline without a loss) the current scale is taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState

from .unscale import by_device_and_dtype, local_of, parameters_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["Stamp", "Stamps"]

States = dict[int, dict[str, Any]]
"""What the scaler remembers of each optimizer in this iteration."""


class Stamp:
    """One value of the scale.

    Attributes:
        value: (), fp32; None as long as it is the current scale.
    """

    value: torch.Tensor | None = None


class _Seen:
    """What outlasts an iteration: one object for each optimizer.

    Attributes:
        used_up: when its gradients were, in backwards of this scaler.
        unscaled: by `unscale_`, and not stepped before `update`.
        found: (), fp32: 1 if its last step was skipped; None before the first.
    """

    __slots__ = ("found", "unscaled", "used_up")

    def __init__(self) -> None:
        self.used_up = -1
        self.unscaled = False
        self.found: torch.Tensor | None = None


class Stamps:
    """The stamps of one scaler; `current` goes on what `scale()` returns."""

    def __init__(self) -> None:
        self.current = Stamp()
        self._carried: Stamp | None = None
        self._handed_out = False
        self._backwards = 0
        self._unclaimed = False  # an iteration ended after a backward, without a step
        self._unscaled = False  # and one with unscale_ only
        self._mixed = False
        self._seen: weakref.WeakKeyDictionary[Optimizer, _Seen] = (
            weakref.WeakKeyDictionary()
        )

    def __getstate__(self) -> dict[str, Any]:
        # A scaler is copied between iterations, when no gradient is on its way.
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]

    def divisor(self, scale: torch.Tensor) -> torch.Tensor:
        """Return (), fp32: what the gradients were multiplied by."""
        carried = self._carried
        if carried is None or carried.value is None:
            return scale
        return carried.value.to(scale.device)

    def watch(self, product: torch.Tensor, scaler: Any) -> None:
        """Follow what `scale()` returns into its backward."""
        if not product.requires_grad or torch.compiler.is_compiling():
            return
        self._handed_out = True
        stamp, there = self.current, weakref.ref(scaler)

        def begins(_: torch.Tensor) -> None:
            if (held := there()) is not None:
                self.begin(stamp, held._scale, held._states)

        product.register_hook(begins)

    def begin(self, stamp: Stamp, scale: torch.Tensor, states: States) -> None:
        """Note that a backward starts. See [Note: Scale stamps].

        Args:
            stamp: what its loss was scaled by.
            scale: (), fp32: the current scale.
            states: of this iteration.
        """
        self._backwards += 1
        if states:
            _guard_unscaled(states.values())
        carried, self._carried = self._carried, stamp
        moved = carried is not None and carried is not stamp
        if moved or self._unscaled:
            self._bring_all(carried or stamp, stamp, scale, states)
        self._mixed = self._mixed or (moved and self._unclaimed)

    def _bring_all(
        self, old: Stamp, new: Stamp, scale: torch.Tensor, now: States
    ) -> None:
        over = scale if new.value is None else new.value
        under = scale if old.value is None else old.value
        used = {id(state.get("optimizer")) for state in now.values()}
        for optimizer, seen in list(self._seen.items()):
            if seen.used_up < self._backwards - 1 and id(optimizer) not in used:
                _bring(optimizer, over if seen.unscaled else over / under)
                seen.unscaled = False
        self._unscaled = False

    def stepped(self, state: dict[str, Any]) -> None:
        """Note that an optimizer has stepped, or was skipped.

        Args:
            state: of this iteration.
        """
        seen = self._seen_of(state["optimizer"])
        seen.used_up, seen.unscaled = self._backwards, False
        # All devices hold the same finding once it is settled.
        seen.found = next(iter(state["found_inf_per_device"].values()), seen.found)

    def found_by_last_step(self, optimizer: Optimizer) -> torch.Tensor | None:
        """Return (), fp32: 1 if the last step was skipped; None before the first."""
        seen = self._seen.get(optimizer)
        return None if seen is None else seen.found

    def _seen_of(self, optimizer: Optimizer) -> _Seen:
        seen = self._seen.get(optimizer)
        if seen is None:
            seen = self._seen[optimizer] = _Seen()
        return seen

    def check(self, optimizer: Optimizer, state: dict[str, Any], call: str) -> None:
        """Raise if an optimizer's gradients carry no single scale.

        Raises:
            RuntimeError: they were scaled by several scales, or only in part.
        """
        if state.get("mixed"):
            raise RuntimeError(
                f"{call}: a backward added scaled gradients to those that unscale_() "
                "had already divided. Call unscale_() or clip_grad_norm_() after the "
                "last backward of an accumulation."
            )
        if self._mixed and optimizer not in self._seen and _was_added_to(optimizer):
            raise RuntimeError(
                f"{call}: update(new_scale) came in the middle of an accumulation of "
                f"{type(optimizer).__name__}, which this scaler had not seen before, "
                "so its gradients mix several scales. Call update() after step(), or "
                "zero_grad() before the next backward."
            )

    def moved(self, before: torch.Tensor | float, scale: torch.Tensor) -> None:
        """Freeze the current stamp, since the scale has moved.

        Args:
            before: (), fp32, or a number: the scale until now.
            scale: (), fp32: the scale from now on.
        """
        if not self._handed_out:
            return  # nothing carries it, nor will
        if not isinstance(before, torch.Tensor):
            before = torch.full_like(scale, before)
        self.current.value = before
        self.current = Stamp()

    def close(self, states: States) -> None:
        """End an iteration."""
        if not self._backwards:
            return
        claimed = False
        for state in states.values():
            optimizer = state.get("optimizer")
            if optimizer is None or state["stage"] is OptState.READY:
                continue
            claimed = True
            if state["stage"] is OptState.UNSCALED:
                seen = self._seen_of(optimizer)
                seen.used_up, seen.unscaled, self._unscaled = -1, True, True
        self._unclaimed = not claimed
        if claimed:
            self._mixed = False


def _bring(optimizer: Optimizer, factor: torch.Tensor) -> None:
    held = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
    with torch.no_grad():
        locals_ = [local_of(parameter, gradient) for parameter, gradient in held]
        for (device, _), tensors in by_device_and_dtype(locals_).items():
            torch._foreach_mul_(tensors, factor.to(device, non_blocking=True))


def _was_added_to(optimizer: Optimizer) -> bool:
    # A gradient that one backward made, and nothing changed since, has version 0.
    return any(
        p.grad is not None and _version(p.grad) for p in parameters_of(optimizer)
    )


def _versions(optimizer: Optimizer) -> list[tuple[Any, int]]:
    grads = [p.grad for p in parameters_of(optimizer)]
    return [(g, -1 if g is None else _version(g)) for g in grads]


def _version(gradient: Any) -> int:
    # A DTensor does not count what fully_shard adds to it: its local tensor does.
    local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return int(local._version)


def _guard_unscaled(states: Iterable[dict[str, Any]]) -> None:
    # Only at the end of this backward is it known what it added to.
    for state in states:
        if state["stage"] is OptState.UNSCALED and state.get("optimizer") is not None:
            _compare_at_the_end(state, _versions(state["optimizer"]))


def _compare_at_the_end(state: dict[str, Any], before: list[tuple[Any, int]]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine

    def compare() -> None:
        after = _versions(state["optimizer"])
        if any(
            a is not b or i != j for (a, i), (b, j) in zip(before, after, strict=True)
        ):
            state["mixed"] = True

    # fully_shard hands out its last gradients in a callback of its own, queued later.
    engine.queue_callback(lambda: engine.queue_callback(compare))
