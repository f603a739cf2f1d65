"""Core of a scaler: clips, steps, data of a sync, and recovery from a call that raises.

`GradScaler` in ``grad_scaler.py`` builds the public calls from these methods. Users may
call or override a method if torch's classes also have it.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
import weakref
from collections import defaultdict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler as _TorchGradScaler
from torch.amp.grad_scaler import OptState

from .errors import APART, CHECK, CLIP, PeerFailedError, RanksDisagreeError, not_finite
from .global_norm import (
    GradsByMesh,
    global_norm,
    grads_by_mesh,
    local_norms,
    norm_alone,
    norm_on_host,
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
    number_in,
)
from .history import INF_OR_NAN, History, first_nonfinite, overflow_of
from .iteration import (
    Iteration,
    OptimizerRecords,
    Part,
    State,
    _refresh_per_optimizer_state,
)
from .policy import HIGHEST_SCALE, FP16Gradients, Policy, check_number
from .replicas import entries_told_apart
from .sync import FIELDS, OverflowSync, Row, Rows, SyncResult
from .sync_group import SyncGroup, state_of


class _Measured(NamedTuple):
    """Global norm of an optimizer's gradients.

    Attributes:
        norm: norm of the unscaled gradients, (), on the device of the scale.
        grads: gradients of this rank.
        is_divided: True if the gradients carry no scale: `unscale_` was called, or they
            were divided to compute the norm.
        carried: scale by which the gradients are still multiplied; 1 if divided.
        factor: factor by which the gradients are clipped.
        is_finite: True if there is no overflow, as far as the host knows.
        is_refused: True if a rank raises for a non-finite norm.
    """

    norm: torch.Tensor
    grads: GradsByMesh
    is_divided: bool
    carried: Number
    factor: Number
    is_finite: bool
    is_refused: bool

    def divisor(self) -> torch.Tensor | None:
        """Return the divisor by which a kernel unscales and clips, (), fp32.

        Returns None if fp32 cannot hold the divisor. On an accelerator the range is not
        checked, because a check would synchronise: a norm beyond fp32 clips to zero.
        """
        factor, divisor = self.factor, self.carried
        if isinstance(factor, torch.Tensor) or isinstance(divisor, torch.Tensor):
            divisor = divisor / factor
        elif self.is_finite:
            if divisor > HIGHEST_SCALE * factor:
                return None
            divisor = divisor / factor
        return torch.as_tensor(divisor, dtype=torch.float32, device=self.norm.device)


class ScalerCore(_TorchGradScaler):
    """Base class of scalers: state, and helpers that several methods share."""

    _steps_without_gradients = False

    # scale() makes both, or the first sync on ranks that never scale.
    _scale: torch.Tensor | None
    _growth_tracker: torch.Tensor | None
    _hysteresis_left: torch.Tensor | None
    _policy: Policy
    _policy_row: Row  # its fields in each row
    _fp16_gradients: FP16Gradients
    _init_hysteresis_left: int
    _was_scaled: bool  # by scale() or a checkpoint, not by a default
    _history: History
    _records: OptimizerRecords
    _iteration: Iteration
    _per_optimizer_states: dict[int, State]
    _sync: OverflowSync

    def _begin(
        self,
        device: str,
        group: SyncGroup,
        history: History,
        fp16_gradients: FP16Gradients,
        policy: Policy,
    ) -> None:
        self._device, self._history, self._policy = device, history, policy
        self._policy_row = Row(**policy.fields())
        self._fp16_gradients = fp16_gradients
        self._init_growth_tracker = 0
        self._init_hysteresis_left = policy.hysteresis
        self._scale = self._growth_tracker = self._hysteresis_left = None
        self._was_scaled = False
        self._records = OptimizerRecords()
        self._end_iteration()
        self._sync = OverflowSync(group, device, self._note)

    # - The scale

    def _check_scale_growth_tracker(
        self, funcname: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is not None and self._growth_tracker is not None:
            return self._scale, self._growth_tracker
        # Ranks of a pipeline that never have a loss get their scale here, and so does a
        # run that resumes. A single process without either cannot have scaled its
        # gradients.
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

    def _scale_or_one(self) -> torch.Tensor:
        # Return a tensor also before the first scale(), and in a disabled scaler.
        if self._scale is not None:
            return self._scale
        has_device = self._device != "cuda" or torch.cuda.is_available()
        device = self._device if has_device else "cpu"
        return torch.ones((), dtype=torch.float32, device=device)

    # - The iteration

    def _check_lacks(self) -> None:
        # A single process cannot lack an optimizer: None is a mistake, and raises as in
        # torch.
        if not self._sync.group.is_distributed:
            raise AttributeError("'NoneType' object has no attribute 'param_groups'")

    def _part_of(self, optimizer: Any) -> Part:
        # Each None gets a new state: this rank may lack several optimizers.
        states = self._per_optimizer_states
        if optimizer is None:
            self._check_lacks()
            self._iteration.passed_none = self._sync.lacks = True
            return Part(state=states[-1 - len(states)])  # no id is below zero
        part = self._iteration.parts.get(id(optimizer))
        if part is None:
            part = self._iteration.begin_part(optimizer, self._records, states)
        part.optimizer, part.state = optimizer, states[id(optimizer)]
        return part

    def _end_iteration(self) -> None:
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._iteration = Iteration()

    # - Clip

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
        self._check_scale_growth_tracker(method)
        if optimizer is None:
            part = self._iteration.lacked_unclipped() or self._part_of(None)
        else:
            part = self._part_of(optimizer)
            if part.has_stepped():
                message = f"{method}() is being called after step()."
                raise self._refused(message, part, method, CLIP)
            if part.is_clipped:
                message = f"{method}() was called twice since update()."
                raise self._refused(message, part, method, CLIP)
        exchanges = self._sync.exchanges
        try:
            measured = self._measure(
                part, method, max_norm, norm_type, refuses=error_if_nonfinite
            )
            divisor, kwargs = None, {}
            if fused := steps and is_fused(optimizer):
                if takes_scaler(optimizer, stacklevel=4):
                    kwargs["grad_scaler"] = self
                elif not measured.is_divided:
                    divisor = measured.divisor()
            if divisor is None:
                if measured.is_finite:
                    clip_(measured.grads.values(), measured.factor, measured.carried)
                else:
                    part.is_undivided = not measured.is_divided
                part.stage = OptState.UNSCALED
            if not steps:
                part.is_clipped = True
            elif part.optimizer is not None:
                self._step_checked(part, divisor, (), kwargs, fused=fused)
            if part.optimizer is None:
                self._iteration.looked_at(part, is_over=steps)
        except BaseException as error:
            self._fail(error, part, method, CLIP, exchanges)
            raise
        if measured.is_refused and error_if_nonfinite:
            raise not_finite(float(measured.norm), norm_type)
        return measured.norm

    def _measure(
        self,
        part: Part,
        method: str,
        max_norm: float,
        norm_type: float,
        *,
        refuses: bool,
    ) -> _Measured:
        # The global norm only reads gradients, unless they must be divided first.
        scale, group = self._scale_or_one(), self._find_group(part)
        carried = number_in(scale)
        is_divided = part.stage is OptState.UNSCALED
        infs: FoundInf = {**part.found} if is_divided else {}  # of an earlier unscale_
        grads = GradsByMesh()
        max_norm = check_number("max_norm", max_norm)
        norm_type = check_number("norm_type", norm_type)
        if part.record is not None:
            # Gradients grow when a scale below one divides them: an overflow shows
            # only afterwards.
            if not is_divided and isinstance(carried, float) and carried < 1.0:
                infs, is_divided = self._unscale_here(part), True
            allow_fp16 = self._fp16_gradients == "in_place"
            grads = grads_by_mesh(
                part.optimizer, part.record, group, allow_fp16=allow_fp16
            )
        part.has_gradients = bool(grads)
        if is_divided:
            carried = carried / carried  # one, on the device of the scale
        entries, flag = local_norms(grads, norm_type, carried)
        if flag is not None:
            infs = {scale.device: any_of([flag, *infs.values()], scale.device)}
        elif not infs and self._steps_without_gradients:
            infs = {scale.device: torch.zeros_like(scale)}
        if group is None:
            self._remember_overflow(part, infs)
            norm = norm_alone(entries, norm_type)
        else:
            clip: Any = {"call": CLIP, "max_norm": max_norm, "norm_type": norm_type}
            clip["refuses"] = float(refuses)
            with state_of(group).turn:
                infs, result = self._synced(part, infs, group, method, entries, **clip)
                norm = self._norm_over(result, part, norm_type, carried)
            # If the rows are not read yet, each rank uses its own setting.
            if result.host_rows is not None:
                refuses = bool(result.host_rows.highest.refuses)
            if isinstance(norm, torch.Tensor):
                norm = norm.to(scale.device)
        found_inf = any_of(infs.values(), scale.device)
        # The factor of torch.nn.utils.clip_grad_norm_, in fp64.
        factor = max_norm / (norm + 1e-6)
        if isinstance(factor, torch.Tensor):
            # The host may not know of an overflow, and counts gradients as divided. A
            # factor of zero would give zeros to an optimizer that shares a gradient.
            factor = torch.where(found_inf > 0.0, 1.0, factor.clamp(max=1.0))
        else:
            factor = min(factor, 1.0)  # min(nan, 1.0) is nan
        is_finite = not is_true(found_inf)
        if is_refused := refuses and not math.isfinite(norm):
            # Treat a norm that is not finite like an overflow.
            infs, is_finite = {scale.device: torch.ones_like(scale)}, False
            part.result = None
        part.found = infs
        # The norm is fp32, unless the host knows that only fp64 can represent it.
        is_large = isinstance(norm, float) and HIGHEST_SCALE < norm < math.inf
        dtype = torch.float64 if is_large else torch.float32
        norm_tensor = torch.as_tensor(norm, dtype=dtype, device=scale.device)
        return _Measured(
            norm_tensor, grads, is_divided, carried, factor, is_finite, is_refused
        )

    def _norm_over(
        self, result: SyncResult, part: Part, norm_type: float, carried: Number
    ) -> Number:
        # All ranks compute the norm from the rows of all ranks.
        if result.host_rows is None:
            return global_norm(result.rows[:, FIELDS:], norm_type)
        norm = norm_on_host(result.host_rows.norms(), norm_type)
        if norm is None:  # this is so on all ranks
            entries = entries_told_apart(self._sync, result, part, norm_type, carried)
            norm = norm_on_host(entries, norm_type, checks="")
        assert norm is not None
        return norm

    # - Step

    def _step_checked(
        self,
        part: Part,
        grad_scale: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        fused: bool,
    ) -> Any:
        # Step or skip. ``grad_scale`` is the divisor that a fused kernel must apply.
        optimizer = part.optimizer
        if "grad_scaler" in kwargs:
            result = optimizer.step(*args, **kwargs)
        elif fused:
            result = self._step_fused(part, grad_scale, args, kwargs)
        else:
            if not part.found:
                raise AssertionError("No inf checks were recorded for this optimizer.")
            result = self._maybe_opt_step(optimizer, part.state, *args, **kwargs)
        part.end_step()
        return result

    def _step_fused(
        self,
        part: Part,
        grad_scale: torch.Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        # Call the optimizer, unless the host knows that the kernel would skip.
        optimizer, record = part.optimizer, part.record
        assert record is not None
        own = getattr(optimizer, "grad_scale", None)  # in torch a user may set this
        # An interrupted step may have left the scaler's value, which is not the user's.
        if own is not None and own is not record.grad_scale:
            grad_scale = own if grad_scale is None else grad_scale * own
        # Copy the reference: the user may set one tensor before each step.
        if isinstance(grad_scale, torch.Tensor):
            grad_scale = grad_scale.detach()
        flags = part.found.values()
        # If nothing was checked, pass the int 0, which torch's sum gives as well. A
        # kernel that finds later gradients then raises; with a tensor it would step on
        # scaled ones.
        found_inf: Any = any_of(flags, self._scale_or_one().device) if flags else 0
        record.grad_scale = grad_scale
        try:
            optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
            # bool() synchronises, until an SGD with momentum has taken its first step.
            if flags and (
                is_true(found_inf) or (_makes_momentum(optimizer) and bool(found_inf))
            ):
                return None
            return optimizer.step(*args, **kwargs)
        finally:
            for name in ("grad_scale", "found_inf"):
                with contextlib.suppress(AttributeError):  # not set yet
                    delattr(optimizer, name)

    def _maybe_opt_step(
        self, optimizer: Any, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        part = self._iteration.parts.get(id(optimizer))
        result = None if part is None else part.result
        if result is not None and result.host_rows is None:
            # The rows have been on their way to the host since the sync.
            rows = result.read()
            skips = bool(rows.highest.found_inf)
            if not (self._steps_without_gradients or rows.highest.has_gradients):
                raise AssertionError("No inf checks were recorded for this optimizer.")
        else:
            skips = False
            for found_inf in optimizer_state["found_inf_per_device"].values():
                skips = skips or bool(number_in(found_inf))
        if skips and not is_readable(self._scale_or_one()):
            rank = 0 if result is None else result.group.rank()
            self._note_overflow(optimizer, rank)
        return None if skips else optimizer.step(*args, **kwargs)

    # - Check and sync

    def _unscale_here(self, part: Part, allow_fp16: bool | None = None) -> FoundInf:
        # Divides this rank's gradients; returns what this rank found.
        scale = self._scale_or_one()
        if allow_fp16 is None:
            allow_fp16 = self._fp16_gradients == "in_place"
        infs: FoundInf = self._unscale_grads_(
            part.optimizer, _reciprocal(scale), torch.zeros_like(scale), allow_fp16
        )
        part.stage = OptState.UNSCALED
        return infs

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> FoundInf:
        gradients = local_gradients(optimizer, allow_fp16=allow_fp16)
        infs = check_and_unscale_(gradients, inv_scale, found_inf)
        if not infs and self._steps_without_gradients:
            infs[found_inf.device] = found_inf
        return infs

    def _find_group(self, part: Part) -> dist.ProcessGroup | None:
        return self._sync.group.find() if part.result is None else part.result.group

    def _row(self) -> Row:
        tracker, left = self._growth_tracker, self._hysteresis_left
        return self._policy_row._replace(
            scale=number_in(self._scale_or_one()),
            growth_tracker=0.0 if tracker is None else number_in(tracker),
            growth_factor=self._growth_factor,
            backoff_factor=self._backoff_factor,
            growth_interval=self._growth_interval,
            hysteresis_left=0.0 if left is None else number_in(left),
            was_scaled=float(self._was_scaled),
            pending=self._iteration.pending(),
        )

    def _synced(
        self,
        part: Part,
        found: FoundInf,
        group: dist.ProcessGroup,
        method: str,
        norms: list[Number] | None = None,
        **fields: float,
    ) -> tuple[FoundInf, SyncResult]:
        # The findings of all ranks replace those of this rank.
        scale, record = self._scale_or_one(), part.record
        if record is not None and record.number is None:
            record.taken = self._records.numbers()
        if found:
            found_inf = number_in(any_of(found.values(), scale.device))
            fields |= {"found_inf": found_inf, "has_gradients": 1.0}  # type: ignore[dict-item]  # or a tensor
            if isinstance(found_inf, float) and found_inf:
                fields["first_bad"] = first_nonfinite(part.optimizer)
        row = self._row()._replace(**fields)
        result = self._sync.exchange(group, method, row, norms or (), record)
        part.result, part.is_dropped = result, False
        flags = found or {scale.device: torch.zeros_like(scale)}
        self._was_scaled = True
        if (rows := result.host_rows) is None:
            any_found = result.found_inf
            return {place: any_found.to(flag) for place, flag in flags.items()}, result
        if rows.highest.found_inf:
            flags = {place: torch.ones_like(flag) for place, flag in flags.items()}
        if not (self._steps_without_gradients or rows.highest.has_gradients):
            flags = {}  # as in one process, where only an unfused step refuses it
        return flags, result

    def _note(self, result: SyncResult, rows: Rows) -> None:
        # Called when the host has read the rows, at once or at the next sync.
        if rows.highest.found_inf:
            rank = max(rank for rank, x in enumerate(rows.column("found_inf")) if x)
            code = int(rows.column("first_bad")[rank])
            optimizer = None if result.record is None else result.record.optimizer()
            overflow = overflow_of(code, rank, result.group.rank(), optimizer)
            is_here = is_readable(self._scale_or_one())
            self._history.overflowed(
                overflow, None if is_here else rows.column("scale")[rank]
            )
        if not result.is_late or (norm_type := rows.value("norm_type")) is None:
            return
        if norm_on_host(rows.norms(), norm_type) is None:
            self._sync.settle()
        if norm_on_host(rows.norms(), norm_type, checks="sums") is None:
            warnings.warn(
                f"The last {result.method} has counted replicas more than once: some "
                "ranks hold parameters together and others alone, which shows only now "
                "on an accelerator. The next clips are right.",
                stacklevel=2,
            )

    def _remember_overflow(self, part: Part, found: FoundInf) -> None:
        # A single process logs the overflow here, if the host knows of it.
        if part.optimizer is not None and any(map(is_true, found.values())):
            self._note_overflow(part.optimizer, 0)

    def _note_overflow(self, optimizer: Any, rank: int) -> None:
        if not (code := first_nonfinite(optimizer)):
            return
        overflow, scale = overflow_of(code, rank, rank, optimizer), self._scale_or_one()
        if is_readable(scale):
            self._history.overflowed(overflow)
            return
        # The gradients are read after a clip, which makes nan of inf; the rows are
        # already logged.
        overflow = overflow._replace(kind=INF_OR_NAN)
        is_logged = self._sync.group.find() is not None
        self._history.overflowed(overflow, None if is_logged else float(scale))

    # - Calls that raise; see [Note: A call that raises] in grad_scaler.py

    def _fail(
        self,
        error: BaseException,
        part: Part,
        method: str,
        call: float,
        exchanges: int,
    ) -> None:
        # A call has raised. Tell the other ranks, unless it has synced since
        # ``exchanges``; then the iteration begins anew.
        is_told = self._tell(error, exchanges, part, method, call)
        scale = self._scale_or_one()
        self._iteration.begin_anew(error, part, self._sync, scale, is_told=is_told)
        for key, state in self._per_optimizer_states.items():
            if key < 0:  # of an optimizer that this rank lacks: each call adds one
                state["found_inf_per_device"] = {}

    def _refused(
        self, message: str, part: Part, method: str, call: int = CHECK
    ) -> RuntimeError:
        # Wrong call order, perhaps on this rank alone: the other ranks must not wait.
        error = RuntimeError(message)
        is_told = self._tell(
            error, self._sync.exchanges, part, method, call, refuses=1.0
        )
        if is_told:
            # `update` must do the same on all ranks. If all of them are refused, it
            # does as in one process.
            self._iteration.has_failed |= not self._sync.is_refused
            self._iteration.drop(self._sync)
            if not self._sync.is_void:
                self._sync.is_unusual = True
        return error

    def _tell(
        self,
        error: BaseException,
        exchanges: int,
        part: Part,
        method: str,
        call: float = CHECK,
        refuses: float = 0.0,
    ) -> bool:
        # Tell the other ranks of an error, unless the call has synced since
        # ``exchanges``. Returns True if they know of the error.
        if not isinstance(error, Exception) or exchanges != self._sync.exchanges:
            is_heard = isinstance(error, (PeerFailedError, RanksDisagreeError))
            return is_heard or self._sync.is_void or self._sync.told == id(error)
        try:
            group = self._find_group(part)
            if group is not None:  # see [Note: An error on one rank] in sync.py
                row = self._row()._replace(
                    call=call, found_inf=1.0, failed=1.0, refuses=refuses
                )
                with contextlib.suppress(PeerFailedError, RanksDisagreeError):
                    self._sync.exchange(group, method, row)  # of the sync before
                if self._sync.is_apart:
                    error.add_note(f"gradparity: {APART}")
            self._sync.told = id(error)
            return group is not None
        except Exception:
            error.add_note(
                "gradparity: the other ranks cannot be told of this error. They wait "
                "until the time limit of their process group."
            )
            return False


def _reciprocal(scale: torch.Tensor) -> torch.Tensor:
    # (), fp32: one over the scale, rounded once. On an accelerator an fp32 division may
    # be compiled to an approximation; through fp64 it is exact. mps has no fp64.
    if scale.is_cpu or scale.device.type == "mps":
        return scale.reciprocal()
    return scale.double().reciprocal().float()


# - Fused optimizers


def is_fused(optimizer: Any) -> bool:
    """Return True if the optimizer divides by ``grad_scale`` and skips by itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_scaler(optimizer: Any, *, stacklevel: int) -> bool:
    """Return True if ``step`` takes the scaler as an argument, a deprecated contract.

    If so, warn as torch does, at the line ``stacklevel`` frames above.
    """
    step: Any = getattr(optimizer.step, "__func__", optimizer.step)
    try:
        takes_it = _TAKES_SCALER.get(step)
    except TypeError:  # a callable that cannot be a key
        takes_it = None
    if takes_it is None:  # reading a signature takes longer than a small step
        takes_it = "grad_scaler" in inspect.signature(step).parameters
        with contextlib.suppress(TypeError):
            _TAKES_SCALER[step] = takes_it
    if takes_it:
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the "
            "passed optimizer. It sets `grad_scale` and `found_inf` on it instead.",
            FutureWarning,
            stacklevel=stacklevel,
        )
    return takes_it


_TAKES_SCALER: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def _makes_momentum(optimizer: Any) -> bool:
    """Return True if the next step of torch's SGD creates momentum, in any group.

    torch's fused SGD creates uninitialised buffers for a whole group, which the kernel
    fills. A kernel that skips does not fill them, and the next step reads uninitialised
    memory.
    """
    try:
        for group in optimizer.param_groups:
            if group["momentum"]:
                firsts = (p for p in group["params"] if p.grad is not None)
                first = next(firsts, None)
                state = optimizer.state.get(first, {})
                if first is not None and state.get("momentum_buffer") is None:
                    return True
    except Exception:  # an optimizer that keeps no momentum as SGD does
        return False
    return False
