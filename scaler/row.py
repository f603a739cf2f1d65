"""Row: the numbers that each rank sends in a sync; Rows: what those of all ranks say.

[Note: One row]
A row has the same length and dtype on every rank, whatever this rank has and whichever
method it called. All ranks get the rows of all ranks by one collective, on every
device. A field is either a finding of one rank, or a number that must be equal on all
ranks; nan is not compared. Behind the fields are the norms of a clip, zeros in other
syncs. All ranks read the same rows, so they come to the same verdict.

gloo sends rows by an all-to-all, directly from rank to rank. For small messages that is
as fast as an all-reduce of one number; its all-gather goes around a ring and takes up
to three times as long (docs/scale.md has the figures).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from .errors import PeerFailedError, RanksDisagreeError
from .grads import Number, tensor_of

CHECK, CLIP, UPDATE, LOAD = range(4)
CALLS = (
    "unscale_() or step()",
    "clip_grad_norm_() or clip_and_step()",
    "update()",
    "load_state_dict()",
)
"""Purpose of a sync, and the methods that make it."""

NORMS = 12
"""Numbers of a clip behind the fields of a row."""

# Its name before torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Row(NamedTuple):
    """Fields of a row; nan is not compared.

    Attributes:
        found_inf: 1 if a gradient of this rank is not finite. Findings of this rank,
            like the next ones; 1 is yes.
        failed: this rank is about to raise.
        has_gradients: it has a gradient.
        was_scaled: the scale came from `scale()` or a checkpoint on this rank.
        takes_part: it has no optimizer, and takes part in a check or a clip.
        refuses: it raises if the norm is not finite.
        first_bad: a number for the first bad gradient, 0 if unknown (`history.py`).
        call: CHECK, CLIP, UPDATE or LOAD. Equal on all ranks, like the next ones.
        scaler: number by which the ranks know the scaler; nan if it is new.
        made_after: how many numbered scalers are older than a new one.
        iteration: of this scaler, counted by `update`.
        position: of the sync in the iteration, from 1.
        scale: loss scale of this rank.
        growth_tracker: good iterations in a row.
        growth_factor: setting of this rank.
        backoff_factor: setting of this rank.
        growth_interval: setting of this rank.
        hysteresis_left: overflows until the next backoff; 0 without hysteresis.
        min_scale: of the policy, like the next ones.
        max_scale: limit of the scale.
        hysteresis: overflows until a backoff.
        refill: 1 if a good step refills the hysteresis.
        max_consecutive_skips: 0 without a limit.
        constant: 1 if the scale stays.
        failures: calls of this rank that raised after their sync.
        max_norm: bound of a clip.
        norm_type: order of the norm of a clip.
        optimizer: number by which the ranks know the optimizer; nan if it is new.
    """

    found_inf: Number = 0.0
    failed: float = 0.0
    has_gradients: float = 0.0
    was_scaled: float = 1.0
    takes_part: float = 0.0
    refuses: float = 0.0
    first_bad: float = 0.0
    call: float = math.nan
    scaler: float = math.nan
    made_after: float = math.nan
    iteration: float = 0.0
    position: float = 0.0
    scale: Number = 1.0
    growth_tracker: Number = 0.0
    growth_factor: float = 1.0
    backoff_factor: float = 1.0
    growth_interval: float = 1.0
    hysteresis_left: Number = 0.0
    min_scale: float = 0.0
    max_scale: float = 0.0
    hysteresis: float = 1.0
    refill: float = 0.0
    max_consecutive_skips: float = 0.0
    constant: float = 0.0
    failures: float = 0.0
    max_norm: float = math.nan
    norm_type: float = math.nan
    optimizer: float = math.nan


FIELDS = len(Row._fields)
LENGTH = FIELDS + NORMS
_PLACE = {name: place for place, name in enumerate(Row._fields)}
_COMPARED = Row._fields[_PLACE["call"] :]


def exchange_rows(
    group: dist.ProcessGroup,
    row: Row,
    norms: Sequence[Number],
    device: torch.device,
    *,
    is_gloo: bool,
) -> torch.Tensor:
    """Return the rows of all ranks, (number of ranks, LENGTH), fp64, on ``device``."""
    norms = norms or [0.0] * NORMS
    return exchange(group, tensor_of([*row, *norms], device), is_gloo=is_gloo)


def exchange(
    group: dist.ProcessGroup, mine: torch.Tensor, *, is_gloo: bool
) -> torch.Tensor:
    """Return what all ranks bring, (number of ranks, elements); one collective."""
    ranks = group.size()
    rows = mine.new_empty(ranks, len(mine))
    if is_gloo:
        dist.all_to_all_single(rows.flatten(), mine.repeat(ranks), group=group)
    else:
        _all_gather(rows.flatten(), mine, group=group)
    return rows


def any_found(rows: torch.Tensor) -> torch.Tensor:
    """Return (), fp32, exactly 0 or 1, on the device of the rows; nothing is read."""
    # A rank that raises skips for all ranks.
    return rows[:, : _PLACE["failed"] + 1].amax().float()


class Rows:
    """Rows of all ranks, on the host.

    Args:
        table: (number of ranks, LENGTH), fp64, on the CPU.
    """

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table
        fields = table[:, :FIELDS]
        ends = torch.stack(
            [
                fields.nan_to_num(-math.inf, math.inf, -math.inf).amax(0),
                fields.nan_to_num(math.inf, math.inf, -math.inf).amin(0),
            ]
        )
        self._highest: dict[str, float]
        self._lowest: dict[str, float]
        highest, lowest = ends.tolist()
        self._highest = dict(zip(Row._fields, highest, strict=True))
        self._lowest = dict(zip(Row._fields, lowest, strict=True))

    def any(self, flag: str) -> bool:
        """Return whether the flag is set on any rank."""
        return bool(self._highest[flag] > 0.0)

    def all(self, flag: str) -> bool:
        """Return whether the flag is set on every rank."""
        return bool(self._lowest[flag] > 0.0)

    def value(self, name: str) -> float | None:
        """Return what all ranks share; None if no rank compares it."""
        value = self._highest[name]
        return None if value == -math.inf else value

    def column(self, name: str) -> list[float]:
        """Return the values of all ranks, in their order."""
        values: list[float] = self._table[:, _PLACE[name]].tolist()
        return values

    def norms(self) -> list[list[float]]:
        """Return mesh, kind and norm of each entry of each rank; unused ones are 0."""
        table: list[list[float]] = self._table[:, FIELDS:].reshape(-1, 3).tolist()
        return table

    def differing(self) -> list[str]:
        """Return the names of fields that should be equal and differ."""
        names = [
            name
            for name in _COMPARED
            if self._highest[name] != self._lowest[name]
            and self._highest[name] != -math.inf
        ]
        if self.any("takes_part") and self._highest["call"] > CLIP:
            names = ["call", *(name for name in names if name != "call")]
        return names

    def check(self, method: str, rank: int, row: Row) -> None:
        """Raise what the rows say.

        Args:
            method: name of the calling method, for messages.
            rank: this rank.
            row: of this rank.

        Raises:
            PeerFailedError: another rank raised.
            RanksDisagreeError: a field that must be equal differs.
            AssertionError: no rank has scaled a loss.
        """
        if self.any("failed"):
            raise self.peer_failed(method, rank)
        if names := self.differing():
            raise self.disagreement(method, rank, row, names)
        if not self.any("was_scaled"):
            raise AssertionError(
                f"Attempted {method} but _scale is None.  This may indicate your "
                "script did not use scaler.scale(loss or outputs) earlier in the "
                "iteration."
            )

    def peer_failed(
        self, method: str, rank: int, failed: Sequence[int] = ()
    ) -> PeerFailedError:
        """Return the error for an exception on other ranks."""
        size = len(self._table)
        failed = failed or [r for r, x in enumerate(self.column("failed")) if x]
        return PeerFailedError(
            f"{method} on rank {rank} of {size}: {_ranks(failed)} raised before or "
            "while reading its gradients, so no rank steps. The cause is in that "
            "rank's traceback.",
            rank=rank,
            call=method,
            failed=tuple(failed),
        )

    def disagreement(
        self, method: str, rank: int, row: Row, names: Sequence[str]
    ) -> RanksDisagreeError:
        """Return the error for fields that differ, with the values of all ranks."""
        columns = {name: self.column(name) for name in names}
        pairs = {name: (self._lowest[name], self._highest[name]) for name in names}
        # A row of another call has another position, too: the first one is told.
        first, way_out = next(
            (fields & pairs.keys(), text)
            for fields, text in _WAYS_OUT
            if fields & pairs.keys()
        )
        shown = "; ".join(
            _differs(name, columns[name]) for name in names if name in first
        )
        here = {
            name: float(value)
            for name, value in row._asdict().items()
            if name in _COMPARED and not math.isnan(value)
        }
        size = len(self._table)
        return RanksDisagreeError(
            f"{method} on rank {rank} of {size}: {shown}. All ranks must hold the "
            f"same. {way_out}",
            rank=rank,
            world_size=size,
            call=method,
            here=here,
            lowest={name: lowest for name, (lowest, _) in pairs.items()},
            highest={name: highest for name, (_, highest) in pairs.items()},
            values={name: tuple(column) for name, column in columns.items()},
        )


_WAYS_OUT = (
    (
        {"failures"},
        "A call raised on some ranks only, after all ranks had agreed to step: their "
        "weights differ. Load a checkpoint on every rank.",
    ),
    (
        {"scaler", "made_after"},
        "Use the scalers in the same order on every rank, and make them in the same "
        "order; scalers of independent models need sync_over=, their process group or "
        "mesh.",
    ),
    (
        {"call"},
        "Make the same calls on every rank between two update(); a rank that lacks an "
        "optimizer passes None for it.",
    ),
    (
        {"iteration", "position"},
        "Call step() for the same number of optimizers on every rank before update(); "
        "a rank that lacks one calls step(None).",
    ),
    (
        {"optimizer"},
        "Step the optimizers in the same order on every rank. They are numbered in the "
        "order in which they first stepped; a set has another order on every rank.",
    ),
    (
        {"max_norm", "norm_type"},
        "Call clip_grad_norm_() with the same max_norm and norm_type on every rank.",
    ),
    (
        set(_COMPARED),
        "Build the scaler with the same arguments on every rank and load the same "
        "state_dict on every rank; if these ranks train independent models, pass "
        "sync_over=, their process group or mesh.",
    ),
)


def _differs(name: str, column: Sequence[float]) -> str:
    # "scale is 4 on ranks 0, 2 and 8 on rank 1"
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(column):
        ranks.setdefault(_shown(name, value), []).append(rank)
    each = [f"{value} on {_ranks(held)}" for value, held in ranks.items()]
    return f"{name} is {', '.join(each[:-1])} and {each[-1]}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {shown}{more}"


def _shown(name: str, value: float) -> str:
    if math.isnan(value):
        return "not compared"
    if name == "call":
        return CALLS[int(value)]
    if name == "made_after":
        return f"made after {value:g} others"
    if name == "position":
        return f"sync {value:g} of the iteration"
    return f"{value:g}"
