"""The arithmetic of clip_grad_norm_: one factor, and where it is applied.

The gradients still carry the scale, so the factor is the clip factor over the scale. It
multiplies the gradients, or goes into the divisor of a fused kernel.

[Note: A clip left to a kernel]
A fused optimizer divides by ``grad_scale`` while it steps, which saves a write of all
gradients. Until then they carry the scale; the scaler holds them (``folded``), so that
a new gradient is another object, and the divisor (``fused_grad_scale``). `step` hands
the divisor over and forgets both, unless the optimizer raised. What comes instead of
that step divides those that are unchanged: a step that goes past the kernel or without
one of them, another optimizer that shares a gradient, `update`. `step` refuses
gradients that were changed or replaced in between, because nothing shows whether they
carry the scale.

Under FSDP2 and DDP gradients are views of one buffer and have one version: clipping
those of another optimizer changes it. So where there may be several optimizers, views
are not left to a kernel, and what was left to one is divided when another optimizer is
seen for the first time.
"""

from __future__ import annotations

import torch

from .config import HIGHEST_SCALE, LOWEST_SCALE
from .global_norm import GradsByMesh
from .grads import Number
from .torch_internals import foreach_mul_


def clip_(
    grads: GradsByMesh, norm: Number, max_norm: float, scale: Number, *, fused: bool
) -> Number | None:
    """Clip local gradients, or return what a fused kernel divides by instead.

    Args:
        grads: local gradients, which carry ``scale``; multiplied in place.
        norm: of all unscaled gradients.
        max_norm: largest norm afterwards.
        scale: 1 if they are unscaled already.
        fused: leave the gradients to a kernel if fp32 can hold its divisor. On an
            accelerator, where reading it would synchronise, a norm beyond fp32 then
            clips to zero.

    Returns:
        The divisor; None if the gradients were multiplied.
    """
    # The factor of torch.nn.utils.clip_grad_norm_, in fp64.
    factor = max_norm / (norm + 1e-6)
    if isinstance(factor, torch.Tensor):
        factor = factor.clamp(max=1.0)
    else:
        factor = min(factor, 1.0)  # of nan and 1 it is nan
    if fused:
        is_unknown = isinstance(factor, torch.Tensor) or isinstance(scale, torch.Tensor)
        if is_unknown or scale <= HIGHEST_SCALE * factor:
            return scale / factor
    once = factor / scale
    # A product that is subnormal in fp32 has lost digits, or is zero.
    is_small = isinstance(once, float) and once < LOWEST_SCALE
    with torch.no_grad():
        for groups in grads.values():
            for (device, dtype), tensors in groups.items():
                is_wide = dtype is torch.float64
                factors = [1.0 / scale, factor] if is_small and not is_wide else [once]
                kind = torch.float64 if is_wide else torch.float32
                for number in factors:
                    value = torch.as_tensor(number, dtype=kind, device=device)
                    foreach_mul_(tensors, value)
    return None
