"""History of a scaler: counters, the last overflow, and one log line for each event."""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from typing import Any, NamedTuple

import torch

from .grads import Number, local_tensor, norms, number_in, parameters_of

_log = logging.getLogger("gradparity.scaler")
_KINDS = ("inf", "nan")
INF_OR_NAN = "inf or nan"
"""Kind of an overflow whose gradient the host has not read."""


class Counters(NamedTuple):
    """Numbers of iterations since the scaler was created, by their result.

    Attributes:
        steps: iterations in which every optimizer stepped.
        skips: iterations in which at least one optimizer was skipped.
        consecutive_skips: skips since the last good iteration, or the last load.
        growths: iterations in which the scale grew by the rule.
        backoffs: iterations in which the scale was reduced by the rule.
    """

    steps: int
    skips: int
    consecutive_skips: int
    growths: int
    backoffs: int


class Overflow(NamedTuple):
    """First non-finite gradient on the highest rank that has one.

    Attributes:
        rank: rank in the group that syncs; 0 for a single process.
        parameter: index of the parameter in the optimizer on that rank, over all its
            groups; None if unknown, as for another rank's gradient on an accelerator.
        name: name of the parameter; None on all other ranks, and if the optimizer has
            no names.
        kind: ``"inf"`` or ``"nan"``; ``"inf or nan"`` if unknown, as on an accelerator.
    """

    rank: int
    parameter: int | None
    name: str | None
    kind: str

    def __str__(self) -> str:
        if self.parameter is None:
            return f"{self.kind} on rank {self.rank}"
        where = self.name or f"parameter {self.parameter}"
        return f"{self.kind} in {where} on rank {self.rank}"


def first_nonfinite(optimizer: Any) -> int:
    """Return a code for this rank's first non-finite gradient; 0 if unknown.

    The code holds the index of the parameter and the kind. Reads the gradients again,
    so call it only after an overflow.
    """
    try:
        bad = _first_bad(optimizer)
        is_nan = bad is not None and bool(bad[1].isnan().any())
    except (RuntimeError, TypeError):  # a tensor class that does not support norms
        return 0
    return 0 if bad is None else 1 + bad[0] * 2 + is_nan


def _first_bad(optimizer: Any) -> tuple[int, torch.Tensor] | None:
    groups: dict[Any, list[tuple[int, torch.Tensor]]] = {}
    with torch.no_grad():
        for index, parameter in enumerate(parameters_of(optimizer)):
            if parameter.grad is not None:
                local = local_tensor(parameter, coalesce=False)
                key = local.device, local.dtype
                groups.setdefault(key, []).append((index, local))
    bad: list[tuple[int, torch.Tensor]] = []
    for members in groups.values():
        largest = norms([local for _, local in members], math.inf)
        largest = largest if isinstance(largest, list) else largest.tolist()
        pairs = zip(members, largest, strict=True)
        bad += [member for member, norm in pairs if not math.isfinite(norm)][:1]
    return min(bad, key=lambda member: member[0], default=None)


def overflow_of(code: int, rank: int, here: int, optimizer: Any) -> Overflow:
    """Decode a result of `first_nonfinite` from ``rank``; this rank is ``here``."""
    if not code:
        return Overflow(rank, None, None, INF_OR_NAN)
    index, kind = divmod(code - 1, 2)
    names: list[str] = []
    with contextlib.suppress(Exception):  # groups may be anything that has "params"
        names = [name for g in optimizer.param_groups for name in g["param_names"]]
    name = names[index] if rank == here and index < len(names) else None
    return Overflow(rank, index, name, _KINDS[kind])


class History:
    """Counters on the host if the scale is on the host, else on the scale's device."""

    def __init__(self) -> None:
        self.last_overflow: Overflow | None = None
        self.scales: deque[Number] = deque(maxlen=16)  # of the latest iterations
        self._counts = [0] * len(Counters._fields)
        self._on_device: torch.Tensor | None = None  # (5,), int64

    def overflowed(self, overflow: Overflow, scale: float | None = None) -> None:
        """Store an overflow, and log it if ``scale`` (the step's) is given.

        Pass ``scale`` if `record` will not log, because the scale is on an accelerator.
        """
        self.last_overflow = overflow
        if scale is not None:
            _log.info("%s: step skipped at scale %g", overflow, scale)

    def record(
        self, found_inf: torch.Tensor, before: Number, after: Number, by_rule: bool
    ) -> None:
        """Count one iteration, with its scale before and after.

        ``found_inf`` is 1 if any optimizer was skipped. ``by_rule`` is True if the
        scale followed the rule, and False if the caller set it.
        """
        self.scales.append(before)
        if isinstance(before, torch.Tensor):
            was_skipped = found_inf > 0
            moved = after if by_rule else before
            events = [
                ~was_skipped,
                was_skipped,
                was_skipped,
                moved > before,
                moved < before,
            ]
            if self._on_device is None:
                self._on_device = torch.zeros(
                    5, dtype=torch.int64, device=was_skipped.device
                )
            self._on_device.add_(torch.stack(events))
            self._on_device[2].mul_(was_skipped)
            return
        skipped, counts = number_in(found_inf), self._counts
        if skipped:
            counts[1:3] = counts[1] + 1, counts[2] + 1
        else:
            counts[0], counts[2] = counts[0] + 1, 0
            if after == before:  # nearly always
                return
        counts[3] += by_rule and bool(after > before)
        counts[4] += by_rule and bool(after < before)
        if skipped:
            cause = self.last_overflow or "an overflow"
            _log.info("%s: step skipped, scale %g -> %g", cause, before, after)
        else:
            cause = "grew" if by_rule else "was set"
            _log.info("scale %s: %g -> %g", cause, before, after)

    def end_row_of_skips(self) -> None:
        """Reset the count of consecutive skips; all ranks must call it together."""
        self._counts[2] = 0
        if self._on_device is not None:
            self._on_device[2].zero_()

    def counters(self) -> Counters:
        """Return the counters; synchronises if they are on an accelerator."""
        if self._on_device is None:
            return Counters(*self._counts)
        return Counters(*self._on_device.tolist())
