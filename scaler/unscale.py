"""Unscale gradients in place and report overflow, by device and dtype.

Everything here looks at local tensors only and never communicates.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import _MultiDeviceReplicator as _TorchReplicator

from .verdicts import moved_to

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = [
    "Gradients",
    "by_device_and_dtype",
    "check_and_unscale_",
    "gradients_of",
    "local_gradients",
    "local_of",
    "parameters_of",
    "quick_locals",
    "refuse_fp16",
    "widen",
]

Gradients = dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]
"""Local gradient tensors, grouped as the foreach kernels want them."""


class _MultiDeviceReplicator(_TorchReplicator):
    """Serves copies of a 0-d tensor by device, each made once.

    Args:
        master_tensor: (), any dtype and device. The first request for its own device
            gets a copy too, never the master.
    """

    def __init__(self, master_tensor: torch.Tensor) -> None:
        self.master = master_tensor
        self._per_device_tensors: dict[torch.device, torch.Tensor] = {}

    def get(self, device: torch.device) -> torch.Tensor:
        """Return the copy on ``device``."""
        copy = self._per_device_tensors.get(device)
        if copy is None:
            copy = self.master.to(device=device, non_blocking=True, copy=True)
            self._per_device_tensors[device] = copy
        return copy


_GeneralMultiDeviceReplicator = _MultiDeviceReplicator
"""The same: a CPU is a device like any other here."""


def parameters_of(optimizer: Any) -> Iterator[Any]:
    """Return the parameters of an optimizer group by group, or of an iterable."""
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        return iter(optimizer)
    return chain.from_iterable([group["params"] for group in groups])


def widen(optimizer: Optimizer) -> None:
    """Replace fp16 gradients by fp32 ones, from now on.

    Backward then hands out fp32 gradients for these parameters by itself.
    """
    for parameter in parameters_of(optimizer):
        gradient = parameter.grad
        if gradient is not None and gradient.dtype is torch.float16:
            parameter.grad = None  # or torch refuses another dtype
            parameter.grad_dtype = torch.float32
            parameter.grad = gradient.float()


def local_gradients(
    optimizer: Optimizer | Sequence[Any],
    *,
    allow_fp16: bool,
    without: Container[int] = (),
) -> Gradients:
    """Collect what this rank holds of the optimizer's gradients.

    Args:
        optimizer: its parameters may be plain tensors, DTensors of any placement and
            mesh, or both; gradients may be dense or sparse. Or the parameters
            themselves.
        allow_fp16: accept fp16 gradients, which lose small values when unscaled in
            place.
        without: ids of parameters to leave out.

    Returns:
        By device and dtype the local dense tensors; of sparse gradients their values.

    Raises:
        AssertionError: a parameter is not a tensor.
        ValueError: an fp16 gradient, and ``allow_fp16`` is false.
    """
    if without:
        optimizer = [p for p in parameters_of(optimizer) if id(p) not in without]
    try:
        locals_ = quick_locals(gradients_of(optimizer))
    except AttributeError:  # a parameter is no tensor
        locals_ = None
    if locals_ is None:
        locals_ = _locals_one_by_one(optimizer, allow_fp16)
    grouped = by_device_and_dtype(locals_)
    if not allow_fp16:
        refuse_fp16(grouped)
    return grouped


def refuse_fp16(gradients: Gradients) -> None:
    """Refuse gradients that lose small values when they are divided in place.

    Raises:
        ValueError: there is one of fp16.
    """
    for _, dtype in gradients:
        if dtype is torch.float16:
            raise ValueError(_FP16)


def gradients_of(optimizer: Optimizer | Sequence[Any]) -> list[Any]:
    """Return the gradients that an optimizer has, or some parameters have.

    Raises:
        AttributeError: a parameter is not a tensor.
    """
    # The loops over parameters are what many small gradients cost: they stay in C, or
    # are comprehensions. Torch functions off: asking DTensor for its own, which it has
    # turned off anyway, takes as long as reading the attribute.
    with torch._C.DisableTorchFunctionSubclass():
        return [g for p in parameters_of(optimizer) if (g := p.grad) is not None]


def quick_locals(gradients: list[Any]) -> list[torch.Tensor] | None:
    """Return the local tensor of each gradient where it is simply there, else None."""
    kinds: set[Any] = set(map(type, gradients))
    for kind in kinds - {torch.Tensor}:
        if not hasattr(kind, "_local_tensor"):
            return None
        # An attribute is a tenth of the price of `to_local`.
        gradients = [g._local_tensor if type(g) is kind else g for g in gradients]
        kinds = set(map(type, gradients))
    if kinds - {torch.Tensor} or any(map(_IS_SPARSE, gradients)):
        return None  # sparse, or still on its way
    return gradients


def _locals_one_by_one(
    optimizer: Optimizer | Sequence[Any], allow_fp16: bool
) -> list[torch.Tensor]:
    gradients: list[torch.Tensor] = []
    with torch.no_grad():
        for parameter in parameters_of(optimizer):
            if not isinstance(parameter, torch.Tensor):
                raise AssertionError(
                    f"expected param to be torch.Tensor, got {type(parameter).__name__}"
                )
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse and gradient.dtype is torch.float16:
                if not allow_fp16:  # before it is coalesced
                    raise ValueError(_FP16)
            gradients.append(local_of(parameter, gradient))
    return gradients


def by_device_and_dtype(tensors: list[torch.Tensor]) -> Gradients:
    """Group tensors as the foreach kernels want them, keeping their order."""
    if not tensors:
        return {}
    if all(map(_IS_CPU, tensors)) and len(set(map(_DTYPE, tensors))) == 1:
        return {(tensors[0].device, tensors[0].dtype): tensors}  # making devices costs
    groups: Gradients = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


_IS_SPARSE, _IS_CPU = attrgetter("is_sparse"), attrgetter("is_cpu")
_DTYPE = attrgetter("dtype")

_FP16 = (
    "Attempting to unscale FP16 gradients. Dividing them in place flushes to zero what "
    "the scale protected. Keep fp32 parameters (autocast, or fully_shard with "
    "MixedPrecisionPolicy(param_dtype=torch.float16)), or build the scaler with "
    'fp16_gradients="widen", or "in place" if you accept the loss.'
)


def local_of(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the local dense tensor behind a gradient, of a sparse one its values."""
    if to_local := getattr(gradient, "to_local", None):
        gradient = to_local()
        if type(gradient) is torch.Tensor and not gradient.is_sparse:
            return gradient
        if hasattr(gradient, "wait"):
            gradient = gradient.wait()  # an AsyncCollectiveTensor, still on its way
    return _values(parameter, gradient) if gradient.is_sparse else gradient


def _values(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    # Two finite fp16 values of one index may overflow when they are added up, which the
    # optimizer will do: so add first, then look. Adding in fp32 works on every device.
    if gradient.dtype is torch.float16:
        gradient = gradient.float().coalesce().to(torch.float16)
        parameter.grad = gradient
    return gradient._values()


def check_and_unscale_(
    gradients: Gradients,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
) -> dict[torch.device, torch.Tensor]:
    """Multiply the gradients by ``inv_scale`` and look for inf and nan beforehand.

    A factor above 1, if the host knows it, may make a finite gradient overflow: then
    afterwards too.

    Args:
        gradients: changed in place, unless ``inv_scale`` is 1.
        inv_scale: (), fp32, any device.
        found_inf: (), fp32, any device: the starting value, usually 0. It becomes the
            finding of its own device.

    Returns:
        For each device with gradients, (), fp32: 1 if any of them is not finite.
    """
    founds: dict[torch.device, torch.Tensor] = {}
    value: Any = inv_scale.tolist() if inv_scale.is_cpu else 1.0
    factors = [inv_scale, torch.ones_like(inv_scale)] if value > 1.0 else [inv_scale]
    grad_mode = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)  # no_grad() takes longer than a small kernel
    try:
        for factor in factors:
            for (device, _), tensors in gradients.items():
                if device not in founds:
                    founds[device] = moved_to(found_inf, device)
                torch._amp_foreach_non_finite_check_and_unscale_(
                    tensors, founds[device], moved_to(factor, device)
                )
    finally:
        torch._C._set_grad_enabled(grad_mode)
    return founds
