"""Parts: a rank's elements of each parameter and gradient that an optimizer steps.

A part knows its box: where its elements lie in the whole tensor.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from .kept import Box

__all__ = [
    "UNNAMED",
    "WRAPPERS",
    "HiddenLayoutError",
    "Part",
    "Piece",
    "bare",
    "boxes_of_range",
    "cuts",
    "has_plain_bits",
    "place",
    "range_of",
    "trains",
]

WRAPPERS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)
"""Name components added by wrappers: DDP, compile, FSDP1, activation checkpointing."""
UNNAMED = "parameter "
"""Prefix of the name of a parameter that is in no module; its index follows."""


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a local parameter that form a box of a whole tensor."""

    name: str
    first: int
    """Position of its first element in the flattened local parameter."""
    box: Box


@dataclass(frozen=True)
class Part:
    """Elements of one parameter on this rank."""

    name: str
    weight: Tensor
    """Local elements: a view of the tensor that the optimizer steps."""
    box: Box
    stepped: Any
    """Tensor in the optimizer's param group: the parameter, or a flat tensor that
    contains it."""
    cut: Callable[[Any], tuple[Tensor, Box]]
    """Function from a tensor with the layout of ``stepped``, such as its gradient, to
    the elements of this part and their box."""
    number: int = 0
    """Index among this rank's parts with the same name."""

    @property
    def key(self) -> str:
        """Number and name of the part."""
        return f"{self.number}/{self.name}"


class HiddenLayoutError(ValueError):
    """Raised for a DTensor that does not say which elements a rank holds."""


def place(tensor: Tensor) -> tuple[Tensor, Box]:
    """Return the local elements of a tensor or DTensor, and their box.

    There is no communication: a partial or sharded DTensor stays as it is. A complex
    number counts as two elements.

    Raises:
        HiddenLayoutError: if the placements of a DTensor give another local shape.
    """
    local, box = _place(tensor)
    if local.is_complex():
        more = (*box.shape, 2), (*box.offsets, 0), (*box.local, 2)
        return torch.view_as_real(local), Box(*more, box.summand)
    return local, box


def _place(tensor: Tensor) -> tuple[Tensor, Box]:
    # a process that has not imported this slow module has no DTensor
    sharded = sys.modules.get("torch.distributed.tensor")
    if sharded is None or not isinstance(tensor, sharded.DTensor):
        return tensor.detach(), _whole(tuple(tensor.shape))
    with torch.no_grad():
        mesh, placements = tensor.device_mesh, tensor.placements
        local = tensor.to_local().detach()
        sums = [dim for dim, p in enumerate(placements) if p.is_partial()]
        if sums:  # offsets of the replicated tensor are offsets of the sum
            whole = sharded.Replicate()
            tensor = sharded.DTensor.from_local(
                local,
                mesh,
                [whole if p.is_partial() else p for p in placements],
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
        shape = tuple(tensor.shape)
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]  # of checkpoints
        if local.numel() and tuple(chunk.sizes) != tuple(local.shape):
            raise HiddenLayoutError(
                f"a DTensor of shape {shape} has {tuple(local.shape)} on this rank, "
                f"and {tuple(chunk.sizes)} by its placements: it is sharded unevenly. "
                "After the layout, let each parameter say where its part lies. "
                "Megatron-FSDP: for p in model.parameters(): "
                "megatron_fsdp.uneven_dtensor.update_uneven_dtensor_chunk_metadata(p)"
            )
        return local, Box(
            shape,
            tuple(chunk.offsets) if local.numel() else (0,) * len(shape),
            tuple(local.shape),
            tuple(mesh.get_local_rank(dim) for dim in sums),
        )


@lru_cache(maxsize=100_000)  # each step asks seven times with equal arguments
def _whole(shape: tuple[int, ...]) -> Box:
    """Return the box of a tensor that is held whole."""
    return Box(shape, (0,) * len(shape), shape)


def has_plain_bits(tensor: Tensor) -> bool:
    """Return True for a dense local tensor whose numbers can be read from memory."""
    odd = tensor.is_quantized, tensor.is_meta, tensor.is_conj(), tensor.is_neg()
    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    return type(tensor) in (Tensor, nn.Parameter) and is_dense and not any(odd)


def trains(module: nn.Module) -> bool:
    """Return True if a module has parameters that require a gradient."""
    return any(p.requires_grad for p in module.parameters())


def bare(name: str) -> str:
    """Remove the names of wrappers from the name of a parameter."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


Cut = Callable[[Any], tuple[Tensor, Box]]


def cuts(local: Tensor, first: int, piece: Piece) -> Iterator[tuple[Cut, Box]]:
    """Cut the elements that a tensor and a piece share into boxes.

    Args:
        local: consecutive elements of a local parameter, or all of them.
        first: position of the first of them in the flattened local parameter.
        piece: piece of the same parameter.

    Yields:
        Function that cuts the box out of a tensor like ``local``, and the box.
    """
    box = piece.box
    if piece.first == first == 0 and box.size == local.numel():
        yield partial(_placed, local=tuple(local.shape), box=box), box
        return
    start = max(first, piece.first)
    end = min(first + local.numel(), piece.first + box.size)
    if start >= end:
        return
    for offsets, sizes in boxes_of_range(
        box.local, start - piece.first, end - piece.first
    ):
        offset = start - first
        start += math.prod(sizes)
        within = tuple(map(operator.add, box.offsets, offsets))
        each = Box(box.shape, within, sizes)
        yield partial(range_of, first=offset, box=each), each


def _placed(tensor: Any, *, local: tuple[int, ...], box: Box) -> tuple[Tensor, Box]:
    """Return the local elements and box of a tensor, such as a gradient.

    If the tensor is plain, or hides its layout, it has the box of its weight.
    """
    try:
        part, own = place(tensor)
    except HiddenLayoutError:
        part = tensor.to_local().detach()
        if tuple(part.shape) != local:
            raise
        return part, box
    if own.shape == box.shape:
        return part, own
    return part.view(box.local) if tuple(part.shape) == local else part, box


def range_of(tensor: Any, *, first: int, box: Box) -> tuple[Tensor, Box]:
    """Return the elements of a box, and the box.

    In the flattened tensor, the elements begin at position ``first``.
    """
    part = tensor.detach().reshape(-1).narrow(0, first, box.size)
    return part.view(box.local), box


def boxes_of_range(
    shape: Sequence[int], start: int, end: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a range of a flattened tensor into boxes, in the order of their elements.

    Returns:
        Offsets and sizes of each box; 2 x dims - 1 boxes at most.
    """
    if start >= end:
        return []
    if len(shape) < 2:
        return [((start,) * len(shape), (end - start,) * len(shape))]
    row = math.prod(shape[1:])
    head, tail = -(-start // row), end // row
    if head > tail:  # the fragment lies within one row
        return _boxes_in_row(shape, tail, start, end)
    boxes = _boxes_in_row(shape, head - 1, start, head * row)
    if head < tail:
        zeros = (0,) * (len(shape) - 1)
        boxes.append(((head, *zeros), (tail - head, *shape[1:])))
    return boxes + _boxes_in_row(shape, tail, tail * row, end)


def _boxes_in_row(
    shape: Sequence[int], row: int, start: int, end: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    before = row * math.prod(shape[1:])
    boxes = boxes_of_range(shape[1:], start - before, end - before)
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes]
