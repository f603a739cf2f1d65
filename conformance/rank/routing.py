"""Learned routers: record the reference's choices and repeat them on the ranks.

A router that takes the top k scores may choose another expert if rounding differs. The
run then computes another model, and gradients of a correct run differ by far more than
noise. So the choices of the fp64 reference are recorded. If a rank's scores agree with
a row of the reference within noise, the rank makes the reference's choice.

[Note: Rows by content]
A row of scores is matched with the nearest row of the reference, whatever the layout:
rows or tokens may be split, permuted or cut into micro-batches, and forwards may be
recomputed. A row that matches none within the noise keeps its own choice: an error then
shows in gradients. A row within the noise of two reference rows with different choices
is ambiguous; the trace counts these.
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
"""Largest number of choices of a router; more are a vocabulary. The largest published
routers choose among 512 experts."""
CHUNK = 64
"""Number of rows that are compared with the reference at a time, to limit memory."""
MASKED = -(2.0**100)
"""Score that replaces the score of a masked choice. A mask is the lowest number of a
dtype or minus infinity, so masks in fp64 and on a rank differ. ``MASKED`` differs from
every other score by more than noise."""
_aten = torch.ops.aten
_CHOOSE = {_aten.topk.default, _aten.argmax.default, _aten.max.dim}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Choices in one step of a reference, row by row, of all calls of one kind.

    Calls of one kind have the same operator, number of scores and number of choices.
    """

    scores: NDArray[np.float64]
    """Array of shape (rows, choices)."""
    chosen: NDArray[np.int64]
    """Array of shape (rows, k): indices of the choices."""
    noise: float = float("inf")
    """Largest error of a score in correct runs of the scenario's precision."""
    limit: float = float("inf")
    """Largest permitted error of a score: the noise times ``SAFETY_FACTOR``."""


class ChoiceLog(Observer):
    """Records choices while it is active, and repeats those of a reference.

    The mode acts below autograd. So gradients flow to the scores of the repeated
    choices, and the indices and values that an operator returns agree.
    """

    def __init__(self, reference: Mapping[str, Choices] | None = None) -> None:
        """Take the choices to repeat, by kind of call; by default none."""
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.reference = reference or {}
        self.errors: dict[str, float] = {}
        """Kind of call -> largest error of a row's scores."""
        self.unclear = 0
        """Number of rows that match two rows of the reference with different
        choices."""
        self._rows: dict[str, list[tuple[Tensor, Tensor]]] = {}

    @property
    def choices(self) -> dict[str, Choices]:
        """Recorded choices, by kind of call."""
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
        """Run ``func``; replace its choices by the reference's."""
        if any(issubclass(t, DTensor | AsyncCollectiveTensor) for t in types):
            return NotImplemented  # calls inside, on local tensors, come here later
        result = func(*args, **(kwargs or {}))
        if func not in _CHOOSE:
            return result
        named = _arguments(func, args, kwargs or {})
        scores, dim = named["self"], named.get("dim")
        indices = result if isinstance(result, Tensor) else result[1]
        of_numbers = scores.is_floating_point() and set(types) <= {Tensor}
        if dim is None or not of_numbers or not 1 < scores.shape[dim] <= MAX_CHOICES:
            return result
        # topk keeps the dimension; max and argmax may drop it
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
        """Return for each row the reference's choice, else that of ``mine``.

        A row keeps its own choice if it matches no row of the reference.
        """
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
        # the distance of two rows is the largest distance of their scores
        apart = torch.cdist(scores, torch.from_numpy(reference.scores), p=torch.inf)
        error, nearest = apart.min(1)
        if reference.limit == torch.inf:  # for a reference, the errors are the noise
            self.errors[kind] = max(self.errors.get(kind, 0.0), float(error.max()))
            return theirs[nearest]
        row, near = (apart <= reference.noise).nonzero(as_tuple=True)
        differs = (theirs[near] != theirs[nearest[row]]).any(-1)
        self.unclear += row[differs].unique().numel()
        matches = (error <= reference.limit).unsqueeze(1)
        return torch.where(matches, theirs[nearest], mine)


def _numbers(scores: Tensor) -> Tensor:
    """Return scores in fp64; the dtype's lowest number becomes ``MASKED``."""
    lowest = max(torch.finfo(scores.dtype).min, torch.finfo(torch.float32).min)
    return torch.where(scores <= lowest / 2, MASKED, scores.double()).cpu()


def _arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name, with defaults."""
    declared = arguments_of(func)
    defaults = {a.name: a.default_value for a in declared if a.has_default_value()}
    names = [a.name for a in declared]
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@cache
def chooses_in_forward(name: str) -> bool:
    """Return True if the model of a workload chooses by scores.

    Returns False if the model cannot be called; ``check_workload`` reports that.
    """
    workload = resolve_workload(name)
    with torch.random.fork_rng(devices=[]), suppress(WorkloadError):
        torch.manual_seed(0)
        model, batch = workload.model(), workload.batch(0, 0)
        with ChoiceLog() as log, workload.calling("forward"):
            model(batch.inputs)
        return bool(log.choices)
    return False
