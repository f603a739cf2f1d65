"""A gradient scaler that cannot let ranks disagree."""

from .errors import (
    InvalidSettingError,
    PeerFailedError,
    RanksDisagreeError,
    ScalerError,
    TooManySkipsError,
)
from .grad_scaler import GradScaler
from .history import Counters, Overflow
from .policy import Policy
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
