"""Small readings of found_inf and of the scale."""

from __future__ import annotations

from typing import Any

import torch

from .agreement import Verdict

__all__ = [
    "Found",
    "any_of",
    "is_found",
    "may_enlarge",
    "on_host",
    "reciprocal",
    "spread",
]

Found = dict[Any, torch.Tensor]
"""By device: (), fp32, 1 if a gradient there is not finite, else 0."""


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Return (), fp32: one over the scale."""
    if scale.device.type == "cpu":
        value: Any = scale.tolist()  # Python divides in fp64
        return torch.full((), 1.0 / value, dtype=torch.float32)
    # An fp32 division may be compiled to an approximation; through fp64 it is exact.
    if scale.device.type == "mps":  # has no fp64
        return scale.reciprocal()
    return scale.double().reciprocal().float()


def may_enlarge(scale: torch.Tensor) -> bool:
    """Return whether dividing by this scale makes values larger, if known here."""
    # tolist, unlike item, is no synchronisation where memory is the host's.
    value: Any = scale.tolist() if scale.device.type == "cpu" else 1.0
    return bool(value < 1.0)


def any_of(found: dict[Any, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return (), fp32 on ``device``: 1 if any of them is 1."""
    if len(found) == 1:
        (only,) = found.values()
        if only.device == device:
            return only
        return only.to(device=device, non_blocking=True)
    tensors = [f.to(device=device, non_blocking=True) for f in found.values()]
    if not tensors:
        return torch.zeros((), dtype=torch.float32, device=device)
    return torch.stack(tensors).amax()


def spread(value: torch.Tensor, found: Found) -> None:
    """Write ``value``, (), into every tensor of ``found``."""
    for tensor in found.values():
        tensor.copy_(value, non_blocking=True)


def on_host(found_inf: torch.Tensor) -> bool:
    """Return whether the host can see a finding, without a synchronisation."""
    return found_inf.device.type == "cpu" and bool(found_inf.tolist())


def is_found(state: dict[str, Any]) -> bool:
    """Return whether the step is to be skipped; at most one synchronisation."""
    # After an agreement all devices hold the same; alone, they were made equal.
    verdict: Verdict | None = state.get("verdict")
    if verdict is not None and verdict.message.device.type != "cpu":
        verdict.check()
        return bool(verdict.value("found_inf"))
    found = next(iter(state["found_inf_per_device"].values()))
    return bool(found.tolist() if found.device.type == "cpu" else found.item())
