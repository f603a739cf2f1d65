"""Errors of a scaler: `InvalidSettingError` at once, `ScalerError` while training.

The functions build the errors of a sync from the values of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


class InvalidSettingError(ValueError, AssertionError):
    """A setting with which no run can work.

    The class is also an ``AssertionError``, because ``torch.amp.GradScaler`` raises an
    ``AssertionError`` for two of these settings, and callers may catch it.
    """


class ScalerError(RuntimeError):
    """Base class of all errors while training; can be pickled.

    Args:
        message: cause of the error, and what to do.
        **data: attributes of the error.
    """

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.__dict__.update(data)


class RanksDisagreeError(ScalerError):
    """The ranks of one sync hold different state; raised on every rank.

    Attributes:
        rank: this rank, in the group that syncs.
        world_size: number of ranks in that group.
        call: method that this rank called.
        here: values of this rank, by field.
        lowest: smallest value over all ranks, by differing field.
        highest: largest value over all ranks, by differing field.
        values: value of each rank, by differing field; nan is not compared.
    """

    rank: int
    world_size: int
    call: str
    here: dict[str, float]
    lowest: dict[str, float]
    highest: dict[str, float]
    values: dict[str, tuple[float, ...]]


class PeerFailedError(ScalerError):
    """Another rank raised in a call of its scaler; no rank steps.

    Attributes:
        rank: this rank, in the group that syncs.
        call: method that this rank called.
        failed: ranks that raised.
    """

    rank: int
    call: str
    failed: tuple[int, ...]


class TooManySkipsError(ScalerError):
    """The scaler reached the limit ``Policy.max_consecutive_skips``.

    Attributes:
        skips: number of skipped iterations in a row.
        scales: scales of the last iterations, oldest first.
    """

    skips: int
    scales: tuple[float, ...]


def not_finite(norm: float, norm_type: float) -> RuntimeError:
    """Return the error of a clip with ``error_if_nonfinite`` and a non-finite norm."""
    return RuntimeError(
        f"The total norm of order {norm_type} of the gradients is {norm}, so "
        "they cannot be clipped. Pass error_if_nonfinite=False to let step() skip "
        "instead."
    )


# - Errors of a sync, one for each rank


CHECK, CLIP, UPDATE, LOAD = range(4)
CALLS = (
    "unscale_() or step()",
    "clip_grad_norm_() or clip_and_step()",
    "update()",
    "load_state_dict()",
)
"""Names of the methods that sync, by purpose of the sync: index with CHECK, CLIP,
UPDATE or LOAD."""


APART = (
    "The ranks are at different batches now, so every sync raises from here on. Load a "
    "checkpoint on every rank, or end the job."
)
"""Way out if a rank raised after its last sync of an iteration."""


def peer_failed(
    method: str, rank: int, size: int, failed: Mapping[int, float], *, is_apart: bool
) -> PeerFailedError:
    """Return the error of this rank after other ranks raised.

    Args:
        method: name of the calling method.
        rank: this rank.
        size: number of ranks.
        failed: ranks that raised, with the call in which each of them did.
        is_apart: true if the ranks are at different batches.
    """
    calls = " and ".join(dict.fromkeys(_shown("call", x) for x in failed.values()))
    return PeerFailedError(
        f"{method} on rank {rank} of {size}: {_ranks([*failed])} raised in {calls}, so "
        f"{_CONSEQUENCES.get(method, 'no rank steps')}. The cause is in that rank's "
        f"traceback.{f' {APART}' if is_apart else ''}",
        rank=rank,
        call=method,
        failed=tuple(failed),
    )


_CONSEQUENCES = {
    "load_state_dict": "nothing is changed",
    "update": "the scale does not move",
}
"""Consequence of a failure for another rank, by the method that it calls."""


def ranks_disagree(
    method: str,
    rank: int,
    size: int,
    here: Mapping[str, float],
    columns: Mapping[str, Sequence[float]],
    *,
    is_apart: bool,
) -> RanksDisagreeError:
    """Return the error for fields that differ between ranks.

    Args:
        method: name of the calling method.
        rank: this rank.
        size: number of ranks.
        here: values of this rank, by field.
        columns: values of all ranks, by differing field.
        is_apart: true if the ranks are at different batches.
    """
    # The row of another call has another position as well; report the call first.
    first, way_out = next(
        (each for each in _WAYS_OUT if each[0] & columns.keys()),
        (columns.keys(), _OTHER_WAY_OUT),
    )
    if is_apart and "iteration" in first and "position" not in columns:
        way_out = APART  # nothing else is wrong in this sync
    elif is_apart:
        way_out = f"{way_out} {APART}"
    shown = "; ".join(
        _differs(name, column) for name, column in columns.items() if name in first
    )
    compared = {
        name: [value for value in column if not math.isnan(value)]
        for name, column in columns.items()
    }
    return RanksDisagreeError(
        f"{method} on rank {rank} of {size}: {shown}. All ranks must hold the "
        f"same. {way_out}",
        rank=rank,
        world_size=size,
        call=method,
        here=dict(here),
        lowest={name: min(values) for name, values in compared.items()},
        highest={name: max(values) for name, values in compared.items()},
        values={name: tuple(column) for name, column in columns.items()},
    )


_WAYS_OUT = (
    (
        {"missed"},
        "A step() raised or was left out on some ranks only, so their weights differ. "
        "Load a checkpoint on every rank.",
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
)

_OTHER_WAY_OUT = (
    "Build the scaler with the same arguments, pass the same new_scale to update() and "
    "load the same state_dict on every rank; if these ranks train independent models, "
    "pass sync_over=, their process group or mesh."
)


_NAMES = {"missed": "the number of missed steps"}  # in messages


def _differs(name: str, column: Sequence[float]) -> str:
    # "scale is 4 on ranks 0, 2 and 8 on rank 1"
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(column):
        ranks.setdefault(_shown(name, value), []).append(rank)
    each = [f"{value} on {_ranks(numbers)}" for value, numbers in ranks.items()]
    name = _NAMES.get(name, name)
    return f"{name} is {', '.join(each[:-1])} and {each[-1]}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {shown}{more}"


def _shown(name: str, value: float) -> str:
    if name == "call":
        return "step(None)" if math.isnan(value) else CALLS[int(value)]
    if math.isnan(value):
        return "not compared"
    if name == "made_after":
        return f"made after {value:g} others"
    if name == "position":
        return f"sync {value:g} of the iteration"
    return f"{value:g}"
