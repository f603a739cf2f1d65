"""Observers on a rank: digests, layouts of gradients, collectives."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    distribute_tensor,
)
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...fixtures import local
from .torch_internals import (
    Observer,
    arguments_of,
    current_node,
    in_backward,
    input_shapes,
    ranks_of,
)
from .trace import Collective, Constants, Reduction, Setting

__all__ = [
    "CallLog",
    "ReductionLog",
    "constants_of",
    "digest",
    "dtype_name",
    "gradient_places",
    "local_part",
    "non_finite",
    "numbers_laid_out_as",
    "optimizer_digest",
    "partial_ranks",
    "scheduled",
]

Places = NDArray[np.int64]


def local_part(tensor: Tensor) -> Tensor:
    """Return the local part of a tensor, detached, sharing its memory."""
    # With gradients enabled, to_local of a DTensor is a step of autograd, and detach is
    # an operator of DTensor: together four times slower.
    with torch.no_grad():
        return local(tensor).detach()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in ``torch``, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def digest(tensor: Tensor) -> str:
    """Return a digest of the bits of a tensor's local elements, in any dtype."""
    return _hash([_bits(local_part(tensor))])


def optimizer_digest(optimizer: object) -> str:
    """Return a digest of the whole state of an optimizer, in parameter order.

    The digest is constant for an object that is not a torch optimizer, since its state
    is unknown. Zeros are left out: a fused optimizer is also called at a skipped step
    and may create its state then. That state is all zeros, which trains like no state.
    """
    parts: list[bytes] = []
    if not isinstance(optimizer, Optimizer):
        return _hash(parts)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            for values in _held(value):
                if not _is_zero(values):
                    parts.append(f"{number} {key}".encode())
                    parts.append(_bits(values))
    return _hash(parts)


def _held(value: Any) -> Iterator[Any]:
    """Yield the plain tensors in a tensor subclass, such as codes and their scales.

    An 8-bit optimizer keeps its state in a subclass that supports few operators.
    """
    part = local_part(value) if isinstance(value, Tensor) else value
    flatten = getattr(part, "__tensor_flatten__", None)
    if flatten is None:
        yield part
        return
    names, _ = flatten()
    for name in names:
        yield from _held(getattr(part, name))


_SCHEDULED = ("lr", "initial_lr", "betas", "momentum", "weight_decay")
"""Settings that schedules may change, and the initial rate that torch's schedulers
store."""


def scheduled(group: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the settings of a param group that schedules may change, as numbers."""
    settings: dict[str, Setting] = {}
    for key in _SCHEDULED:
        numbers = _numbers(group.get(key))
        if isinstance(numbers, tuple):
            settings[key] = tuple(map(float, numbers))
        elif numbers is not None:
            settings[key] = float(numbers)
    return settings


_IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")
"""Flags that choose between implementations of one optimizer."""


def constants_of(optimizer: Optimizer, group: Mapping[str, Any]) -> Constants:
    """Return the other settings of a param group: numbers and flags.

    Only settings that the optimizer's constructor takes are returned. Other keys of a
    group come from schedulers, or describe the layout of its parameters.
    """
    kind, defaults = type(optimizer), getattr(optimizer, "defaults", None)
    keys = defaults if isinstance(defaults, Mapping) else ()
    values: dict[str, Setting] = {}
    for key in keys:
        if key in group and key not in (*_SCHEDULED, *_IMPLEMENTATIONS):
            numbers = _numbers(group[key])
            if numbers is not None:
                values[key] = numbers
    return Constants(f"{kind.__module__}.{kind.__qualname__}", values)


def _numbers(value: Any) -> Setting | None:
    """Return a setting without tensors; None if it holds other things than numbers."""
    values: list[Any] = [*value] if isinstance(value, tuple | list) else [value]
    values = [
        v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for v in values
    ]
    if not all(isinstance(v, int | float) for v in values):
        return None
    return tuple(values) if isinstance(value, tuple | list) else values[0]


def _is_zero(value: object) -> bool:
    if isinstance(value, Tensor):
        return not bool(value.any())  # torch cannot count zeros in all dtypes
    return value is None or value == 0


def _bits(value: object) -> bytes:
    if not isinstance(value, Tensor):
        return repr(value).encode()
    return value.contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()


def _hash(parts: Iterable[bytes]) -> str:
    state = hashlib.blake2b(digest_size=8)
    for part in parts:
        state.update(part)
    return state.hexdigest()


def non_finite(gradient: Tensor, scale: float) -> bool:
    """Return True if a local gradient is not finite, before or after unscaling."""
    part = local_part(gradient)
    if part.is_sparse:
        part = part.coalesce().values()
    return not bool(torch.isfinite(part.float() / scale).all())


def gradient_places(gradient: Tensor, parameter: Tensor, index: Places) -> Places:
    """Return the position of each local gradient element in the flat full tensor.

    A tensor-parallel plan may leave a gradient whole although the parameter is sharded,
    or the reverse. The optimizer redistributes the gradient later. So before its step
    the positions may differ from those of the parameter.

    Args:
        gradient: gradient when the optimizer is called.
        parameter: its parameter.
        index: position of each local element of ``parameter``.

    Raises:
        ValueError: if the elements cannot be determined.
    """
    if _sharding(gradient) == _sharding(parameter):
        return index
    # The placements give places in the full shape of the DTensor. If they reproduce the
    # parameter's known index, this shape is that of the full parameter. Then the
    # gradient's placements give right places, too.
    if not np.array_equal(numbers_laid_out_as(parameter), index):
        raise ValueError(
            f"the gradient is laid out as {_sharding(gradient)}, its parameter as "
            f"{_sharding(parameter)}, and the model has made that part itself: the "
            "elements of the gradient are unknown; give both the same layout"
        )
    return numbers_laid_out_as(gradient)


def _sharding(tensor: Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """Return mesh and placements of a DTensor, each partial one as replicated.

    Returns None for a plain tensor.
    """
    if not isinstance(tensor, DTensor):
        return None
    whole = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return tensor.device_mesh, tuple(whole)


def numbers_laid_out_as(tensor: Tensor) -> Places:
    """Return the position of each local element in the flat full tensor."""
    numbers = torch.arange(tensor.numel()).view(tensor.shape)
    if sharding := _sharding(tensor):
        # with src_data_rank=None no collective is sent: every rank has the numbers
        numbers = local(distribute_tensor(numbers, *sharding, src_data_rank=None))
    return numbers.reshape(-1).cpu().numpy()


def partial_ranks(gradient: Tensor) -> tuple[tuple[int, ...], int]:
    """Return the ranks over which a gradient is still to be summed, if it is partial.

    Returns:
        Two results: the ranks, including this one, and the divisor of their sum. The
        ranks are empty if the gradient is not partial. The divisor is the number of
        ranks on axes over which the gradient is a partial mean; 1 without such an axis.
    """
    if not isinstance(gradient, DTensor):
        return (), 1
    mesh, placements = gradient.device_mesh, gradient.placements
    here = mesh.get_coordinate()
    kinds = [p.reduce_op if isinstance(p, Partial) else "" for p in placements]
    # other reductions, as of a partial norm, are no sums of gradients
    if here is None or not {"sum", "avg"} & {*kinds}:
        return (), 1
    along = tuple(
        slice(None) if kind in ("sum", "avg") else at
        for kind, at in zip(kinds, here, strict=True)
    )
    ranks = tuple(mesh.mesh[along].reshape(-1).tolist())
    averaged = [n for n, kind in zip(mesh.shape, kinds, strict=True) if kind == "avg"]
    return ranks, math.prod(averaged)


class CallLog(Observer):
    """Records the collectives issued while it is active.

    A dispatch mode sees the operators below any Python wrapper that a scaler may use,
    and needs no patch of ``torch.distributed``.
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
            # DTensor then unpacks itself, and its inner calls come here
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self._log_collective(func, args)
        return func(*args, **(kwargs or {}))

    def _log_collective(self, func: Any, args: tuple[Any, ...]) -> None:
        for declared, value in zip(arguments_of(func), args, strict=False):
            if declared.name in ("process_group", "group_name"):  # a wait has no group
                call = func.overloadpacket.__name__.rstrip("_")
                # the tensor of a barrier is a placeholder, not data
                sent = "" if "barrier" in call else _shape(args)
                self._note(Collective(f"{call}{sent}", ranks_of(value)), args)

    def _note(self, collective: Collective, _args: tuple[Any, ...]) -> None:
        self.collectives.append(collective)


class ReductionLog(CallLog):
    """Records the reductions of gradients, from the first backward to the step.

    Backward also reduces gradients of activations, in the compute dtype, which is
    right. The running autograd node distinguishes both kinds, see [Note: Gradients of
    parameters]. The size cannot, because an activation may have the size of a
    parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reductions: list[Reduction] = []
        self._late: list[Reduction] = []
        """Reductions since the last backward; the next backward or step decides their
        kind."""
        self._stepped = True

    def __enter__(self) -> Self:
        self._hook = register_optimizer_step_pre_hook(lambda *_: self._end())
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # untyped in torch
        self._hook.remove()
        self._end()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Log and run ``func``; note whether backward is running."""
        if in_backward():
            # a forward pass lies between two backward passes
            self._late.clear()
            self._stepped = False
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _end(self) -> None:
        self.reductions += self._late
        self._late.clear()
        self._stepped = True

    def _note(self, collective: Collective, args: tuple[Any, ...]) -> None:
        if self._stepped or "reduce" not in collective.call:
            return
        into = self.reductions if in_backward() else self._late
        # the output of a reduce-scatter comes before its input; an all-reduce has one
        # tensor
        for tensor in [*_tensors(args[1:2])] or [*_tensors(args[:1])]:
            if tensor.is_floating_point() and _is_of_parameter(tensor.shape):
                dtype = dtype_name(tensor.dtype)
                into.append(
                    Reduction(
                        collective=collective, dtype=dtype, elements=tensor.numel()
                    )
                )


def _is_of_parameter(shape: tuple[int, ...]) -> bool:
    """Return True if the reduced tensor is the gradient of a parameter.

    [Note: Gradients of parameters]
    Hooks on gradients run outside any node of the graph, or in the node that
    accumulates into a parameter. A recomputed forward runs with gradients enabled. In
    any other node the reduced tensor counts as an activation's gradient, with two
    exceptions:

    - The node passes on a gradient to one parameter alone. The tensor has the shape of
      that gradient, and no other output of the node has as many dims. Then the node's
      function reduces for its parameter.
    - The node passes on gradients with the shapes of those that it got, and the tensor
      has another number of dims. Then the node exists only for a hook (``fully_shard``
      creates such nodes).

    In doubt the tensor counts as an activation's gradient, to avoid false positives.
    """
    if not in_backward():
        return math.prod(shape) > 1  # a norm, a count or a flag is no gradient
    if torch.is_grad_enabled():
        return False
    node = current_node()
    if node is None or hasattr(node, "variable"):
        return True
    input_shape = input_shapes(node)
    parameters: list[tuple[int, ...]] = []
    others: list[tuple[int, ...]] = []
    for onward, place in node.next_functions:
        if onward is not None:
            handed = input_shapes(onward)[place]
            (parameters if _ends_in_parameter(onward) else others).append(handed)
    if any(len(handed) == len(shape) for handed in others):
        return False
    alike = [h for h in parameters if len(h) == len(shape)]
    if any(math.prod(handed) == math.prod(shape) for handed in alike):
        return True
    return bool(input_shape) and input_shape == others


def _ends_in_parameter(node: Any) -> bool:
    """Return True if a node's gradient flows to a single parameter.

    No node on the way may change its number of elements.
    """
    count = math.prod(input_shapes(node)[0])
    while not hasattr(node, "variable"):
        if len(node.next_functions) != 1 or node.next_functions[0][0] is None:
            return False
        ((node, place),) = node.next_functions
        if math.prod(input_shapes(node)[place]) != count:
            return False
    return True


def _shape(args: tuple[Any, ...]) -> str:
    return ",".join(
        f"[{'x'.join(map(str, t.shape))}:{str(t.dtype).removeprefix('torch.')}]"
        for t in _tensors(args[:1])
    )


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument; a gather has a list of outputs per input."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for branch in tree:
            yield from _tensors(branch)
