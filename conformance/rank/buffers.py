"""Buffers that training changes: statistics of a norm, the bias of a router.

A buffer is compared if it is dense, fp32 or fp64 in the model, and in the
``state_dict``. Its name and shape must be the same on the rank as on one process.
Other buffers are caches, or parts of a buffer.
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
from ..record.parts import has_plain_bits
from .modules import modules_in, names_of
from .observe import digest

if TYPE_CHECKING:
    from .engine import Engine

__all__ = [
    "buffers_as_they_are",
    "buffers_on_rank",
    "digests_of_buffers",
    "saved_buffers",
    "saved_names",
]


def saved_buffers(workload: ResolvedWorkload, model: nn.Module) -> dict[str, Tensor]:
    """Return name -> fp32 or fp64 buffer in the ``state_dict`` of a whole model.

    Args:
        workload: its ``local_buffers`` are left out: ranks keep different ones on
            purpose.
        model: model before ``parallelize``.
    """
    saved = saved_names(model)
    return {
        name: buffer
        for name, buffer in model.named_buffers()
        if name in saved
        and buffer.dtype in (torch.float32, torch.float64)
        and has_plain_bits(buffer)
        and not any(
            f".{name}".endswith(f".{ending}") for ending in workload.local_buffers
        )
    }


def saved_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the buffers in the ``state_dict`` of a whole model."""
    names = (name for name, _ in model.named_buffers())
    return frozenset(names).intersection(model.state_dict())


def buffers_on_rank(engine: Engine) -> dict[str, Tensor]:
    """Return name -> buffer that is whole on this rank, in any floating dtype.

    Returns an empty dict if forwards are recomputed: that changes buffers twice.
    """
    # a forward that runs again in backward moves its buffers twice, by the recipe
    if not engine.buffers or engine.scenario.parsed_recipe.recompute:
        return {}
    return {
        name: local(buffer.detach())
        for name, buffer in _named(engine).items()
        if (whole := engine.buffers.get(name)) is not None and _is_whole(buffer, whole)
    }


def digests_of_buffers(engine: Engine) -> dict[str, str]:
    """Return name -> digest of each buffer of a ``state_dict``, in any dtype."""
    return {n: digest(b) for n, b in _named(engine).items() if n in engine.saved_names}


def _named(engine: Engine) -> dict[str, Tensor]:
    """Return the dense buffers of a rank's modules, by their names in the full model.

    A copy of the model, such as its running average, has buffers with the same names.
    Of these, the buffers of the module with the trained parameters are returned.
    """
    trained = {id(parameter) for parameter in engine.parameters.values()}
    roots = sorted(
        modules_in(engine.module),
        key=lambda root: trained.isdisjoint(map(id, root.parameters())),
    )
    buffers: dict[str, Tensor] = {}
    for root in roots:
        names = names_of(root, engine.module_names, engine.parameters)
        overwritten = _overwritten(root)
        for module, name in names.items():
            if module not in overwritten:
                for last, buffer in module.named_buffers(recurse=False):
                    if has_plain_bits(local(buffer.detach())):
                        buffers.setdefault(f"{name}.{last}" if name else last, buffer)
    return buffers


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
        if has_plain_bits(local(buffer.detach()))
    ]
    yield
    for module, name, buffer, was in buffers:
        buffer.detach().copy_(was)
        setattr(module, name, buffer)
