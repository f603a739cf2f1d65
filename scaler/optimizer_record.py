"""Records of optimizers: what outlasts an iteration, and which wrappers are one."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(eq=False)
class OptimizerRecord:
    """State of an optimizer that outlasts an iteration; nothing about gradients.

    Attributes:
        optimizers: weak references to the optimizer and its wrappers.
        groups_key: stands for their ``param_groups``, by which wrappers are known.
        number: that the ranks know it by; None before its first sync.
        taken: the numbers of this rank's other optimizers, where it has none yet.
        found_inf: (), fp32: 1 if its last step was skipped; None before the first.
        places: where its gradients lay in the last clip (``global_norm.py``).
        holders: the meshes that hold each of its parameters (``replicas.py``).
        grad_scale: what a fused kernel was handed last.
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
        """Return a living optimizer of it, or None."""
        living = (ref() for ref in self.optimizers)
        return next((each for each in living if each is not None), None)


class OptimizerRecords:
    """The records of one scaler, by optimizer.

    Optimizers are distinguished by identity: one may be unhashable, or compare equal to
    another. Those that share their ``param_groups`` have one record: a wrapper and the
    optimizer inside. torch's ``load_state_dict`` makes new groups around the old lists
    of parameters; they count as the same. One that takes no weak reference is kept
    alive.
    """

    def __init__(self) -> None:
        self._records: dict[int, tuple[Callable[[], Any], OptimizerRecord]] = {}
        self._by_groups: dict[int, OptimizerRecord] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return OptimizerRecords, ()  # a copy of the scaler meets its optimizers anew

    def find(self, optimizer: Any) -> OptimizerRecord | None:
        """Return the record of an optimizer, None if it was never seen."""
        ref, record = self._records.get(id(optimizer), (None, None))
        if ref is not None and ref() is optimizer:
            return record
        record = self._by_groups.get(_key_of(groups := _groups_of(optimizer)))
        if record is None or groups is None:
            return None
        living = [each for ref in record.optimizers if (each := ref()) is not None]
        is_same = any(_are_same(_groups_of(each), groups) for each in living)
        return record if is_same else None

    def find_or_add(self, optimizer: Any) -> tuple[OptimizerRecord, bool]:
        """Return the record of an optimizer, and whether it was never seen."""
        entry = self._records.get(id(optimizer))
        if entry is not None and entry[0]() is optimizer:
            return entry[1], False
        same = self.find(optimizer)
        record = same or OptimizerRecord()
        key, ref = id(optimizer), lambda: optimizer
        with contextlib.suppress(TypeError):
            ref = weakref.ref(optimizer, lambda _: self._forget(key))
        self._records[key] = ref, record
        record.optimizers.append(ref)
        if (groups := _groups_of(optimizer)) is not None:
            record.groups_key = _key_of(groups)
            self._by_groups[record.groups_key] = record
        return record, same is None

    def _forget(self, key: int) -> None:
        ref, record = self._records.pop(key)
        record.optimizers.remove(ref)
        is_last = not record.optimizers
        if is_last and self._by_groups.get(record.groups_key) is record:
            del self._by_groups[record.groups_key]

    def numbers(self) -> frozenset[int]:
        """Return the numbers that living optimizers have."""
        records = [record for _, record in self._records.values()]
        return frozenset(r.number for r in records if r.number is not None)

    def forget_numbers(self) -> None:
        """Start to count anew, at a point where all ranks do."""
        for _, record in self._records.values():
            record.number = None


def _groups_of(optimizer: Any) -> Any:
    try:
        return optimizer.param_groups
    except Exception:
        return None  # what it says is raised where its gradients are read


def _key_of(groups: Any) -> int:
    # The same for groups that `_are_same`.
    try:
        return id(groups[0]["params"])
    except Exception:
        return id(groups)  # groups of some other form


def _are_same(groups: Any, others: Any) -> bool:
    # Optimizers that were built from one dictionary share it, and yet they are two.
    if groups is others:
        return True
    try:
        pairs = zip(groups, others, strict=True)
        return all(
            one is not two and one["params"] is two["params"] for one, two in pairs
        )
    except Exception:
        return False
