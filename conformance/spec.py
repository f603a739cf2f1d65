"""Specs: what the command line names by ``module:attribute``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ..fixtures import named
from .status import UsageError, as_usage

__all__ = ["NO_SCALER", "import_from", "load_scaler", "refuse_mixed"]

NO_SCALER = "none"
"""As a scaler: train without one and judge the stack alone."""


@as_usage(ValueError)
def load_scaler(spec: str, folder: str) -> Any:
    """The class or factory that ``module:attribute`` names; None for ``none``.

    Args:
        spec: for example ``torch.amp:GradScaler``.
        folder: put first on the import path, so that a user's own module is found.

    Raises:
        UsageError: if ``spec`` has another form or names nothing callable.
    """
    import_from(folder)
    if spec == NO_SCALER:
        return None
    found = named("scaler", spec, "torch.amp:GradScaler")
    if not callable(found):
        raise UsageError(f"scaler {spec!r} is not callable: {found!r}")
    return found


def import_from(folder: str) -> None:
    """Put ``folder`` first on the import path."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def refuse_mixed(specs: Sequence[str]) -> None:
    """Refuse ``none`` beside scalers: it trains in scenarios of its own.

    Raises:
        UsageError: says so.
    """
    if NO_SCALER in specs and len(set(specs)) > 1:
        raise UsageError(
            f"--scaler {NO_SCALER} trains in scenarios of its own: give no other "
            "--scaler beside it"
        )
