"""A gradient scaler that cannot let ranks disagree.

- The two classes are torch's, with torch's names, errors and state (``grad_scaler``,
  ``sharded``). Where they differ, docs/deviations.md has the defect that is cured.
- Every step, or what comes before it, begins with one collective: each rank gets a row
  of all ranks, with what was found and the state that must be equal (``sync``).
- Nothing is remembered about gradients: after a call ``.grad`` holds what the name of
  the call says.
- A call that raises begins its optimizer's part of the iteration anew, on all ranks.
"""

from typing import TYPE_CHECKING, Any

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
