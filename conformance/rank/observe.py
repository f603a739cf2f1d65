"""Observers that run on a rank: digests, layouts of gradients, collectives."""

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
from .trace import Collective, Reduction, Setting

__all__ = [
    "CallLog",
    "ReductionLog",
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
    """The part of ``tensor`` on this rank, without history, sharing its memory."""
    # where gradients are enabled, to_local of a DTensor is a step of autograd, and
    # detach one of DTensor's operators: four times the time
    with torch.no_grad():
        return local(tensor).detach()


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype in ``torch``, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def digest(tensor: Tensor) -> str:
    """Digest of the bits of the local elements of ``tensor``, whatever its dtype."""
    return _hash([_bits(local_part(tensor))])


def optimizer_digest(optimizer: object) -> str:
    """Digest of the whole state of ``optimizer``, in parameter order.

    Of an object that is no optimizer of torch no state is known.

    Zeros are left out: a fused optimizer is also called at a skipped step and may
    create its state then. That state is all zeros, which trains like no state.
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
    """The plain tensors in a value of a subclass, such as codes and their scales.

    An optimizer of 8 bits has its state in a subclass that supports few operators.
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
"""Settings that schedules move, and the rate from which torch's began."""


def scheduled(group: Mapping[str, Any]) -> dict[str, Setting]:
    """Return the settings of a param group that schedules move, as numbers."""
    settings: dict[str, Setting] = {}
    for key in _SCHEDULED:
        value = group.get(key)
        values: list[Any] = [*value] if isinstance(value, tuple | list) else [value]
        if all(
            isinstance(v, int | float) or (isinstance(v, Tensor) and v.numel() == 1)
            for v in values
        ):
            numbers = tuple(map(float, values))
            settings[key] = numbers if isinstance(value, tuple | list) else numbers[0]
    return settings


def _is_zero(value: object) -> bool:
    if isinstance(value, Tensor):
        return not bool(value.any())  # not of all dtypes are zeros counted
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
    """True if a local gradient, or the gradient divided by ``scale``, is not finite."""
    part = local_part(gradient)
    if part.is_sparse:
        part = part.coalesce().values()
    return not bool(torch.isfinite(part.float() / scale).all())


def gradient_places(gradient: Tensor, parameter: Tensor, index: Places) -> Places:
    """Place of each local element of a gradient in the flat full tensor.

    A tensor-parallel plan may leave a gradient whole where the parameter is sharded, or
    the other way round: the optimizer redistributes it, and a comparison must account
    for that.

    Args:
        gradient: the gradient at the optimizer call.
        parameter: its parameter.
        index: place of each local element of ``parameter``.

    Raises:
        ValueError: if the elements cannot be determined.
    """
    if _sharding(gradient) == _sharding(parameter):
        return index
    # The placements give places in the DTensor's own full shape. If they reproduce the
    # parameter's known index, that shape is the full tensor's, and the placements of
    # the gradient give right places, too.
    if not np.array_equal(numbers_laid_out_as(parameter), index):
        raise ValueError(
            f"the gradient is laid out as {_sharding(gradient)}, its parameter as "
            f"{_sharding(parameter)}, and the model has made that part itself: the "
            "elements of the gradient are unknown; give both the same layout"
        )
    return numbers_laid_out_as(gradient)


def _sharding(tensor: Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """The placements with partial ones as replicated: the elements of each rank."""
    if not isinstance(tensor, DTensor):
        return None
    whole = [Replicate() if p.is_partial() else p for p in tensor.placements]
    return tensor.device_mesh, tuple(whole)


def numbers_laid_out_as(tensor: Tensor) -> Places:
    """Place of each local element of ``tensor`` in the flat full one."""
    numbers = torch.arange(tensor.numel()).view(tensor.shape)
    if sharding := _sharding(tensor):
        # src_data_rank=None: every rank has the numbers, so no collective is sent
        numbers = local(distribute_tensor(numbers, *sharding, src_data_rank=None))
    return numbers.reshape(-1).cpu().numpy()


def partial_ranks(gradient: Tensor) -> tuple[tuple[int, ...], int]:
    """Ranks over which a gradient is a partial sum, which is legal.

    Returns:
        The ranks, including this one, empty if the gradient is no partial sum; and the
        divisor of the sum: the ranks of the axes over which it is a partial mean.
    """
    if not isinstance(gradient, DTensor):
        return (), 1
    mesh, placements = gradient.device_mesh, gradient.placements
    here = mesh.get_coordinate()
    kinds = [p.reduce_op if isinstance(p, Partial) else "" for p in placements]
    # other reductions, such as of a norm's partial, are no sums of gradients
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
            # makes DTensor unpack itself: its inner calls come here
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self._log_collective(func, args)
        return func(*args, **(kwargs or {}))

    def _log_collective(self, func: Any, args: tuple[Any, ...]) -> None:
        for declared, value in zip(arguments_of(func), args, strict=False):
            if declared.name in ("process_group", "group_name"):  # waiting has none
                call = func.overloadpacket.__name__.rstrip("_")
                # the tensor of a barrier is a placeholder, not data
                sent = "" if "barrier" in call else _shape(args)
                self._note(Collective(f"{call}{sent}", ranks_of(value)), args)

    def _note(self, collective: Collective, _args: tuple[Any, ...]) -> None:
        self.collectives.append(collective)


class ReductionLog(CallLog):
    """Records the reductions of gradients, from the first backward to the step.

    Gradients of activations are also reduced in backward, in the compute dtype, which
    is right. The running autograd node distinguishes them ([Note: Whose gradient is
    reduced]); their size cannot, because an activation may have the size of a
    parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reductions: list[Reduction] = []
        self._late: list[Reduction] = []
        """Issued since the last backward; a later backward or step decides the kind."""
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
        """Note whether this is backward, log ``func`` and run it."""
        if in_backward():
            # between two backward passes lies the forward pass of the second one
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
        # a reduce-scatter has its output before its input, an all-reduce has only one
        for tensor in [*_tensors(args[1:2])] or [*_tensors(args[:1])]:
            if tensor.is_floating_point() and _is_of_parameter(tensor.shape):
                dtype = dtype_name(tensor.dtype)
                into.append(
                    Reduction(
                        collective=collective, dtype=dtype, elements=tensor.numel()
                    )
                )


def _is_of_parameter(shape: tuple[int, ...]) -> bool:
    """True if the reduced tensor is the gradient of a parameter.

    [Note: Whose gradient is reduced]
    Hooks on gradients run in no node of the graph, or in the one that accumulates into
    a parameter; a pass through the model that is computed again runs with gradients
    enabled. In any other node a reduction counts as one of the gradient of an
    activation, unless
    - it has the shape of what the node hands on to one parameter alone, and nothing
      else that it hands on has so many dims: a function that reduces for its parameter;
    - the node hands on what it is given, and that has other dims: it is there for a
      hook (``fully_shard`` makes such ones).
    If in doubt, it counts as no gradient of a parameter, so that no law accuses it.
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
    """True if a gradient flows from here to one parameter with unchanged elements."""
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
    """The tensors of an argument; a gather has a list of outputs for each input."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for branch in tree:
            yield from _tensors(branch)
