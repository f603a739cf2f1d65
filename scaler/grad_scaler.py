"""GradScaler: scale, unscale_, step, update, as in torch, with ranks that agree.

1. ``scale(loss)`` multiplies the loss, backward makes scaled gradients.
2. ``unscale_`` or ``step`` looks at this rank's gradients (``unscale.py``) and agrees
   with the other ranks (``agreement.py``); they are divided, here or in the optimizer.
3. ``step`` calls the optimizer, on all ranks or on none.
4. ``update`` moves the scale (``policy.py``).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState

from .agreement import Holding, Verdict
from .fused import step_with, wants_scaler
from .holder import ScaleHolder, never_scaled
from .policy import advance, set_scale
from .states import fresh_state, real_optimizer, refuse_closure
from .unscale import check_and_unscale_, local_gradients
from .verdicts import Found, any_of, is_found, may_enlarge, reciprocal, spread

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.optim import Optimizer

__all__ = ["GradScaler"]


class GradScaler(ScaleHolder):
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
        allow_fp16: let ``unscale_`` divide fp16 gradients in place, which flushes small
            values to zero; by default it raises, as torch does.

    Raises:
        InvalidSettingError: a setting that no run can work with.
        ValueError: ``agree_over`` is unknown, or a group and a mesh were both given.
    """

    # - Gradients

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide this optimizer's gradients by the scale, and agree on overflow.

        Optional: only to look at gradients, or to change them, before `step`. Call it
        once per optimizer and iteration, after all gradients are accumulated. One
        collective when several ranks agree.

        Args:
            optimizer: its gradients are changed in place.

        Raises:
            RuntimeError: called twice, or after `step`, in one iteration.
            AssertionError: the gradients cannot have been scaled yet.
            ValueError: an fp16 gradient without ``allow_fp16``.
            RanksDisagreeError: the ranks hold different state.
            PeerFailedError: another rank raised.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("unscale_")
        state = self._state_of(optimizer)
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last "
                "update()."
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._look(optimizer, reciprocal(scale), self._allow_fp16, "unscale_")
        state["stage"] = OptState.UNSCALED

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> Found:
        gradients = local_gradients(optimizer, allow_fp16=allow_fp16)
        look_again = self._scale is not None and may_enlarge(self._scale)
        found = check_and_unscale_(
            gradients, inv_scale, found_inf, look_again=look_again
        )
        if not found and self._steps_without_gradients:
            found[found_inf.device] = found_inf.clone()
        return found

    def _check_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        # For optimizers that unscale by themselves: look only, change nothing.
        scale, _ = self._check_scale_growth_tracker("_check_inf_per_device")
        return self._look(
            optimizer, torch.ones_like(scale), True, "_check_inf_per_device"
        )

    def _found_inf_per_device(self, optimizer: Optimizer) -> dict[Any, Any]:
        return self._state_of(optimizer)["found_inf_per_device"]  # type: ignore[no-any-return]

    def _look(
        self, optimizer: Optimizer, inv_scale: torch.Tensor, allow_fp16: bool, call: str
    ) -> Found:
        scale, _ = self._check_scale_growth_tracker(call)
        group = self._group(optimizer)
        zero = torch.zeros((), dtype=torch.float32, device=scale.device)
        try:
            found = self._unscale_grads_(optimizer, inv_scale, zero, allow_fp16)
        except Exception:
            # See [Note: An error on one rank].
            if group is not None:
                self._agreement.agree(group, self._holding(None, failed=True), call)
            raise
        state = self._state_of(optimizer)
        state["found_inf_per_device"] = found
        if group is not None:
            state["verdict"] = self._settle(group, found, call)
        elif len(found) > 1:
            spread(any_of(found, scale.device), found)
        return found

    # - Agreement

    def _settle(self, group: ProcessGroup, found: Found, call: str) -> Verdict:
        # Replaces what this rank found by what any rank found.
        scale, _ = self._check_scale_growth_tracker(call)
        mine = any_of(found, scale.device) if found else None
        verdict = self._agreement.agree(group, self._holding(mine), call)
        if not found:
            found[scale.device] = torch.zeros(
                (), dtype=torch.float32, device=scale.device
            )
        spread(verdict.found_inf, found)
        self._refuse_empty_step(verdict, call)
        return verdict

    def _holding(
        self, found_inf: torch.Tensor | None, *, failed: bool = False
    ) -> Holding:
        scale, tracker = self._check_scale_growth_tracker("agree")
        return Holding(
            found_inf=found_inf,
            scale=scale,
            growth_tracker=tracker,
            growth_factor=self._growth_factor,
            backoff_factor=self._backoff_factor,
            growth_interval=self._growth_interval,
            has_gradients=found_inf is not None,
            was_scaled=self._was_scaled,
            failed=failed,
        )

    def _refuse_empty_step(self, verdict: Verdict, call: str) -> None:
        # What torch refuses on one rank is refused here when it holds for all of them.
        if not verdict.message.device.type == "cpu":
            return
        if not verdict.flag("was_scaled"):
            raise AssertionError(never_scaled(call, "_scale"))
        if not verdict.flag("has_gradients") and not self._steps_without_gradients:
            raise AssertionError("No inf checks were recorded for this optimizer.")

    # - Steps

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
            ValueError: an fp16 gradient without ``allow_fp16``.
            RanksDisagreeError: the ranks hold different state.
            PeerFailedError: another rank raised.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        refuse_closure(args, kwargs)
        self._check_scale_growth_tracker("step")
        state = self._state_of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update()."
            )
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            return self._fused_step(optimizer, state, *args, **kwargs)
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        if not state["found_inf_per_device"]:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def step_without_optimizer(self) -> None:
        """Take part in the other ranks' next `step`, on a rank without parameters.

        Raises:
            RanksDisagreeError: the ranks hold different state.
            PeerFailedError: another rank raised.
        """
        if not self._enabled:
            return
        scale, _ = self._check_scale_growth_tracker("step_without_optimizer")
        found: Found = {}
        if (group := self._group()) is not None:
            self._settle(group, found, "step_without_optimizer")
        found = found or {scale.device: torch.zeros_like(scale)}
        # No optimizer has the id of this very dict while the dict is alive.
        state = fresh_state()
        state.update(stage=OptState.STEPPED, found_inf_per_device=found)
        self._per_optimizer_states[id(state)] = state

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
        return result

    def _prepare_fused(self, optimizer: Optimizer, state: dict[str, Any]) -> bool:
        # Sets what the kernel divides by; False if the step is known to be skipped.
        scale, _ = self._check_scale_growth_tracker("step")
        if state["stage"] is OptState.READY and may_enlarge(scale):
            # The kernel would not notice what overflows while it divides.
            self._look(optimizer, reciprocal(scale), True, "step")
            state["stage"] = OptState.UNSCALED
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
            state["grad_scale"] = scale * getattr(optimizer, "grad_scale", 1)
        else:
            state["grad_scale"] = getattr(optimizer, "grad_scale", None)
        found = state["found_inf_per_device"]
        state["found_inf"] = any_of(found, scale.device)
        on_host = scale.device.type == "cpu"
        return not (on_host and state["found_inf"].tolist())

    # - The policy

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
        found = self._found_since_update()
        if new_scale is None or found:
            self._agreement.close(self._group(), self._holding(None), "update")
        if new_scale is not None:
            set_scale(scale, new_scale, self._device)
        elif not found:
            raise AssertionError("No inf checks were recorded prior to update.")
        else:
            self._move_scale(any_of(dict(enumerate(found)), scale.device), tracker)
        self._per_optimizer_states = defaultdict(fresh_state)

    def _found_since_update(self) -> list[torch.Tensor]:
        return [
            found_inf
            for state in self._per_optimizer_states.values()
            for found_inf in state["found_inf_per_device"].values()
        ]

    def _move_scale(self, found_inf: torch.Tensor, tracker: torch.Tensor) -> None:
        assert self._scale is not None
        advance(
            self._scale,
            tracker,
            found_inf,
            growth_factor=self._growth_factor,
            backoff_factor=self._backoff_factor,
            growth_interval=self._growth_interval,
        )

    def _amp_update_scale_cpu_(self, found_inf: torch.Tensor) -> None:
        _, tracker = self._check_scale_growth_tracker("_amp_update_scale_cpu_")
        self._move_scale(found_inf.clamp(max=1.0).reshape(()), tracker)

    def _state_of(self, optimizer: Optimizer) -> dict[str, Any]:
        real = real_optimizer(optimizer)
        state = self._per_optimizer_states[id(real)]
        # Keeps it alive: the id of a dead optimizer may be given to a new one.
        state["optimizer"] = real
        return state
