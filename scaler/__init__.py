"""A gradient scaler that cannot let ranks disagree."""

from .errors import (
    InvalidSettingError,
    PeerFailedError,
    RanksDisagreeError,
    ScalerError,
)
from .grad_scaler import GradScaler
from .sharded import ShardedGradScaler

__all__ = [
    "GradScaler",
    "InvalidSettingError",
    "PeerFailedError",
    "RanksDisagreeError",
    "ScalerError",
    "ShardedGradScaler",
]
