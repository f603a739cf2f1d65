"""This rank's gradients: local tensors by device and dtype, their division and norms.

Nothing here communicates, except that `local_tensor` waits for a pending gradient. No
function keeps anything about a gradient.

[Note: Small tensors]
A kernel call per tensor costs about 1 us on a CPU, more than reading a small tensor. So
tensors of one size are stacked, as many as fit into the cache, and reduced by one call.
This is 5 times faster for 16 elements, 2 times for 1024, and no faster above 4096.
Kernels of an accelerator are batched anyway.

[Note: Exact enough]
fp32 accumulation loses digits with the number of elements (0.5 % at 65 million on a
CPU). So large tensors are reduced in pieces, and pieces are added in fp64. The error is
1e-7 for usual gradients, and up to 6e-5 if all elements of a piece are equal, so that
rounding goes one way. fp64 throughout would take three times as long. Norms of other
orders than 2 and infinity lose more digits, and are rare: they are computed in fp64,
after a division by the largest element, since a high power exceeds the range of fp64
too. A norm that is not finite at first is computed again in this way. If the result is
still not finite, there was an overflow.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import attrgetter
from typing import Any

import torch

from .torch_internals import (
    DisableTorchFunctions,
    foreach_mul_,
    foreach_norm,
    local_tensors,
    non_finite_check_and_unscale_,
    set_grad_enabled,
    sparse_values,
)

Gradients = dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]
"""Local gradient tensors, grouped for the foreach kernels."""

FoundInf = dict[Any, torch.Tensor]
"""Maps each device to a tensor, (), fp32: 1 if a gradient there is not finite, else
0."""

Number = float | torch.Tensor
"""A number that the host knows, or a tensor, (), on the device that holds it. Python
arithmetic takes a tenth of the time of arithmetic with such tensors."""


LOWEST_SCALE = torch.finfo(torch.float32).tiny
"""Smallest normal fp32 number: the smallest scale with a finite reciprocal."""


class Host:
    """Test switch: ``reads_cpu`` is True if the host reads CPU memory without waiting.

    Tests set it to False, so that code for accelerators also runs on a CPU.
    """

    reads_cpu = True


def is_readable(tensor: torch.Tensor) -> bool:
    """Return True if the host can read the tensor without waiting for a device.

    A tensor of a subclass may hold no data (``FakeTensor``).
    """
    return Host.reads_cpu and tensor.is_cpu and type(tensor) is torch.Tensor


FP16_REFUSED = (
    "Attempting to unscale FP16 gradients. Dividing them in place flushes to zero what "
    "the scale protected. Keep fp32 parameters (autocast, or fully_shard with "
    "MixedPrecisionPolicy(param_dtype=torch.float16)), or build the scaler with "
    'fp16_gradients="in_place" if you accept the loss.'
)


# - Parameters and gradients of an optimizer


def parameters_of(optimizer: Any) -> Iterator[Any]:
    """Yield the parameters of an optimizer, group by group."""
    return chain.from_iterable([group["params"] for group in optimizer.param_groups])


def gradients_of(optimizer: Any) -> tuple[list[Any], list[torch.Tensor] | None]:
    """Return an optimizer's gradients, and their local tensors.

    Returns None in place of the local tensors if a gradient is sparse, pending, or of
    another class.

    Raises:
        AssertionError: a parameter is not a tensor.
    """
    # Loops over parameters dominate the cost of many small gradients. So they stay in
    # C, or are comprehensions.
    try:
        with DisableTorchFunctions():
            gradients: list[Any] = [
                gradient
                for group in optimizer.param_groups
                for parameter in group["params"]
                if (gradient := parameter.grad) is not None
            ]
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


def local_gradients(optimizer: Any, *, allow_fp16: bool) -> Gradients:
    """Return the local tensors of an optimizer's gradients; values of sparse ones.

    Raises:
        AssertionError: a parameter is not a tensor.
        ValueError: there is an fp16 gradient and ``allow_fp16`` is false.
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
    return by_device_and_dtype(locals_, allow_fp16=allow_fp16)


def local_tensor(parameter: torch.Tensor, *, coalesce: bool) -> torch.Tensor:
    """Return the local dense tensor of a gradient; the values if it is sparse.

    Args:
        parameter: parameter with the gradient; a coalesced gradient is stored in it.
        coalesce: true to add up the values of one index first. The optimizer will do
            so, and two finite fp16 values may then overflow. The norm of the sum also
            differs.
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


def references_of(optimizer: Any) -> set[weakref.ref[Any]]:
    """Return weak references to the local gradients of an optimizer."""
    grads = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
    return set(map(weakref.ref, local_tensors(grads)))


def by_device_and_dtype(tensors: list[torch.Tensor], *, allow_fp16: bool) -> Gradients:
    """Group tensors for the foreach kernels, keeping their order.

    Raises:
        ValueError: a tensor is fp16 and ``allow_fp16`` is false.
    """
    groups: Gradients = {}
    # Making a device for each tensor costs more than these looks at all of them.
    on_one_device = all(map(_IS_CPU, tensors)) or (
        all(map(_IS_CUDA, tensors))
        and len(set(map(torch.Tensor.get_device, tensors))) == 1
    )
    if tensors and on_one_device and len(set(map(_DTYPE, tensors))) == 1:
        groups[tensors[0].device, tensors[0].dtype] = tensors
    else:
        for tensor in tensors:
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    if not allow_fp16 and torch.float16 in [dtype for _, dtype in groups]:
        raise ValueError(FP16_REFUSED)
    return groups


_IS_SPARSE = attrgetter("is_sparse")
_IS_CPU, _IS_CUDA = attrgetter("is_cpu"), attrgetter("is_cuda")
_DTYPE = attrgetter("dtype")
_PLAIN = {torch.Tensor}


# - Check and unscale


def check_and_unscale_(
    gradients: Gradients, inv_scale: torch.Tensor, found_inf: torch.Tensor
) -> FoundInf:
    """Check gradients for inf and nan, and multiply them by ``inv_scale``.

    If ``inv_scale`` is a plain CPU tensor above 1, the products are checked too: they
    may overflow. After an error all gradients are unchanged.

    Args:
        gradients: changed in place.
        inv_scale: one element, fp32, any device.
        found_inf: one element, fp32, any device: the starting value.

    Returns:
        A flag for each device with gradients, shaped as ``found_inf``: 1 if a gradient
        there is not finite, else the starting value.
    """
    flag_by_device: FoundInf = {}
    once = number_in(inv_scale)
    may_overflow = isinstance(once, float) and once > 1.0
    grad_mode, done = torch.is_grad_enabled(), list[Write]()
    try:
        set_grad_enabled(False)
        for key, tensors in gradients.items():
            device = key[0]
            factor = moved_to(inv_scale, device)
            flag = flag_by_device.get(device)
            if flag is None:
                flag = flag_by_device[device] = found_inf.to(device, copy=True)
            non_finite_check_and_unscale_(tensors, flag, factor)
            done.append((key, tensors, once))
            if may_overflow:
                one = torch.ones_like(factor)
                non_finite_check_and_unscale_(tensors, flag, one)
    except BaseException:
        _take_back(done, [(key, group, once) for key, group in gradients.items()])
        raise
    finally:
        set_grad_enabled(grad_mode)
    return flag_by_device


def multiply_(gradients: Gradients, factor: Number) -> None:
    """Multiply gradients in place, computing in fp32, or in fp64 for fp64 gradients.

    After an error all gradients are unchanged.
    """
    _multiply([(key, tensors, factor) for key, tensors in gradients.items()])


def clip_(grads: Iterable[Gradients], factor: Number, scale: Number) -> None:
    """Multiply gradients, which carry ``scale``, in place by ``factor / scale``.

    After an error all gradients are unchanged.
    """
    factors = [factor / scale]
    if isinstance(factors[0], float) and factors[0] < LOWEST_SCALE:
        # The quotient is subnormal in fp32 and has lost digits, or is zero. So multiply
        # twice. The factor comes last: it may be zero, which cannot be taken back, and
        # by then every gradient has been written to without an error.
        factors = [1.0 / scale, factor]
    groups = list(chain.from_iterable(gradients.items() for gradients in grads))
    _multiply([(*group, number) for number in factors for group in groups])


Write = tuple[tuple[torch.device, torch.dtype], list[torch.Tensor], Number]
"""Tensors of one device and dtype, and the factor of an in-place multiplication."""


def _multiply(writes: list[Write]) -> None:
    done: list[Write] = []
    try:
        for write in writes:
            _write(write)
            done.append(write)
    except BaseException:
        _take_back(done, writes)
        raise


def _write(write: Write) -> None:
    (device, dtype), tensors, factor = write
    kind = torch.float64 if dtype is torch.float64 else torch.float32
    with torch.no_grad():
        foreach_mul_(tensors, torch.as_tensor(factor, dtype=kind, device=device))


def _take_back(done: list[Write], writes: list[Write]) -> None:
    # After an exception no gradient is left multiplied, or the retry would do it again.
    written = done[:]
    if len(done) < len(writes):
        key, tensors, factor = writes[len(done)]
        written.append((key, _written(tensors), factor))
    for key, tensors, factor in written:
        with contextlib.suppress(Exception):  # the caller reports the first error
            if tensors and (isinstance(factor, torch.Tensor) or factor != 0.0):
                _write((key, tensors, 1.0 / factor))


def _written(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    # On a CPU a foreach kernel writes one tensor after another, until one cannot be
    # written to (an expanded gradient). On other devices it checks all tensors first.
    if not tensors[0].is_cpu:
        return []
    for index, tensor in enumerate(tensors):
        try:
            with torch.no_grad():
                tensor.mul_(1)
        except Exception:
            return tensors[:index]
    return []  # no tensor raised, so the kernel had not begun to write


# - Norms, each tensor read once

Norms = list[float] | torch.Tensor
"""Numbers that the host knows, or a tensor (number of tensors,), fp64, on their
device."""

# What a tensor on the host holds, without `item`, which counts as a synchronisation.
_listed: Any = torch.Tensor.tolist

_SMALL = 4096  # elements; see [Note: Small tensors]
_STACKED = 131072  # elements at a time; see [Note: Small tensors]
_PIECE = 65536  # elements; see [Note: Exact enough]
_NARROW_PIECE = 4096  # the same for 16-bit elements, which torch adds up less well


def norms(tensors: list[torch.Tensor], norm_type: float) -> Norms:
    """Return the norm of each tensor; all have one device and dtype.

    A norm is not finite only if the tensor is not, or if the norm of fp64 elements
    exceeds the range of fp64.

    Raises:
        NotImplementedError: the device is neither CPU nor CUDA; or a gradient is
            complex, for which torch's ``unscale_`` raises it as well.
    """
    if not tensors:
        return []
    kind, dtype = tensors[0].device.type, tensors[0].dtype
    if dtype.is_complex:
        raise NotImplementedError(
            f"Complex gradients ({dtype}) cannot be scaled, and have no norm here."
        )
    if kind not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"clip_grad_norm_ reads gradients on CPU and CUDA, got {kind}. Use "
            "unscale_() and torch.nn.utils.clip_grad_norm_() instead."
        )
    is_fast = norm_type in (2.0, math.inf)
    if kind == "cuda":
        if is_fast and dtype is not torch.float64:
            # fp64 sums of fp32 squares cannot overflow: no second read.
            return _norms_cuda(tensors, norm_type)
        return _in_fp64(tensors, norm_type)
    # Subclasses need not know the kernels for lists.
    if not is_fast or not {*map(type, tensors)} <= {torch.Tensor}:
        return _in_fp64(tensors, norm_type)
    norms_of_all = _norms_cpu(tensors, norm_type)
    if math.isfinite(sum(norms_of_all)):
        return norms_of_all
    return [
        norm if math.isfinite(norm) else _listed(scaled_norm(tensor, norm_type))
        for norm, tensor in zip(norms_of_all, tensors, strict=True)
    ]


def scaled_norm(tensor: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return the norm, (), fp64; no intermediate result exceeds the range of fp64."""
    # nan and inf stay what they are: the largest element is one of them.
    if not tensor.numel():
        return tensor.new_zeros((), dtype=torch.float64)
    wide = tensor.double()
    largest = wide.abs().amax()
    is_usable = largest.isfinite() & (largest > 0.0)
    divisor = torch.where(is_usable, largest, 1.0)
    norm = torch.linalg.vector_norm(wide / divisor, norm_type) * divisor
    return torch.where(is_usable, norm, largest)


def _in_fp64(tensors: list[torch.Tensor], norm_type: float) -> Norms:
    # For any order of the norm and any class of tensors.
    each = [scaled_norm(tensor, norm_type) for tensor in tensors]
    if {*map(type, each)} == {torch.Tensor}:
        return _listed(torch.stack(each)) if each[0].is_cpu else torch.stack(each)
    try:
        return [float(norm.item()) for norm in each]
    except RuntimeError:  # one may hold nothing (FakeTensor)
        return torch.stack(each)


def _norms_cuda(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    # The kernel refuses an infinite order if a tensor is empty; one zero has norm 0.
    filled = [each if each.numel() else each.new_zeros(1) for each in tensors]
    return torch.stack(foreach_norm(filled, norm_type, torch.float64))


def _norms_cpu(tensors: list[torch.Tensor], norm_type: float) -> list[float]:
    sizes = list(map(torch.Tensor.numel, tensors))
    if len(set(sizes)) == 1:
        return _norms_of_one_size(tensors, sizes[0], norm_type)
    indices: dict[int, list[int]] = {}
    for i, size in enumerate(sizes):
        indices.setdefault(size, []).append(i)
    results = [0.0] * len(tensors)
    for size, places in indices.items():
        group = [tensors[i] for i in places]
        of_group = _norms_of_one_size(group, size, norm_type)
        for i, norm in zip(places, of_group, strict=True):
            results[i] = norm
    return results


def _norms_of_one_size(
    group: list[torch.Tensor], size: int, norm_type: float
) -> list[float]:
    if size == 0:
        return [0.0] * len(group)
    dtype = group[0].dtype
    wide = None if dtype is torch.float64 else torch.float32
    piece = _PIECE if dtype.itemsize >= 4 else _NARROW_PIECE
    if size > piece:
        return [_listed(_norm_in_pieces(tensor, norm_type, piece)) for tensor in group]
    if size > _SMALL or len(group) == 1:
        return list(map(_listed, foreach_norm(group, norm_type, wide)))
    step = _STACKED // size
    results: list[float] = []
    for start in range(0, len(group), step):
        chunk = group[start : start + step]
        try:
            rows = torch.stack(chunk)
        except RuntimeError:  # of one size, but not of one shape
            rows = torch.stack([tensor.reshape(-1) for tensor in chunk])
        rows = rows.reshape(-1, size)
        results += _listed(torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=wide))
    return results


def _norm_in_pieces(tensor: torch.Tensor, norm_type: float, piece: int) -> torch.Tensor:
    wide = None if tensor.dtype is torch.float64 else torch.float32
    each = torch.stack(foreach_norm(tensor.reshape(-1).split(piece), norm_type, wide))
    norm: torch.Tensor = torch.linalg.vector_norm(each.double(), norm_type)
    return norm


# - Readings of found_inf


def number_in(tensor: torch.Tensor) -> Number:
    """Return the number in a tensor with one element, if the host can read it.

    A tensor on an accelerator is returned unchanged, and so is one of a subclass; see
    `is_readable`.
    """
    # The test of `is_readable`, inlined, because a step runs it many times.
    if not (Host.reads_cpu and tensor.is_cpu and type(tensor) is torch.Tensor):
        return tensor
    # Unlike item, tolist is not counted as a synchronisation, which it is not here.
    value: Any = tensor.tolist()
    return float(tensor.item() if isinstance(value, list) else value)


def is_true(found_inf: torch.Tensor) -> bool:
    """Return True if the flag is set and the host can read it without waiting."""
    number = number_in(found_inf)
    return isinstance(number, float) and number > 0.0


def moved_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on ``device``; waits only if the target is the host."""
    if tensor.device == device:  # `to` takes three times as long to find out
        return tensor
    # The CPU would read pinned memory before an asynchronous copy has filled it.
    return tensor.to(device, non_blocking=device.type != "cpu")


def tensor_of(numbers: list[Number], device: torch.device) -> torch.Tensor:
    """Return the numbers as an fp64 tensor on ``device``, without a synchronisation."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # a replayed graph keeps the arguments of its kernels, but not host memory
        vector = torch.empty(len(numbers), dtype=torch.float64, device=device)
        for slot, number in zip(vector, numbers, strict=True):
            fill = slot.copy_ if isinstance(number, torch.Tensor) else slot.fill_
            fill(number)
        return vector
    on_device = {i: x for i, x in enumerate(numbers) if isinstance(x, torch.Tensor)}
    for place in on_device:
        numbers[place] = float("nan")
    vector = moved_to(torch.tensor(numbers, dtype=torch.float64, device="cpu"), device)
    for place, value in on_device.items():
        vector[place].copy_(value, non_blocking=device.type != "cpu")
    return vector


def any_of(flags: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a tensor, (), fp32, on ``device``: 1 if any flag is 1, else 0."""
    tensors = [moved_to(flag, device) for flag in flags]
    if len(tensors) == 1:
        return tensors[0]
    if not tensors:
        return torch.zeros((), dtype=torch.float32, device=device)
    return torch.stack([tensor.reshape(()) for tensor in tensors]).amax()
