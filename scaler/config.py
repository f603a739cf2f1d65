"""Settings of a scaler: the policy, what every setting may be, and a saved state."""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, SupportsFloat, SupportsIndex

import torch

from .errors import InvalidSettingError

FP16Gradients = Literal["refuse", "in_place"]
"""``refuse``: unscale_ raises, as torch.amp does. ``in_place``: divide them where they
are, which flushes small values to zero, as torch's ShardedGradScaler does."""

_FP32 = torch.finfo(torch.float32)

LOWEST_SCALE = _FP32.tiny
"""Smallest normal fp32: the smallest scale whose reciprocal is still finite."""

HIGHEST_SCALE = _FP32.max
"""Largest finite fp32."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What the scale may do beyond torch's rule; the defaults are torch's rule.

    Raises:
        InvalidSettingError: limits that no scale fits, or a count below its minimum.
    """

    min_scale: float = LOWEST_SCALE
    """The scale never backs off below it. 1 is a good choice for fp16: a smaller scale
    protects nothing."""

    max_scale: float = HIGHEST_SCALE
    """The scale never grows beyond it."""

    hysteresis: int = 1
    """Back off at this overflow only; earlier ones skip the step and keep the scale."""

    refill: Literal["growth", "good_step"] = "growth"
    """What makes the hysteresis count anew: the scale grew (Megatron, DeepSpeed), or
    one good step (apex; ``consecutive_hysteresis`` of DeepSpeed)."""

    max_consecutive_skips: int | None = None
    """`update` raises after so many skipped iterations in a row. Costs one host
    synchronisation per iteration on an accelerator."""

    constant: bool = False
    """Keep the scale; overflows still skip the step."""

    def __post_init__(self) -> None:
        check_scale(self.min_scale, "min_scale")
        check_scale(self.max_scale, "max_scale")
        if self.min_scale > self.max_scale:
            raise InvalidSettingError(
                f"min_scale ({self.min_scale}) is larger than max_scale "
                f"({self.max_scale})."
            )
        _count("hysteresis", self.hysteresis, at_least=1)
        if self.refill not in ("growth", "good_step"):
            raise InvalidSettingError(
                f'refill must be "growth" or "good_step", got {self.refill!r}.'
            )
        if self.max_consecutive_skips is not None:
            _count("max_consecutive_skips", self.max_consecutive_skips, at_least=1)

    def fingerprint(self) -> int:
        """Return 32 bits that equal policies share on all ranks."""
        return zlib.crc32(repr(self).encode())

    def check_start(self, scale: float) -> None:
        """Refuse a first scale outside the limits.

        Raises:
            InvalidSettingError: it is outside.
        """
        if not self.min_scale <= scale <= self.max_scale:
            raise InvalidSettingError(
                f"The scale ({scale}) is outside the policy's limits "
                f"[{self.min_scale}, {self.max_scale}]."
            )


class SavedState(NamedTuple):
    """What a state dict holds, checked."""

    scale: float
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    growth_tracker: int
    hysteresis_left: int


def check_state(state: Mapping[str, Any], policy: Policy) -> SavedState:
    """Return what a state dict holds, before anything is changed.

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
    saved = SavedState(
        check_scale(state["scale"]),
        check_growth_factor(state["growth_factor"]),
        check_backoff_factor(state["backoff_factor"]),
        check_growth_interval(state["growth_interval"]),
        _count("The growth tracker", state["_growth_tracker"], at_least=0),
        _count("The hysteresis left", left, at_least=0),
    )
    policy.check_start(saved.scale)
    return saved


def check_scale(value: SupportsFloat, name: str = "The scale") -> float:
    """Return ``value`` as a float if an fp32 scale can hold it.

    Raises:
        InvalidSettingError: not a number in ``[LOWEST_SCALE, HIGHEST_SCALE]``.
    """
    scale = _number(name, value)
    if not LOWEST_SCALE <= scale <= HIGHEST_SCALE:
        raise InvalidSettingError(
            f"{name} must be finite and at least {LOWEST_SCALE:.3g} (so that its "
            f"reciprocal is finite in fp32), got {value!r}."
        )
    return scale


def check_growth_factor(value: SupportsFloat) -> float:
    """Return the factor as a float; it must be finite and larger than 1.

    Raises:
        InvalidSettingError: it is not.
    """
    factor = _number("The growth factor", value)
    if not (factor > 1.0 and math.isfinite(factor)):
        raise InvalidSettingError(
            f"The growth factor must be > 1.0 and finite, got {value!r}."
        )
    return factor


def check_backoff_factor(value: SupportsFloat) -> float:
    """Return the factor as a float; it must lie between 0 and 1, both excluded.

    Raises:
        InvalidSettingError: it does not.
    """
    factor = _number("The backoff factor", value)
    if not 0.0 < factor < 1.0:
        raise InvalidSettingError(
            f"The backoff factor must be < 1.0 and > 0.0, got {value!r}."
        )
    return factor


def check_growth_interval(value: SupportsIndex) -> int:
    """Return the interval in steps; it must be an integer of at least 1.

    Raises:
        InvalidSettingError: it is not.
    """
    return _count("The growth interval", value, at_least=1)


def check_clip(max_norm: float, norm_type: float) -> None:
    """Refuse what is no bound, or no norm; either may be infinite.

    Raises:
        InvalidSettingError: ``max_norm`` is negative or nan, which would turn gradients
            round or make them nan after they were found finite; or ``norm_type`` is not
            positive: what torch computes for it is no norm.
    """
    if not max_norm >= 0.0:
        raise InvalidSettingError(f"max_norm must be at least 0, got {max_norm!r}.")
    if not norm_type > 0.0:
        raise InvalidSettingError(f"norm_type must be above 0, got {norm_type!r}.")


def _number(name: str, value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InvalidSettingError(f"{name} must be a number, got {value!r}.") from error


def _count(name: str, value: SupportsIndex, *, at_least: int) -> int:
    try:
        count = operator.index(value)
    except TypeError as error:
        raise InvalidSettingError(
            f"{name} must be an integer, got {value!r}."
        ) from error
    if not at_least <= count < 2**31:
        raise InvalidSettingError(
            f"{name} must be at least {at_least} and fit int32, got {value!r}."
        )
    return count
