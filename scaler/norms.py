"""Norms of many tensors, each read once.

[Note: Small tensors]
A kernel call per tensor costs about 1 us on a CPU, more than reading a small tensor. So
tensors of one shape are copied side by side and reduced by one call: 10 times faster
for 16 elements, twice for 4096, and slower beyond. An accelerator batches by itself.

[Note: Exact enough]
fp32 accumulation loses digits with the number of elements (0.5 % at 65 million on a
CPU). So large tensors are reduced in pieces, and pieces are added in fp64. Orders other
than 2 and infinity lose more, and are rare: they are read in fp64 throughout. A finite
gradient may have a norm beyond fp32: what is not finite is read again in fp64, and only
what is still not finite has overflowed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["norms"]

_SMALL = 8192  # elements; see [Note: Small tensors]
_PIECE = 65536  # elements; see [Note: Exact enough]
_NARROW_PIECE = 4096  # the same for 16-bit elements, which torch adds up less well


def norms(tensors: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of each tensor.

    Args:
        tensors: any shapes; one device, one floating dtype.
        norm_type: order of the norm; may be infinite.

    Returns:
        (len(tensors),), fp64, on the device of the tensors; not finite only where a
        tensor is not.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    if tensors[0].device.type != "cpu":
        # fp64 sums cannot overflow, so no second look, which would synchronise.
        each = torch._foreach_norm(list(tensors), norm_type, torch.float64)
        return torch.stack(each)
    if norm_type not in (2.0, math.inf):
        tensors = [tensor.double() for tensor in tensors]
    found = _norms_cpu(tensors, norm_type)
    for i in (~found.isfinite()).nonzero().flatten().tolist():
        found[i] = _norm(tensors[i].double(), norm_type)
    return found


def _norms_cpu(tensors: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    order: list[int] = []
    parts: list[torch.Tensor] = []
    for shape, indices in _by_shape(tensors).items():
        group = list(tensors)
        if len(indices) < len(group):
            group = [tensors[i] for i in indices]
        order += indices
        if math.prod(shape) <= _SMALL and len(group) > 1 and shape:
            side_by_side = torch.cat(group).view(len(group), -1)
            parts.append(_norm(_wide(side_by_side), norm_type, dim=1))
        elif math.prod(shape) <= _piece_of(group[0]):
            dtype = None if group[0].dtype is torch.float64 else torch.float32
            parts.append(torch.stack(torch._foreach_norm(group, norm_type, dtype)))
        else:
            parts += [_norm_in_pieces(t, norm_type) for t in group]
    found = torch.cat([part.double() for part in parts])
    if order == list(range(len(order))):
        return found
    return torch.empty_like(found).index_copy_(0, torch.tensor(order), found)


def _piece_of(tensor: torch.Tensor) -> int:
    return _PIECE if tensor.element_size() >= 4 else _NARROW_PIECE


def _by_shape(tensors: Sequence[torch.Tensor]) -> dict[torch.Size, list[int]]:
    shapes = {tensor.shape for tensor in tensors}
    if len(shapes) == 1:
        return {shapes.pop(): list(range(len(tensors)))}
    indices: dict[torch.Size, list[int]] = {}
    for i, tensor in enumerate(tensors):
        indices.setdefault(tensor.shape, []).append(i)
    return indices


def _norm_in_pieces(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    pieces = tensor.reshape(-1).split(_piece_of(tensor))
    dtype = None if tensor.dtype is torch.float64 else torch.float32
    each = torch.stack(torch._foreach_norm(pieces, norm_type, dtype)).double()
    return _norm(each, norm_type).reshape(1)


def _norm(
    tensor: torch.Tensor, norm_type: float, dim: int | None = None
) -> torch.Tensor:
    if not tensor.numel() and math.isinf(norm_type):
        return tensor.new_zeros(tensor.shape[:1] if dim == 1 else ())
    norm: torch.Tensor = torch.linalg.vector_norm(tensor, norm_type, dim=dim)
    return norm


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
