"""State of a scaler's iteration, and the longer-lived record of each optimizer.

- `Iteration` has a `Part` for each optimizer; `begin_anew` undoes a call that raised.
- `OptimizerRecord` is state that outlives an iteration. A wrapper shares the record of
  the optimizer inside it.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from .grads import (
    FoundInf,
    local_gradients,
    multiply_,
    parameters_of,
    references_of,
)
from .sync import OverflowSync, SyncResult

State = dict[str, Any]
"""Dictionary that torch keeps for an optimizer in an iteration."""


def _refresh_per_optimizer_state() -> State:
    return {"stage": OptState.READY, "found_inf_per_device": {}}


@dataclass(eq=False, slots=True)
class Part:
    """State of one optimizer in one iteration.

    Attributes:
        optimizer: None on a rank that lacks it.
        record: state that outlives the iteration; None without an optimizer.
        state: torch's dictionary of the optimizer in this iteration.
        key: id of the optimizer that was passed first, if there are wrappers.
        result: result of the optimizer's last sync, or None.
        is_clipped: True if a clip was called.
        is_undivided: True if a clip found an overflow and did not divide the gradients.
        is_dropped: True if all ranks drop its step, since a call raised.
        has_gradients: True if its last check saw a gradient on this rank.
        stepped_on: weak references to the gradients of its step, if a later call in the
            iteration raised; the next step must use other tensors.
        caller: method that the user called, if it calls `unscale_` next; else empty.
    """

    optimizer: Any = None
    record: OptimizerRecord | None = None
    state: State = field(default_factory=_refresh_per_optimizer_state)
    key: int = 0
    result: SyncResult | None = None
    is_clipped: bool = False
    is_undivided: bool = False
    is_dropped: bool = False
    has_gradients: bool = False
    stepped_on: set[Any] | None = None
    caller: str = ""

    @property
    def stage(self) -> OptState:
        """Stage of the optimizer: READY, UNSCALED or STEPPED."""
        return self.state["stage"]  # type: ignore[no-any-return]

    @stage.setter
    def stage(self, stage: OptState) -> None:
        self.state["stage"] = stage

    @property
    def found(self) -> FoundInf:
        """Maps each device to 1 if any rank found an overflow, else to 0.

        Empty before a check.
        """
        return self.state["found_inf_per_device"]  # type: ignore[no-any-return]

    @found.setter
    def found(self, found: FoundInf) -> None:
        self.state["found_inf_per_device"] = found

    def has_stepped(self) -> bool:
        """Return True if the optimizer has stepped, and may not step again.

        After a call that raised, it may step again if all its gradient tensors are new;
        then its stage is reset.
        """
        if self.state["stage"] is not OptState.STEPPED:
            return False
        stepped_on = self.stepped_on
        if stepped_on is None:
            return True
        if not stepped_on.isdisjoint(references_of(self.optimizer)):
            return True
        self.stage, self.stepped_on = OptState.READY, None
        self.is_clipped = self.is_undivided = False
        return False

    def end_step(self) -> None:
        """Record that the optimizer stepped, or was skipped."""
        assert self.record is not None
        self.state["stage"] = OptState.STEPPED
        # After a sync all devices have the same value; without gradients there is none.
        flag = next(iter(self.found.values()), None)
        self.record.found_inf = torch.zeros((), device="cpu") if flag is None else flag

    def begin_anew(self, scale: torch.Tensor) -> None:
        """Multiply divided gradients by the scale again, and allow another step."""
        # The next step must have new gradient tensors: a backward may have added to
        # those of the last step.
        stage = self.stage
        if self.optimizer is None or stage is OptState.READY:
            return
        is_divided = stage is OptState.UNSCALED and not self.is_undivided
        if stage is OptState.UNSCALED:
            self.stage = OptState.READY
            self.is_clipped = self.is_undivided = False
        with contextlib.suppress(Exception):  # the caller reports the first error
            if is_divided:
                gradients = local_gradients(self.optimizer, allow_fp16=True)
                multiply_(gradients, scale)
            elif stage is OptState.STEPPED and self.stepped_on is None:
                self.stepped_on = references_of(self.optimizer)


class Iteration:
    """State of one iteration: a `Part` for each optimizer.

    Attributes:
        parts: id of an optimizer -> its part; a wrapper shares that of its optimizer.
        lacked: parts of optimizers that only other ranks have, from their first sync
            there until their step.
        has_failed: True if a call raised.
        has_new: True if an optimizer was seen for the first time.
        passed_none: True if a call got None for an optimizer.
    """

    __slots__ = (
        "_alive",
        "_by_record",
        "has_failed",
        "has_new",
        "lacked",
        "parts",
        "passed_none",
    )

    def __init__(self) -> None:
        self.parts: dict[int, Part] = {}
        self.lacked: list[Part] = []
        self.has_failed = self.has_new = self.passed_none = False
        self._by_record: dict[int, Part] = {}
        # The id of a dead optimizer may be given to a new one.
        self._alive: list[Any] = []

    def begin_part(
        self, optimizer: Any, records: OptimizerRecords, states: dict[int, State]
    ) -> Part:
        """Return the part of an optimizer at its first call in this iteration.

        A wrapper gets the part of the optimizer inside. ``states`` is torch's
        dictionary, which callers may read and write.
        """
        key = id(optimizer)
        record, is_new = records.find_or_add(optimizer)
        part = self._by_record.get(id(record))
        if part is None:
            part = self._by_record[id(record)] = Part(
                optimizer, record, states[key], key
            )
        else:
            states[key] = states[part.key]
        self.has_new = self.has_new or is_new
        self._alive.append(optimizer)
        self.parts[key] = part
        return part

    def lacked_unclipped(self) -> Part | None:
        """Return the first lacked part that was not clipped yet, or None."""
        return next((part for part in self.lacked if not part.is_clipped), None)

    def looked_at(self, part: Part, *, is_over: bool = False) -> None:
        """Store the part of an optimizer that this rank lacks, or remove it.

        Args:
            part: part to store.
            is_over: true to remove the part.
        """
        self.lacked = [each for each in self.lacked if each is not part]
        if not is_over:
            self.lacked.append(part)

    def begin_anew(
        self,
        error: BaseException,
        part: Part,
        sync: OverflowSync,
        scale: torch.Tensor,
        *,
        is_told: bool,
    ) -> None:
        """Undo a call that raised; see [Note: A call that raises].

        Args:
            error: exception of the call.
            part: part of the optimizer of the call, whose result is dropped; an empty
                part for `update`. The other parts keep their results.
            sync: syncs of the scaler.
            scale: scale by which gradients are multiplied again.
            is_told: true if the other ranks know of the failure.
        """
        self.has_failed = True
        is_empty = isinstance(error, AssertionError) and not part.found
        if not (is_empty or sync.is_void):  # else all ranks count anew
            sync.is_unusual = True
        if is_told:
            self.drop(sync)
        elif sync.sent and not is_empty:
            sync.missed += len({*self.due(), part})
        self.lacked.clear()
        part.found = {}
        for each in list(self.parts.values()):
            each.begin_anew(scale)

    def pending(self) -> float:
        """Return the number of steps that are due; nan if this rank passed None."""
        return math.nan if self.passed_none else float(len(self.due()))

    def due(self) -> list[Part]:
        """Return the parts whose step the ranks have agreed on and is still to come.

        A step without gradients changes nothing and may be left out.
        """
        return [
            part
            for part in self._by_record.values()
            if part.stage is OptState.UNSCALED
            and part.result is not None
            and part.has_gradients
            and not part.is_dropped
        ]

    def drop(self, sync: OverflowSync) -> None:
        """Drop the steps that are due, since all ranks know of a failure."""
        due = self.due()
        if sync.lags:
            sync.missed += len(due)
        for part in due:
            part.is_dropped = True

    def shares_parameters(self) -> bool:
        """Return True if two optimizers share a parameter.

        An object without parameters shares none: a call with it has raised, and
        `update` must still end the iteration.
        """
        owners: dict[int, Part] = {}
        for part in self.parts.values():
            try:
                parameters = list(parameters_of(part.optimizer))
            except Exception:
                continue
            for parameter in parameters:
                if not getattr(parameter, "requires_grad", True):
                    continue  # frozen: it has no gradient to divide
                if owners.setdefault(id(parameter), part) is not part:
                    return True
        return False


# - State that outlives an iteration


@dataclass(eq=False)
class OptimizerRecord:
    """State of an optimizer that outlives an iteration; nothing about gradients.

    Attributes:
        optimizers: weak references to the optimizer and its wrappers.
        groups_key: identity of their ``param_groups``, by which wrappers are
            recognised.
        number: number by which the ranks identify it; None before its first sync.
        taken: numbers of this rank's other optimizers, while it has no number.
        found_inf: (), fp32: 1 if its last step was skipped; None before the first.
        places: layouts of its gradients in the last clip (``global_norm.py``).
        holders: meshes that hold each of its parameters (``replicas.py``).
        grad_scale: scale that a fused kernel got last.
    """

    optimizers: list[Callable[[], Any]] = field(default_factory=list)
    groups_key: int = 0
    number: int | None = None
    taken: frozenset[int] = frozenset()
    found_inf: torch.Tensor | None = None
    places: Any = None
    holders: Any = None
    grad_scale: torch.Tensor | None = None

    def optimizer(self) -> Any:
        """Return a living optimizer with this record, or None."""
        living = (ref() for ref in self.optimizers)
        return next((each for each in living if each is not None), None)


class OptimizerRecords:
    """Records of one scaler, by optimizer.

    Optimizers are distinguished by identity: one may be unhashable, or compare equal to
    another. Optimizers that share their ``param_groups``, such as a wrapper and the
    optimizer inside, have one record. torch's ``load_state_dict`` creates new groups
    around the old lists of parameters; such groups count as the same. An optimizer that
    supports no weak references is kept alive.
    """

    def __init__(self) -> None:
        # The record of a dead optimizer is removed before its id can be used again.
        self._records: dict[int, OptimizerRecord] = {}
        self._by_groups: dict[int, OptimizerRecord] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return OptimizerRecords, ()  # a copy of the scaler starts without records

    def find(self, optimizer: Any) -> OptimizerRecord | None:
        """Return the record of an optimizer, or None if it was never seen."""
        if (record := self._records.get(id(optimizer))) is not None:
            return record
        record = self._by_groups.get(_key_of(groups := _groups_of(optimizer)))
        if record is None or groups is None:
            return None
        living = [each for ref in record.optimizers if (each := ref()) is not None]
        is_same = any(_are_same(_groups_of(each), groups) for each in living)
        return record if is_same else None

    def find_or_add(self, optimizer: Any) -> tuple[OptimizerRecord, bool]:
        """Return the record of an optimizer, and True if it is new."""
        key, ref = id(optimizer), lambda: optimizer
        if key in self._records:
            return self._records[key], False
        same = self.find(optimizer)
        record = self._records[key] = same or OptimizerRecord()
        with contextlib.suppress(TypeError):
            ref = weakref.ref(optimizer, lambda ref: self._forget(key, ref))
        record.optimizers.append(ref)
        if (groups := _groups_of(optimizer)) is not None:
            record.groups_key = _key_of(groups)
            self._by_groups[record.groups_key] = record
        return record, same is None

    def _forget(self, key: int, ref: Callable[[], Any]) -> None:
        record = self._records.pop(key)
        record.optimizers.remove(ref)
        is_last = not record.optimizers
        if is_last and self._by_groups.get(record.groups_key) is record:
            del self._by_groups[record.groups_key]

    def numbers(self) -> frozenset[int]:
        """Return the numbers by which the ranks identify the living optimizers.

        An optimizer has no number before its first sync.
        """
        # Copy to a list first: an optimizer that dies meanwhile leaves the dictionary.
        numbers = [record.number for record in list(self._records.values())]
        return frozenset(number for number in numbers if number is not None)

    def forget_numbers(self) -> None:
        """Remove the numbers of all optimizers; all ranks must call it together."""
        for record in list(self._records.values()):
            record.number = None


def _groups_of(optimizer: Any) -> Any:
    try:
        return optimizer.param_groups
    except Exception:
        return None  # the same error is raised where its gradients are read


def _key_of(groups: Any) -> int:
    # Equal for groups for which `_are_same` is true.
    try:
        return id(groups[0]["params"])
    except Exception:
        return id(groups)  # groups of some other form


def _are_same(groups: Any, others: Any) -> bool:
    # Two optimizers that were built from one dictionary share it, but are not the same.
    if groups is others:
        return True
    try:
        pairs = zip(groups, others, strict=True)
        return all(
            one is not two and one["params"] is two["params"] for one, two in pairs
        )
    except Exception:
        return False
