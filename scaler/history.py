"""What happened so far: counters, the last overflow, and one log line per event."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["Counters", "History", "Overflow", "code_of", "overflow_of"]

_log = logging.getLogger("gradparity.scaler")
_KINDS = ("inf", "nan")
_MOST = 2**31  # parameters that a code can tell apart


class Counters(NamedTuple):
    """Iterations since the scaler was made, by what happened in them.

    Attributes:
        steps: every optimizer stepped.
        skips: at least one optimizer was skipped.
        consecutive_skips: skips since the last good iteration.
        growths: the scale grew.
        backoffs: the scale was reduced.
    """

    steps: int
    skips: int
    consecutive_skips: int
    growths: int
    backoffs: int


class Overflow(NamedTuple):
    """The first bad gradient of the highest rank that had one.

    Attributes:
        rank: in the group that agrees; 0 when this process is on its own.
        parameter: position in the optimizer on that rank, over all its groups.
        name: name of the parameter, if the optimizer was given names and the rank is
            this one.
        kind: ``"inf"`` or ``"nan"``.
    """

    rank: int
    parameter: int
    name: str | None
    kind: str

    def __str__(self) -> str:
        where = self.name or f"parameter {self.parameter}"
        return f"{self.kind} in {where} on rank {self.rank}"


def code_of(optimizer: Optimizer | None, rank: int) -> float:
    """Return the first bad gradient of this rank as a number; 0 if there is none.

    Larger for higher ranks, and exact in fp64, so that it fits an agreement. Reads the
    gradients again: call it after an overflow only.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    parameters = (p for group in groups for p in group["params"])
    for index, parameter in enumerate(parameters):
        gradient = parameter.grad
        if gradient is None:
            continue
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        values = local._values() if local.is_sparse else local
        if not bool(values.isfinite().all()):
            kind = int(bool(values.isnan().any()))
            return float(((rank + 1) * _MOST + index) * 2 + kind)
    return 0.0


def overflow_of(code: float, rank: int, optimizer: Optimizer) -> Overflow | None:
    """Return what `code_of` wrote, None for 0.

    Args:
        code: a number from `code_of` on any rank.
        rank: this rank: only here the names are known.
        optimizer: the optimizer that was looked at.
    """
    if not code:
        return None
    place, kind = divmod(int(code), 2)
    there, index = divmod(place, _MOST)
    name = _name_of(optimizer, index) if there - 1 == rank else None
    return Overflow(there - 1, index, name, _KINDS[kind])


def _name_of(optimizer: Optimizer, index: int) -> str | None:
    names: Iterable[str] = (
        name for g in optimizer.param_groups for name in g.get("param_names", ())
    )
    return dict(enumerate(names)).get(index)


class History:
    """Counts on the host where the scale is there, else on the device of the scale."""

    def __init__(self) -> None:
        self.last_overflow: Overflow | None = None
        self.scales: deque[float] = deque(maxlen=16)
        self._counts = [0] * len(Counters._fields)
        self._on_device: torch.Tensor | None = None  # (5,), int64

    def record(
        self,
        found_inf: torch.Tensor,
        before: torch.Tensor | float,
        after: torch.Tensor | float,
    ) -> None:
        """Count one iteration.

        Args:
            found_inf: (), fp32: any optimizer was skipped.
            before: the scale of the iteration; a number where the host knows it, else
                (), fp32.
            after: the next scale, likewise.
        """
        if isinstance(before, torch.Tensor):
            assert isinstance(after, torch.Tensor)
            self._record_on_device(found_inf, before, after)
            return
        assert isinstance(after, float)
        found = bool(found_inf.tolist())
        self.scales.append(before)
        counts = self._counts
        if not found and after == before:  # nearly always
            counts[0] += 1
            counts[2] = 0
            return
        counts[0] += not found
        counts[1] += found
        counts[2] = counts[2] + 1 if found else 0
        counts[3] += after > before
        counts[4] += after < before
        self._tell(found, before, after)

    def counters(self) -> Counters:
        """Return the counters; synchronises if they are on an accelerator."""
        if self._on_device is None:
            return Counters(*self._counts)
        return Counters(*self._on_device.tolist())

    def _record_on_device(
        self, found_inf: torch.Tensor, before: torch.Tensor, after: torch.Tensor
    ) -> None:
        found = found_inf > 0
        events = [~found, found, found, after > before, after < before]
        if self._on_device is None:
            self._on_device = torch.zeros(
                len(events), dtype=torch.int64, device=found.device
            )
        self._on_device.add_(torch.stack(events))
        self._on_device[2].mul_(found)

    def _tell(self, found: bool, old: float, new: float) -> None:
        if not _log.isEnabledFor(logging.INFO):
            return
        if found:
            cause = self.last_overflow or "an overflow"
            _log.info("%s: step skipped, scale %g -> %g", cause, old, new)
        else:
            _log.info("scale grew: %g -> %g", old, new)
