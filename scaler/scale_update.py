"""The rule by which the scale moves, on the device of the scale."""

from __future__ import annotations

from typing import Any

import torch

from .config import HIGHEST_SCALE, LOWEST_SCALE, Policy, check_number
from .torch_internals import amp_update_scale_


def advance(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    policy: Policy,
    hysteresis_left: torch.Tensor | None = None,
) -> None:
    """Move the scale after one iteration, in place and without a synchronisation.

    Args:
        scale: (), fp32; stays within the limits of the policy.
        growth_tracker: (), int32, on the same device: good iterations in a row.
        found_inf: (), fp32, on the same device: 0 or 1.
        growth_factor: factor after ``growth_interval`` good iterations.
        backoff_factor: factor after an overflow.
        growth_interval: number of good iterations.
        policy: limits and hysteresis.
        hysteresis_left: (), int32, on the same device: overflows until the next
            backoff; None without hysteresis.
    """
    if policy.constant:
        growth_tracker.add_(1).mul_(1 - found_inf.int())
        return
    before = scale if hysteresis_left is None else scale.clone()
    if hysteresis_left is not None:
        # Back off at the last one only. The kernel adds one to the tracker of a
        # tolerated overflow, so that must start from -1.
        hysteresis_left.sub_(found_inf.int()).clamp_(min=0)
        growth_tracker.masked_fill_((found_inf > 0) & (hysteresis_left > 0), -1)
        found_inf = found_inf * (hysteresis_left == 0)
    amp_update_scale_(
        scale,
        growth_tracker,
        found_inf,
        growth_factor,
        backoff_factor,
        growth_interval,
    )
    # The kernel never grows past fp32, but backs off to zero. Whether it did is known
    # at no cost only where the host's memory holds the scale.
    value: Any = scale.tolist() if scale.is_cpu else -1.0
    if not policy.min_scale <= value <= policy.max_scale:
        scale.clamp_(policy.min_scale, policy.max_scale)
    if hysteresis_left is not None:
        refill = scale > before
        if policy.refill == "good_step":
            refill |= growth_tracker > 0
        hysteresis_left.masked_fill_(refill, policy.hysteresis)


def set_scale(
    scale: torch.Tensor, new_scale: float | torch.Tensor, device_type: str
) -> None:
    """Write a scale that the caller chose, in place.

    Args:
        scale: (), fp32.
        new_scale: a number, or a tensor with one element.
        device_type: device type that a tensor must have.

    Raises:
        AssertionError: a tensor of another device type or size, or with a gradient.
        InvalidSettingError: a value that no run can work with.
    """
    if not isinstance(new_scale, torch.Tensor):
        scale.fill_(check_number("new_scale", new_scale))
        return
    if (
        new_scale.device.type != device_type
        or new_scale.numel() != 1
        or new_scale.requires_grad
    ):
        raise AssertionError(
            "new_scale should be a number or a tensor with one element on "
            f"{device_type} without gradient, got {new_scale.numel()} on "
            f"{new_scale.device.type}, requires_grad={new_scale.requires_grad}."
        )
    if new_scale.device.type == "cpu":
        check_number("new_scale", new_scale.item())
    # On an accelerator looking would synchronise: a value out of range is clamped.
    value = new_scale.reshape(()).nan_to_num(nan=LOWEST_SCALE)
    scale.copy_(value.clamp(LOWEST_SCALE, HIGHEST_SCALE))
