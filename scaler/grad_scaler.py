"""GradScaler: scale, unscale_, clip_grad_norm_, step, update as in torch, on N ranks.

1. ``scale(loss)`` multiplies the loss; backward makes scaled gradients.
2. ``unscale_``, ``clip_grad_norm_``, ``clip_and_step`` or ``step`` checks this rank's
   gradients (``grads.py``) and syncs found_inf with the other ranks (``sync.py``); the
   gradients are divided, here or in a fused optimizer.
3. ``step`` or ``clip_and_step`` calls the optimizer, on all ranks or on none.
4. ``update`` moves the scale (``policy.py``) and ends the iteration.

Nothing about a gradient is kept between calls: the last call determines what ``.grad``
holds.

[Note: A call that raises]
A sync that fails raises on every rank. After any exception in a call, also from an
optimizer's step, the iteration begins anew. Divided gradients are multiplied by the
scale again, and findings of the call are dropped. An optimizer that has stepped may
step again, on new gradient tensors. To recover, catch the error, drop the batch and go
on: training continues as if the batch had not existed. Calling `update` first is
allowed, and moves nothing unless other optimizers have stepped. Errors of wrong call
order are raised before anything is changed, and are also sent to the other ranks:
after them `update` ends the iteration, as in torch. See also
[Note: Ranks at different batches] in ``sync.py``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from functools import cached_property
from typing import Any, TypeVar, get_args

import torch
from torch.amp.grad_scaler import OptState as OptState
from torch.amp.grad_scaler import _MultiDeviceReplicator as _MultiDeviceReplicator

from .core import ScalerCore, is_fused, takes_scaler
from .errors import CHECK, CLIP, LOAD, UPDATE, TooManySkipsError, not_finite
from .grads import Number, any_of, clip_, is_readable, number_in
from .history import Counters, History, Overflow
from .iteration import Part
from .iteration import _refresh_per_optimizer_state as _refresh_per_optimizer_state
from .policy import (
    FP16Gradients,
    Policy,
    advance,
    check_choice,
    check_count,
    check_number,
    check_state,
    checked_scale,
)
from .sync import NOTHING_CHECKED
from .sync_group import SyncGroup, SyncOver, state_of
from .torch_internals import no_compile

Outputs = TypeVar("Outputs", bound="torch.Tensor | Iterable[Any]")


class GradScaler(ScalerCore):
    """Gradient scaler for one process or many; a drop-in for ``torch.amp.GradScaler``.

    Either all ranks skip a step or none, and the scale is the same on every rank. By
    default all ranks of the default process group sync, whatever parameters they hold.
    Without a process group there is no collective. See [Note: Which ranks sync] in
    ``sync_group.py``.

    Args:
        device: device type of the losses, as in torch.
        init_scale: first scale, in fp32.
        growth_factor: factor of the scale after ``growth_interval`` good steps.
        backoff_factor: factor of the scale after an overflow.
        growth_interval: number of good steps in a row before the scale grows.
        enabled: if false, `step` calls the optimizer, `clip_grad_norm_` clips, and the
            other methods do nothing.
        sync_over: ranks that sync: ``"world"`` (all ranks), a process group, a device
            mesh of any number of axes, or ``"local"``. ``"local"`` makes no collective:
            use it if all ranks of the model already have equal gradients.
        fp16_gradients: ``"refuse"`` raises for fp16 gradients, as torch does.
            ``"in_place"`` divides them, as torch's ShardedGradScaler does, which
            flushes small values to zero.
        policy: limits, hysteresis and other rules; the default is torch's rule.

    Raises:
        InvalidSettingError: a setting is invalid.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        sync_over: SyncOver = "world",
        fp16_gradients: FP16Gradients = "refuse",
        policy: Policy | None = None,
    ) -> None:
        self._enabled = enabled
        if enabled and device == "cuda":
            if torch.cuda.amp.common.amp_definitely_not_available():
                warnings.warn(
                    "GradScaler is enabled for device 'cuda', but CUDA is not "
                    "available. Disabling.",
                    stacklevel=2,
                )
                self._enabled = False
        policy = policy or Policy()
        if self._enabled:
            growth_factor = check_number("The growth factor", growth_factor)
            backoff_factor = check_number("The backoff factor", backoff_factor)
            growth_interval = check_count("The growth interval", growth_interval)
            init_scale = check_number("init_scale", init_scale)
            policy.check_start(init_scale)
        check_choice("fp16_gradients", fp16_gradients, get_args(FP16Gradients))
        # A disabled scaler has them too, so that its getters work.
        self._init_scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._has_warned = False
        self._begin(device, SyncGroup(sync_over), History(), fp16_gradients, policy)

    @cached_property
    def _disabled(self) -> _Disabled:
        return _Disabled(self)

    # - The scale

    def scale(self, outputs: Outputs) -> Outputs:
        """Multiply a loss, or any nest of losses, by the scale.

        Args:
            outputs: tensors of any shape, dtype and device.

        Returns:
            The products in the same nest; the outputs themselves if disabled.

        Raises:
            ValueError: an output is neither a tensor nor iterable.
        """
        if not self._enabled:
            return outputs
        is_tensor = isinstance(outputs, torch.Tensor)
        scale: Any = self._scaled if is_tensor else super().scale
        scaled = scale(outputs)
        self._was_scaled = self._sync.has_scaled = True
        return scaled  # type: ignore[no-any-return]

    def _scaled(self, output: torch.Tensor) -> torch.Tensor:
        # The same as in torch, whose own method torch.compile does not trace.
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
        assert self._scale is not None
        return output * self._scale.to(device=output.device, non_blocking=True)

    # - Unscale and clip

    @no_compile
    def unscale_(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Divide this optimizer's gradients by the scale, and sync found_inf.

        Optional: use this method to inspect or change gradients before `step`. Call
        `unscale_` once per optimizer and iteration, after all gradients are
        accumulated. A call makes one collective if several ranks sync. As in torch, a
        gradient that two optimizers share is divided twice.

        Args:
            optimizer: optimizer whose gradients are changed in place; None on a rank
                that lacks it.

        Raises:
            RuntimeError: called twice, or after `step`, in one iteration.
            AssertionError: the gradients cannot have been scaled yet.
            ValueError: there is an fp16 gradient and ``fp16_gradients`` is
                ``"refuse"``.
            RanksDisagreeError: the ranks hold different state, or call something else.
            PeerFailedError: another rank raised.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        part = self._part_of(optimizer)
        if optimizer is None:
            self._take_part(part, "unscale_", call=CHECK)
            self._iteration.looked_at(part)
            return
        if part.stage is OptState.UNSCALED:
            raise self._refused(
                "unscale_() has already been called on this optimizer since the last "
                "update().",
                part,
                "unscale_",
            )
        if part.has_stepped():
            message = "unscale_() is being called after step()."
            raise self._refused(message, part, "unscale_")
        method, part.caller = part.caller or "unscale_", ""
        exchanges = self._sync.exchanges
        try:
            self._check_and_sync(part, method)
        except BaseException as error:
            self._fail(error, part, "unscale_", CHECK, exchanges)
            raise

    @no_compile
    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer | None,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Unscale this optimizer's gradients and clip them by their global norm.

        Replaces `unscale_` and ``torch.nn.utils.clip_grad_norm_``. The norm is that of
        all gradients on all ranks that sync: shards are added, and each replica counts
        once (see [Note: Each replica once] in ``global_norm.py``). Afterwards ``.grad``
        is unscaled and clipped; after an overflow it is invalid, and `step` will skip.
        `clip_and_step` is faster. A disabled scaler clips in the same way.

        Args:
            optimizer: optimizer of plain tensors, and of DTensors on up to four meshes;
                None on a rank that lacks it.
            max_norm: largest norm after the call, at least 0; the same on all ranks.
            norm_type: order of the norm, 2 or any other above 0, also infinite; the
                same on all ranks.
            error_if_nonfinite: raise if the norm is not finite; synchronises with the
                device. Afterwards `step` skips and `update` reduces the scale as usual.

        Returns:
            (), fp32, on the device of the scale: the norm of the unscaled gradients
            before clipping, the same on every rank. fp64 if fp32 cannot hold the norm.
            Not finite after an overflow.

        Raises:
            InvalidSettingError: ``max_norm`` or ``norm_type`` is invalid.
            RuntimeError: called after `step` or twice, or the norm is not finite and
                ``error_if_nonfinite`` is set.
            NotImplementedError: a gradient is complex.
            AssertionError: the gradients cannot have been scaled yet.
            ValueError: there is an fp16 gradient and ``fp16_gradients`` is
                ``"refuse"``; or a mesh of the gradients has ranks that do not sync.
            RanksDisagreeError: the ranks hold different state, or clip differently.
            PeerFailedError: another rank raised.
        """
        clipper = self if self._enabled else self._disabled
        return clipper._clip(
            optimizer, max_norm, norm_type, error_if_nonfinite, steps=False
        )

    @no_compile
    def clip_and_step(
        self,
        optimizer: torch.optim.Optimizer | None,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Unscale, clip by the global norm, and step, or skip, in one call.

        Equivalent to `clip_grad_norm_` and `step`, but faster: a fused optimizer
        divides and clips in its own kernel, by its ``grad_scale``; other optimizers
        need one multiplication. Afterwards ``.grad`` is unscaled and clipped; a fused
        kernel writes it back. As in `step`, a pre-hook of a fused optimizer gets
        gradients that are still scaled. A disabled scaler clips and steps.

        Args:
            optimizer: see `clip_grad_norm_`; None on a rank that lacks it.
            max_norm: see `clip_grad_norm_`.
            norm_type: see `clip_grad_norm_`.
            error_if_nonfinite: raise if the norm is not finite; synchronises with the
                device. The step is skipped in any case.

        Returns:
            The norm, as `clip_grad_norm_` returns it.

        Raises:
            RuntimeError: called after `step` or after a clip, or the norm is not finite
                and ``error_if_nonfinite`` is set.
            Exception: any error of `clip_grad_norm_` and ``optimizer.step``.
        """
        clipper = self if self._enabled else self._disabled
        return clipper._clip(
            optimizer, max_norm, norm_type, error_if_nonfinite, steps=True
        )

    # - Step

    @no_compile
    def step(
        self, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> Any:
        """Step the optimizer, unless a gradient on any rank is not finite.

        Unscales first unless `unscale_` was called. Fused optimizers divide by the
        scale themselves and skip on the device, without a host synchronisation.

        Args:
            optimizer: optimizer to step. A rank that lacks it passes None where the
                other ranks pass the optimizer. The call then takes part in their first
                sync of that optimizer, unless this rank has already called `unscale_`
                or a clip with None.
            *args: arguments of ``optimizer.step``.
            **kwargs: keyword arguments of ``optimizer.step``.

        Returns:
            The result of ``optimizer.step``; None if it was skipped.

        Raises:
            RuntimeError: a closure is given, or `step` is called twice in one
                iteration.
            AssertionError: the gradients cannot have been scaled, or there are none.
            ValueError: there is an fp16 gradient and ``fp16_gradients`` is
                ``"refuse"``.
            RanksDisagreeError: the ranks hold different state, or call something else.
            PeerFailedError: another rank raised.
        """
        if not self._enabled:
            if optimizer is None:
                return self._check_lacks()
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or (args and callable(args[0])):
            # A closure would make new, scaled gradients after the check.
            message = "Closure use is not currently supported if GradScaler is enabled."
            raise self._refused(message, Part(), "step")
        self._check_scale_growth_tracker("step")
        if optimizer is None:
            if self._iteration.lacked:
                del self._iteration.lacked[0]  # an earlier call has taken part
            else:
                self._take_part(self._part_of(None), "step")
            return None
        part = self._part_of(optimizer)
        if part.has_stepped():
            message = "step() has already been called since the last update()."
            if part.stepped_on is not None:
                message += (
                    " A call has raised since then. To drop the batch, call update(), "
                    "or zero_grad() with set_to_none=True, before the next one."
                )
            raise self._refused(message, part, "step")
        is_unscaled = part.stage is OptState.UNSCALED
        # If the gradients are unscaled already, no other rank waits for a sync.
        exchanges = -1 if is_unscaled else self._sync.exchanges
        try:
            grad_scale = None
            if not (fused := is_fused(optimizer)):
                if not is_unscaled:
                    part.caller = "step"
                    self.unscale_(optimizer)
            elif takes_scaler(optimizer, stacklevel=3):
                kwargs["grad_scaler"] = self
            elif not is_unscaled:
                # A scale below one makes gradients grow when it divides them: an
                # overflow shows only afterwards.
                scale = number_in(self._scale_or_one())
                if isinstance(scale, float) and scale < 1.0:
                    self._check_and_sync(part, "step", allow_fp16=True)
                else:
                    self._check_inf_per_device(optimizer)
                    grad_scale = self._scale
            return self._step_checked(part, grad_scale, args, kwargs, fused=fused)
        except BaseException as error:
            self._fail(error, part, "step", CHECK, exchanges)
            raise

    def _check_and_sync(
        self,
        part: Part,
        method: str,
        *,
        allow_fp16: bool | None = None,
        only_check: bool = False,
    ) -> None:
        # Check this rank's gradients and divide them, unless ``only_check``. Then
        # replace this rank's findings by those of all ranks.
        group = self._find_group(part)
        if only_check:
            scale = self._scale_or_one()
            one, zero = torch.ones_like(scale), torch.zeros_like(scale)
            infs = self._unscale_grads_(part.optimizer, one, zero, True)
        else:
            infs = self._unscale_here(part, allow_fp16)
        part.has_gradients = bool(infs)
        if group is not None:
            infs, _ = self._synced(part, infs, group, method, call=CHECK)
        else:
            self._remember_overflow(part, infs)
            if len(infs) > 1:
                any_found = any_of(infs.values(), self._scale_or_one().device)
                infs = {place: any_found.to(flag) for place, flag in infs.items()}
        part.found = infs

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        # For optimizers that unscale by themselves: check only, change nothing.
        self._check_scale_growth_tracker("_check_inf_per_device")
        part = self._part_of(optimizer)
        self._check_and_sync(part, "step", only_check=True)
        return part.found

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        return self._part_of(optimizer).found

    def _take_part(self, part: Part, method: str, **fields: float) -> None:
        # Take part in the other ranks' sync of an optimizer that this rank lacks.
        exchanges = self._sync.exchanges
        try:
            if (group := self._find_group(part)) is None:
                return
            with state_of(group).turn:
                infs, result = self._synced(part, {}, group, method, None, **fields)
                rows = result.host_rows
                if rows is not None and (norm_type := rows.value("norm_type")):
                    norm = self._norm_over(result, part, norm_type, 1.0)
                    if rows.highest.refuses and not math.isfinite(norm):
                        infs = {key: torch.ones_like(x) for key, x in infs.items()}
            part.found = infs
        except BaseException as error:
            call = fields.get("call", math.nan)
            self._fail(error, part, method, call, exchanges)
            raise

    # - Update

    @no_compile
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Adjust the scale and end the iteration.

        After an overflow the scale is multiplied by the backoff factor, after
        ``growth_interval`` good iterations by the growth factor. The scale always stays
        finite and above zero.

        Args:
            new_scale: scale to set instead: a number, or a tensor with one element on a
                device of the scaler's type, without gradient, which is copied. The
                iteration still counts in `counters` and in the policy's limit of skips.

        Raises:
            AssertionError: there was no step since the last `update`, or ``new_scale``
                is a tensor of another kind.
            InvalidSettingError: ``new_scale`` is not finite, not positive or outside of
                the policy's limits; a tensor on an accelerator is clamped to them.
            RanksDisagreeError: the ranks stepped different numbers of optimizers.
            PeerFailedError: another rank raised.
            TooManySkipsError: the policy's limit is reached.
        """
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        states = self._per_optimizer_states.values()
        flags = [f for state in states for f in state["found_inf_per_device"].values()]
        iteration, exchanges, chosen = self._iteration, self._sync.exchanges, None
        try:
            if new_scale is not None:
                chosen = checked_scale(new_scale, self._device, self._policy)
            may_warn = iteration.has_new and not self._has_warned
            warns = may_warn and iteration.shares_parameters()
            self._sync.end_iteration(
                self._row,
                "update",
                # Without flags the error is raised below, not at the next sync.
                must_have_gradients=bool(flags)
                and not (
                    iteration.has_failed
                    or chosen is not None
                    or self._steps_without_gradients
                ),
            )
        except BaseException as error:
            if self._tell(error, exchanges, Part(), "update", UPDATE):
                iteration.begin_anew(error, Part(), self._sync, scale, is_told=True)
            raise
        if not flags and not iteration.has_failed and chosen is None:
            raise AssertionError(NOTHING_CHECKED)
        if flags:
            self._move_scale(any_of(flags, scale.device), tracker, chosen)
        elif chosen is not None:
            scale.fill_(chosen)
        if exchanges and not self._sync.lacks:
            self._sync.missed += len(iteration.due())
        self._end_iteration()
        if warns:  # last: a warning may be an error
            self._has_warned = True
            warnings.warn(
                "Two optimizers of this scaler share a parameter. As with "
                "torch.amp.GradScaler, each of them divides its gradient by the scale: "
                "give it a gradient of its own, by zero_grad() and another backward(), "
                "before each step().",
                stacklevel=2,
            )
        most = self._policy.max_consecutive_skips
        if most is None or not flags:
            return
        if (skips := self.counters.consecutive_skips) >= most:
            scales = tuple(map(float, self._history.scales))
            raise TooManySkipsError(
                f"update: {skips} iterations in a row were skipped, the policy allows "
                f"fewer than {most}. Scales so far: {list(scales)}; last: "
                f"{self.last_overflow}. No scale helps a gradient that is always nan: "
                "look at the data, the loss and the learning rate.",
                skips=skips,
                scales=scales,
            )

    def _move_scale(
        self,
        found_inf: torch.Tensor,
        tracker: torch.Tensor,
        chosen: Number | None = None,
    ) -> None:
        # Move the scale by the rule, or to the value that the caller chose. As in
        # torch, the growth tracker then stays.
        scale = self._scale_or_one()
        before: Any = scale.tolist() if is_readable(scale) else scale.clone()
        rule = self._growth_factor, self._backoff_factor, self._growth_interval
        left = self._hysteresis_left
        if chosen is not None:
            scale.fill_(chosen)
            after = chosen
        else:
            after = advance(scale, tracker, found_inf, rule, self._policy, left)
        self._history.record(found_inf, before, after, by_rule=chosen is None)

    def _amp_update_scale_cpu_(self, found_inf: torch.Tensor) -> None:
        _, tracker = self._check_scale_growth_tracker("_amp_update_scale_cpu_")
        self._move_scale(found_inf.clamp(max=1.0).reshape(()), tracker)

    def _limit_tracker(self) -> None:
        # torch's kernel grows the scale if tracker and interval are equal. With a
        # tracker above a lowered interval the scale would never grow again.
        most = min(self._growth_interval, 2**31) - 1
        self._init_growth_tracker = min(self._init_growth_tracker, most)
        if self._growth_tracker is not None:
            self._growth_tracker.clamp_(max=most)

    def _get_hysteresis_left(self) -> int:
        if self._hysteresis_left is None:
            return self._init_hysteresis_left
        return int(self._hysteresis_left.item())

    # - What happened

    @no_compile
    def step_was_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if the last `step` of this optimizer was skipped.

        Also correct for fused optimizers, and after `update`. Synchronises with the
        device if found_inf is on an accelerator.

        Raises:
            ValueError: this scaler has not stepped this optimizer yet.
        """
        if not self._enabled:
            return False
        record = self._records.find(optimizer)
        if record is None or record.found_inf is None:
            raise ValueError(
                "step_was_skipped() was asked about an optimizer that this scaler has "
                f"not stepped yet: {type(optimizer).__name__}."
            )
        return bool(number_in(record.found_inf))

    @no_compile
    def step_scheduler(self, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
        """Step a learning-rate scheduler, unless its optimizer's step was skipped.

        The optimizer is ``scheduler.optimizer``; further arguments go to
        ``scheduler.step``.

        Returns:
            True if the scheduler stepped.

        Raises:
            ValueError: this scaler has not stepped the scheduler's optimizer yet.
        """
        if self.step_was_skipped(scheduler.optimizer):
            return False
        scheduler.step(*args, **kwargs)
        return True

    @property
    def counters(self) -> Counters:
        """Numbers of steps, skips, growths and backoffs since the scaler was created.

        Updated by `update`. Synchronises with the device if the scale is on an
        accelerator.
        """
        return self._history.counters()

    @property
    def last_overflow(self) -> Overflow | None:
        """Rank and parameter of the last overflow; None before the first.

        Equal on every rank if the scale is on a CPU. On an accelerator, the other ranks
        learn at their next sync which rank it was. Each rank knows the parameter of its
        own overflow only, after a step that was not fused.
        """
        return self._history.last_overflow

    # - Settings

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows: finite and 1 or more."""
        self._growth_factor = check_number("growth_factor", new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale backs off: above 0 and below 1."""
        self._backoff_factor = check_number("The backoff factor", new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of good steps before the scale grows: 1 or more."""
        self._growth_interval = check_count("The growth interval", new_interval)
        self._limit_tracker()

    # - Saved state

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in the keys of torch; empty if disabled.

        A policy with hysteresis adds the key ``"_hysteresis_left"``. Call this method
        after `update`. Synchronises with the device.
        """
        state = super().state_dict()
        if self._enabled and self._policy.hysteresis > 1:
            state["_hysteresis_left"] = self._get_hysteresis_left()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this class or torch's saved; does nothing if disabled.

        All ranks must load the same state: one collective compares the states before
        anything is changed.

        Raises:
            RuntimeError: the state is empty, as a disabled scaler saves it.
            InvalidSettingError: a value is invalid; nothing is changed.
            RanksDisagreeError: the ranks load different states; nothing is changed.
            PeerFailedError: another rank raised; nothing is changed.
        """
        if not self._enabled:
            return
        group, exchanges = self._sync.group.find(), self._sync.exchanges
        try:
            saved = check_state(state_dict, self._policy)
        except Exception as error:
            self._tell(error, exchanges, Part(), "load_state_dict", LOAD)
            raise
        if group is not None:
            fields = {key.lstrip("_"): value for key, value in saved.items()}
            row = self._row()._replace(call=LOAD, was_scaled=1.0, **fields)
            self._sync.exchange(group, "load_state_dict", row).read()
        # From here on all ranks count alike, also those that joined later.
        self._sync.restart()
        self._records.forget_numbers()
        self._history.end_row_of_skips()
        for part in self._iteration.parts.values():
            part.result = None
        super().load_state_dict(saved)
        self._init_hysteresis_left = saved["_hysteresis_left"]
        self._was_scaled = True
        if self._hysteresis_left is not None:
            self._hysteresis_left.fill_(self._init_hysteresis_left)
        self._limit_tracker()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("_disabled", None)
        if self._enabled:
            state["_init_hysteresis_left"] = self._get_hysteresis_left()
            state["_hysteresis_left"] = None
        return state


class _Disabled(ScalerCore):
    # Clips of a disabled scaler: gradients without a scale have the same global norm
    # over all ranks. No step is skipped, and each clip is an iteration. Other methods
    # of a disabled scaler are one line each in `GradScaler`, so that a program may read
    # and set `_enabled`.

    _steps_without_gradients = True

    def __init__(self, scaler: ScalerCore) -> None:
        device, group, history = scaler._device, scaler._sync.group, scaler._history
        self._begin(device, group, history, "in_place", Policy())
        self._growth_factor, self._backoff_factor, self._growth_interval = 2.0, 0.5, 1
        self._was_scaled = True  # the scale is one

    def _clip(
        self,
        optimizer: torch.optim.Optimizer | None,
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
        *,
        steps: bool,
    ) -> torch.Tensor:
        method = "clip_and_step" if steps else "clip_grad_norm_"
        part, exchanges = self._part_of(optimizer), self._sync.exchanges
        try:
            measured = self._measure(
                part, method, max_norm, norm_type, refuses=error_if_nonfinite
            )
            if not measured.is_refused:
                clip_(measured.grads.values(), measured.factor, measured.carried)
                if steps and optimizer is not None:
                    optimizer.step()
        except BaseException as error:
            self._fail(error, part, method, CLIP, exchanges)
            raise
        finally:
            self._end_iteration()
        if measured.is_refused and error_if_nonfinite:
            raise not_finite(float(measured.norm), norm_type)
        return measured.norm
