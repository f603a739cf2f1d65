"""What is remembered of an optimizer, and what optimizers may look like.

`OptimizerState` lasts until `update`, `OptimizerRecord` as long as the optimizer.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from .grads import Written
from .sync import SyncResult


class OptimizerState(dict[str, Any]):
    """State of one optimizer in this iteration.

    It is the dict that torch's protocol has in ``_per_optimizer_states``, with its keys
    ``"stage"`` and ``"found_inf_per_device"``. What this scaler adds is typed.

    Attributes:
        optimizer: kept alive, or the id of a dead one may be given to a new one.
        record: what outlasts the iteration; None on a rank without the optimizer.
        divided: gradients that this optimizer's unscaling has divided.
        folded: gradients that its kernel will divide by ``fused_grad_scale``.
        clips: calls of clip_grad_norm_; their sync stands for that of `step`.
        fused_grad_scale: (), fp32: what a fused kernel divides by after a clip.
        result: of the last sync; None without one.
    """

    optimizer: Any = None
    record: OptimizerRecord | None = None
    divided: Written = Written()
    folded: Written = Written()
    clips: int = 0
    fused_grad_scale: torch.Tensor | None = None
    result: SyncResult | None = None

    def __init__(self) -> None:
        self["stage"], self["found_inf_per_device"] = OptState.READY, {}


@dataclass(eq=False)
class OptimizerRecord:
    """What outlasts an iteration.

    Attributes:
        optimizer: gives it while it lives.
        ordinal: how many optimizers had synced before this one did for the first time;
            None as long as it has not. Equal on all ranks, or they step in different
            orders.
        found_inf: (), fp32: 1 if its last step was skipped; None before the first.
        places: where its gradients lay in the last clip (``global_norm.py``).
    """

    optimizer: Callable[[], Any]
    ordinal: int | None = None
    found_inf: torch.Tensor | None = None
    places: Any = None


class OptimizerRecords:
    """The records of one scaler, by optimizer.

    Optimizers are distinguished by identity: one may be unhashable, or compare equal to
    another. One that takes no weak reference is kept alive.
    """

    def __init__(self) -> None:
        self._records: dict[int, OptimizerRecord] = {}
        self._synced = 0
        # Whether optimizers may hold each other's gradients: in the first iteration,
        # and where the last one had several of them.
        self.may_share = True

    def __reduce__(self) -> tuple[Any, ...]:
        return OptimizerRecords, ()  # a copy of the scaler meets its optimizers anew

    def __len__(self) -> int:
        return len(self._records)

    def find(self, optimizer: Any) -> OptimizerRecord | None:
        """Return the record of an optimizer, None if it was never seen."""
        record = self._records.get(id(optimizer))
        if record is None or record.optimizer() is not optimizer:
            return None
        return record

    def start(
        self, optimizer: Any, states: dict[int, OptimizerState]
    ) -> tuple[OptimizerState, bool]:
        """Return an optimizer's state in this iteration, and if it was never seen."""
        record = self.find(optimizer)
        if record is None:  # only inner ones have a record
            optimizer = inner_optimizer(optimizer)
            record = self.find(optimizer)
        is_new = record is None
        state = states[id(optimizer)]
        state.optimizer, state.record = optimizer, record or self._add(optimizer)
        return state, is_new

    def _add(self, optimizer: Any) -> OptimizerRecord:
        key, ref = id(optimizer), lambda: optimizer
        with contextlib.suppress(TypeError):
            ref = weakref.ref(optimizer, lambda _: self._records.pop(key, None))
        record = self._records[key] = OptimizerRecord(ref)
        return record

    def number(self, record: OptimizerRecord) -> int:
        """Return an optimizer's place in the order of first syncs."""
        if record.ordinal is None:
            record.ordinal, self._synced = self._synced, self._synced + 1
        return record.ordinal

    def forget_order(self) -> None:
        """Start to count anew, at a point where all ranks do."""
        self._synced = 0
        for record in self._records.values():
            record.ordinal = None


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside wrappers that share its parameter groups.

    ``unscale_(inner)`` and ``step(wrapper)`` then mean the same gradients, which are
    unscaled once.
    """
    groups = getattr(optimizer, "param_groups", None)
    for value in getattr(optimizer, "__dict__", {}).values():
        if value is optimizer or groups is None or isinstance(value, dict):
            continue
        if getattr(value, "param_groups", None) is groups:
            return inner_optimizer(value)
    return optimizer


def takes_scaler(optimizer: Any) -> bool:
    """Return whether ``step`` asks for the scaler itself, the old contract."""
    step: Any = getattr(optimizer.step, "__func__", optimizer.step)
    try:
        known = _TAKES_SCALER.get(step)
    except TypeError:  # a callable that cannot be a key
        known = None
    if known is None:  # reading a signature takes longer than a small step
        known = "grad_scaler" in inspect.signature(step).parameters
        with contextlib.suppress(TypeError):
            _TAKES_SCALER[step] = known
    if known:
        warnings.warn(
            "GradScaler is going to stop passing itself as a keyword argument to the "
            "passed optimizer. It sets `grad_scale` and `found_inf` on it instead.",
            FutureWarning,
            stacklevel=4,
        )
    return known


_TAKES_SCALER: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def makes_momentum(optimizer: Any) -> bool:
    """Return whether the next step makes the momentum of an SGD, and must be taken.

    torch's fused SGD makes it of uninitialised memory for the kernel to fill. A kernel
    that is to skip does not, and the next step takes what lay there (B21).
    """
    if not any(group.get("momentum") for group in optimizer.param_groups):
        return False
    states = getattr(optimizer, "state", {}).values()
    return not any(state.get("momentum_buffer") is not None for state in states)
