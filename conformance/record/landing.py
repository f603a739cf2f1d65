"""Copies of small tensors between host and device that do not block the host.

A blocking copy also waits for all work that was queued on the device before, which is
the training step. So numbers go to the device from pinned memory. They come back on a
separate stream, into pinned memory, with an event for their arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["Landing", "send"]


def send(numbers: Sequence[int | Tensor], device: torch.device) -> Tensor:
    """Gather numbers of the host and of the device into one tensor on the device.

    Args:
        numbers: integers, or int64 scalars on the device.
        device: device of the result.

    Returns:
        (n,) int64.
    """
    here = [0] * len(numbers)
    places = list(range(len(numbers)))
    on_device = list[Tensor]()
    for at, number in enumerate(numbers):
        if isinstance(number, Tensor) and number.device.type != "cpu":
            places[at] = len(numbers) + len(on_device)
            on_device.append(number.to(torch.int64))
        else:
            here[at] = int(number)
    table = torch.tensor([here, places], dtype=torch.int64, device="cpu")
    if device.type != "cpu":
        table = table.pin_memory().to(device, non_blocking=True)
    if not on_device:
        return table[0]
    return torch.cat([table[0], torch.stack(on_device)])[table[1]]


class Landing:
    """Tensors that are being copied to the host."""

    def __init__(self, tensors: Sequence[Tensor], works: Sequence[Any]) -> None:
        """Start the copy without waiting.

        Args:
            tensors: tensors on one device; they must not be written from now on.
            works: handles of the collectives that compute the tensors.
        """
        self._tensors, self._works = [*tensors], [*works]
        self._event: Any = None
        device = self._tensors[0].device
        if device.type == "cpu":
            return
        module = torch.get_device_module(device)
        stream = _stream(device)
        stream.wait_stream(module.current_stream(device))
        with module.stream(stream):
            for work in self._works:
                work.wait()  # the stream waits, and not the host
            for at, tensor in enumerate(self._tensors):
                host = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True
                )
                self._tensors[at] = host.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
            self._event = module.Event()
            self._event.record(stream)

    @property
    def is_there(self) -> bool:
        """True if ``read`` would not wait."""
        if self._event is not None:
            return bool(self._event.query())
        return all(work.is_completed() for work in self._works)

    def read(self) -> list[Tensor]:
        """Return the tensors on the host."""
        if self._event is not None:
            self._event.synchronize()
        else:
            for work in self._works:
                work.wait()
        return self._tensors


@cache
def _stream(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device=device)
