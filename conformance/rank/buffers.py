"""Buffers that training changes: statistics of a norm, the bias of a router.

A buffer is compared if it is fp32 or fp64 in the model, is in the ``state_dict``, and
has the same name and shape on the rank as on one process. Other buffers are caches, or
parts of a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ...fixtures import ResolvedWorkload, local
from .modules import modules_in, names_of

if TYPE_CHECKING:
    from .engine import Engine

__all__ = ["buffers_as_they_are", "buffers_on_rank", "saved_buffers"]


def saved_buffers(workload: ResolvedWorkload, model: nn.Module) -> dict[str, Tensor]:
    """Return name -> fp32 or fp64 buffer in the ``state_dict`` of a whole model.

    Args:
        workload: its ``local_buffers`` are left out: ranks keep different ones on
            purpose.
        model: model before ``parallelize``.
    """
    saved = model.state_dict().keys()
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in saved
        and buffer.dtype in (torch.float32, torch.float64)
        and not any(
            f".{name}".endswith(f".{ending}") for ending in workload.local_buffers
        )
    }


def buffers_on_rank(engine: Engine) -> dict[str, Tensor]:
    """Return name -> buffer that is whole on this rank, in any floating dtype.

    Returns none if forwards are recomputed, which moves buffers twice.
    """
    # a forward that runs again in backward moves its buffers twice, by the recipe
    if not engine.buffers or engine.scenario.parsed_recipe.recompute:
        return {}
    whole_by_name: dict[str, Tensor] = {}
    for root in modules_in(engine.module):
        names = names_of(root, engine.module_names, engine.parameters)
        overwritten = _overwritten(root)
        for module, name in names.items():
            for last, buffer in module.named_buffers(recurse=False):
                full = f"{name}.{last}" if name else last
                whole = engine.buffers.get(full)
                if whole is None or module in overwritten:
                    continue
                if _is_whole(buffer, whole):
                    whole_by_name[full] = local(buffer.detach())
    return whole_by_name


def _is_whole(buffer: Tensor, whole: Tensor) -> bool:
    if isinstance(buffer, DTensor) and any(p.is_partial() for p in buffer.placements):
        return False
    return buffer.is_floating_point() and local(buffer).shape == whole.shape


def _overwritten(root: nn.Module) -> set[nn.Module]:
    """Return modules whose buffers the next forward receives from another rank.

    By default ``DistributedDataParallel`` broadcasts the buffers of the first rank.
    """
    return {
        module
        for replica in root.modules()
        if isinstance(replica, DistributedDataParallel)
        and replica.broadcast_buffers
        and dist.get_rank(replica.process_group)
        for module in replica.modules()
    }


@contextmanager
def buffers_as_they_are(stack: object) -> Iterator[None]:
    """Restore the buffers of a workload's modules when this context ends."""
    buffers = [
        (module, name, buffer, buffer.detach().clone())
        for root in modules_in(stack)
        for module in root.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    yield
    for module, name, buffer, was in buffers:
        buffer.detach().copy_(was)
        setattr(module, name, buffer)
