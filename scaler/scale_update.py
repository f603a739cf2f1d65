"""The rule by which the scale moves, on the device of the scale."""

from __future__ import annotations

from typing import Any

import torch

from .config import Policy, check_number
from .grads import Number, is_readable, number_in
from .torch_internals import amp_update_scale_


def advance(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    rule: tuple[float, float, int],
    policy: Policy,
    hysteresis_left: torch.Tensor | None,
) -> Number:
    """Move the scale after one iteration, in place and without a synchronisation.

    Tensors are (), on one device: the scale fp32, the good iterations in a row and the
    overflows until the next backoff (None without hysteresis) int32, found_inf fp32, 0
    or 1. The rule is growth factor, backoff factor and growth interval; the scale stays
    within the limits of the policy. Returns the scale as it is now.
    """
    if policy.constant:
        # As the kernel counts, so that torch's class can go on from here.
        interval = min(rule[2], 2**31 - 1)
        growth_tracker.add_(1).remainder_(interval).mul_(1 - found_inf.int())
        return number_in(scale)
    any_found = found_inf
    if hysteresis_left is not None:
        # Back off at the last one only. The kernel adds one to the tracker of a
        # tolerated overflow, so that must start from -1.
        hysteresis_left.sub_(found_inf.int()).clamp_(min=0)
        growth_tracker.masked_fill_((found_inf > 0) & (hysteresis_left > 0), -1)
        found_inf = found_inf * (hysteresis_left == 0)
    amp_update_scale_(scale, growth_tracker, found_inf, *rule)
    # The kernel never grows past fp32, but backs off to zero. Whether it did is known
    # at no cost only where the host's memory holds the scale.
    value: Any = scale.tolist() if is_readable(scale) else -1.0
    if not policy.min_scale <= value <= policy.max_scale:
        value = number_in(scale.clamp_(policy.min_scale, policy.max_scale))
    if hysteresis_left is not None:
        # The kernel's growth shows in the tracker, also where a limit undoes it.
        is_good = any_found == 0
        if policy.refill == "growth":
            is_good &= growth_tracker == 0
        hysteresis_left.masked_fill_(is_good, policy.hysteresis)
    return value  # type: ignore[no-any-return]


def checked_scale(
    new_scale: float | torch.Tensor, device_type: str, policy: Policy
) -> Number:
    """Return a scale that the caller chose; on an accelerator as a tensor, clamped.

    Raises:
        AssertionError: a tensor of another device type or size, or with a gradient.
        InvalidSettingError: a value that no run can work with, or outside the policy.
    """
    if isinstance(new_scale, torch.Tensor):
        kind, size = new_scale.device.type, new_scale.numel()
        if kind != device_type or size != 1 or new_scale.requires_grad:
            raise AssertionError(
                "new_scale should be a number or a tensor with one element on "
                f"{device_type} without gradient, got {size} on {kind}, "
                f"requires_grad={new_scale.requires_grad}."
            )
        number = number_in(new_scale)
        if isinstance(number, torch.Tensor):
            # Looking would synchronise: a value out of range is clamped.
            value = number.reshape(()).nan_to_num(nan=policy.min_scale)
            return value.clamp(policy.min_scale, policy.max_scale)
        new_scale = number
    scale = check_number("new_scale", new_scale)
    policy.check_start(scale)
    return scale
