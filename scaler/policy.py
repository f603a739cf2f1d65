"""Policy of a scaler: the rule by which its scale moves, and checks of settings."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, SupportsFloat, SupportsIndex

import torch

from .errors import InvalidSettingError
from .grads import LOWEST_SCALE, Number, is_readable, number_in
from .torch_internals import amp_update_scale_

FP16Gradients = Literal["refuse", "in_place"]
"""Treatment of fp16 gradients; see `GradScaler`."""

HIGHEST_SCALE = torch.finfo(torch.float32).max
"""Largest finite fp32 number."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Rules of the scale beyond torch's; the defaults are torch's rule.

    Raises:
        InvalidSettingError: the limits exclude every scale, or a count is too small.
    """

    min_scale: float = LOWEST_SCALE
    """Lower limit of the scale. 1 is a good choice for fp16: a smaller scale has no
    benefit."""

    max_scale: float = HIGHEST_SCALE
    """Upper limit of the scale."""

    hysteresis: int = 1
    """Number of overflows until the scale backs off; earlier ones only skip the
    step."""

    refill: Literal["growth", "good_step"] = "growth"
    """Event that resets the count of hysteresis: growth of the scale (Megatron,
    DeepSpeed), or one good step (apex; ``consecutive_hysteresis`` of DeepSpeed)."""

    max_consecutive_skips: int | None = None
    """Number of skipped iterations in a row after which `update` raises; None for no
    limit. A limit costs one host synchronisation per iteration on an accelerator."""

    constant: bool = False
    """True to keep the scale; overflows still skip the step."""

    def __post_init__(self) -> None:
        # Policies with equal meaning are equal, on all ranks: 1 becomes 1.0.
        keep = partial(object.__setattr__, self)  # a frozen dataclass
        keep("min_scale", check_number("min_scale", self.min_scale))
        keep("max_scale", check_number("max_scale", self.max_scale))
        if self.min_scale > self.max_scale:
            raise InvalidSettingError(
                f"min_scale ({self.min_scale}) is larger than max_scale "
                f"({self.max_scale})."
            )
        keep("hysteresis", check_count("hysteresis", self.hysteresis))
        check_choice("refill", self.refill, ("growth", "good_step"))
        if (skips := self.max_consecutive_skips) is not None:
            keep("max_consecutive_skips", check_count("max_consecutive_skips", skips))
        keep("constant", bool(self.constant))

    def fields(self) -> dict[str, float]:
        """Return each setting as a number, for the row that ranks compare."""
        return {
            "min_scale": self.min_scale,
            "max_scale": self.max_scale,
            "hysteresis": self.hysteresis,
            "refill": float(self.refill == "good_step"),
            "max_consecutive_skips": self.max_consecutive_skips or 0,
            "constant": float(self.constant),
        }

    def check_start(self, scale: float) -> None:
        """Raise InvalidSettingError if a new scale is outside the limits."""
        if not self.min_scale <= scale <= self.max_scale:
            raise InvalidSettingError(
                f"The scale ({scale}) is outside the policy's limits "
                f"[{self.min_scale}, {self.max_scale}]."
            )


# - How the scale moves


def advance(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    rule: tuple[float, float, int],
    policy: Policy,
    hysteresis_left: torch.Tensor | None,
) -> Number:
    """Move the scale after one iteration, in place and without a synchronisation.

    Args:
        scale: (), fp32; all tensors are on one device.
        growth_tracker: (), int32: number of good iterations in a row.
        found_inf: (), fp32: 0 or 1.
        rule: growth factor, backoff factor and growth interval.
        policy: limits of the scale, and hysteresis.
        hysteresis_left: (), int32: overflows until the next backoff; None without
            hysteresis.

    Returns:
        The new scale.
    """
    if policy.constant:
        # As the kernel counts, so that torch's class can go on from here.
        interval = min(rule[2], 2**31 - 1)
        growth_tracker.add_(1).remainder_(interval).mul_(1 - found_inf.int())
        return number_in(scale)
    any_found = found_inf
    if hysteresis_left is not None:
        # Back off at the last overflow only. The kernel then sets the tracker to 0, and
        # adds one to the tracker of a tolerated overflow, which must start from -1.
        hysteresis_left.sub_(found_inf.int()).clamp_(min=0)
        growth_tracker.masked_fill_(found_inf > 0, -1)
        found_inf = found_inf * (hysteresis_left == 0)
    amp_update_scale_(scale, growth_tracker, found_inf, *rule)
    # The kernel never grows past fp32, but backs off to zero. The host can check this
    # at no cost only if the scale is in its memory.
    value: Any = scale.tolist() if is_readable(scale) else -1.0
    if not policy.min_scale <= value <= policy.max_scale:
        value = number_in(scale.clamp_(policy.min_scale, policy.max_scale))
    if hysteresis_left is not None:
        # The tracker shows a growth of the kernel, also if a limit undoes it.
        is_good = any_found == 0
        if policy.refill == "growth":
            is_good &= growth_tracker == 0
        hysteresis_left.masked_fill_(is_good, policy.hysteresis)
    return value  # type: ignore[no-any-return]


def checked_scale(
    new_scale: float | torch.Tensor, device_type: str | torch.device, policy: Policy
) -> Number:
    """Check a scale that the caller chose; on an accelerator clamp and return a tensor.

    Raises:
        AssertionError: a tensor has another device type or size, or a gradient.
        InvalidSettingError: the value is invalid, or outside the policy's limits.
    """
    if isinstance(new_scale, torch.Tensor):
        kind, size = new_scale.device.type, new_scale.numel()
        if kind != device_type or size != 1 or new_scale.requires_grad:
            message = (
                "new_scale should be a number or a tensor with one element on "
                f"{device_type} without gradient, got {size} on {kind}, "
                f"requires_grad={new_scale.requires_grad}."
            )
            if isinstance(device_type, torch.device):  # equals the type of no tensor
                message += (
                    f" The scaler was built with {device_type!r}: build it with "
                    f"{device_type.type!r}."
                )
            raise AssertionError(message)
        number = number_in(new_scale)
        if isinstance(number, torch.Tensor):
            # A check would synchronise, so a value out of range is clamped.
            value = number.reshape(()).nan_to_num(nan=policy.min_scale)
            return value.clamp(policy.min_scale, policy.max_scale)
        new_scale = number
    scale = check_number("new_scale", new_scale)
    policy.check_start(scale)
    return scale


# - What a setting may be


def check_state(state: Mapping[str, Any], policy: Policy) -> dict[str, Any]:
    """Check each value of a state dict, before anything is changed, and return it.

    Raises:
        RuntimeError: the state is empty, as a disabled scaler saves it.
        InvalidSettingError: a value is invalid.
    """
    if not state:
        raise RuntimeError(
            "The source state dict is empty, possibly because it was saved from a "
            "disabled instance of GradScaler."
        )
    tracker = state["_growth_tracker"]
    left = state.get("_hysteresis_left", policy.hysteresis)  # absent in torch's
    checked = {
        "scale": check_number("The scale", state["scale"]),
        "growth_factor": check_number("growth_factor", state["growth_factor"]),
        "backoff_factor": check_number("The backoff factor", state["backoff_factor"]),
        "growth_interval": check_count("The growth interval", state["growth_interval"]),
        "_growth_tracker": check_count("The growth tracker", tracker, at_least=0),
        "_hysteresis_left": check_count("The hysteresis left", left, at_least=0),
    }
    policy.check_start(checked["scale"])
    return checked


_SCALE = (
    lambda x: LOWEST_SCALE <= x <= HIGHEST_SCALE,
    f"finite and at least {LOWEST_SCALE:.3g} (so that its reciprocal is finite in "
    "fp32)",
)
_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "The growth factor": (lambda x: 1.0 < x < math.inf, "> 1.0 and finite"),
    # Torch demands more in its constructor only: 1 ends the growth.
    "growth_factor": (lambda x: 1.0 <= x < math.inf, ">= 1.0 and finite"),
    "The backoff factor": (lambda x: 0.0 < x < 1.0, "< 1.0 and > 0.0"),
    # A negative bound would reverse gradients, and other orders are no norms. Either
    # may be infinite.
    "max_norm": (lambda x: x >= 0.0, "at least 0"),
    "norm_type": (lambda x: x > 0.0, "above 0"),
}


def check_number(name: str, value: SupportsFloat) -> float:
    """Return a setting as a float; without a rule for its name, check it as a scale.

    Raises:
        InvalidSettingError: the value is not a number, or is not allowed for this
            setting.
    """
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidSettingError(f"{name} must be a number, got {value!r}.") from error
    is_fit, wanted = _NUMBERS.get(name, _SCALE)
    if not is_fit(number):
        raise InvalidSettingError(f"{name} must be {wanted}, got {value!r}.")
    return number


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise InvalidSettingError unless the value is one of the choices."""
    if value not in choices:
        raise InvalidSettingError(f"{name} must be one of {choices}, got {value!r}.")


def check_count(name: str, value: SupportsIndex, *, at_least: int = 1) -> int:
    """Return a setting as an int.

    Raises:
        InvalidSettingError: the value is not an integer, below ``at_least``, or too
            large for a kernel.
    """
    try:
        count = operator.index(value)
    except TypeError as error:
        raise InvalidSettingError(
            f"{name} must be an integer, got {value!r}."
        ) from error
    bits = 64 if name == "The growth interval" else 32
    if not at_least <= count < 2 ** (bits - 1):
        raise InvalidSettingError(
            f"{name} must be at least {at_least} and fit int{bits}, got {value!r}."
        )
    return count
