"""The arithmetic of clip_grad_norm_: one factor, and where it is applied.

The gradients still carry the scale, so the factor is the clip factor over the scale. It
multiplies the gradients, or goes into the divisor of a fused kernel.
"""

from __future__ import annotations

import torch

from .config import HIGHEST_SCALE, LOWEST_SCALE
from .global_norm import GradsByMesh, Number
from .grads import host_value
from .torch_internals import foreach_mul_


def number_of(tensor: torch.Tensor) -> Number:
    """Return what a tensor holds, (), without a synchronisation.

    Arithmetic with Python's numbers costs a tenth of that with tensors of one element.
    """
    return host_value(tensor) if tensor.is_cpu else tensor.double()


def clip_factor(norm: Number, max_norm: float) -> Number:
    """Return the factor of ``torch.nn.utils.clip_grad_norm_``, in fp64."""
    factor = max_norm / (norm + 1e-6)
    if isinstance(factor, torch.Tensor):
        return factor.clamp(max=1.0)
    return min(factor, 1.0)  # of nan and 1 it is nan


def multiply_(grads: GradsByMesh, factor: Number, scale: Number) -> None:
    """Multiply local gradients in place by ``factor / scale``.

    Args:
        grads: the local gradients.
        factor: at most 1.
        scale: what the gradients carry; 1 if they are unscaled.
    """
    once = factor / scale
    # A product that is subnormal in fp32 has lost digits, or is zero.
    is_small = isinstance(once, float) and once < LOWEST_SCALE
    with torch.no_grad():
        for some in grads.values():
            for (device, dtype), tensors in some.gradients.items():
                is_wide = dtype is torch.float64
                factors = [1.0 / scale, factor] if is_small and not is_wide else [once]
                kind = torch.float64 if is_wide else torch.float32
                for number in factors:
                    foreach_mul_(
                        tensors, torch.as_tensor(number, dtype=kind, device=device)
                    )


def fused_divisor(factor: Number, scale: Number) -> Number | None:
    """Return what a fused kernel divides by, None if fp32 cannot hold it.

    A norm beyond fp32 asks for a divisor beyond fp32. On an accelerator, where reading
    it would synchronise, it is used all the same, and clips to zero.
    """
    if isinstance(factor, torch.Tensor) or isinstance(scale, torch.Tensor):
        return scale / factor
    return scale / factor if scale <= HIGHEST_SCALE * factor else None


def norm_tensor(norm: Number, device: torch.device) -> torch.Tensor:
    """Return a norm as (), fp32; fp64 where the host sees that fp32 cannot hold it."""
    is_large = isinstance(norm, float) and HIGHEST_SCALE < norm < float("inf")
    dtype = torch.float64 if is_large else torch.float32
    return torch.as_tensor(norm, dtype=dtype, device=device)
