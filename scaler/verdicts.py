"""Small readings of found_inf and of the scale."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from .message import Verdict

__all__ = [
    "Found",
    "Number",
    "any_of",
    "is_found",
    "may_enlarge",
    "moved_to",
    "number_of",
    "on_host",
    "reciprocal",
    "spread",
]

Found = dict[Any, torch.Tensor]
"""By device: (), fp32, 1 if a gradient there is not finite, else 0."""

Number = float | torch.Tensor
"""A number that the host knows, or (), fp64, on the device that knows it."""


def number_of(tensor: torch.Tensor) -> Number:
    """Return what a tensor holds, (), without a synchronisation.

    Arithmetic with Python's numbers costs a tenth of that with tensors of one element.
    """
    if not tensor.is_cpu:
        return tensor.double()
    value: Any = tensor.tolist()
    return float(value)


def reciprocal(scale: torch.Tensor) -> torch.Tensor:
    """Return (), fp32: one over the scale."""
    if scale.is_cpu:
        value: Any = scale.tolist()  # Python divides in fp64
        return _inverse(value)
    # An fp32 division may be compiled to an approximation; through fp64 it is exact.
    if scale.device.type == "mps":  # has no fp64
        return scale.reciprocal()
    return scale.double().reciprocal().float()


@lru_cache(maxsize=64)
def _inverse(scale: float) -> torch.Tensor:
    # Only ever read, and the scale moves rarely.
    return torch.tensor(1.0 / scale, dtype=torch.float32)


def may_enlarge(scale: torch.Tensor) -> bool:
    """Return whether dividing by this scale makes values larger, if known here."""
    # tolist, unlike item, is no synchronisation where memory is the host's.
    value: Any = scale.tolist() if scale.is_cpu else 1.0
    return bool(value < 1.0)


def moved_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on ``device``, without waiting for it to arrive."""
    if tensor.device == device:  # `to` takes three times as long to find out
        return tensor
    return tensor.to(device, non_blocking=True)


def any_of(flags: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return (), fp32 on ``device``: 1 if any of them is 1."""
    tensors = [moved_to(flag, device) for flag in flags]
    if len(tensors) == 1:
        return tensors[0]
    if not tensors:
        return torch.zeros((), dtype=torch.float32, device=device)
    return torch.stack(tensors).amax()


def spread(value: torch.Tensor, found: Found) -> None:
    """Write ``value``, (), into every tensor of ``found``."""
    for tensor in found.values():
        tensor.copy_(value, non_blocking=True)


def on_host(found_inf: torch.Tensor) -> bool:
    """Return whether the host can see a finding, without a synchronisation."""
    return found_inf.is_cpu and bool(found_inf.tolist())


def is_found(state: dict[str, Any]) -> bool:
    """Return whether the step is to be skipped; at most one synchronisation."""
    # After an agreement all devices hold the same; alone, they were made equal.
    verdict: Verdict | None = state.get("verdict")
    if verdict is not None and verdict.message.device.type != "cpu":
        verdict.check()
        return bool(verdict.value("found_inf"))
    found = next(iter(state["found_inf_per_device"].values()))
    return bool(found.tolist() if found.is_cpu else found.item())
