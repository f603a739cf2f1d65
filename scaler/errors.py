"""What a scaler raises.

::

    Exception
    ├── ValueError, AssertionError
    │   └── InvalidSettingError         a setting no run can work with
    └── RuntimeError
        └── ScalerError                 something went wrong while training
            ├── RanksDisagreeError      the ranks that sync hold different state
            ├── PeerFailedError         another rank raised in the same sync
            └── TooManySkipsError       the policy's limit of skips in a row is reached
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class InvalidSettingError(ValueError, AssertionError):
    """A setting that no run can work with.

    It is an ``AssertionError`` as well, because that is what ``torch.amp.GradScaler``
    raises for two of these settings and callers may catch it.
    """


class ScalerError(RuntimeError):
    """Root of everything that goes wrong while training; can be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions pickle as a call with their positional arguments: keyword-only
        # attributes would be lost on the way to a parent process.
        return _rebuild, (type(self), self.args, self.__dict__.copy())


def _rebuild(
    kind: type[ScalerError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> ScalerError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class RanksDisagreeError(ScalerError):
    """The ranks of one sync hold different state; raised on every rank alike.

    Attributes:
        rank: this rank, in the group that syncs.
        world_size: number of ranks in that group.
        call: the method that this rank had called.
        here: what this rank holds, by field.
        lowest: the smallest value over all ranks, by field that differs.
        highest: the largest value over all ranks, by field that differs.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        world_size: int,
        call: str,
        here: Mapping[str, float],
        lowest: Mapping[str, float],
        highest: Mapping[str, float],
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.world_size = world_size
        self.call = call
        self.here = dict(here)
        self.lowest = dict(lowest)
        self.highest = dict(highest)


class PeerFailedError(ScalerError):
    """Another rank raised while it read its gradients; no rank steps.

    Attributes:
        rank: this rank, in the group that syncs.
        call: the method that this rank had called.
    """

    def __init__(self, message: str, *, rank: int, call: str) -> None:
        super().__init__(message)
        self.rank = rank
        self.call = call


class TooManySkipsError(ScalerError):
    """The limit ``Policy.max_consecutive_skips`` is reached.

    Attributes:
        skips: skipped iterations in a row.
        scales: scales of the last iterations, oldest first, as far as the host knows.
    """

    def __init__(self, message: str, *, skips: int, scales: Sequence[float]) -> None:
        super().__init__(message)
        self.skips = skips
        self.scales = tuple(scales)
