"""Which settings a scaler accepts, checked wherever one can enter."""

from __future__ import annotations

import math
import operator
from typing import SupportsFloat, SupportsIndex

import torch

from .errors import InvalidSettingError

__all__ = [
    "HIGHEST_SCALE",
    "LOWEST_SCALE",
    "check_backoff_factor",
    "check_clip",
    "check_growth_factor",
    "check_growth_interval",
    "check_growth_tracker",
    "check_scale",
]

_FP32 = torch.finfo(torch.float32)

LOWEST_SCALE = _FP32.tiny
"""Smallest normal fp32: the smallest scale whose reciprocal is still finite."""

HIGHEST_SCALE = _FP32.max
"""Largest finite fp32."""


def _number(name: str, value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InvalidSettingError(f"{name} must be a number, got {value!r}.") from error


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


def check_growth_tracker(value: SupportsIndex) -> int:
    """Return the number of good steps in a row; it must be a non-negative integer.

    Raises:
        InvalidSettingError: it is not.
    """
    return _count("The growth tracker", value, at_least=0)


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
