"""This rank's gradients: local tensors, by device and dtype, checked and unscaled.

Nothing here communicates, except `local_tensor` of a gradient still on its way.

[Note: A gradient divided twice]
torch unscales a parameter of two optimizers twice. Whether a gradient was divided is a
property of that gradient, not of an optimizer: after a division the tensor itself (by
weak reference) and its version are written down, and another optimizer of the same
iteration checks such a gradient without dividing it again. A new gradient is another
tensor, or has another version after a backward added to it or ``zero_grad`` cleared it,
and is divided like any other. A DTensor and its local tensor each count the writes that
go through them, so both versions are written down; foreach functions on DTensors are
counted by neither. A gradient that was changed in place after it was
divided (clipped by hand) has another version, too: it is divided again, as by torch.
Writing down costs a fifth of a microsecond a gradient, so it is done only in the first
iteration and where the one before had several optimizers.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

from .torch_internals import (
    DisableTorchFunctions,
    local_tensors,
    non_finite_check_and_unscale_,
    set_grad_enabled,
    sparse_values,
    version_of,
)

Gradients = dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]
"""Local gradient tensors, grouped as the foreach kernels want them."""

FoundInf = dict[Any, torch.Tensor]
"""By device: (), fp32, 1 if a gradient there is not finite, else 0."""

Number = float | torch.Tensor
"""A number that the host knows, or a tensor, (), on the device that knows it.
Arithmetic with Python's numbers costs a tenth of that with such tensors."""


class Written(NamedTuple):
    """Gradients, and how often each had been written to.

    Attributes:
        gradients: as the parameters have them, or weak references to them.
        versions: of the gradients, then, unless all are plain, of their local tensors.
        is_weak: which of the two.
    """

    gradients: Sequence[Any] = ()
    versions: Sequence[int] = ()
    is_weak: bool = False


FP16_REFUSED = (
    "Attempting to unscale FP16 gradients. Dividing them in place flushes to zero what "
    "the scale protected. Keep fp32 parameters (autocast, or fully_shard with "
    "MixedPrecisionPolicy(param_dtype=torch.float16)), or build the scaler with "
    'fp16_gradients="in_place" if you accept the loss.'
)


# - Parameters and gradients of an optimizer


def parameters_of(optimizer: Any) -> Iterator[Any]:
    """Return the parameters of an optimizer, group by group."""
    return chain.from_iterable([group["params"] for group in optimizer.param_groups])


def gradients_of(optimizer: Any) -> tuple[list[Any], list[torch.Tensor] | None]:
    """Return an optimizer's gradients, and the local tensor of each if all are dense.

    Raises:
        AssertionError: a parameter is not a tensor.
    """
    # The loops over parameters are what many small gradients cost: they stay in C, or
    # are comprehensions.
    try:
        gradients = _gradients(optimizer)
    except AttributeError:
        others = [type(p) for p in parameters_of(optimizer) if not hasattr(p, "grad")]
        raise AssertionError(
            f"expected param to be torch.Tensor, got {others[0].__name__}"
        ) from None
    kinds: set[Any] = set(map(type, gradients))
    locals_, is_plain = gradients, True
    if not kinds <= _PLAIN:
        locals_, is_plain = local_tensors(gradients), torch.Tensor in kinds
        kinds = set(map(type, locals_))
    # DTensor knows no sparse tensors.
    if not kinds <= _PLAIN or (is_plain and any(map(_IS_SPARSE, locals_))):
        return gradients, None  # sparse, of another class, or still on its way
    return gradients, locals_


def _gradients(optimizer: Any) -> list[Any]:
    with DisableTorchFunctions():
        return [
            gradient
            for group in optimizer.param_groups
            for parameter in group["params"]
            if (gradient := parameter.grad) is not None
        ]


def local_gradients(optimizer: Any, *, allow_fp16: bool) -> Gradients:
    """Return the local tensors of an optimizer's gradients, of sparse ones the values.

    Raises:
        AssertionError: a parameter is not a tensor.
        ValueError: an fp16 gradient, and ``allow_fp16`` is false.
    """
    gradients, locals_ = gradients_of(optimizer)
    if locals_ is None:
        # Before they are coalesced.
        if not allow_fp16 and any(g.dtype is torch.float16 for g in gradients):
            raise ValueError(FP16_REFUSED)
        with torch.no_grad():
            locals_ = [
                local_tensor(p, coalesce=p.grad.dtype is torch.float16)
                for p in parameters_of(optimizer)
                if p.grad is not None
            ]
    groups = by_device_and_dtype(locals_)
    if not allow_fp16 and torch.float16 in [dtype for _, dtype in groups]:
        raise ValueError(FP16_REFUSED)
    return groups


def local_tensor(parameter: torch.Tensor, *, coalesce: bool) -> torch.Tensor:
    """Return the local dense tensor behind a gradient, of a sparse one its values.

    Args:
        parameter: has the gradient, and gets the coalesced one.
        coalesce: add up the values of one index first. The optimizer will do so, and
            two finite fp16 values may overflow then; a norm is not that of the parts.
    """
    gradient: Any = parameter.grad
    if to_local := getattr(gradient, "to_local", None):
        gradient = to_local()
    if hasattr(gradient, "wait"):
        gradient = gradient.wait()  # an AsyncCollectiveTensor
    if not gradient.is_sparse:
        return gradient  # type: ignore[no-any-return]
    if coalesce and not gradient.is_coalesced():
        dtype = gradient.dtype  # adding in fp32 works on every device
        wide = gradient.float() if dtype is torch.float16 else gradient
        gradient = parameter.grad = wide.coalesce().to(dtype)
    return sparse_values(gradient)


def by_device_and_dtype(tensors: list[torch.Tensor]) -> Gradients:
    """Group tensors as the foreach kernels want them, keeping their order."""
    if not tensors:
        return {}
    # Making a device for each tensor costs more than these looks at all of them.
    is_one = len(tensors) == 1
    if is_one or (all(map(_IS_CPU, tensors)) and len(set(map(_DTYPE, tensors))) == 1):
        return {(tensors[0].device, tensors[0].dtype): tensors}
    groups: Gradients = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups


_IS_SPARSE, _IS_CPU = attrgetter("is_sparse"), attrgetter("is_cpu")
_DTYPE = attrgetter("dtype")
_PLAIN = {torch.Tensor}


# - Check and unscale


def check_and_unscale_(
    gradients: Gradients,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    without: Collection[int] = (),
) -> FoundInf:
    """Multiply gradients by ``inv_scale`` and look for inf and nan beforehand.

    A factor above 1, if the host knows it, may make a finite gradient overflow: then
    the product is checked, too.

    Args:
        gradients: changed in place.
        inv_scale: one element, fp32, any device.
        found_inf: one element, fp32, any device: the starting value; may be written.
        without: ids of tensors that are checked but not multiplied.

    Returns:
        For each device with gradients, shaped as ``found_inf``: 1 if any of them is
        not finite.
    """
    found: FoundInf = {}
    may_overflow = inv_scale.is_cpu and number_in(inv_scale) > 1.0
    grad_mode = torch.is_grad_enabled()
    set_grad_enabled(False)
    try:
        for (device, _), tensors in gradients.items():
            factor = moved_to(inv_scale, device)
            if device not in found:
                found[device] = moved_to(found_inf, device)
            mine = tensors
            if without:
                mine = [tensor for tensor in tensors if id(tensor) not in without]
            non_finite_check_and_unscale_(mine, found[device], factor)
            if without or may_overflow:
                one = torch.ones_like(factor)
                non_finite_check_and_unscale_(tensors, found[device], one)
    finally:
        set_grad_enabled(grad_mode)
    return found


def write_down(
    gradients: Sequence[Any],
    locals_: Sequence[torch.Tensor] | None = None,
    *,
    is_weak: bool = True,
) -> Written:
    """Write down gradients as they are now; without those that have no version.

    ``locals_`` is the local tensor of each if they are known, ``gradients`` itself if
    none is a DTensor; ``is_weak``: do not keep them alive.
    """
    if locals_ is None:
        locals_ = local_tensors(gradients)
    try:
        versions = _versions(gradients, locals_)
    except RuntimeError:  # one was made in inference mode
        gradients = [gradient for gradient in gradients if not gradient.is_inference()]
        versions = _versions(gradients, local_tensors(gradients))
    if is_weak:
        gradients = list(map(weakref.ref, gradients))
    return Written(gradients, versions, is_weak)


def _versions(gradients: Sequence[Any], locals_: Sequence[torch.Tensor]) -> list[int]:
    with DisableTorchFunctions():  # half the price for DTensors
        found = list(map(version_of, gradients))
        return found if locals_ is gradients else [*found, *map(version_of, locals_)]


def divide_(gradients: Written, divisor: torch.Tensor) -> Written:
    """Divide those gradients that are as they were written down; return them anew."""
    still = unchanged(gradients)
    with torch.no_grad():
        for local in local_tensors(still):
            local.div_(moved_to(divisor, local.device))
    return write_down(still)


def unchanged(written: Written) -> list[Any]:
    """Return those gradients that are as they were written down."""
    gradients, versions, is_weak = written
    if is_weak:
        gradients = [ref() for ref in gradients]
    alive = [gradient for gradient in gradients if gradient is not None]
    if len(alive) == len(gradients) and _have_versions(alive, versions):
        return alive
    return [
        gradient
        for index, gradient in enumerate(gradients)
        if gradient is not None
        and _have_versions([gradient], versions[index :: len(gradients)])
    ]


def _have_versions(gradients: Sequence[Any], versions: Sequence[int]) -> bool:
    has_locals = len(versions) > len(gradients)
    locals_ = local_tensors(gradients) if has_locals else gradients
    return _versions(gradients, locals_) == versions


def are_unchanged(optimizer: Any, written: Written) -> bool:
    """Return whether an optimizer's gradients are those written down, unchanged."""
    now = _gradients(optimizer)
    return (
        len(now) == len(written.gradients)
        and all(map(is_, now, written.gradients))
        and _have_versions(now, written.versions)
    )


def local_ids(gradients: Iterable[Any]) -> set[int]:
    """Return the ids of the local tensors of gradients."""
    return set(map(id, local_tensors(gradients)))


# - Readings of found_inf


def number_in(tensor: torch.Tensor) -> Number:
    """Return what a tensor with one element holds; on an accelerator the tensor."""
    if not tensor.is_cpu:
        return tensor
    # Unlike item, tolist is not counted as a synchronisation, which it is not here.
    value: Any = tensor.tolist()
    return float(tensor.item() if isinstance(value, list) else value)


def is_true(found_inf: torch.Tensor) -> bool:
    """Return whether the host can see an overflow, without a synchronisation."""
    return found_inf.is_cpu and bool(number_in(found_inf))


def moved_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on ``device``, without waiting for it to arrive."""
    if tensor.device == device:  # `to` takes three times as long to find out
        return tensor
    return tensor.to(device, non_blocking=True)


def tensor_of(numbers: list[Number], device: torch.device) -> torch.Tensor:
    """Return (numbers,), fp64, on ``device``, without a synchronisation."""
    on_device = {i: x for i, x in enumerate(numbers) if isinstance(x, torch.Tensor)}
    for place in on_device:
        numbers[place] = float("nan")
    made = moved_to(torch.tensor(numbers, dtype=torch.float64, device="cpu"), device)
    for place, value in on_device.items():
        made[place].copy_(value, non_blocking=True)
    return made


def any_of(flags: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return (), fp32 on ``device``: 1 if any of them is 1."""
    tensors = [moved_to(flag, device) for flag in flags]
    if len(tensors) == 1:
        return tensors[0]
    if not tensors:
        return torch.zeros((), dtype=torch.float32, device=device)
    return torch.stack([tensor.reshape(()) for tensor in tensors]).amax()
