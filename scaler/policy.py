"""The rule by which the scale moves, on the device of the scale."""

from __future__ import annotations

import torch

from .settings import HIGHEST_SCALE, LOWEST_SCALE, check_scale

__all__ = ["advance", "set_scale"]


def advance(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    """Move the scale after one iteration, in place and without a synchronisation.

    Args:
        scale: (), fp32; stays within ``[LOWEST_SCALE, HIGHEST_SCALE]``.
        growth_tracker: (), int32, on the same device: good iterations in a row.
        found_inf: (), fp32, on the same device: 0 or 1.
        growth_factor: factor after ``growth_interval`` good iterations.
        backoff_factor: factor after an overflow.
        growth_interval: number of good iterations.
    """
    # torch's kernel asks for equality: a tracker beyond a lowered interval never grows.
    growth_tracker.clamp_(max=growth_interval - 1)
    torch._amp_update_scale_(
        scale,
        growth_tracker,
        found_inf,
        growth_factor,
        backoff_factor,
        growth_interval,
    )
    # The kernel never grows past fp32, but backs off to zero.
    scale.clamp_(min=LOWEST_SCALE)


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
        scale.fill_(check_scale(new_scale, "new_scale"))
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
        check_scale(new_scale.item(), "new_scale")
    # On an accelerator looking would synchronise: a value out of range is clamped.
    value = new_scale.reshape(()).nan_to_num(nan=LOWEST_SCALE)
    scale.copy_(value.clamp(LOWEST_SCALE, HIGHEST_SCALE))
