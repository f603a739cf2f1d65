"""GradScaler: scale, unscale_, step, update, as in torch, with ranks that agree.

1. ``scale(loss)`` multiplies the loss, backward makes scaled gradients.
2. ``unscale_`` or ``step`` looks at this rank's gradients (``unscale.py``) and agrees
   with the other ranks (``agreement.py``); they are divided, here or in the optimizer.
3. ``step`` calls the optimizer, on all ranks or on none.
4. ``update`` moves the scale (``policy.py``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState

from .answers import Answerer
from .eager import eager
from .errors import TooManySkipsError
from .fused import makes_momentum, step_with, wants_scaler
from .policy import advance, set_scale
from .states import fresh_state, refuse_closure
from .unscale import _MultiDeviceReplicator as _MultiDeviceReplicator
from .verdicts import any_of, is_found, may_enlarge, on_host, reciprocal, spread

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["GradScaler"]

# where torch has it, for those who import it from there
_refresh_per_optimizer_state = fresh_state


class GradScaler(Answerer):
    """Gradient scaler for one process or many; a drop-in for ``torch.amp.GradScaler``.

    All ranks skip a step or none does, and the scale is the same on every rank. Unless
    told otherwise all ranks of the default process group agree, whatever parameters
    they hold; without a process group there is no collective. See [Note: Who agrees]
    in ``groups.py``.

    Args:
        device: device type of the losses, as in torch.
        init_scale: first scale, in fp32.
        growth_factor: factor of the scale after ``growth_interval`` good steps.
        backoff_factor: factor of the scale after an overflow.
        growth_interval: number of good steps in a row before the scale grows.
        enabled: if false, every method does nothing but call the optimizer.
        agree_over: ``"world"`` (all ranks), ``"mesh"`` (the root mesh of the DTensor
            parameters: independent models in one world) or ``"local"`` (no collective:
            gradients are already equal on all ranks that matter).
        process_group: the ranks that agree; wins over ``agree_over``.
        mesh: the same as a mesh of any number of axes.
        fp16_gradients: ``"refuse"`` them as torch does, divide them ``"in place"``,
            which flushes small values to zero, or ``"widen"`` them to fp32.
        policy: limits, hysteresis and the like; the default is torch's rule.
        recheck: `step` looks again at gradients that were unscaled before, because
            they are changed in between. Costs one more read and collective.

    Raises:
        InvalidSettingError: a setting that no run can work with.
        ValueError: ``agree_over`` is unknown, or a group and a mesh were both given.
    """

    # - Steps

    @eager
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, unless a gradient on any rank is not finite.

        Unscales first unless `unscale_` was called. Fused optimizers divide by the
        scale themselves and skip on the device, without a host synchronisation.

        Args:
            optimizer: the optimizer to step.
            *args: handed to ``optimizer.step``.
            **kwargs: handed to ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returned; None if it was skipped.

        Raises:
            RuntimeError: a closure was given, or `step` was already called.
            AssertionError: the gradients cannot have been scaled, or there are none.
            ValueError: an fp16 gradient, and ``fp16_gradients`` is ``"refuse"``.
            RanksDisagreeError: the ranks hold different state.
            PeerFailedError: another rank raised.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if args or kwargs:
            refuse_closure(args, kwargs)
        self._check_scale_growth_tracker("step")
        state = self._state_of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(_STEPPED)
        self._stamps.check(state["optimizer"], state, "step")
        if self._recheck and state["stage"] is OptState.UNSCALED:
            self._look_again(optimizer, state)
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return self._fused_step(optimizer, state, *args, **kwargs)
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
            self._settle()
        if not state["found_inf_per_device"]:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        self._stamps.stepped(state)
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    @eager
    def step_together(self, *optimizers: Optimizer) -> bool:
        """Step these optimizers, all of them or none.

        They are unscaled unless they were, and checked together, with one collective,
        before any of them steps.

        Args:
            *optimizers: fused or not.

        Returns:
            Whether they stepped; True where only the device knows, on an accelerator.

        Raises:
            RuntimeError: one of them has already stepped.
            AssertionError: the gradients cannot have been scaled, or there are none.
        """
        if not self._enabled:
            for optimizer in optimizers:
                optimizer.step()
            return True
        scale, _ = self._check_scale_growth_tracker("step_together")
        states = [self._state_of(optimizer) for optimizer in optimizers]
        if any(state["stage"] is OptState.STEPPED for state in states):
            raise RuntimeError(_STEPPED)
        fresh = [
            optimizer
            for optimizer, state in zip(optimizers, states, strict=True)
            if state["stage"] is OptState.READY
        ]
        allow_fp16 = self._fp16_gradients != "refuse"
        for optimizer, state in zip(optimizers, states, strict=True):
            self._stamps.check(optimizer, state, "step_together")
        divisor = self._divisor("step_together")
        if fresh:  # what was unscaled before was agreed on then
            self._look(fresh, reciprocal(divisor), allow_fp16, "step_together")
        found = any_of(_flags_of(states), scale.device)
        for state in states:
            spread(found, state["found_inf_per_device"])
            state["verdict"], state["stage"] = None, OptState.UNSCALED
        for optimizer in optimizers:
            self.step(optimizer)
        return not on_host(found)

    @eager
    def step_without_optimizer(self) -> None:
        """Take part in the other ranks' next `step`, on a rank without parameters.

        After ``clip_grad_norm_(None, ...)`` there is nothing left to take part in.

        Raises:
            RanksDisagreeError: the ranks hold different state.
            PeerFailedError: another rank raised.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("step_without_optimizer")
        state = self._per_optimizer_states[id(None)]
        if state.pop("clipped", False):
            return
        verdict = self._conclude([], [], self._group(), "step_without_optimizer")
        found = state["found_inf_per_device"]
        agreed = torch.zeros_like(scale) if verdict is None else verdict.found_inf
        found[len(found)] = agreed.to(scale.device)

    def _maybe_opt_step(
        self,
        optimizer: Optimizer,
        optimizer_state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if is_found(optimizer_state):
            return None
        return optimizer.step(*args, **kwargs)

    def _fused_step(
        self,
        optimizer: Optimizer,
        state: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if wants_scaler(optimizer):
            kwargs["grad_scaler"] = self
            result = optimizer.step(*args, **kwargs)
        elif self._prepare_fused(optimizer, state):
            result = step_with(optimizer, state, *args, **kwargs)
        else:
            result = None
        state["stage"] = OptState.STEPPED
        self._stamps.stepped(state)
        return result

    def _prepare_fused(self, optimizer: Optimizer, state: dict[str, Any]) -> bool:
        # Sets what the kernel divides by; False if the step is known to be skipped.
        scale = self._divisor("step")
        ready = state["stage"] is OptState.READY
        if ready and (may_enlarge(scale) or self._divided_before(optimizer)):
            # The kernel would not notice what overflows while it divides.
            # Nor can it divide one gradient and not another.
            self._look([optimizer], reciprocal(scale), True, "step")
            state["stage"] = OptState.UNSCALED
        of_user = getattr(optimizer, "grad_scale", None)
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
            state["grad_scale"] = scale if of_user is None else scale * of_user
            state["by_kernel"] = self._found_of(state)
        else:
            # What clip_grad_norm_ left to the kernel.
            state["grad_scale"] = state.pop("folded", of_user)
        found = state["found_inf"] = self._found_of(state)
        # bool synchronises, until an SGD with momentum has taken its first step
        return not (
            on_host(found) or (makes_momentum(state["optimizer"]) and bool(found))
        )

    def _found_of(self, state: dict[str, Any]) -> torch.Tensor:
        scale, _ = self._check_scale_growth_tracker("step")
        return any_of(state["found_inf_per_device"].values(), scale.device)

    # - The policy

    @eager
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale and end the iteration.

        After an overflow the scale is multiplied by the backoff factor, after
        ``growth_interval`` good iterations by the growth factor. It stays finite and
        above zero whatever happens.

        Args:
            new_scale: set this scale instead: a number, or a tensor with one element on
                a device of the scaler's type, without gradient. It is copied.

        Raises:
            AssertionError: no step since the last `update`, or an unfit tensor.
            InvalidSettingError: ``new_scale`` is not finite or not positive.
            RanksDisagreeError: the ranks stepped different numbers of optimizers.
        """
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        self._settle()
        found = _flags_of(self._states.values())
        if new_scale is None or found:
            self._agreement.close(lambda: self._holding(None), "update")
        self._stamps.close(self._states)
        if new_scale is not None:
            before = scale.clone()
            set_scale(scale, new_scale, self._device)
            self._stamps.moved(before, scale)
        elif not found:
            raise AssertionError("No inf checks were recorded prior to update.")
        else:
            self._move_scale(any_of(found, scale.device), tracker)
        self._states = defaultdict(fresh_state)
        if new_scale is None and self._policy.max_consecutive_skips is not None:
            self._refuse_endless_skips()

    def _move_scale(self, found_inf: torch.Tensor, tracker: torch.Tensor) -> None:
        assert self._scale is not None
        scale = self._scale
        before: Any = scale.tolist() if scale.is_cpu else scale.clone()
        advance(
            scale,
            tracker,
            found_inf,
            growth_factor=self._growth_factor,
            backoff_factor=self._backoff_factor,
            growth_interval=self._growth_interval,
            policy=self._policy,
            hysteresis_left=self._hysteresis_left,
        )
        after: Any = scale.tolist() if scale.is_cpu else scale
        self._history.record(found_inf, before, after)
        if isinstance(before, torch.Tensor) or before != after:
            self._stamps.moved(before, scale)

    def _refuse_endless_skips(self) -> None:
        most = self._policy.max_consecutive_skips
        if most is None or (skips := self.counters.consecutive_skips) < most:
            return
        scales = self._history.scales
        raise TooManySkipsError(
            f"update: {skips} iterations in a row were skipped, the policy allows "
            f"fewer than {most}. Scales so far: {list(scales)}; last: "
            f"{self.last_overflow}. A gradient that is nan at any scale is no question "
            "of scaling: look at the data, the loss and the learning rate.",
            skips=skips,
            scales=scales,
        )

    def _amp_update_scale_cpu_(self, found_inf: torch.Tensor) -> None:
        _, tracker = self._check_scale_growth_tracker("_amp_update_scale_cpu_")
        self._move_scale(found_inf.clamp(max=1.0).reshape(()), tracker)


_STEPPED = "step() has already been called since the last update()."


def _flags_of(states: Iterable[dict[str, Any]]) -> list[torch.Tensor]:
    return [f for state in states for f in state["found_inf_per_device"].values()]
