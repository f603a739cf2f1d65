"""Nudge, write or replace the weights of a job before its first step.

All three use the position of an element in the whole tensor. So a model is nudged, and
starts, in the same way in every layout.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from .files import is_muon
from .kept import CHUNK, Box, mix, places_of
from .layouts import copies_of, fp32_range_of
from .parts import bare, cuts, place
from .roots import Roots

__all__ = ["begin_from", "nudge", "nudge_gradients", "write_start"]

SELDOM = 32
"""One in this many half-precision weights is nudged, because one unit in the last place
is as large as many training steps. One in this many elements of Muon's gradients is
nudged as well. With one in 512, two of twelve correct jobs of four ranks failed. With
one in four, some updates were all noise."""
BF16, FP16 = 2**16, 2**13
"""Distance between neighbouring numbers of bf16, and of fp16, in fp32 units in the last
place. TF32 rounds like fp16."""
NEAR = 32
"""Largest distance from a boundary of bf16 rounding, in fp32 units in the last place,
at which a weight moves across the boundary; for fp16, an eighth of it. Without these
moves, no weight of a small model would change after rounding to 16 bits. One weight in
2,000 moves across a boundary. In root mean square all weights then move by 1.1
units."""
ACROSS = 16
"""Expected number of weights that cross a boundary of rounding. A model of fewer
than 32,000 weights needs a larger ``NEAR`` for it. If only one or two cross, too little
noise is measured: correct bf16 jobs of 3,000 weights failed with two of eight seeds."""
FAR = 512
"""Largest value of ``NEAR``. In root mean square all weights then move by 26 units,
3e-6 of their size."""
PLACES = "gradparity.places"
"""Key of the boxes in the metadata of a file with weights."""


def _weights(module: nn.Module, roots: Roots) -> Iterator[tuple[str, Tensor, Box]]:
    """Yield name, local elements and box of each piece of each trained parameter.

    The fp32 masters of a parameter are yielded under its name.
    """
    roots.learn(module)
    masters: dict[int, list[tuple[Tensor, int]]] = {}
    for stepped, whole, first in copies_of(roots):
        both = [place(each)[0] for each in (stepped, whole)]
        if len({each.untyped_storage().data_ptr() for each in both}) == 2:
            masters.setdefault(id(whole), []).append((both[0], first))
    parameter: Any  # may have attributes that DeepSpeed adds
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        master = fp32_range_of(parameter)
        if master is not None:
            yield bare(name), *master
        # under ZeRO 3 the parameter itself is empty
        if hasattr(parameter, "ds_tensor"):
            shape, part = tuple(parameter.ds_shape), parameter.ds_tensor
            start = master[1].offsets if master else (0,)
            part = part.detach().narrow(0, 0, master[1].size if master else 0)
            yield bare(name), part, Box(shape, start, tuple(part.shape))
            continue
        local, box = place(parameter)
        pieces = roots.pieces(bare(name), parameter, box)
        for tensor, first in [*masters.get(id(parameter), ()), (local, 0)]:
            for piece in pieces:
                for cut, _ in cuts(tensor, first, piece):
                    yield piece.name, *cut(tensor)


@torch.no_grad()
def nudge(module: nn.Module, seed: int, roots: Roots) -> None:
    """Move the trained weights of a model to neighbouring numbers.

    In 16 bits only one weight in ``SELDOM`` moves. Some fp32 weights move further,
    across the nearest boundary of rounding to bf16 or fp16.
    """
    weights = [*_weights(module, roots)]
    sizes = {name: math.prod(box.shape) for name, _, box in weights}
    # half of the near weights cross
    reach = max(NEAR, min(FAR, ACROSS * BF16 // max(1, sum(sizes.values()))))
    drawn = mix(torch.tensor(seed * 7919 + 1, device="cpu"))
    for _, part, box in weights:
        if not part.numel() or not part.is_floating_point():
            continue
        for rows, start in _in_chunks(part):
            places = places_of(box, start, start + rows.numel(), part.device)
            words = mix((places * 0x9E3779B1 + drawn.to(part.device)) & 0xFFFFFFFF)
            rows.copy_(_nudged(rows, words.view(rows.shape), reach))


@torch.no_grad()
def nudge_gradients(optimizer: Any, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Replace gradients of Muon by copies in which some elements grow by a bf16 unit.

    Muon makes an update orthogonal by a chain of products in bf16. Nudged weights flip
    few of its roundings or none. Another order of sums may flip some, and each flip
    moves the whole update. Replicas have equal bits, and are nudged alike.

    Returns:
        Parameters and their own gradients, to put back after the step.
    """
    own = list[tuple[Tensor, Tensor]]()
    for group in optimizer.param_groups:
        if not is_muon(type(optimizer).__name__, group):
            continue
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None and gradient.dtype == torch.float32:
                own.append((parameter, gradient))
                parameter.grad = gradient.clone()
                local, _ = place(parameter.grad)
                bits = local.view(torch.int32)
                words = mix((bits.long() + seed) & 0xFFFFFFFF)
                bits += torch.where(words % SELDOM == 0, BF16, 0).to(torch.int32)
    return own


def _in_chunks(part: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Yield a part by ranges of dim 0, each with its first element's position in it.

    The words of all elements of a large embedding would take gigabytes.
    """
    part = part if part.ndim else part.reshape(1)
    inner = math.prod(part.shape[1:])
    count = max(1, CHUNK // inner)
    for first in range(0, len(part), count):
        yield part[first : first + count], first * inner


def _nudged(part: Tensor, words: Tensor, reach: int) -> Tensor:
    """Return each weight moved to a neighbouring number, as its random word says.

    ``reach`` is the largest distance from a rounding boundary that is crossed; see
    ``NEAR``.
    """
    up = ((words >> 9) & 1).bool()
    moved = torch.nextafter(part, torch.where(up, torch.inf, -torch.inf).to(part))
    if part.element_size() < 4:
        return torch.where((words >> 13) % SELDOM != 0, part, moved)
    if part.dtype == torch.float32:
        bits = part.view(torch.int32)
        for apart, bit in ((FP16, 11), (BF16, 10)):
            past = bits % apart - apart // 2  # above 0 a weight rounds up
            across = bits - past + torch.where(past > 0, -1, 1)
            crosses = ((words >> bit) & 1).bool()
            near = (past.abs() <= reach * apart // BF16) & crosses
            across = across.to(torch.int32).view(part.dtype)
            moved = torch.where(near, across, moved)
    return moved


def write_start(folder: Path, rank: int, module: nn.Module, roots: Roots) -> None:
    """Write this rank's weights of a model atomically."""
    weights = dict[str, Tensor]()
    boxes = dict[str, Box]()
    for number, (name, part, box) in enumerate(_weights(module, roots)):
        weights[f"{number}/{name}"] = part.cpu().clone(
            memory_format=torch.contiguous_format
        )
        boxes[f"{number}/{name}"] = box
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"start-{rank}-{len([*folder.glob(f'start-{rank}-*')])}.safetensors"
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    save_file(weights, draft, {PLACES: msgspec.json.encode(boxes).decode()})
    os.replace(draft, path)


@torch.no_grad()
def begin_from(folder: Path, number: int, module: nn.Module, roots: Roots) -> str:
    """Load the weights of another job into a model; their layouts may differ.

    Args:
        folder: folder with ``start-RANK-NUMBER.safetensors``, made by
            :func:`write_start`.
        number: number of the model, in the order of first calls: two models may have
            parameters with the same names.
        module: model whose trained parameters are overwritten.
        roots: names and boxes of parameters.

    Returns:
        A note on parameters that keep their values; empty if all were loaded.
    """
    wanted = {name: box.shape for name, _, box in _weights(module, roots)}
    parts_by_name: dict[str, dict[int, list[tuple[Tensor, Box]]]] = {}
    for path in sorted(folder.glob("start-*.safetensors")):
        of_model = int(path.stem.rpartition("-")[2])
        try:
            with safe_open(path, framework="pt") as file:
                raw = (file.metadata() or {}).get(PLACES, "{}")
                boxes = msgspec.json.decode(raw, type=dict[str, Box])
                for key, box in boxes.items():
                    if (name := key.partition("/")[2]) in wanted:
                        parts = parts_by_name.setdefault(name, {})
                        part = file.get_tensor(key)
                        parts.setdefault(of_model, []).append((part, box))
        except (SafetensorError, msgspec.DecodeError) as error:
            raise ValueError(f"{path}: holds no weights: {error}") from error
    whole_by_name = {
        # stages of one model number their tensors from 0, and have each name once
        name: _whole(parts.get(number) or [*itertools.chain(*parts.values())])
        for name, parts in parts_by_name.items()
    }
    left = dict[str, None]()
    for name, part, box in _weights(module, roots):
        whole = whole_by_name.get(name, torch.empty(0, device="cpu"))
        if whole.shape != torch.Size(box.shape) or whole.isnan().any():
            left[name] = None
        else:
            part.copy_(_range(whole, box).view(part.shape))
    if not left:
        return ""
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return (
        f"{folder} has no whole {next(iter(left))}{more}: the job kept its own weights"
    )


def _whole(parts: list[tuple[Tensor, Box]]) -> Tensor:
    """Assemble the whole tensor from parts; elements without a part are nan."""
    # fp32 masters come last and overwrite copies in half precision
    parts.sort(key=lambda each: each[0].element_size())
    last, box = parts[-1]
    whole = last.new_full(box.shape, torch.nan)
    for part, box in parts:
        if box.shape == whole.shape:
            _range(whole, box).copy_(part.view(box.local))
    return whole


def _range(whole: Tensor, box: Box) -> Tensor:
    """Return a view of the elements of a box."""
    if box.is_flat:
        return whole.view(-1).narrow(0, box.offsets[0], box.size)
    for dim, (offset, size) in enumerate(zip(box.offsets, box.local, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole
