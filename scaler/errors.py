"""Errors of a scaler: `InvalidSettingError` at once, `ScalerError` while training."""

from __future__ import annotations

from typing import Any


class InvalidSettingError(ValueError, AssertionError):
    """A setting that no run can work with.

    It is an ``AssertionError`` as well, because that is what ``torch.amp.GradScaler``
    raises for two of these settings and callers may catch it.
    """


class ScalerError(RuntimeError):
    """Root of everything that goes wrong while training; can be pickled.

    Args:
        message: what went wrong, and the way out.
        **data: the attributes of the error.
    """

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.__dict__.update(data)


class RanksDisagreeError(ScalerError):
    """The ranks of one sync hold different state; raised on every rank alike.

    Attributes:
        rank: this rank, in the group that syncs.
        world_size: number of ranks in that group.
        call: the method that this rank had called.
        here: what this rank holds, by field.
        lowest: the smallest value over all ranks, by field that differs.
        highest: the largest value over all ranks, by field that differs.
        values: the value of each rank, by field that differs; nan is not compared.
    """

    rank: int
    world_size: int
    call: str
    here: dict[str, float]
    lowest: dict[str, float]
    highest: dict[str, float]
    values: dict[str, tuple[float, ...]]


class PeerFailedError(ScalerError):
    """Another rank raised while it read its gradients; no rank steps.

    Attributes:
        rank: this rank, in the group that syncs.
        call: the method that this rank had called.
        failed: the ranks that raised.
    """

    rank: int
    call: str
    failed: tuple[int, ...]


class TooManySkipsError(ScalerError):
    """The limit ``Policy.max_consecutive_skips`` is reached.

    Attributes:
        skips: skipped iterations in a row.
        scales: scales of the last iterations, oldest first, as far as the host knows.
    """

    skips: int
    scales: tuple[float, ...]
