"""A gradient scaler that cannot let ranks disagree, and the harness that proves it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conformance.record.recorder import record as record

__version__ = "0.1.0"
__all__ = ["__version__", "record"]


def __getattr__(name: str) -> Any:
    if name != "record":  # imported when it is used: it needs torch
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .conformance.record.recorder import record

    return record
