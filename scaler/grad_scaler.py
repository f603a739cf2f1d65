"""GradScaler: scale, unscale_, clip_grad_norm_, step, update, as in torch, on N ranks.

1. ``scale(loss)`` multiplies the loss; backward makes scaled gradients.
2. ``unscale_``, ``clip_grad_norm_``, ``clip_and_step`` or ``step`` checks this rank's
   gradients (``grads.py``) and syncs found_inf with the other ranks (``sync.py``); the
   gradients are divided, here or in a fused optimizer.
3. ``step`` or ``clip_and_step`` calls the optimizer, on all ranks or on none.
4. ``update`` moves the scale (``scale_update.py``) and ends the iteration.

Nothing about a gradient is kept between calls: what ``.grad`` holds follows from the
name of the last call.

[Note: A call that raises]
A sync that fails raises on every rank. Whatever raises in a call, also in the optimizer
that it steps, the iteration begins anew: gradients that were divided are multiplied by
the scale again, what the call found is dropped, and an optimizer that has stepped may
step again, on new gradient tensors. So whoever catches the error, drops the batch and
goes on trains as if the batch had not been, with an `update` in between (which then
moves nothing, unless other optimizers have stepped) or without. Errors of wrong call
order are raised before anything has happened; the other ranks hear of them, too.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar, get_args

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler as _TorchGradScaler
from torch.amp.grad_scaler import OptState as OptState
from torch.amp.grad_scaler import _MultiDeviceReplicator as _MultiDeviceReplicator
from typing_extensions import TypeIs

from .config import (
    HIGHEST_SCALE,
    FP16Gradients,
    Policy,
    check_choice,
    check_count,
    check_number,
    check_state,
)
from .errors import PeerFailedError, RanksDisagreeError, TooManySkipsError
from .global_norm import (
    GradsByMesh,
    clip_factor,
    global_norm,
    gradient_table,
    grads_by_mesh,
    local_norms,
    norm_alone,
    norm_on_host,
    tell_apart,
)
from .grads import (
    FoundInf,
    Number,
    any_of,
    check_and_unscale_,
    clip_,
    is_readable,
    is_true,
    local_gradients,
    multiply_,
    number_in,
    parameters_of,
    references_of,
    tensor_of,
)
from .history import (
    INF_OR_NAN,
    Counters,
    History,
    Overflow,
    first_nonfinite,
    overflow_of,
)
from .optimizer_record import (
    OptimizerRecord,
    OptimizerRecords,
    makes_momentum,
    takes_scaler,
)
from .row import CHECK, CLIP, FIELDS, LOAD, UPDATE, Row, Rows
from .scale_update import advance, checked_scale
from .sync import NOTHING_CHECKED, OverflowSync, SyncResult, one_at_a_time
from .sync_group import SyncGroup, SyncOver
from .torch_internals import no_compile

Outputs = TypeVar("Outputs", bound="torch.Tensor | Iterable[Any]")
State = dict[str, Any]


def _refresh_per_optimizer_state() -> State:
    # What torch keeps of an optimizer in an iteration.
    return {"stage": OptState.READY, "found_inf_per_device": {}}


class _Measured(NamedTuple):
    # The global norm of an optimizer's gradients, and what these carry.
    norm: Number
    grads: GradsByMesh
    carried: Number
    factor: Number  # that clips it
    is_finite: bool
    is_refused: bool  # a rank refuses a norm that is not finite

    def divisor(self, device: torch.device) -> torch.Tensor | None:
        # (), fp32: what a kernel divides by to unscale and clip; None if fp32 cannot
        # hold it. On an accelerator, where reading it would synchronise, a norm beyond
        # fp32 then clips to zero.
        factor, divisor = self.factor, self.carried
        if isinstance(factor, torch.Tensor) or isinstance(divisor, torch.Tensor):
            divisor = divisor / factor
        elif self.is_finite:
            if divisor > HIGHEST_SCALE * factor:
                return None
            divisor = divisor / factor
        return torch.as_tensor(divisor, dtype=torch.float32, device=device)


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
        sync_over: the ranks that sync: ``"world"`` (all ranks), a process group, a
            device mesh of any number of axes, or ``"local"`` (no collective: gradients
            are already equal on all ranks that matter).
        fp16_gradients: ``"refuse"`` them as torch does, or divide them ``"in_place"``,
            as its ShardedGradScaler does, which flushes small values to zero.
        policy: limits, hysteresis and the like; the default is torch's rule.

    Raises:
        InvalidSettingError: a setting that no run can work with.
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
        sync_over: SyncOver = "world",
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
        # True once the scale came from scale() or a checkpoint, not from a default.
        self._was_scaled = False
        self._history = History()
        self._records = OptimizerRecords()
        self._per_optimizer_states: dict[int, State] = defaultdict(
            _refresh_per_optimizer_state
        )
        # By id: the optimizers of this iteration and the record of each. It keeps them
        # alive: the id of a dead one may be given to a new one.
        self._held: dict[int, tuple[Any, OptimizerRecord]] = {}
        # Of this iteration: a call raised; it need not have as many syncs as others;
        # optimizers were seen for the first time.
        self._has_failed = self._is_unusual = self._has_new = False
        # Optimizers that this rank lacks and has not stepped: unscaled, and clipped.
        self._unscaled_without = self._clipped_without = 0
        self._has_warned = False
        self._sync = OverflowSync(SyncGroup(sync_over), device, self._note)

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
        is_tensor = isinstance(outputs, torch.Tensor)
        scale: Any = self._scaled if is_tensor else super().scale
        scaled = scale(outputs)
        self._was_scaled = True
        return scaled  # type: ignore[no-any-return]

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
    def unscale_(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Divide this optimizer's gradients by the scale, and sync found_inf.

        Optional: only to look at gradients, or to change them, before `step`. Call it
        once per optimizer and iteration, after all gradients are accumulated. One
        collective when several ranks sync. As in torch, a gradient that two optimizers
        share is divided for each of them.

        Args:
            optimizer: its gradients are changed in place; None on a rank that lacks it.

        Raises:
            RuntimeError: called twice, or after `step`, in one iteration.
            AssertionError: the gradients cannot have been scaled yet.
            ValueError: an fp16 gradient, and ``fp16_gradients`` is ``"refuse"``.
            RanksDisagreeError: the ranks hold different state, or call something else.
            PeerFailedError: another rank raised.
        """
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        if self._lacks(optimizer):
            self._take_part("unscale_", call=CHECK)
            self._unscaled_without += 1
            return
        state, record = self._state_of(optimizer)
        if state["stage"] is OptState.UNSCALED:
            raise self._refused(
                "unscale_() has already been called on this optimizer since the last "
                "update().",
                optimizer,
                "unscale_",
            )
        if self._has_stepped(optimizer, state):
            message = "unscale_() is being called after step()."
            raise self._refused(message, optimizer, "unscale_")
        exchanges = self._sync.exchanges
        try:
            self._check_and_sync(optimizer, state, record, "unscale_")
        except BaseException as error:
            is_told = self._tell(error, exchanges, optimizer, "unscale_")
            self._begin_anew(error, is_told, optimizer, state)
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

        Takes the place of `unscale_` and ``torch.nn.utils.clip_grad_norm_``. The norm
        is that of all gradients on all ranks that sync, each shard added and each
        replica counted once (see [Note: Each replica once] in ``global_norm.py``).
        Afterwards ``.grad`` is unscaled and clipped; after an overflow it is of no use,
        and `step` will skip. `clip_and_step` is faster. A disabled scaler clips in the
        same way.

        Args:
            optimizer: plain tensors and DTensors on up to four meshes; None on a rank
                that lacks it.
            max_norm: largest norm after the call, at least 0; the same on all ranks.
            norm_type: order of the norm, 2 or any other above 0, also infinite; the
                same on all ranks.
            error_if_nonfinite: raise if the norm is not finite; synchronises. `step`
                then skips, and `update` reduces the scale, as without it.

        Returns:
            (), fp32, on the device of the scale: the norm of the unscaled gradients
            before clipping, the same on every rank; fp64 where fp32 cannot hold it. Not
            finite after an overflow.

        Raises:
            InvalidSettingError: ``max_norm`` or ``norm_type`` is no such number.
            RuntimeError: called after `step` or twice, or the norm is not finite and
                ``error_if_nonfinite`` is set.
            NotImplementedError: complex gradients.
            AssertionError: the gradients cannot have been scaled yet.
            ValueError: an fp16 gradient, and ``fp16_gradients`` is ``"refuse"``; or
                a mesh of the gradients has ranks that do not sync.
            RanksDisagreeError: the ranks hold different state, or clip differently.
            PeerFailedError: another rank raised.
        """
        return self._clip(
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

        The same as `clip_grad_norm_` and `step`, faster: a fused optimizer divides and
        clips in its own kernel, by its ``grad_scale``; others take one multiplication.
        Afterwards ``.grad`` is unscaled and clipped; with a fused optimizer it is what
        the kernel leaves, and torch's write just this back. As in `step`, a pre-hook of
        a fused optimizer sees gradients that are still scaled. A disabled scaler clips
        and steps.

        Args:
            optimizer: as in `clip_grad_norm_`; None on a rank that lacks it.
            max_norm: as in `clip_grad_norm_`.
            norm_type: as in `clip_grad_norm_`.
            error_if_nonfinite: raise if the norm is not finite; synchronises. The step
                is skipped then, as without it.

        Returns:
            The norm, as `clip_grad_norm_` returns it.

        Raises:
            RuntimeError: called after `step` or after a clip, or the norm is not finite
                and ``error_if_nonfinite`` is set.
            Exception: what `clip_grad_norm_` and ``optimizer.step`` raise.
        """
        return self._clip(
            optimizer, max_norm, norm_type, error_if_nonfinite, steps=True
        )

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
        state, record = self._state_to_clip(optimizer, method)
        exchanges = self._sync.exchanges
        try:
            measured = self._measure(
                optimizer,
                state,
                record,
                method,
                max_norm,
                norm_type,
                refuses=error_if_nonfinite,
            )
            norm = _norm_tensor(measured.norm, self._scale_or_one().device)
            is_refused = measured.is_refused
            if is_refused:
                # As after an overflow, also where only the norm is not finite.
                measured = measured._replace(is_finite=False)
                one = torch.ones((), dtype=torch.float32, device=norm.device)
                state["found_inf_per_device"] = {norm.device: one}
                if record is not None:
                    record.result = None
                else:
                    self._add_found(state["found_inf_per_device"])
            divisor, kwargs = None, {}
            if steps and self._enabled and is_fused(optimizer):
                if takes_scaler(optimizer, stacklevel=4):
                    kwargs["grad_scaler"] = self
                elif state["stage"] is OptState.READY:
                    divisor = measured.divisor(norm.device)
            if divisor is None:
                if measured.is_finite:
                    clip_(measured.grads.values(), measured.factor, measured.carried)
                elif record is not None:
                    record.is_undivided = state["stage"] is OptState.READY
                state["stage"] = OptState.UNSCALED
            if record is None:
                self._unscaled_without = max(self._unscaled_without - 1, 0)
                self._clipped_without += self._enabled and not steps
            elif not steps:
                record.is_clipped = True
            elif self._enabled or not is_refused:
                self._step_checked(optimizer, state, record, divisor, **kwargs)
        except BaseException as error:
            is_told = self._tell(error, exchanges, optimizer, method, CLIP)
            self._begin_anew(error, is_told, optimizer, state)
            raise
        finally:
            if not self._enabled:
                self._end_states()  # nothing lasts until an update
        if is_refused and error_if_nonfinite:
            raise RuntimeError(
                f"The total norm of order {norm_type} of the gradients is "
                f"{float(norm)}, so they cannot be clipped. Pass "
                "error_if_nonfinite=False to let step() skip instead."
            )
        return norm

    def _state_to_clip(
        self, optimizer: torch.optim.Optimizer | None, method: str
    ) -> tuple[State, OptimizerRecord | None]:
        if self._enabled:
            self._check_scale_growth_tracker(method)
        if optimizer is None:
            return _refresh_per_optimizer_state(), None
        state, record = self._state_of(optimizer)
        if self._has_stepped(optimizer, state):
            message = f"{method}() is being called after step()."
            raise self._refused(message, optimizer, method, CLIP)
        if record.is_clipped and self._enabled:
            message = f"{method}() was called twice since update()."
            raise self._refused(message, optimizer, method, CLIP)
        return state, record

    def _measure(
        self,
        optimizer: torch.optim.Optimizer | None,
        state: State,
        record: OptimizerRecord | None,
        method: str,
        max_norm: float,
        norm_type: float,
        *,
        refuses: bool,
    ) -> _Measured:
        # The global norm. Gradients are only read, unless they must be divided first.
        scale, group = self._scale_or_one(), self._find_group(record)
        carried = number_in(scale)
        found: FoundInf = {}
        if state["stage"] is OptState.UNSCALED:  # of an earlier unscale_
            found = {**state["found_inf_per_device"]}
        grads, ranks = GradsByMesh(), _ranks_of(group)
        max_norm = check_number("max_norm", max_norm)
        norm_type = check_number("norm_type", norm_type)
        if optimizer is not None and record is not None:
            if state["stage"] is OptState.READY and _is_below_one(carried):
                found = self._unscale_here(optimizer, state)
            allow_fp16 = not self._enabled or self._fp16_gradients == "in_place"
            (rank,) = _ranks_of(None)
            grads = grads_by_mesh(optimizer, record, rank, ranks, allow_fp16=allow_fp16)
        if state["stage"] is OptState.UNSCALED:
            carried = carried / carried  # one, on the device of the scale
        entries, flag = local_norms(grads, norm_type, carried)
        if flag is not None:
            found = {scale.device: any_of([flag, *found.values()], scale.device)}
        elif not found and self._steps_without_gradients:
            found = {scale.device: torch.zeros_like(scale)}
        result = None
        if group is None:
            self._remember_overflow(optimizer, found)
            norm = norm_alone(entries, norm_type)
        else:
            clip: Any = {"call": CLIP, "max_norm": max_norm, "norm_type": norm_type}
            clip["refuses"] = float(refuses)
            with one_at_a_time(group):
                found, result = self._synced(
                    optimizer, record, found, group, method, entries, **clip
                )
                norm = self._norm_over(result, optimizer, record, norm_type, carried)
            if result.is_known:  # else no rank hears of another one's wish
                refuses = result.read().any("refuses")
            if isinstance(norm, torch.Tensor):
                norm = norm.to(scale.device)
        state["found_inf_per_device"] = found
        if optimizer is None:
            self._add_found(found)
        overflows = self._enabled and is_true(any_of(found.values(), scale.device))
        factor = clip_factor(norm, max_norm)
        is_refused = refuses and not math.isfinite(norm)
        return _Measured(norm, grads, carried, factor, not overflows, is_refused)

    def _norm_over(
        self,
        result: SyncResult,
        optimizer: Any,
        record: OptimizerRecord | None,
        norm_type: float,
        carried: Number,
    ) -> Number:
        # From the rows; if replicas must be told apart, all ranks see that, and do.
        if not result.is_known:
            return global_norm(result.rows[:, FIELDS:], norm_type)
        norm = norm_on_host(result.read().norms(), norm_type)
        if norm is None:
            entries = self._told_apart(result, optimizer, record, norm_type, carried)
            norm = norm_on_host(entries, norm_type, is_told=True)
        assert norm is not None
        return norm

    def _told_apart(
        self,
        result: SyncResult,
        optimizer: Any,
        record: OptimizerRecord | None,
        norm_type: float,
        carried: Number,
    ) -> list[list[float]]:
        # The entries once more, with replicas told apart by parameter.
        (rank,), ranks = _ranks_of(None), _ranks_of(result.group)
        table, error = None, None
        try:
            table = gradient_table(optimizer, rank)
        except Exception as caught:  # the other ranks wait for the table
            error = caught
        try:
            tables = self._sync.tables_of(result, table)
        except PeerFailedError as failed:
            raise error or failed from None
        tell_apart(optimizer, record, tables, result.group.rank(), result.method)
        grads = GradsByMesh()
        if optimizer is not None and record is not None:
            grads = grads_by_mesh(optimizer, record, rank, ranks, allow_fp16=True)
        entries, _ = local_norms(grads, norm_type, carried)
        rows = self._sync.rows_of(result, tensor_of(entries, result.rows.device))
        told: list[list[float]] = rows.reshape(-1, 3).tolist()
        return told

    def _scale_or_one(self) -> torch.Tensor:
        # A disabled scaler clips by the same norm; its gradients carry no scale.
        if self._scale is not None:
            return self._scale
        has_device = self._device != "cuda" or torch.cuda.is_available()
        device = self._device if has_device else "cpu"
        return torch.ones((), dtype=torch.float32, device=device)

    # - Step

    @no_compile
    def step(
        self, optimizer: torch.optim.Optimizer | None, *args: Any, **kwargs: Any
    ) -> Any:
        """Step the optimizer, unless a gradient on any rank is not finite.

        Unscales first unless `unscale_` was called. Fused optimizers divide by the
        scale themselves and skip on the device, without a host synchronisation.

        Args:
            optimizer: the optimizer to step. None on a rank that lacks it, at its place
                in the order of the others; it takes part in their first sync of it,
                whatever they call, unless `unscale_` or a clip with None has.
            *args: handed to ``optimizer.step``.
            **kwargs: handed to ``optimizer.step``.

        Returns:
            What ``optimizer.step`` returned; None if it was skipped.

        Raises:
            RuntimeError: a closure; called twice.
            AssertionError: the gradients cannot have been scaled, or there are none.
            ValueError: an fp16 gradient, and ``fp16_gradients`` is ``"refuse"``.
            RanksDisagreeError: the ranks hold different state, or call something else.
            PeerFailedError: another rank raised.
        """
        if not self._enabled:
            return None if self._lacks(optimizer) else optimizer.step(*args, **kwargs)
        if "closure" in kwargs or (args and callable(args[0])):
            # It would make new, scaled gradients after the check.
            message = "Closure use is not currently supported if GradScaler is enabled."
            raise self._refused(message, optimizer, "step")
        self._check_scale_growth_tracker("step")
        if self._lacks(optimizer):
            if self._clipped_without:
                self._clipped_without -= 1
            elif self._unscaled_without:
                self._unscaled_without -= 1
            else:
                self._take_part("step", takes_part=1.0)
            return None
        state, record = self._state_of(optimizer)
        if self._has_stepped(optimizer, state):
            message = "step() has already been called since the last update()."
            if record.stepped_on is not None:
                message += (
                    " A call has raised since then. To drop the batch, call update(), "
                    "or zero_grad() with set_to_none=True, before the next one."
                )
            raise self._refused(message, optimizer, "step")
        exchanges = self._sync.exchanges
        if state["stage"] is OptState.UNSCALED:
            exchanges = -1  # the other ranks wait no more
        try:
            grad_scale = None
            if not is_fused(optimizer):
                if state["stage"] is OptState.READY:
                    self.unscale_(optimizer)
            elif takes_scaler(optimizer, stacklevel=3):
                kwargs["grad_scaler"] = self
            elif state["stage"] is OptState.READY:
                if _is_below_one(number_in(self._scale_or_one())):
                    self._check_and_sync(
                        optimizer, state, record, "step", allow_fp16=True
                    )
                else:
                    self._check_inf_per_device(optimizer)
                    grad_scale = self._scale
            return self._step_checked(
                optimizer, state, record, grad_scale, *args, **kwargs
            )
        except BaseException as error:
            is_told = self._tell(error, exchanges, optimizer, "step")
            self._begin_anew(error, is_told, optimizer, state)
            raise

    def _step_checked(
        self,
        optimizer: Any,
        state: State,
        record: OptimizerRecord,
        grad_scale: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Steps or skips; ``grad_scale`` is what a kernel is still to divide by.
        if not self._enabled or "grad_scaler" in kwargs:
            result = optimizer.step(*args, **kwargs)
        elif is_fused(optimizer):
            result = self._step_fused(
                optimizer, state, record, grad_scale, *args, **kwargs
            )
        else:
            if not state["found_inf_per_device"]:
                raise AssertionError("No inf checks were recorded for this optimizer.")
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        # All devices hold the same once the ranks have synced.
        record.found_inf = next(iter(state["found_inf_per_device"].values()), None)
        return result

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        held = self._held.get(id(optimizer))
        result = None if held is None else held[1].result
        if result is not None and not result.is_known:
            # The rows have been on their way to the host since the sync.
            skips = (rows := result.read()).any("found_inf")
            if self._must_have_gradients and not rows.any("has_gradients"):
                raise AssertionError("No inf checks were recorded for this optimizer.")
        else:
            skips = False
            for found_inf in optimizer_state["found_inf_per_device"].values():
                skips = skips or bool(number_in(found_inf))
        if skips and not is_readable(self._scale_or_one()):
            rank = 0 if result is None else result.group.rank()
            self._note_overflow(optimizer, rank)
        return None if skips else optimizer.step(*args, **kwargs)

    def _step_fused(
        self,
        optimizer: Any,
        state: State,
        record: OptimizerRecord,
        grad_scale: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        own = getattr(optimizer, "grad_scale", None)  # torch's: the user's own
        # What an interrupted step has left there is not the user's.
        if own is not None and own is not record.grad_scale:
            grad_scale = own if grad_scale is None else grad_scale * own
        # An object of its own: the user may set one tensor before each step.
        if isinstance(grad_scale, torch.Tensor):
            grad_scale = grad_scale.detach()
        flags = state["found_inf_per_device"].values()
        # The int 0, as torch's sum, where nothing was checked: a kernel that finds
        # gradients made since raises, where a tensor would let it step on scaled ones.
        found_inf: Any = any_of(flags, self._scale_or_one().device) if flags else 0
        record.grad_scale = grad_scale
        try:
            optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
            # bool synchronises, until an SGD with momentum has taken its first step.
            if flags and (
                is_true(found_inf) or (makes_momentum(optimizer) and bool(found_inf))
            ):
                return None
            return optimizer.step(*args, **kwargs)
        finally:
            for name in ("grad_scale", "found_inf"):
                with contextlib.suppress(AttributeError):  # interrupted before it was
                    delattr(optimizer, name)

    def _lacks(self, optimizer: Any) -> TypeIs[None]:
        # A rank on its own lacks none: None is a mistake there, and raises as torch's.
        return optimizer is None and self._sync.group.is_distributed

    def _take_part(self, method: str, **fields: float) -> None:
        # In the other ranks' sync of an optimizer that this rank lacks.
        exchanges = self._sync.exchanges
        try:
            if (group := self._find_group(None)) is None:
                return
            with one_at_a_time(group):
                found, result = self._synced(
                    None, None, {}, group, method, None, **fields
                )
                rows = result.read() if result.is_known else None
                if rows is not None and (norm_type := rows.value("norm_type")):
                    norm = self._norm_over(result, None, None, norm_type, 1.0)
                    if rows.any("refuses") and not math.isfinite(norm):
                        found = {key: torch.ones_like(x) for key, x in found.items()}
            self._add_found(found)
        except BaseException as error:
            call = fields.get("call", math.nan)
            is_told = self._tell(error, exchanges, None, method, call)
            self._begin_anew(error, is_told, None, _refresh_per_optimizer_state())
            raise

    # - Check and sync

    def _check_and_sync(
        self,
        optimizer: torch.optim.Optimizer,
        state: State,
        record: OptimizerRecord,
        method: str,
        *,
        allow_fp16: bool | None = None,
        only_check: bool = False,
    ) -> None:
        # Checks this rank's gradients, divides them unless asked not to, and replaces
        # what this rank found by what any rank found.
        group = self._find_group(record)
        if only_check:
            scale = self._scale_or_one()
            one, zero = torch.ones_like(scale), torch.zeros_like(scale)
            found = self._unscale_grads_(optimizer, one, zero, True)
        else:
            found = self._unscale_here(optimizer, state, allow_fp16)
        if group is not None:
            found, _ = self._synced(optimizer, record, found, group, method, call=CHECK)
        else:
            self._remember_overflow(optimizer, found)
            if len(found) > 1:
                any_found = any_of(found.values(), self._scale_or_one().device)
                found = {place: any_found.to(flag) for place, flag in found.items()}
        state["found_inf_per_device"] = found

    def _unscale_here(
        self, optimizer: Any, state: State, allow_fp16: bool | None = None
    ) -> FoundInf:
        # Divides this rank's gradients; returns what this rank found.
        scale = self._scale_or_one()
        if allow_fp16 is None:
            allow_fp16 = self._fp16_gradients == "in_place"
        found: FoundInf = self._unscale_grads_(
            optimizer, _reciprocal(scale), torch.zeros_like(scale), allow_fp16
        )
        state["stage"] = OptState.UNSCALED
        return found

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> FoundInf:
        gradients = local_gradients(optimizer, allow_fp16=allow_fp16)
        found = check_and_unscale_(gradients, inv_scale, found_inf)
        if not found and self._steps_without_gradients:
            found[found_inf.device] = found_inf
        return found

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        # For optimizers that unscale by themselves: check only, change nothing.
        self._check_scale_growth_tracker("_check_inf_per_device")
        state, record = self._state_of(optimizer)
        self._check_and_sync(optimizer, state, record, "step", only_check=True)
        return state["found_inf_per_device"]  # type: ignore[no-any-return]

    def _found_inf_per_device(self, optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
        return self._state_of(optimizer)[0]["found_inf_per_device"]  # type: ignore[no-any-return]

    # - Calls that raise; see [Note: A call that raises]

    def _begin_anew(
        self,
        error: BaseException,
        is_told: bool,
        optimizer: Any,
        state: State | None,
    ) -> None:
        # ``state``: of the optimizer's part, which is dropped; None in an update. The
        # other parts keep what was found in them.
        self._has_failed = True
        self._unscaled_without = self._clipped_without = 0
        has_found = state is not None and bool(state["found_inf_per_device"])
        is_empty = isinstance(error, AssertionError) and not has_found
        if not (is_empty or self._sync.is_void):  # else all ranks count anew
            self._is_unusual = True
        if self._sync.sent and not (is_told or is_empty):
            self._sync.failures += 1
        if state is not None:
            self._end_part(optimizer, state)
            state["found_inf_per_device"] = {}
        for each, _ in list(self._held.values()):
            self._end_part(each, self._per_optimizer_states[id(each)])

    def _end_part(self, optimizer: Any, state: State) -> None:
        # Divided gradients carry the scale again. An optimizer that has stepped may
        # step again, on other tensors: a backward may have added to those.
        held, stage = self._held.get(id(optimizer)), state["stage"]
        if held is None or stage is OptState.READY or not self._enabled:
            return
        is_divided = stage is OptState.UNSCALED and not held[1].is_undivided
        if stage is OptState.UNSCALED:
            state["stage"] = OptState.READY
            held[1].is_clipped = held[1].is_undivided = False
        with contextlib.suppress(Exception):  # the first error is the one to tell
            if is_divided:
                gradients = local_gradients(optimizer, allow_fp16=True)
                multiply_(gradients, self._scale_or_one())
            elif stage is OptState.STEPPED and held[1].stepped_on is None:
                held[1].stepped_on = references_of(optimizer)

    def _has_stepped(self, optimizer: Any, state: State) -> bool:
        # In this iteration; as far as a failure has not ended it, see `_end_part`.
        if state["stage"] is not OptState.STEPPED:
            return False
        record = self._held[id(optimizer)][1]
        if record.stepped_on is None:
            return True
        if not record.stepped_on.isdisjoint(references_of(optimizer)):
            return True
        state["stage"], record.stepped_on = OptState.READY, None
        record.is_clipped = record.is_undivided = False
        return False

    def _refused(
        self, message: str, optimizer: Any, method: str, call: int = CHECK
    ) -> RuntimeError:
        # Wrong call order, perhaps on this rank alone: the other ranks must not wait.
        error = RuntimeError(message)
        is_told = self._tell(error, self._sync.exchanges, optimizer, method, call)
        if is_told and not self._sync.is_void:
            self._is_unusual = True
        return error

    def _tell(
        self,
        error: BaseException,
        exchanges: int,
        optimizer: Any,
        method: str,
        call: float = CHECK,
    ) -> bool:
        # The other ranks hear of an error before the sync of a call, which has not made
        # one of the ``exchanges`` yet. Returns whether they do, or have.
        if not isinstance(error, Exception) or exchanges != self._sync.exchanges:
            is_heard = isinstance(error, (PeerFailedError, RanksDisagreeError))
            return is_heard or self._sync.is_void or self._sync.told == id(error)
        held = self._held.get(id(optimizer))
        try:
            group = self._find_group(None if held is None else held[1])
            with contextlib.suppress(PeerFailedError, RanksDisagreeError):
                self._report_failure(group, method, call)  # they are of the sync before
            self._sync.told = id(error)
            return group is not None
        except Exception:
            error.add_note(
                "gradparity: the other ranks cannot be told of this error. They wait "
                "until the time limit of their process group."
            )
            return False

    def _find_group(self, record: OptimizerRecord | None) -> dist.ProcessGroup | None:
        if record is not None and record.result is not None:
            return record.result.group
        return self._sync.group.find()

    def _report_failure(
        self, group: dist.ProcessGroup | None, method: str, call: float
    ) -> None:
        # See [Note: An error on one rank] in sync.py.
        if group is not None:
            row = self._row()._replace(call=call, found_inf=1.0, failed=1.0)
            self._sync.exchange(group, method, row)

    def _row(self) -> Row:
        # The state that must be equal on all ranks.
        tracker, left = self._growth_tracker, self._hysteresis_left
        return Row(
            scale=number_in(self._scale_or_one()),
            growth_tracker=0.0 if tracker is None else number_in(tracker),
            growth_factor=self._growth_factor,
            backoff_factor=self._backoff_factor,
            growth_interval=self._growth_interval,
            hysteresis_left=0.0 if left is None else number_in(left),
            was_scaled=float(self._was_scaled or not self._enabled),
            **self._policy.fields(),
        )

    def _synced(
        self,
        optimizer: Any,
        record: OptimizerRecord | None,
        found: FoundInf,
        group: dist.ProcessGroup,
        method: str,
        norms: list[Number] | None = None,
        **fields: float,
    ) -> tuple[FoundInf, SyncResult]:
        # What any rank found, in place of what this one did.
        scale = self._scale_or_one()
        if record is not None and record.number is None:
            record.taken = self._records.numbers()
        if found:
            found_inf = number_in(any_of(found.values(), scale.device))
            fields |= {"found_inf": found_inf, "has_gradients": 1.0}  # type: ignore[dict-item]  # or a tensor
            if isinstance(found_inf, float) and found_inf:
                fields["first_bad"] = first_nonfinite(optimizer)
        row = self._row()._replace(**fields)
        result = self._sync.exchange(group, method, row, norms or (), record)
        if record is not None:
            record.result = result
        flags = found or {scale.device: torch.zeros_like(scale)}
        self._was_scaled = self._was_scaled or self._enabled
        if not result.is_known:
            any_found = result.found_inf
            return {place: any_found.to(flag) for place, flag in flags.items()}, result
        rows = result.read()
        if rows.any("found_inf"):
            flags = {place: torch.ones_like(flag) for place, flag in flags.items()}
        if self._must_have_gradients and not rows.any("has_gradients"):
            flags = {}  # as in one process, where only an unfused step refuses it
        return flags, result

    @property
    def _must_have_gradients(self) -> bool:
        return self._enabled and not self._steps_without_gradients

    def _note(self, result: SyncResult, rows: Rows) -> None:
        # Called when the host has read the rows, at once or at the next sync.
        if rows.any("found_inf"):
            rank = max(rank for rank, x in enumerate(rows.column("found_inf")) if x)
            code = int(rows.column("first_bad")[rank])
            optimizer = None if result.record is None else result.record.optimizer()
            overflow = overflow_of(code, rank, result.group.rank(), optimizer)
            is_here = is_readable(self._scale_or_one())
            self._history.overflowed(
                overflow, None if is_here else rows.column("scale")[rank]
            )
        norm_type = rows.value("norm_type")
        if not result.is_late or norm_type is None:
            return
        if norm_on_host(rows.norms(), norm_type) is None:
            self._sync.settle()
            warnings.warn(
                f"The last {result.method} has counted replicas more than once: some "
                "ranks hold parameters together and others alone, which shows only now "
                "on an accelerator. The next clips are right.",
                stacklevel=2,
            )

    def _add_found(self, found: FoundInf) -> None:
        # On a rank without the optimizer; kept until update.
        flags = self._per_optimizer_states[id(None)]["found_inf_per_device"]
        for flag in found.values():
            flags[len(flags)] = flag

    def _remember_overflow(self, optimizer: Any, found: FoundInf) -> None:
        # On a rank on its own, where the host sees it.
        if optimizer is not None and any(map(is_true, found.values())):
            self._note_overflow(optimizer, 0)

    def _note_overflow(self, optimizer: Any, rank: int) -> None:
        if not (code := first_nonfinite(optimizer)):
            return
        overflow, scale = overflow_of(code, rank, rank, optimizer), self._scale_or_one()
        if is_readable(scale):
            self._history.overflowed(overflow)
            return
        # Looked at after a clip, which makes nan of inf; the rows have been logged.
        overflow = overflow._replace(kind=INF_OR_NAN)
        is_logged = self._sync.group.find() is not None
        self._history.overflowed(overflow, None if is_logged else float(scale))

    def _state_of(self, optimizer: Any) -> tuple[State, OptimizerRecord]:
        key = id(optimizer)
        held = self._held.get(key)
        record = self._hold(optimizer) if held is None else held[1]
        return self._per_optimizer_states[key], record

    def _hold(self, optimizer: Any) -> OptimizerRecord:
        # A wrapper and the optimizer inside have one state in an iteration.
        record, is_new = self._records.find_or_add(optimizer)
        first = self._held.get(record.key)
        if first is not None and first[1] is record:
            shared = self._per_optimizer_states[record.key]
            self._per_optimizer_states[id(optimizer)] = shared
        else:
            record.key = id(optimizer)
        self._has_new = self._has_new or is_new
        self._held[id(optimizer)] = optimizer, record
        return record

    # - Update

    @no_compile
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale and end the iteration.

        After an overflow the scale is multiplied by the backoff factor, after
        ``growth_interval`` good iterations by the growth factor. It stays finite and
        above zero whatever happens.

        Args:
            new_scale: set this scale instead: a number, or a tensor with one element on
                a device of the scaler's type, without gradient. It is copied. The
                iteration counts in `counters`, and in the policy's limit of skips.

        Raises:
            AssertionError: no step since the last `update`, or an unfit tensor.
            InvalidSettingError: ``new_scale`` is not finite, not positive or outside of
                the policy's limits. A tensor on an accelerator is clamped to them.
            RanksDisagreeError: the ranks stepped different numbers of optimizers.
            PeerFailedError: another rank raised.
            TooManySkipsError: the policy's limit is reached.
        """
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        states = self._per_optimizer_states.values()
        found = [f for state in states for f in state["found_inf_per_device"].values()]
        has_failed, is_usual = self._has_failed, not self._is_unusual
        chosen, exchanges = None, self._sync.exchanges
        try:
            if new_scale is not None:
                chosen = checked_scale(new_scale, self._device, self._policy)
            if self._has_new and not self._has_warned:
                self._warn_of_shared_parameters()
            self._sync.end_iteration(
                self._row,
                "update",
                is_usual=is_usual,
                must_have_gradients=self._must_have_gradients
                and not has_failed
                and chosen is None,
            )
        except BaseException as error:
            if self._tell(error, exchanges, None, "update", UPDATE):
                self._begin_anew(error, True, None, None)
            raise
        if not found and not has_failed and chosen is None:
            raise AssertionError(NOTHING_CHECKED)
        if found:
            self._move_scale(any_of(found, scale.device), tracker, chosen)
        elif chosen is not None:
            scale.fill_(chosen)
        self._end_states()
        most = self._policy.max_consecutive_skips
        if most is None or not found:
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

    def _end_states(self) -> None:
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        for _, record in self._held.values():
            record.result = record.stepped_on = None
            record.is_clipped = record.is_undivided = False
        self._held = {}
        self._has_failed = self._is_unusual = self._has_new = False
        self._unscaled_without = self._clipped_without = 0

    def _warn_of_shared_parameters(self) -> None:
        owners: dict[int, OptimizerRecord] = {}
        for optimizer, record in self._held.values():
            for parameter in parameters_of(optimizer):
                if not getattr(parameter, "requires_grad", True):
                    continue  # frozen: it has no gradient to divide
                if owners.setdefault(id(parameter), record) is not record:
                    self._has_warned = True
                    warnings.warn(
                        "Two optimizers of this scaler share a parameter. As with "
                        "torch.amp.GradScaler, each of them divides its gradient by "
                        "the scale: give it a gradient of its own, by zero_grad() and "
                        "another backward(), before each step().",
                        stacklevel=3,
                    )
                    return

    def _move_scale(
        self,
        found_inf: torch.Tensor,
        tracker: torch.Tensor,
        chosen: Number | None = None,
    ) -> None:
        # By the rule; or to what the caller chose, which leaves the tracker, as torch.
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

        Known on every rank alike where the scale is on a CPU. On an accelerator ranks
        know the rank of it at their next sync, and each rank the parameter of its own
        after a step that was not fused.
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

    def _limit_tracker(self) -> None:
        # torch's kernel asks for equality: a tracker beyond a lowered interval would
        # never grow the scale again.
        most = min(self._growth_interval, 2**31) - 1
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
        anything is changed.

        Raises:
            RuntimeError: the state is empty, as a disabled scaler saves it.
            InvalidSettingError: a value that no run can work with; nothing is changed.
            RanksDisagreeError: the ranks load different states; nothing is changed.
            PeerFailedError: another rank raised; nothing is changed.
        """
        if not self._enabled:
            return
        group = self._sync.group.find()
        try:
            saved = check_state(state_dict, self._policy)
        except Exception:
            self._report_failure(group, "load_state_dict", LOAD)
            raise
        if group is not None:
            fields = {key.lstrip("_"): value for key, value in saved.items()}
            row = self._row()._replace(call=LOAD, was_scaled=1.0, **fields)
            self._sync.exchange(group, "load_state_dict", row).read()
        # Ranks that lived differently long until now count alike from here on.
        self._sync.restart()
        self._records.forget_numbers()
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


def is_fused(optimizer: Any) -> bool:
    """Return whether the optimizer divides by ``grad_scale`` and skips by itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def _ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    # In ascending order, as ranks of the default process group.
    if group is not None:
        return tuple(sorted(dist.get_process_group_ranks(group)))
    return (dist.get_rank() if dist.is_initialized() else 0,)


def _is_below_one(scale: Number) -> bool:
    # Gradients then grow when they are divided: what overflows shows only afterwards.
    return isinstance(scale, float) and scale < 1.0


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
