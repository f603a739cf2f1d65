"""Multiply a loss, or any nest of losses, by the scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from .unscale import _MultiDeviceReplicator

__all__ = ["multiply"]


def multiply(
    outputs: torch.Tensor | Iterable[Any],
    scale_for: Callable[[torch.device], torch.Tensor],
    *,
    keep_dtype: bool,
    watch: Callable[[torch.Tensor], None],
) -> torch.Tensor | Iterable[Any]:
    """Return ``outputs`` times the scale, in the same shape of nest.

    Args:
        outputs: a tensor of any shape, or lists, tuples and other iterables of such.
        scale_for: gives the scale, (), fp32, for a first output on that device.
        keep_dtype: give each result the dtype of its output, except fp16; otherwise
            torch's type promotion decides.
        watch: called with every product.

    Raises:
        ValueError: something that is neither a tensor nor iterable.
    """
    if isinstance(outputs, torch.Tensor):  # the common case needs no copies
        scale = scale_for(outputs.device).to(device=outputs.device, non_blocking=True)
        product = _product(outputs, scale, keep_dtype)
        watch(product)
        return product
    copies: list[_MultiDeviceReplicator] = []

    def apply(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if not copies:
                copies.append(_MultiDeviceReplicator(scale_for(value.device)))
            product = _product(value, copies[0].get(value.device), keep_dtype)
            watch(product)
            return product
        if not isinstance(value, Iterable):
            raise ValueError("outputs must be a Tensor or an iterable of Tensors")
        scaled = map(apply, value)
        return type(value)(scaled) if isinstance(value, (list, tuple)) else scaled

    return apply(outputs)  # type: ignore[no-any-return]


def _product(
    output: torch.Tensor, scale: torch.Tensor, keep_dtype: bool
) -> torch.Tensor:
    product = output * scale
    # fp16 cannot hold most scaled losses: those stay as wide as the scale.
    keep_dtype = keep_dtype and output.dtype is not torch.float16
    return product.to(output.dtype) if keep_dtype else product
