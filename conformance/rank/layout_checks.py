"""Check a user's workload on the ranks; a failure ends the command with exit 3.

All ranks must create the same model and batches, and the shares of a batch must hold
every element once. The layout must hold all parameters of the model, and no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from ...fixtures import Batch, OfWorkload, ResolvedWorkload, compared_parameters, local
from .local_parts import FP32, full_name, parameters_of
from .observe import digest
from .trace import RankTrace

__all__ = [
    "check_layout",
    "check_share",
    "check_whole",
    "distinct",
    "same_everywhere",
]


def same_everywhere(
    workload: ResolvedWorkload, call: str, made: Mapping[str, Tensor]
) -> None:
    """Compare the result of a call with the result on rank 0.

    Args:
        workload: the workload.
        call: name of the call.
        made: tensors of the result by name; the same names on every rank.

    Raises:
        WorkloadError: on every rank if any rank differs, so that no rank waits.
    """
    mine = {name: f"{tuple(t.shape)} {t.dtype} {digest(t)}" for name, t in made.items()}
    # gather digests on all ranks, so that each raises the same error by itself
    all_: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_, mine)
    for rank, theirs in enumerate(all_):
        names = [n for n in {**all_[0], **theirs} if all_[0].get(n) != theirs.get(n)]
        if names:
            raise workload.refuse(
                call,
                f"gave another {names[0]} on rank {rank} than on rank 0: all ranks "
                f"must make the same {call}, whatever their rank",
            )


def check_layout(
    workload: ResolvedWorkload,
    module: object,
    whole: Mapping[str, Tensor],
    tied: Mapping[str, str],
) -> None:
    """Check the result of ``parallelize``, whose parameters hold element numbers.

    Args:
        workload: the workload.
        module: result of its ``parallelize``.
        whole: the model's parameters by name.
        tied: second name of a tied parameter -> its name in ``whole``.

    Raises:
        WorkloadError: if the result is not a module, or its parameters are not the
            model's.
    """
    if not isinstance(module, nn.Module):
        text = f"returned {type(module).__name__}, expected the module to call"
        if OfWorkload.LOOP not in workload.has:
            text += ": a stack of another type needs weights(stack)"
        raise workload.refuse("parallelize", text)
    parameters = parameters_of(module, whole)
    unknown = [n for n in parameters if n not in whole]
    # first the likely cause: a plan that replaces one of two tied parameters
    if unknown and full_name(unknown[0], tied) in tied:
        name = full_name(unknown[0], tied)
        raise workload.refuse(
            "parallelize",
            f"{name} is tied to {tied[name]} in model(), and not after parallelize: "
            "tie it again",
        )
    if unknown:
        raise workload.refuse(
            "parallelize",
            f"gave the parameter {unknown[0]!r}, which the model does not have: "
            f"parameters keep their names ({', '.join([*whole][:8])})",
        )
    for name, parameter in parameters.items():
        _check_numbers(workload, name, parameter, whole[name])


def _check_numbers(
    workload: ResolvedWorkload, name: str, parameter: nn.Parameter, whole: Tensor
) -> None:
    count = whole.numel()
    if parameter.dtype != whole.dtype:
        text = f"made {name} {parameter.dtype}: {FP32}"
        raise workload.refuse("parallelize", text)
    flat = local(parameter.detach()).reshape(-1).cpu().numpy()
    # distinct integers below count are element numbers that nothing has changed
    right = (flat >= 0) & (flat < count) & (flat == np.floor(flat))
    if not right.all() or distinct(flat.astype(np.int64)) < len(flat):
        raise workload.refuse(
            "parallelize",
            f"changed the values of {name}: parallelize keeps the model's values, so "
            "let it initialise, copy or scale nothing",
        )


def check_share(
    workload: ResolvedWorkload,
    batch: Batch,
    share: Batch,
    groups: Sequence[dist.ProcessGroup],
) -> None:
    """Check that the shares of all data ranks together are the global batch.

    Args:
        workload: the workload.
        batch: the global batch.
        share: this rank's part of the batch.
        groups: process groups of the mesh axes along which ranks have different parts.

    Raises:
        WorkloadError: on every rank, if elements are missing or occur twice.
    """
    totals = torch.tensor([share.elements, _content(share)])
    for group in groups:
        # integers wrap around, so the sum of digests does not depend on the order
        dist.all_reduce(totals, group=group)
    count, content = totals.tolist()
    if count != batch.elements:
        what = "leave a hole" if count < batch.elements else "overlap"
        raise workload.refuse(
            "shard",
            f"the parts of all ranks {what}: together they have {count} elements of "
            f"the targets, the batch has {batch.elements}; where some are padding, let "
            "the loss be (sum, count)",
        )
    if content != _content(batch):
        raise workload.refuse(
            "shard",
            "the parts of all ranks overlap and leave a hole: together they have as "
            "many elements as the batch, some of them twice",
        )


def _content(batch: Batch) -> int:
    """Return a digest that ignores the order of elements; digests of parts add up."""
    total = 0
    for tensor in batch.counted:
        bits = tensor.detach().cpu().double().reshape(-1).numpy().view(np.uint64)
        # mixed (splitmix64), because sums of plain bits are equal for many tensors
        mixed = (bits ^ (bits >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        total += int((mixed ^ (mixed >> np.uint64(32))).sum().view(np.int64))
    # into the range of int64, in which all_reduce wraps its sum
    return (total + 2**63) % 2**64 - 2**63


def distinct(places: NDArray[np.int64]) -> int:
    """Return the number of different element numbers; faster than sorting."""
    return int(np.count_nonzero(np.bincount(places)))


def check_whole(workload: ResolvedWorkload, traces: Sequence[RankTrace]) -> None:
    """Check that the ranks together hold every element of a user's model.

    Raises:
        WorkloadError: names the parameter with missing elements.
    """
    # a rank that hung has no trace; one that holds no parameter has one
    if OfWorkload.OF_USER not in workload.has or not all(t.initial for t in traces):
        return
    for name, parameter in compared_parameters(workload.model()).items():
        parts = [t.index[name] for t in traces if name in t.index]
        n_held = distinct(np.concatenate(parts)) if parts else 0
        if n_held < parameter.numel():
            text = f"no rank holds {parameter.numel() - n_held} of {parameter.numel()}"
            raise workload.refuse("parallelize", f"{text} elements of {name}")
