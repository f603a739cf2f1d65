"""Learned routers: the choices of the reference, recorded and made again on the ranks.

A router that takes the top k of scores may choose another expert under another
rounding, and then computes another model: gradients of a right stack differ by far more
than noise. So choices are recorded in the fp64 reference, and where a rank's own choice
differs from that within the noise of the scores, the reference's is taken.

[Note: By content]
A row of scores finds its row of the reference by being nearest to it, whatever the
layout: rows or tokens may be split, permuted or cut into micro-batches, and forwards
may run again. A row whose scores are no reference's within the noise is left alone: an
error then shows in gradients, as without this replay. Rows that are within the noise of
two that choose differently are ambiguous; the run says how many there were.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...fixtures import WorkloadError, resolve_workload
from .torch_internals import AsyncCollectiveTensor, Observer, arguments_of

__all__ = ["MASKED", "ChoiceLog", "Choices", "chooses_in_forward"]

MAX_CHOICES = 1024
"""More are a vocabulary: the largest published routers choose among 512 experts."""
CHUNK = 64
"""Rows compared with all rows of the reference at a time, to bound the memory."""
MASKED = -(2.0**100)
"""Score of what must not be chosen. A mask is the lowest number of a dtype, or minus
infinity: another number in fp64 than on a rank, and further away than any noise."""
_aten = torch.ops.aten
_CHOOSE = {_aten.topk.default, _aten.argmax.default, _aten.max.dim}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Choices of the calls of one kind in one step of a reference, row by row."""

    scores: NDArray[np.float64]
    """(rows, choices)."""
    chosen: NDArray[np.int64]
    """(rows, k)."""
    noise: float = float("inf")
    """The largest error of a score in correct runs of the scenario's precision."""
    limit: float = float("inf")
    """Largest allowed error of a score: the noise times ``SAFETY_FACTOR``."""


class ChoiceLog(Observer):
    """Notes choices while it is active, and repeats the choices of a reference.

    As it stands below autograd, the gradient of what is taken flows to the score that
    was chosen, and indices and values agree.
    """

    def __init__(self, reference: Mapping[str, Choices] | None = None) -> None:
        """Take the choices to be made again, by kind of call; by default none."""
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.reference = reference or {}
        self.errors: dict[str, float] = {}
        """Kind of call -> the largest error of a row's scores."""
        self.unclear = 0
        """Rows that could be either of two that choose differently."""
        self._rows: dict[str, list[tuple[Tensor, Tensor]]] = {}

    @property
    def choices(self) -> dict[str, Choices]:
        """All that was chosen, by kind of call."""
        return {
            kind: Choices(
                scores=torch.cat([scores for scores, _ in rows]).numpy(),
                chosen=torch.cat([chosen for _, chosen in rows]).numpy(),
            )
            for kind, rows in self._rows.items()
        }

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; choose as the reference did."""
        if any(issubclass(t, DTensor | AsyncCollectiveTensor) for t in types):
            return NotImplemented  # its inner calls, on local tensors, come here
        result = func(*args, **(kwargs or {}))
        if func not in _CHOOSE:
            return result
        named = _arguments(func, args, kwargs or {})
        scores, dim = named["self"], named.get("dim")
        indices = result if isinstance(result, Tensor) else result[1]
        of_numbers = scores.is_floating_point() and set(types) <= {Tensor}
        if dim is None or not of_numbers or not 1 < scores.shape[dim] <= MAX_CHOICES:
            return result
        # topk keeps the dim, max and argmax may drop it
        keeps = indices.ndim == scores.ndim
        wide = indices if keeps else indices.unsqueeze(dim)
        rows = scores.detach().movedim(dim, -1)
        chosen = wide.movedim(dim, -1)
        kind = f"{func} {rows.shape[-1]} {chosen.shape[-1]} {named.get('largest')}"
        mine = chosen.reshape(-1, chosen.shape[-1]).cpu()
        due = self._choose(kind, _numbers(rows.reshape(-1, rows.shape[-1])), mine)
        if torch.equal(due, mine):
            return result
        wide = due.to(wide.device).view(chosen.shape).movedim(-1, dim)
        taken = wide if keeps else wide.squeeze(dim)
        if isinstance(result, Tensor):
            return taken
        values = scores.gather(dim, wide)
        return values if keeps else values.squeeze(dim), taken

    def _choose(self, kind: str, scores: Tensor, mine: Tensor) -> Tensor:
        """Return the reference's choice of each row; without a reference, ``mine``."""
        self._rows.setdefault(kind, []).append((scores, mine))
        reference = self.reference.get(kind)
        if reference is None or not len(scores):
            return mine
        parts = zip(scores.split(CHUNK), mine.split(CHUNK), strict=True)
        return torch.cat([self._match(kind, reference, *part) for part in parts])

    def _match(
        self, kind: str, reference: Choices, scores: Tensor, mine: Tensor
    ) -> Tensor:
        theirs = torch.from_numpy(reference.chosen)
        # the noise bounds single scores, so rows are as far apart as their worst score
        apart = torch.cdist(scores, torch.from_numpy(reference.scores), p=torch.inf)
        error, nearest = apart.min(1)
        if reference.limit == torch.inf:  # a reference, whose errors are the noise
            self.errors[kind] = max(self.errors.get(kind, 0.0), float(error.max()))
            return theirs[nearest]
        row, near = (apart <= reference.noise).nonzero(as_tuple=True)
        differs = (theirs[near] != theirs[nearest[row]]).any(-1)
        self.unclear += row[differs].unique().numel()
        matches = (error <= reference.limit).unsqueeze(1)
        return torch.where(matches, theirs[nearest], mine)


def _numbers(scores: Tensor) -> Tensor:
    """Scores in fp64; a score equal to its dtype's lowest number becomes ``MASKED``."""
    lowest = max(torch.finfo(scores.dtype).min, torch.finfo(torch.float32).min)
    return torch.where(scores <= lowest / 2, MASKED, scores.double()).cpu()


def _arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Arguments by name, with the defaults of those that were not given."""
    declared = arguments_of(func)
    defaults = {a.name: a.default_value for a in declared if a.has_default_value()}
    names = [a.name for a in declared]
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@cache
def chooses_in_forward(name: str) -> bool:
    """True if the model of a workload chooses by its scores.

    False where it cannot be called: ``check_workload`` has the words for that.
    """
    workload = resolve_workload(name)
    with torch.random.fork_rng(devices=[]), suppress(WorkloadError):
        torch.manual_seed(0)
        model, batch = workload.model(), workload.batch(0, 0)
        with ChoiceLog() as log, workload.calling("forward"):
            model(batch.inputs)
        return bool(log.choices)
    return False
