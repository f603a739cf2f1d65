"""Norms of many tensors, each read once.

[Note: Small tensors]
A kernel call per tensor costs about 1 us on a CPU, more than reading a small tensor. So
tensors of one size are stacked, as many as the cache holds, and reduced by one call: 5
times faster for 16 elements, twice for 1024, no faster beyond 4096. An accelerator
batches by itself.

[Note: Exact enough]
fp32 accumulation loses digits with the number of elements (0.5 % at 65 million on a
CPU). So large tensors are reduced in pieces, and pieces are added in fp64: 1e-7 for
gradients as they are, up to 6e-5 where all elements of a piece are equal and rounding
goes one way. fp64 throughout would cost three times the read. Orders other than 2 and
infinity lose more, and are rare: they are read in fp64 throughout, after a division by
the largest element, since a high power leaves the range of fp64 as well. So is what is
not finite at the first read: only what is still not finite has overflowed.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache
from typing import Any

import torch

from .torch_internals import foreach_norm

Norms = list[float] | torch.Tensor
"""Numbers that the host knows, or (number of tensors,), fp64, on their device."""

# What a tensor on the host holds, without `item`, which counts as a synchronisation.
_listed: Any = torch.Tensor.tolist

_SMALL = 4096  # elements; see [Note: Small tensors]
_STACKED = 131072  # elements at a time; see [Note: Small tensors]
_PIECE = 65536  # elements; see [Note: Exact enough]
_NARROW_PIECE = 4096  # the same for 16-bit elements, which torch adds up less well


def norms(tensors: list[torch.Tensor], norm_type: float) -> Norms:
    """Return the norm of each tensor; they have one device and one dtype.

    Not finite only where the tensor is not, or where the norm of fp64 elements leaves
    the range of fp64.

    Raises:
        NotImplementedError: neither on CPU nor on CUDA; or complex gradients, for
            which torch's ``unscale_`` raises it, too.
    """
    if not tensors:
        return []
    kind, dtype = tensors[0].device.type, tensors[0].dtype
    if dtype.is_complex:
        raise NotImplementedError(
            f"Complex gradients ({dtype}) cannot be scaled, and have no norm here."
        )
    if kind not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"clip_grad_norm_ reads gradients on CPU and CUDA, got {kind}. Use "
            "unscale_() and torch.nn.utils.clip_grad_norm_() instead."
        )
    is_fast = norm_type in (2.0, math.inf)
    if kind == "cuda":
        if is_fast and dtype is not torch.float64:
            # fp64 sums of fp32 squares cannot overflow: no second read.
            return torch.stack(foreach_norm(tensors, norm_type, torch.float64))
        return _in_fp64(tensors, norm_type)
    # Subclasses need not know the kernels for lists.
    if not is_fast or not {*map(type, tensors)} <= {torch.Tensor}:
        return _in_fp64(tensors, norm_type)
    norms_of_all = _norms_cpu(tensors, norm_type)
    if math.isfinite(sum(norms_of_all)):
        return norms_of_all
    return [
        norm if math.isfinite(norm) else _listed(scaled_norm(tensor, norm_type))
        for norm, tensor in zip(norms_of_all, tensors, strict=True)
    ]


@lru_cache(maxsize=65536)
def hashed(text: str) -> float:
    """Return 52 bits, exact in fp64, the same in every process, unlike hash()."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return float(int.from_bytes(digest, "big") >> 12) + 1.0


def scaled_norm(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm, (), fp64, without leaving the range of fp64 on the way."""
    # nan and inf stay what they are: the largest element is one of them.
    if not tensor.numel():
        return tensor.new_zeros((), dtype=torch.float64)
    wide = tensor.double()
    largest = wide.abs().amax()
    is_usable = largest.isfinite() & (largest > 0.0)
    divisor = torch.where(is_usable, largest, 1.0)
    norm = torch.linalg.vector_norm(wide / divisor, norm_type) * divisor
    return torch.where(is_usable, norm, largest)


def _in_fp64(tensors: list[torch.Tensor], norm_type: float) -> Norms:
    # Of any order and every class of tensors.
    each = [scaled_norm(tensor, norm_type) for tensor in tensors]
    if {*map(type, each)} == {torch.Tensor}:
        return _listed(torch.stack(each)) if each[0].is_cpu else torch.stack(each)
    try:
        return [float(norm.item()) for norm in each]
    except RuntimeError:  # one may hold nothing (FakeTensor)
        return torch.stack(each)


def _norms_cpu(tensors: list[torch.Tensor], norm_type: float) -> list[float]:
    sizes = list(map(torch.Tensor.numel, tensors))
    if len(set(sizes)) == 1:
        return _norms_of_one_size(tensors, sizes[0], norm_type)
    indices: dict[int, list[int]] = {}
    for i, size in enumerate(sizes):
        indices.setdefault(size, []).append(i)
    results = [0.0] * len(tensors)
    for size, places in indices.items():
        group = [tensors[i] for i in places]
        of_group = _norms_of_one_size(group, size, norm_type)
        for i, norm in zip(places, of_group, strict=True):
            results[i] = norm
    return results


def _norms_of_one_size(
    group: list[torch.Tensor], size: int, norm_type: float
) -> list[float]:
    if size == 0:
        return [0.0] * len(group)
    dtype = group[0].dtype
    wide = None if dtype is torch.float64 else torch.float32
    piece = _PIECE if dtype.itemsize >= 4 else _NARROW_PIECE
    if size > piece:
        return [_listed(_norm_in_pieces(tensor, norm_type, piece)) for tensor in group]
    if size > _SMALL or len(group) == 1:
        return list(map(_listed, foreach_norm(group, norm_type, wide)))
    step = _STACKED // size
    results: list[float] = []
    for start in range(0, len(group), step):
        chunk = group[start : start + step]
        try:
            rows = torch.stack(chunk)
        except RuntimeError:  # of one size, but not of one shape
            rows = torch.stack([tensor.reshape(-1) for tensor in chunk])
        rows = rows.reshape(-1, size)
        results += _listed(torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=wide))
    return results


def _norm_in_pieces(tensor: torch.Tensor, norm_type: float, piece: int) -> torch.Tensor:
    wide = None if tensor.dtype is torch.float64 else torch.float32
    each = torch.stack(foreach_norm(tensor.reshape(-1).split(piece), norm_type, wide))
    norm: torch.Tensor = torch.linalg.vector_norm(each.double(), norm_type)
    return norm
