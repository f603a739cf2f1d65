"""A gradient scaler that cannot let ranks disagree."""

from typing import TYPE_CHECKING, Any

from .config import Policy
from .errors import (
    InvalidSettingError,
    PeerFailedError,
    RanksDisagreeError,
    ScalerError,
    TooManySkipsError,
)
from .grad_scaler import GradScaler
from .history import Counters, Overflow

if TYPE_CHECKING:
    from .sharded import ShardedGradScaler

__all__ = [
    "Counters",
    "GradScaler",
    "InvalidSettingError",
    "Overflow",
    "PeerFailedError",
    "Policy",
    "RanksDisagreeError",
    "ScalerError",
    "ShardedGradScaler",
    "TooManySkipsError",
]


def __getattr__(name: str) -> Any:
    # Its base class imports torch.distributed.fsdp, as slow as torch itself.
    if name == "ShardedGradScaler":
        from .sharded import ShardedGradScaler

        return ShardedGradScaler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
