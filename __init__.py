"""Find out whether your parallel PyTorch training computes what one process would."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conformance.record.recorder import record as record
    from .conformance.record.watch import RanksDifferError as RanksDifferError
    from .conformance.record.watch import watch as watch

__version__ = "0.1.0"
__all__ = ["RanksDifferError", "__version__", "record", "watch"]


def __getattr__(name: str) -> Any:
    # imported when they are used: they need torch
    if name == "record":
        from .conformance.record.recorder import record

        return record
    if name in ("RanksDifferError", "watch"):
        from .conformance.record import watch

        return getattr(watch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
