"""GradScaler: scale, unscale_, clip_grad_norm_, step, update, as in torch, on N ranks.

1. ``scale(loss)`` multiplies the loss; backward makes scaled gradients.
2. ``unscale_``, ``clip_grad_norm_`` or ``step`` checks this rank's gradients
   (``grads.py``) and syncs found_inf with the other ranks (``sync.py``); the gradients
   are divided, here or in a fused optimizer.
3. ``step`` calls the optimizer, on all ranks or on none.
4. ``update`` moves the scale (``scale_update.py``) and ends the iteration.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, get_args

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler as _TorchGradScaler
from torch.amp.grad_scaler import OptState as OptState
from torch.amp.grad_scaler import _MultiDeviceReplicator as _MultiDeviceReplicator
from torch.distributed.device_mesh import DeviceMesh

from .config import (
    HIGHEST_SCALE,
    FP16Gradients,
    Policy,
    check_choice,
    check_count,
    check_number,
    check_state,
)
from .errors import TooManySkipsError
from .global_norm import GradsByMesh, clip_, global_norm, grads_by_mesh, local_norms
from .grads import (
    FP16_REFUSED,
    FoundInf,
    Number,
    Written,
    any_of,
    are_unchanged,
    check_and_unscale_,
    divide_,
    gradients_of,
    is_true,
    local_gradients,
    local_ids,
    number_in,
    tensor_of,
    unchanged,
    write_down,
)
from .history import Counters, History, Overflow, first_nonfinite, overflow_of
from .optimizer_state import (
    OptimizerRecords,
    OptimizerState,
    inner_optimizer,
    makes_momentum,
    takes_scaler,
)
from .scale_update import advance, set_scale
from .sync import OverflowSync, SyncResult
from .sync_group import AgreeOver, SyncGroup
from .sync_message import LocalState
from .torch_internals import is_view, local_tensors, no_compile

Outputs = TypeVar("Outputs", bound="torch.Tensor | Iterable[Any]")

# Where torch has it, for callers that import it from there.
_refresh_per_optimizer_state = OptimizerState


class GradScaler(_TorchGradScaler):
    """Gradient scaler for one process or many; a drop-in for ``torch.amp.GradScaler``.

    All ranks skip a step or none does, and the scale is the same on every rank. By
    default all ranks of the default process group sync, whatever parameters they hold;
    without a process group there is no collective. See [Note: Which ranks sync] in
    ``sync_group.py``.

    Args:
        device: device type of the losses, as in torch.
        init_scale: first scale, in fp32.
        growth_factor: factor of the scale after ``growth_interval`` good steps.
        backoff_factor: factor of the scale after an overflow.
        growth_interval: number of good steps in a row before the scale grows.
        enabled: if false, `step` calls the optimizer, `clip_grad_norm_` clips, and the
            other methods do nothing.
        agree_over: ``"world"`` (all ranks), ``"mesh"`` (the root mesh of the DTensor
            parameters: independent models in one world) or ``"local"`` (no collective:
            gradients are already equal on all ranks that matter).
        process_group: the ranks that sync, instead of ``agree_over``.
        mesh: the same as a mesh of any number of axes.
        fp16_gradients: ``"refuse"`` them as torch does, or divide them ``"in_place"``,
            as its ShardedGradScaler does, which flushes small values to zero.
        policy: limits, hysteresis and the like; the default is torch's rule.

    Raises:
        InvalidSettingError: a setting that no run can work with, or several of
            ``agree_over``, ``process_group`` and ``mesh``.
    """

    _steps_without_gradients = False

    # Made by scale(), or by the first sync on ranks that never scale.
    _scale: torch.Tensor | None
    _growth_tracker: torch.Tensor | None
    _hysteresis_left: torch.Tensor | None

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        agree_over: AgreeOver = "world",
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
        fp16_gradients: FP16Gradients = "refuse",
        policy: Policy | None = None,
    ) -> None:
        self._device = device
        self._enabled = enabled
        if enabled and device == "cuda":
            if torch.cuda.amp.common.amp_definitely_not_available():
                warnings.warn(
                    "GradScaler is enabled for device 'cuda', but CUDA is not "
                    "available. Disabling.",
                    stacklevel=2,
                )
                self._enabled = False
        self._policy = policy or Policy()
        if self._enabled:
            growth_factor = check_number("The growth factor", growth_factor)
            backoff_factor = check_number("The backoff factor", backoff_factor)
            growth_interval = check_count("The growth interval", growth_interval)
            init_scale = check_number("init_scale", init_scale)
            self._policy.check_start(init_scale)
        check_choice("fp16_gradients", fp16_gradients, get_args(FP16Gradients))
        # A disabled scaler has them too, so that its getters work.
        self._init_scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._init_growth_tracker = 0
        self._init_hysteresis_left = self._policy.hysteresis
        self._scale = self._growth_tracker = self._hysteresis_left = None
        self._fp16_gradients: FP16Gradients = fp16_gradients
        self._fingerprint = self._policy.fingerprint()
        # True once the scale came from scale() or a checkpoint, not from a default.
        self._was_scaled = False
        self._history = History()
        self._records = OptimizerRecords()
        self._states: dict[int, OptimizerState] = defaultdict(OptimizerState)
        # What unscale_ has sent and no call has waited for. See [Note: Waiting later].
        self._pending: OptimizerState | None = None
        self._dividing: OptimizerState | None = None  # by unscale_, at this moment
        self._sync = OverflowSync(SyncGroup(agree_over, process_group, mesh), device)

    # - The scale

    def scale(self, outputs: Outputs) -> Outputs:
        """Multiply a loss, or any nest of losses, by the scale.

        Args:
            outputs: tensors of any shape, dtype and device.

        Returns:
            The products in the same nest; the outputs themselves if disabled.

        Raises:
            ValueError: something that is neither a tensor nor iterable.
        """
        if not self._enabled:
            return outputs
        self._was_scaled = True
        is_tensor = isinstance(outputs, torch.Tensor)
        scale: Any = self._scaled if is_tensor else super().scale
        return scale(outputs)  # type: ignore[no-any-return]

    def _scaled(self, output: torch.Tensor) -> torch.Tensor:
        # As torch has it, but torch.compile does not trace into torch's.
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(output.device)
        assert self._scale is not None
        return output * self._scale.to(device=output.device, non_blocking=True)

    def _check_scale_growth_tracker(
        self, funcname: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is not None and self._growth_tracker is not None:
            return self._scale, self._growth_tracker
        # Ranks of a pipeline that never see a loss get their scale here; so does a run
        # that resumes. Alone and without either, the gradients cannot have been scaled.
        if self._scale is None and self._growth_tracker is None:
            if self._was_scaled or self._sync.group.is_distributed:
                self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device) -> None:
        if self._growth_tracker is not None:
            raise AssertionError("_growth_tracker initialized before _scale")
        self._scale = torch.full((), self._init_scale, dtype=torch.float32, device=dev)
        self._growth_tracker = torch.full(
            (), self._init_growth_tracker, dtype=torch.int32, device=dev
        )
        if self._policy.hysteresis > 1:
            self._hysteresis_left = torch.full(
                (), self._init_hysteresis_left, dtype=torch.int32, device=dev
            )

    # - Unscale and clip

    @no_compile
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide this optimizer's gradients by the scale, and sync found_inf.

        Optional: only to look at gradients, or to change them, before `step`. Call it
        once per optimizer and iteration, after all gradients are accumulated. One
        collective when several ranks sync, which the next call that needs its result
        waits for: what the ranks disagree on is raised there. A gradient that another
        optimizer of this iteration has divided is not divided again (see [Note: A
        gradient divided twice] in ``grads.py``).

        Args:
            optimizer: its gradients are changed in place.

        Raises:
            RuntimeError: called twice, or after `step`, in one iteration.
            AssertionError: the gradients cannot have been scaled yet.
            ValueError: an fp16 gradient, and ``fp16_gradients`` is ``"refuse"``.
            RanksDisagreeError: in that next call: the ranks hold different state.
            PeerFailedError: in that next call: another rank raised.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._state_of(optimizer)
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError(
                "unscale_() has already been called on this optimizer since the last "
                "update()."
            )
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        self._check_and_sync(optimizer, state, "unscale_", async_op=True)

    @no_compile
    def clip_grad_norm_(
        self,
        optimizer: torch.optim.Optimizer | None,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Unscale this optimizer's gradients and clip them by their global norm.

        Takes the place of `unscale_` and ``torch.nn.utils.clip_grad_norm_``, and reads
        the gradients once. The norm is that of all gradients on all ranks that sync,
        each shard added and each replica counted once (see [Note: Each replica once] in
        ``global_norm.py``). With a fused optimizer the gradients stay as they are,
        not to be written to, until `step` divides and clips them. Call it once per
        optimizer and iteration; one collective when several ranks sync. A disabled
        scaler clips in the same way.

        Args:
            optimizer: plain tensors and DTensors on up to four meshes. None on a rank
                without parameters, once for each optimizer of the other ranks; it then
                calls `step_without_optimizer` as often.
            max_norm: largest norm after the call, at least 0; the same on all ranks.
            norm_type: order of the norm, 2 or any other above 0, also infinite; the
                same on all ranks.
            error_if_nonfinite: raise if the norm is not finite; synchronises.

        Returns:
            (), fp32, on the device of the scale: the norm of the unscaled gradients
            before clipping, the same on every rank; fp64 where fp32 cannot hold it. Not
            finite after an overflow; the gradients are then left as they are, and
            `step` will skip.

        Raises:
            InvalidSettingError: ``max_norm`` or ``norm_type`` is no such number.
            RuntimeError: called after `step` or twice, or the norm is not finite and
                ``error_if_nonfinite`` is set.
            NotImplementedError: complex gradients.
            AssertionError: the gradients cannot have been scaled yet.
            ValueError: an fp16 gradient, and ``fp16_gradients`` is ``"refuse"``; or
                ``agree_over="local"`` with sharded gradients.
            RanksDisagreeError: the ranks hold different state, or clip differently.
            PeerFailedError: another rank raised.
        """
        if self._enabled:
            self._check_scale_growth_tracker("clip_grad_norm_")
        scale = self._scale_or_one()
        state = OptimizerState() if optimizer is None else self._state_of(optimizer)
        self._wait_pending()
        if self._enabled and (state["stage"] is OptState.STEPPED or state.clips):
            raise RuntimeError(
                "clip_grad_norm_() was called after step(), or twice since update()."
            )
        group = self._find_group(state)
        found: FoundInf = {**state["found_inf_per_device"]}  # of an earlier unscale_
        grads = GradsByMesh()
        try:
            max_norm = check_number("max_norm", max_norm)
            norm_type = check_number("norm_type", norm_type)
            if optimizer is not None and self._must_unscale_first(state, scale):
                found = self._unscale_here(optimizer, state)
            is_unscaled = not self._enabled or state["stage"] is OptState.UNSCALED
            carried = number_in(torch.ones_like(scale) if is_unscaled else scale)
            if state.record is not None:
                rank = 0 if group is None else group.rank()
                grads = grads_by_mesh(state.optimizer, state.record, rank)
                self._refuse_unfit(grads, group)
            entries, flag = local_norms(grads, norm_type, carried)
        except Exception:
            nothing, _ = local_norms(GradsByMesh(), 2.0, 1.0)
            self._report_failure(group, "clip_grad_norm_", nothing)
            raise
        if flag is not None:
            found = {scale.device: any_of([flag, *found.values()], scale.device)}
        state["found_inf_per_device"] = found
        if group is None:
            rows = tensor_of(entries, scale.device)
            self._remember_overflow(state, 0)
        else:
            local = self._local_state(state, group)
            local = local._replace(max_norm=max_norm, norm_type=norm_type)
            result = self._sync.found_inf(group, local, "clip_grad_norm_", row=entries)
            assert result.rows is not None
            state.result, rows = result, result.rows
            if self._enabled:
                self._record_result(state)
        norm = global_norm(rows, norm_type)
        if isinstance(norm, torch.Tensor):
            norm = norm.to(scale.device)
        state.clips, state["stage"] = 1, OptState.UNSCALED
        if optimizer is None and self._enabled:
            self._add_to_none(state, clips=1)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients is "
                f"{float(norm)}, so they cannot be clipped. Pass "
                "error_if_nonfinite=False to let step() skip instead."
            )
        skips = self._enabled and is_true(any_of(found.values(), scale.device))
        if optimizer is not None and not skips:
            # See [Note: A clip left to a kernel] in global_norm.py.
            is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
            fused, folded = self._enabled and is_fused, Written()
            if fused and (self._records.may_share or len(self._records) > 1):
                fused = not any(map(is_view, local_tensors(grads.gradients)))
            if fused:
                folded = write_down(grads.gradients, grads.locals, is_weak=False)
                fused = len(folded.gradients) == len(grads.gradients)
            divisor = clip_(grads, norm, max_norm, carried, fused=fused)
            if divisor is not None:
                state.fused_grad_scale = _norm_tensor(divisor, scale.device)
                state.folded = folded
            elif self._records.may_share:
                state.divided = write_down(grads.gradients, grads.locals)
        if not self._enabled:
            self._states.clear()  # nothing lasts until an update
        return _norm_tensor(norm, scale.device)

    def _scale_or_one(self) -> torch.Tensor:
        # A disabled scaler clips by the same norm; its gradients carry no scale.
        if self._scale is not None:
            return self._scale
        has_device = self._device != "cuda" or torch.cuda.is_available()
        return torch.ones((), device=self._device if has_device else "cpu")

    def _must_unscale_first(self, state: OptimizerState, scale: torch.Tensor) -> bool:
        # What overflows while it is divided shows only afterwards, and a kernel cannot
        # divide one gradient and not another that was divided for another optimizer.
        if not self._enabled or state["stage"] is not OptState.READY:
            return False
        if scale.is_cpu and number_in(scale) < 1.0:
            return True
        return bool(self._divided_by_others(state))

    def _refuse_unfit(
        self, grads: GradsByMesh, group: dist.ProcessGroup | None
    ) -> None:
        if self._enabled and self._fp16_gradients == "refuse":
            if torch.float16 in [dtype for some in grads.values() for _, dtype in some]:
                raise ValueError(FP16_REFUSED)
        if group is None and any(layout.size > 1 for layout in grads):
            raise ValueError(
                "clip_grad_norm_ needs the gradients of all ranks of a mesh, and this "
                "scaler syncs with no other rank. Do not pass agree_over='local'."
            )

    # - Step

    @no_compile
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
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
            RuntimeError: a closure; called twice; gradients changed after a clip.
            AssertionError: the gradients cannot have been scaled, or there are none.
            ValueError: an fp16 gradient, and ``fp16_gradients`` is ``"refuse"``.
            RanksDisagreeError: the ranks hold different state.
            PeerFailedError: another rank raised.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if "closure" in kwargs or (args and callable(args[0])):
            # It would make new, scaled gradients after the check.
            raise RuntimeError(
                "Closure use is not currently supported if GradScaler is enabled."
            )
        self._check_scale_growth_tracker("step")
        state = self._state_of(optimizer)
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError(
                "step() has already been called since the last update()."
            )
        is_fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if state.folded.gradients:
            is_whole = are_unchanged(state.optimizer, state.folded)
            if not is_whole:
                _refuse_changed(state)
            if not (is_whole and is_fused):  # fused at the clip: a wrapper may hide it
                _divide_folded(state)
        if is_fused:
            result = self._step_fused(optimizer, state, *args, **kwargs)
        else:
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
                self._wait_pending()
            if not state["found_inf_per_device"]:
                raise AssertionError("No inf checks were recorded for this optimizer.")
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        if state.record is not None:
            # All devices hold the same once the ranks have synced.
            found = state["found_inf_per_device"].values()
            state.record.found_inf = next(iter(found), None)
        return result

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        result: SyncResult | None = getattr(optimizer_state, "result", None)
        if result is not None and result.is_deferred:
            # The message has been on its way to the host since the sync.
            skips = result.read().found_inf
        else:
            found = optimizer_state["found_inf_per_device"].values()
            skips = any(map(number_in, found))
        return None if skips else optimizer.step(*args, **kwargs)

    def _step_fused(
        self, optimizer: Any, state: OptimizerState, *args: Any, **kwargs: Any
    ) -> Any:
        if takes_scaler(optimizer):
            _divide_folded(state)
            return optimizer.step(*args, grad_scaler=self, **kwargs)
        scale, _ = self._check_scale_growth_tracker("step")
        try:
            unscales_first = self._must_unscale_first(state, scale)
        except Exception:
            self._report_failure(self._find_group(state), "step")
            raise
        if unscales_first:
            self._check_and_sync(optimizer, state, "step", allow_fp16=True)
        elif state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        own = getattr(optimizer, "grad_scale", None)  # torch's: the user's own
        is_ready = state["stage"] is OptState.READY
        grad_scale = scale if is_ready else state.fused_grad_scale
        if own is not None:
            grad_scale = own if grad_scale is None else grad_scale * own
        flags = state["found_inf_per_device"].values()
        # The int 0, as torch's sum, where nothing was checked: a kernel that finds
        # gradients made since raises, where a tensor would let it step on scaled ones.
        found_inf: Any = any_of(flags, scale.device) if flags else 0
        optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
        try:
            # bool synchronises, until an SGD with momentum has taken its first step.
            if flags and (
                is_true(found_inf)
                or (makes_momentum(state.optimizer) and bool(found_inf))
            ):
                return None
            result = optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf
        # Not after an exception: whoever catches it may step again.
        state.folded, state.fused_grad_scale = Written(), None
        return result

    @no_compile
    def step_without_optimizer(self) -> None:
        """Take part in the other ranks' next `step`, on a rank without parameters.

        Where ``clip_grad_norm_(None, ...)`` has taken part in the other ranks' clip,
        there is nothing left to take part in.

        Raises:
            RanksDisagreeError: the ranks hold different state.
            PeerFailedError: another rank raised.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("step_without_optimizer")
        self._wait_pending()
        none = self._states[id(None)]
        if none.clips:
            none.clips -= 1
            return
        state = OptimizerState()
        if (group := self._find_group(state)) is not None:
            local = self._local_state(state, group)
            state.result = self._sync.found_inf(group, local, "step_without_optimizer")
            self._record_result(state)
        self._add_to_none(state)

    def _add_to_none(self, state: OptimizerState, clips: int = 0) -> None:
        # Keeps what the other ranks found until update, on a rank without parameters.
        none = self._states[id(None)]
        none.clips += clips
        found = none["found_inf_per_device"]
        flags = state["found_inf_per_device"].values()
        found[len(found)] = any_of(flags, self._scale_or_one().device)

    # - Check and sync

    def _check_and_sync(
        self,
        optimizer: torch.optim.Optimizer,
        state: OptimizerState,
        call: str,
        *,
        allow_fp16: bool | None = None,
        only_check: bool = False,
        async_op: bool = False,
    ) -> None:
        # Checks this rank's gradients, divides them unless asked not to, and replaces
        # what this rank found by what any rank found.
        group = self._find_group(state)
        try:
            if only_check:
                scale = self._scale_or_one()
                one, zero = torch.ones_like(scale), torch.zeros_like(scale)
                found = self._unscale_grads_(optimizer, one, zero, True)
            else:
                found = self._unscale_here(optimizer, state, allow_fp16)
        except Exception:
            self._report_failure(group, call)
            raise
        state["found_inf_per_device"] = found
        if group is None:
            if len(found) > 1:
                _spread(any_of(found.values(), self._scale_or_one().device), found)
            self._remember_overflow(state, 0)
            return
        local = self._local_state(state, group)
        state.result = self._sync.found_inf(group, local, call, async_op=async_op)
        self._pending = state
        if state.result.work is None:
            self._wait_pending()

    def _unscale_here(
        self, optimizer: Any, state: OptimizerState, allow_fp16: bool | None = None
    ) -> FoundInf:
        # Divides this rank's gradients; returns what this rank found.
        scale = self._scale_or_one()
        if allow_fp16 is None:
            allow_fp16 = self._fp16_gradients == "in_place"
        self._dividing = state
        try:
            found = self._unscale_grads_(
                optimizer, _reciprocal(scale), torch.zeros_like(scale), allow_fp16
            )
        finally:
            self._dividing = None
        state["stage"] = OptState.UNSCALED
        return found

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> FoundInf:
        state = self._dividing
        divided = set() if state is None else self._divided_by_others(state)
        if state is None:  # a caller of torch's protocol keeps its own
            found_inf = found_inf.clone()
        gradients = local_gradients(optimizer, allow_fp16=allow_fp16)
        found = check_and_unscale_(gradients, inv_scale, found_inf, divided)
        if state is not None and self._records.may_share:
            state.divided = write_down(gradients_of(state.optimizer)[0])
        if not found and self._steps_without_gradients:
            found[found_inf.device] = found_inf
        return found

    def _divided_by_others(self, state: OptimizerState) -> set[int]:
        # Ids of its gradients that other optimizers have divided, or divide here.
        if len(self._states) < 2:
            return set()
        mine, divided = local_ids(gradients_of(state.optimizer)[0]), set[int]()
        for other in self._states.values():
            if other is not state:
                if mine & local_ids(unchanged(other.folded)):
                    _refuse_changed(other)  # what is not divided now keeps the scale
                    _divide_folded(other)
                divided |= mine & local_ids(unchanged(other.divided))
        return divided

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        # For optimizers that unscale by themselves: check only, change nothing.
        self._check_scale_growth_tracker("_check_inf_per_device")
        state = self._state_of(optimizer)
        self._check_and_sync(optimizer, state, "step", only_check=True)
        return state["found_inf_per_device"]  # type: ignore[no-any-return]

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        return self._state_of(optimizer)["found_inf_per_device"]  # type: ignore[no-any-return]

    def _find_group(self, state: OptimizerState) -> dist.ProcessGroup | None:
        if state.result is not None:
            return state.result.group
        return self._sync.group.find(state.optimizer)

    def _report_failure(
        self, group: dist.ProcessGroup | None, call: str, row: Sequence[Number] = ()
    ) -> None:
        # See [Note: An error on one rank] in sync.py.
        if group is not None:
            local = self._local_state(OptimizerState(), group)
            self._sync.found_inf(group, local._replace(failed=True), call, row=row)

    def _local_state(
        self, state: OptimizerState, group: dist.ProcessGroup | None
    ) -> LocalState:
        # What this rank brings to a sync about ``state``.
        scale, found = self._scale_or_one(), state["found_inf_per_device"].values()
        record = None if group is None else state.record
        ordinal = None if record is None else self._records.number(record)
        found_inf, bad = any_of(found, scale.device) if found else None, 0
        if found_inf is not None and group is not None and is_true(found_inf):
            bad = first_nonfinite(state.optimizer, group.rank())
        tracker, left = self._growth_tracker, self._hysteresis_left
        return LocalState(
            found_inf=None if found_inf is None else number_in(found_inf),
            scale=number_in(scale),
            growth_tracker=0.0 if tracker is None else number_in(tracker),
            growth_factor=self._growth_factor,
            backoff_factor=self._backoff_factor,
            growth_interval=self._growth_interval,
            policy=self._fingerprint,
            hysteresis_left=0.0 if left is None else number_in(left),
            optimizer=ordinal,
            was_scaled=self._was_scaled,
            first_nonfinite=bad,
        )

    def _wait_pending(self) -> None:
        # Waits for what unscale_ has sent. See [Note: Waiting later] in sync.py.
        if self._pending is not None:
            state, self._pending = self._pending, None
            self._record_result(state)

    def _record_result(self, state: OptimizerState) -> None:
        # Replaces what this rank found by what any rank found.
        result, found = state.result, state["found_inf_per_device"]
        assert result is not None
        scale, rank = self._scale_or_one(), result.group.rank()
        if not found:
            found[scale.device] = torch.zeros_like(scale)
        if result.is_deferred:
            _spread(result.found_inf, found)
            self._remember_overflow(state, rank)
            return
        summary = result.read()
        if summary.found_inf:
            _spread(torch.ones_like(scale), found)
            self._remember_overflow(state, rank, summary.first_nonfinite)
        # What torch refuses on one rank is refused here when it holds for all of them.
        if not summary.was_scaled:
            raise AssertionError(
                f"Attempted {result.call} but _scale is None.  This may indicate your "
                "script did not use scaler.scale(loss or outputs) earlier in the "
                "iteration."
            )
        self._was_scaled = True
        if not (summary.has_gradients or self._steps_without_gradients):
            raise AssertionError("No inf checks were recorded for this optimizer.")

    def _remember_overflow(
        self, state: OptimizerState, rank: int, code: int | None = None
    ) -> None:
        # ``code``: what any rank found; None: look for what this rank alone found.
        if state.record is None:
            return
        if code is None:
            found = any(map(is_true, state["found_inf_per_device"].values()))
            code = first_nonfinite(state.optimizer, rank) if found else 0
        if code:
            self._history.last_overflow = overflow_of(code, rank, state.optimizer)

    @property
    def _per_optimizer_states(self) -> dict[int, Any]:
        # As torch calls it. Other ranks do not see what this rank has found.
        self._wait_pending()
        return self._states

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, states: dict[int, Any]) -> None:
        self._wait_pending()
        self._states = states

    def _state_of(self, optimizer: Any) -> OptimizerState:
        self._wait_pending()
        state = self._states.get(id(optimizer))
        if state is not None and state.optimizer is optimizer:
            return state
        state, is_new = self._records.start(optimizer, self._states)
        if is_new:
            # See [Note: A clip left to a kernel] in global_norm.py.
            for other in self._states.values():
                if len(unchanged(other.folded)) == len(other.folded.gradients):
                    _divide_folded(other)
        return state

    # - Update

    @no_compile
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
            TooManySkipsError: the policy's limit is reached.
        """
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        self._wait_pending()
        states = self._states.values()
        found = [f for state in states for f in state["found_inf_per_device"].values()]
        if found or new_scale is None:
            self._sync.end_iteration(
                lambda: self._local_state(OptimizerState(), None), "update"
            )
        if new_scale is not None:
            set_scale(scale, new_scale, self._device)
        elif not found:
            raise AssertionError("No inf checks were recorded prior to update.")
        else:
            found_inf = found[0] if len(found) == 1 else any_of(found, scale.device)
            self._move_scale(found_inf.to(scale.device), tracker)
        for state in states:
            _divide_folded(state)  # its optimizer has not stepped
        self._records.may_share = len(self._states) > 1
        self._states = defaultdict(OptimizerState)
        most = self._policy.max_consecutive_skips
        if new_scale is not None or most is None:
            return
        if (skips := self.counters.consecutive_skips) >= most:
            scales = tuple(self._history.scales)
            raise TooManySkipsError(
                f"update: {skips} iterations in a row were skipped, the policy allows "
                f"fewer than {most}. Scales so far: {list(scales)}; last: "
                f"{self.last_overflow}. A gradient that is nan at any scale is no "
                "question of scaling: look at the data, the loss and the learning "
                "rate.",
                skips=skips,
                scales=scales,
            )

    def _move_scale(self, found_inf: torch.Tensor, tracker: torch.Tensor) -> None:
        scale = self._scale_or_one()
        before: Any = scale.tolist() if scale.is_cpu else scale.clone()
        rule = self._growth_factor, self._backoff_factor, self._growth_interval
        left = self._hysteresis_left
        after = advance(scale, tracker, found_inf, rule, self._policy, left)
        self._history.record(found_inf, before, after)

    def _amp_update_scale_cpu_(self, found_inf: torch.Tensor) -> None:
        _, tracker = self._check_scale_growth_tracker("_amp_update_scale_cpu_")
        self._move_scale(found_inf.clamp(max=1.0).reshape(()), tracker)

    # - What happened

    @no_compile
    def step_was_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the last `step` of this optimizer was skipped.

        Right for fused optimizers too; also after `update`. Synchronises if found_inf
        is on an accelerator.

        Raises:
            ValueError: this scaler has not stepped this optimizer yet.
        """
        if not self._enabled:
            return False
        record = self._records.find(inner_optimizer(optimizer))
        if record is None or record.found_inf is None:
            raise ValueError(
                "step_was_skipped() was asked about an optimizer that this scaler has "
                f"not stepped yet: {type(optimizer).__name__}."
            )
        return bool(record.found_inf.tolist())

    @no_compile
    def step_scheduler(self, scheduler: Any, *args: Any, **kwargs: Any) -> bool:
        """Step a learning-rate scheduler, unless its optimizer's step was skipped.

        ``scheduler.optimizer`` decides; the other arguments go to ``scheduler.step``.

        Returns:
            Whether the scheduler stepped.

        Raises:
            ValueError: this scaler has not stepped the scheduler's optimizer yet.
        """
        if self.step_was_skipped(scheduler.optimizer):
            return False
        scheduler.step(*args, **kwargs)
        return True

    @property
    def counters(self) -> Counters:
        """Steps, skips, growths and backoffs since the scaler was made.

        Counted by `update`. Synchronises if the scale is on an accelerator.
        """
        return self._history.counters()

    @property
    def last_overflow(self) -> Overflow | None:
        """The parameter and rank of the last overflow, None before the first.

        Known on every rank alike where the scale is on a CPU; on an accelerator each
        rank knows its own overflows, after a step that was not fused.
        """
        self._wait_pending()
        return self._history.last_overflow

    # - Settings

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale grows: finite and above 1."""
        self._growth_factor = check_number("The growth factor", new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor by which the scale backs off: above 0 and below 1."""
        self._backoff_factor = check_number("The backoff factor", new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of good steps before the scale grows: 1 or more."""
        self._growth_interval = check_count("The growth interval", new_interval)
        self._limit_tracker()

    def _limit_tracker(self) -> None:
        # torch's kernel asks for equality: a tracker beyond a lowered interval would
        # never grow the scale again.
        most = self._growth_interval - 1
        self._init_growth_tracker = min(self._init_growth_tracker, most)
        if self._growth_tracker is not None:
            self._growth_tracker.clamp_(max=most)

    # - Saved state

    def state_dict(self) -> dict[str, Any]:
        """Return the state, in the keys of torch; empty if disabled.

        A policy with hysteresis adds the key ``"_hysteresis_left"``. Synchronises with
        the device. Call it after `update`.
        """
        state = super().state_dict()
        if self._enabled and self._policy.hysteresis > 1:
            state["_hysteresis_left"] = self._get_hysteresis_left()
        return state

    def _get_hysteresis_left(self) -> int:
        if self._hysteresis_left is None:
            return self._init_hysteresis_left
        return int(self._hysteresis_left.item())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state that this class or torch's saved; nothing if disabled.

        All ranks must call it, with the same state: one collective compares them before
        anything is changed (with ``agree_over="mesh"`` and no step so far, the next
        sync does).

        Raises:
            RuntimeError: the state is empty, as a disabled scaler saves it.
            InvalidSettingError: a value that no run can work with; nothing is changed.
            RanksDisagreeError: the ranks load different states; nothing is changed.
            PeerFailedError: another rank raised; nothing is changed.
        """
        if not self._enabled:
            return
        group = self._sync.group.find_known()
        try:
            saved = check_state(state_dict, self._policy)
        except Exception:
            if group is not None:
                failed = LocalState(None, 1.0, 0.0, 2.0, 0.5, 1, 0, failed=True)
                self._sync.assert_same_state(group, failed, "load_state_dict")
            raise
        if group is not None:
            fields = {key.lstrip("_"): value for key, value in saved.items()}
            local = LocalState(None, policy=self._fingerprint, **fields)
            self._sync.assert_same_state(group, local, "load_state_dict")
        # Ranks that lived differently long until now count alike from here on.
        self._sync.restart()
        self._records.forget_order()
        super().load_state_dict(saved)
        self._init_hysteresis_left = saved["_hysteresis_left"]
        self._was_scaled = True
        if self._hysteresis_left is not None:
            self._hysteresis_left.fill_(self._init_hysteresis_left)
        self._limit_tracker()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if self._enabled:
            state["_init_hysteresis_left"] = self._get_hysteresis_left()
            state["_hysteresis_left"] = None
        return state


def _refuse_changed(state: OptimizerState) -> None:
    unchanged_ids = local_ids(unchanged(state.folded))
    if local_ids(gradients_of(state.optimizer)[0]) - unchanged_ids:
        raise RuntimeError(
            "Gradients were changed after clip_grad_norm_(), which leaves them to the "
            "step() of a fused optimizer: change them before it."
        )


def _divide_folded(state: OptimizerState) -> None:
    # See [Note: A clip left to a kernel] in global_norm.py.
    if state.fused_grad_scale is not None:
        state.divided = divide_(state.folded, state.fused_grad_scale)
        state.folded, state.fused_grad_scale = Written(), None


def _spread(found_inf: torch.Tensor, found: FoundInf) -> None:
    for flag in found.values():
        flag.copy_(found_inf, non_blocking=True)


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    # (), fp32: one over the scale, rounded once. On an accelerator an fp32 division may
    # be compiled to an approximation; through fp64 it is exact. mps has no fp64.
    if scale.is_cpu or scale.device.type == "mps":
        return scale.reciprocal()
    return scale.double().reciprocal().float()


def _norm_tensor(norm: Number, device: torch.device) -> torch.Tensor:
    # (), fp32; fp64 where the host sees that fp32 cannot hold it.
    is_large = isinstance(norm, float) and HIGHEST_SCALE < norm < math.inf
    dtype = torch.float64 if is_large else torch.float32
    return torch.as_tensor(norm, dtype=dtype, device=device)
