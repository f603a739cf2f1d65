"""A gradient scaler with which ranks cannot disagree.

- The two classes are torch's, with torch's names, errors and state (``grad_scaler``,
  ``sharded``). docs/deviations.md lists where they differ, and the defect that each
  difference fixes.
- Every step, or a call before it, makes one collective, in which each rank sends its
  findings and the state that must be equal, and gets those of all ranks (``sync``).
- The scaler keeps no state about gradients: the last call on an optimizer determines
  what ``.grad`` holds.
- If a call raises, its optimizer's part of the iteration starts again, on all ranks.
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
