"""Norm of a clip over the ranks that sync, and what gradients are divided by for it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed as dist

from .config import HIGHEST_SCALE
from .errors import PeerFailedError
from .global_norm import (
    GradsByMesh,
    global_norm,
    gradient_table,
    grads_by_mesh,
    local_norms,
    norm_on_host,
    tell_apart,
)
from .grads import Number, tensor_of
from .iteration import Part
from .row import FIELDS
from .sync import OverflowSync, SyncResult


class Measured(NamedTuple):
    """Global norm of an optimizer's gradients.

    Attributes:
        norm: unscaled.
        grads: this rank's.
        carried: the scale that they are still multiplied by.
        factor: clips them.
        is_finite: no overflow, as far as the host sees.
        is_refused: a rank refuses a norm that is not finite.
    """

    norm: Number
    grads: GradsByMesh
    carried: Number
    factor: Number
    is_finite: bool
    is_refused: bool

    def divisor(self, device: torch.device) -> torch.Tensor | None:
        """Return what a kernel divides by to unscale and clip, (), fp32.

        None if fp32 cannot hold it. On an accelerator, where reading it would
        synchronise, a norm beyond fp32 then clips to zero.
        """
        factor, divisor = self.factor, self.carried
        if isinstance(factor, torch.Tensor) or isinstance(divisor, torch.Tensor):
            divisor = divisor / factor
        elif self.is_finite:
            if divisor > HIGHEST_SCALE * factor:
                return None
            divisor = divisor / factor
        return torch.as_tensor(divisor, dtype=torch.float32, device=device)


def norm_over(
    sync: OverflowSync,
    result: SyncResult,
    part: Part,
    norm_type: float,
    carried: Number,
) -> Number:
    """Return the norm from the rows of a sync, whose ranks all call this.

    If replicas must be told apart first, all ranks see that in the rows, and do.
    """
    if result.host_rows is None:
        return global_norm(result.rows[:, FIELDS:], norm_type)
    norm = norm_on_host(result.host_rows.norms(), norm_type)
    if norm is None:
        entries = _told_apart(sync, result, part, norm_type, carried)
        norm = norm_on_host(entries, norm_type, is_told=True)
    assert norm is not None
    return norm


def _told_apart(
    sync: OverflowSync,
    result: SyncResult,
    part: Part,
    norm_type: float,
    carried: Number,
) -> list[list[float]]:
    # The entries once more, with replicas told apart by parameter.
    rank, ranks = ranks_of(result.group)
    table, error = None, None
    try:
        table = gradient_table(part.optimizer, rank)
    except Exception as caught:  # the other ranks wait for the table
        error = caught
    try:
        tables = sync.tables_of(result, table)
    except PeerFailedError as failed:
        raise error or failed from None
    index = result.group.rank()
    tell_apart(part.optimizer, part.record, tables, index, result.method)
    grads = GradsByMesh()
    if part.record is not None:
        grads = grads_by_mesh(part.optimizer, part.record, rank, ranks, allow_fp16=True)
    entries, _ = local_norms(grads, norm_type, carried)
    rows = sync.rows_of(result, tensor_of(entries, result.rows.device))
    numbers: list[list[float]] = rows.reshape(-1, 3).tolist()
    return numbers


def ranks_of(group: dist.ProcessGroup | None) -> tuple[int, tuple[int, ...]]:
    """Return this rank and, in ascending order, those of a group (None: this one).

    They count as ranks of the default process group.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    if group is None:
        return rank, (rank,)
    return rank, tuple(sorted(dist.get_process_group_ranks(group)))


def norm_tensor(norm: Number, device: torch.device) -> torch.Tensor:
    """Return the norm, (), fp32; fp64 where the host sees that fp32 cannot hold it."""
    is_large = isinstance(norm, float) and HIGHEST_SCALE < norm < math.inf
    dtype = torch.float64 if is_large else torch.float32
    return torch.as_tensor(norm, dtype=dtype, device=device)


def not_finite(norm: torch.Tensor, norm_type: float) -> RuntimeError:
    """Return what a clip raises that refuses a norm which is not finite."""
    return RuntimeError(
        f"The total norm of order {norm_type} of the gradients is {float(norm)}, so "
        "they cannot be clipped. Pass error_if_nonfinite=False to let step() skip "
        "instead."
    )
