"""Observers that run on a rank: digests, layouts of gradients, collectives."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    distribute_tensor,
)
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ..fixtures import local
from .trace import Collective

__all__ = [
    "NO_STATE",
    "CallLog",
    "digest",
    "gradient_places",
    "non_finite",
    "numbers_laid_out_as",
    "optimizer_digest",
    "partial_ranks",
]

Places = NDArray[np.int64]


def digest(tensor: Tensor) -> str:
    """Digest of the bits of the local elements of ``tensor``, whatever its dtype."""
    part = local(tensor.detach()).contiguous().cpu()
    return _hash([part.view(-1).view(torch.uint8).numpy().tobytes()])


def optimizer_digest(optimizer: Optimizer) -> str:
    """Digest of everything ``optimizer`` remembers, in parameter order.

    Zeros are left out: a fused optimizer is called at a skipped step, too, and may make
    its state then, all of it zero, which trains as none does.
    """
    parts: list[bytes] = []
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if not _is_zero(value):
                parts.append(f"{number} {key}".encode())
                parts.append(_bits(value))
    return _hash(parts)


NO_STATE = hashlib.blake2b(digest_size=8).hexdigest()
"""The digest of an optimizer that remembers nothing."""


def _is_zero(value: object) -> bool:
    if isinstance(value, Tensor):
        return not bool(local(value).count_nonzero())
    return value is None or value == 0


def _bits(value: object) -> bytes:
    return (digest(value) if isinstance(value, Tensor) else repr(value)).encode()


def _hash(parts: Iterable[bytes]) -> str:
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(part)
    return state.hexdigest()


def non_finite(gradient: Tensor, scale: float) -> bool:
    """Whether a local gradient is not finite, as it is or divided by ``scale``."""
    part = local(gradient.detach())
    if part.is_sparse:
        part = part.coalesce().values()
    return not bool(torch.isfinite(part.float() / scale).all())


def gradient_places(gradient: Tensor, parameter: Tensor, index: Places) -> Places:
    """Place of each local element of a gradient in the flat full tensor.

    A tensor-parallel plan may leave a gradient whole where the parameter is sharded, or
    the other way round: the optimizer lays it out anew, and so must a comparison.

    Args:
        gradient: as the optimizer is handed it.
        parameter: whose gradient it is.
        index: place of each local element of ``parameter``.

    Raises:
        ValueError: if nobody can say which elements these are.
    """
    if _sharding(gradient) == _sharding(parameter):
        return index
    # The placements tell places in the tensor that torch knows. If they give those of
    # the parameter, that tensor is the full one, and they give the gradient's, too.
    if not np.array_equal(numbers_laid_out_as(parameter), index):
        raise ValueError(
            f"the gradient is laid out as {_sharding(gradient)}, its parameter as "
            f"{_sharding(parameter)}, and that is a part of the model's own: which "
            "elements of it the gradient has cannot be told; give both one layout"
        )
    return numbers_laid_out_as(gradient)


def _sharding(tensor: Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """Which elements the ranks hold, whether they are whole or partial sums."""
    if not isinstance(tensor, DTensor):
        return None
    whole = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return tensor.device_mesh, tuple(whole)


def numbers_laid_out_as(tensor: Tensor) -> Places:
    """Place of each local element of ``tensor`` in the flat full one."""
    numbers = torch.arange(tensor.numel()).view(tensor.shape)
    if sharding := _sharding(tensor):
        numbers = local(distribute_tensor(numbers, *sharding, src_data_rank=None))
    return numbers.reshape(-1).cpu().numpy()


def partial_ranks(gradient: Tensor) -> tuple[tuple[int, ...], int]:
    """Over which ranks a gradient is still to be summed; such a one is legal.

    Returns:
        The ranks, this one included, none where the gradient is no partial sum; and
        what to divide the sum by, as a partial mean is a sum, too.
    """
    if not isinstance(gradient, DTensor):
        return (), 1
    mesh, placements = gradient.device_mesh, gradient.placements
    here = mesh.get_coordinate()
    kinds = [p.reduce_op if isinstance(p, Partial) else "" for p in placements]
    if here is None or not {"sum", "avg"} & {*kinds}:
        return (), 1
    along = tuple(
        slice(None) if kind in ("sum", "avg") else at
        for kind, at in zip(kinds, here, strict=True)
    )
    ranks = tuple(mesh.mesh[along].reshape(-1).tolist())
    return ranks, len(ranks) if "avg" in kinds else 1


class CallLog(TorchDispatchMode):
    """Notes the collectives issued while it is active.

    A dispatch mode sees what the calls really do, below any Python wrapper that a
    scaler may use, and needs no patch of ``torch.distributed``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.collectives: list[Collective] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Log ``func`` and run it."""
        if any(issubclass(t, DTensor) for t in types):
            return (
                NotImplemented  # let DTensor unpack itself: its inner calls come here
            )
        if func.namespace in ("c10d", "_c10d_functional"):
            self._log_collective(func, args)
        return func(*args, **(kwargs or {}))

    def _log_collective(self, func: Any, args: tuple[Any, ...]) -> None:
        for declared, value in zip(func._schema.arguments, args, strict=False):
            if declared.name in ("process_group", "group_name"):  # waiting has none
                call = func.overloadpacket.__name__.rstrip("_")
                sent = "" if "barrier" in call else _shape(args)
                self.collectives.append(Collective(f"{call}{sent}", _ranks(value)))


def _ranks(group: Any) -> tuple[int, ...]:
    """Ranks of a group: its name and its object may differ from rank to rank."""
    if isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    elif not isinstance(group, dist.ProcessGroup):  # functional collectives know names
        group = _resolve_process_group(group)
    return tuple(dist.get_process_group_ranks(group))


def _shape(args: tuple[Any, ...]) -> str:
    return ",".join(
        f"[{'x'.join(map(str, t.shape))}:{str(t.dtype).removeprefix('torch.')}]"
        for t in _tensors(args[:1])
    )


def _tensors(tree: Any) -> Iterator[Tensor]:
    """A gather has a list of outputs for each input."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for branch in tree:
            yield from _tensors(branch)
