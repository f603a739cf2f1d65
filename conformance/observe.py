"""Observers that run on a rank: digests, collectives, host synchronisations."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ..fixtures import local

__all__ = ["CallLog", "digest", "non_finite", "optimizer_digest", "partial_axes"]


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


def partial_axes(gradient: Tensor) -> tuple[str, ...]:
    """Mesh axes over which a gradient is a partial sum; such a one is legal."""
    if not isinstance(gradient, DTensor):
        return ()
    mesh = gradient.device_mesh
    names = mesh.mesh_dim_names or tuple(f"axis {i}" for i in range(mesh.ndim))
    pairs = zip(names, gradient.placements, strict=True)
    return tuple(name for name, placement in pairs if placement.is_partial())


class CallLog(TorchDispatchMode):
    """Notes collectives and host synchronisations issued while it is active.

    A dispatch mode sees what the calls really do, below any Python wrapper that a
    scaler may use, and needs no patch of ``torch.distributed``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.collectives: list[str] = []
        self.host_syncs = 0

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
            self._log_collective(str(func), args)
        elif func is torch.ops.aten._local_scalar_dense.default:
            self.host_syncs += 1
        return func(*args, **(kwargs or {}))

    def _log_collective(self, name: str, args: tuple[Any, ...]) -> None:
        short = name.split(".")[1].rstrip("_") if name.count(".") else name
        if short not in ("wait_tensor", "barrier"):
            self.collectives.append(f"{short}{_shape(args)}")


def _shape(args: tuple[Any, ...]) -> str:
    flat = args[0] if args and isinstance(args[0], list | tuple) else args[:1]
    return ",".join(
        f"[{'x'.join(map(str, t.shape))}:{str(t.dtype).removeprefix('torch.')}]"
        for t in flat
        if isinstance(t, Tensor)
    )
