"""A saved state, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from .settings import (
    check_backoff_factor,
    check_growth_factor,
    check_growth_interval,
    check_growth_tracker,
    check_scale,
)

if TYPE_CHECKING:
    from .policy import Policy

__all__ = ["Loaded", "checked"]


class Loaded(NamedTuple):
    """What a state holds; the names are those of an agreement."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    growth_tracker: int
    hysteresis_left: int


def checked(state: Mapping[str, Any], policy: Policy) -> Loaded:
    """Return what ``state`` holds.

    Args:
        state: as this class or torch's saved it.
        policy: of the scaler that loads it.

    Raises:
        RuntimeError: it is empty, as a disabled scaler saves it.
        InvalidSettingError: a value that no run can work with.
    """
    if not state:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved from a "
            "disabled instance of GradScaler."
        )
    # The last one is absent in what torch saved.
    left = state.get("_hysteresis_left", policy.hysteresis)
    new = Loaded(
        check_scale(state["scale"]),
        check_growth_factor(state["growth_factor"]),
        check_backoff_factor(state["backoff_factor"]),
        check_growth_interval(state["growth_interval"]),
        check_growth_tracker(state["_growth_tracker"]),
        check_growth_tracker(left),
    )
    policy.check_start(new.scale)
    return new
