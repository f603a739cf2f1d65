"""Every private name of torch that the scaler uses, one function each.

``tests/test_scaler_torch_internals.py`` asserts that each name exists and has the
signature that is used here, so that a new torch fails there and not in a norm.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import torch
from torch.amp.grad_scaler import _MultiDeviceReplicator

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


P = ParamSpec("P")
T = TypeVar("T")


MultiDeviceReplicator = _MultiDeviceReplicator
"""Serves copies of a tensor with one element by device, each made once."""


def no_compile(method: Callable[P, T]) -> Callable[P, T]:
    """Keep a method out of compiled graphs; functions compiled within it stay so.

    A compiled training step may call the scaler. ``scale`` is arithmetic and is
    compiled with the loss; the other methods read Python objects, communicate and
    branch on results, which a graph cannot hold: it breaks before and after each.
    ``torch.compiler.disable`` would import ``torch._dynamo`` with the scaler; this one
    imports it at the first call, as every optimizer of torch does.
    """
    return cast("Callable[P, T]", torch._compile._disable_dynamo(method))


def non_finite_check_and_unscale_(
    tensors: list[torch.Tensor], found_inf: torch.Tensor, inv_scale: torch.Tensor
) -> None:
    """Multiply tensors of one device and dtype in place; set found_inf to 1 if needed.

    Args:
        tensors: dense, any shapes.
        found_inf: one element, fp32, on their device.
        inv_scale: one element, fp32, on their device.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found_inf, inv_scale)


def amp_update_scale_(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    """Move the scale in place by torch's rule: (), fp32; (), int32; (), fp32."""
    torch._amp_update_scale_(
        scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval
    )


def foreach_norm(
    tensors: list[torch.Tensor], norm_type: float, dtype: torch.dtype | None
) -> list[torch.Tensor]:
    """Return the norm of each tensor, (), accumulated in ``dtype``."""
    return list(torch._foreach_norm(tensors, norm_type, dtype))


def foreach_mul_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply tensors in place by a factor, (), on their device."""
    torch._foreach_mul_(tensors, factor)


def set_grad_enabled(mode: bool) -> None:
    """Set the grad mode; ``no_grad()`` takes longer than a small kernel."""
    torch._C._set_grad_enabled(mode)


def disable_torch_functions() -> Any:
    """Return a context in which subclasses are read as plain objects.

    Asking DTensor for its torch function, which DTensor has turned off anyway, takes as
    long as reading the attribute.
    """
    return torch._C.DisableTorchFunctionSubclass()


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return how often each tensor was written in place, as autograd counts it."""
    return list(map(_VERSION, tensors))


def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse tensor, coalesced or not, without a copy."""
    return tensor._values()


def dtensor_type() -> type[Any] | None:
    """Return ``DTensor``, or None while nobody has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else cast("type[Any]", module.DTensor)


def local_tensors(gradients: list[Any], kind: type[Any]) -> list[torch.Tensor]:
    """Return the local tensor of each DTensor; others as they are.

    The attribute is a tenth of the price of ``to_local``.
    """
    return [g._local_tensor if type(g) is kind else g for g in gradients]


def specs(gradients: list[Any]) -> list[Any]:
    """Return mesh, placements and global shape of each DTensor; None for others."""
    kind = dtensor_type()
    if kind is None:
        return [None] * len(gradients)
    return [g._spec if isinstance(g, kind) else None for g in gradients]


def root_mesh(mesh: Any) -> Any:
    """Return the mesh that a submesh was sliced from; a mesh of its own as it is."""
    return mesh._get_root_mesh()


def device_types(group: ProcessGroup) -> list[str]:
    """Return the types of device that a process group has a backend for."""
    return [device.type for device in group._device_types]


_VERSION = attrgetter("_version")
