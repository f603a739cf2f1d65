"""Nudge: weights moved by a unit in the last place, to measure the noise of a job.

The direction is drawn from the place of an element in the whole tensor and from a seed,
so any layout of the model is moved alike. Weights stored in half precision move in one
of 32 elements only: a unit of these is as large as many steps of training.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .kept import Box, mix, places_of
from .parts import place

__all__ = ["nudge"]

SELDOM = 32
"""Of the elements of a half precision one in so many moves."""


@torch.no_grad()
def nudge(module: nn.Module, seed: int) -> None:
    """Move all trained parameters of a model, and the fp32 masters that it knows."""
    for parameter in module.parameters():
        if not parameter.requires_grad:
            continue
        mapping: Any = getattr(parameter, "_hp_mapping", None)
        if mapping is not None:  # of DeepSpeed: the optimizer steps these
            start = mapping.lp_fragment_address.start
            master = mapping.hp_fragment
            _move(
                master, Box(tuple(parameter.shape), (start,), (master.numel(),)), seed
            )
        local, box = place(parameter)
        _move(local, box, seed)


def _move(part: Tensor, box: Box, seed: int) -> None:
    """Move each element of a part to one of its neighbours."""
    if not part.numel() or not part.is_floating_point():
        return
    places = places_of(box, 0, box.size, part.device)
    words = mix((places * 0x9E3779B1 + mix(torch.tensor(seed * 7919 + 1))) & 0xFFFFFFFF)
    up = ((words >> 9) & 1).bool().view(part.shape)
    towards = torch.where(up, torch.inf, -torch.inf).to(part)
    moved = torch.nextafter(part, towards)
    if part.element_size() < 4:
        stays = ((words >> 13) % SELDOM != 0).view(part.shape)
        moved = torch.where(stays, part, moved)
    part.copy_(moved)
