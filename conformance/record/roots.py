"""Outermost modules of a job, and the names and places of their parameters."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from operator import index
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .kept import Box
from .parts import HiddenLayoutError, Piece, bare, has_plain_bits, place, trains
from .torch_internals import buffers_of, children_of

__all__ = ["Places", "Roots", "living"]

NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
STATISTICS = "running_mean", "running_var"
"""Buffers of ``NORMS`` that are compared. If two sides give each forward the same rows,
these buffers are equal, like the outputs. Other buffers may differ: the buffers of an
``InstanceNorm`` depend on the number of micro-batches, and its outputs do not."""
Place = tuple[str, Sequence[int], Sequence[int]]
"""Name in the whole model, shape of the whole tensor, position of the first element."""
Range = tuple[str, Sequence[int], Sequence[int], Sequence[int]]
"""A place, and the shape of the elements that lie there."""
Places = Callable[[str, nn.Parameter], Place | list[Place] | list[Range] | None]
"""Maps (name, parameter) to its place; None: take the layout from the tensor. If a
tensor consists of several ranges, one after the other, the result is a list."""

T = TypeVar("T")


def living(kind: type[T]) -> list[T]:
    """Return the objects of a type in this process, by a scan of all objects.

    ``isinstance`` would create the object behind a lazy proxy.
    """
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]


class Roots:
    """Outermost modules, and the names of their parameters.

    An optimizer does not know the names of its parameters, so all objects of the
    process are scanned for modules. The scan is repeated when an optimizer has unknown
    parameters.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.called: list[nn.Module] = []
        """Outermost modules, in the order of their first forward."""
        self.names: dict[int, str] = {}
        """id of a parameter -> its name in its model, without the names of wrappers."""
        self.owners: dict[str, list[int]] = {}
        """Name -> ids of the parameters with this name, in the order in which
        :meth:`name_of` numbers them."""
        self.kept: list[nn.Parameter] = []
        """The parameters, kept alive so that their ids stay valid."""
        self.places: Places | None = None
        """User's function for layouts that tensors do not show: custom shards, stages,
        experts."""
        self.searched: dict[int, Tensor] = {}
        """id of a tensor that is in no module -> the tensor, such as a flat one or a
        copy."""
        self.checkpointed: dict[int, tuple[Any, list[Piece]]] = {}
        """id of a parameter -> the parameter and its pieces in checkpoints."""
        self.distributed: list[Any] = []
        """Distributed optimizers of Megatron in this process."""
        self.copies: list[tuple[Tensor, Any]] = []
        """Tensors that optimizers step in place of parameters, and these parameters:
        copies that the job itself keeps."""
        self.notes: list[str] = []
        """Reasons why a layout could not be read."""

    def add(self, module: nn.Module) -> None:
        """Add an outermost module and the names of its parameters."""
        self.modules.append(module)
        self.learn(module)
        for name, parameter in module.named_parameters():
            self.names[id(parameter)] = bare(name)
            self.kept.append(parameter)

    def find(self, wanted: Iterable[Tensor]) -> None:
        """Find the names of parameters, by a scan for the modules that hold them."""
        unknown = {id(p): p for p in wanted if id(p) not in self.names}
        if unknown.keys() <= self.searched.keys():
            return
        self.searched |= unknown
        modules = living(nn.Module)
        children = {id(child) for m in modules for child in children_of(m)}
        roots = [m for m in modules if id(m) not in children and trains(m)]
        self.modules = []
        # the largest model comes last, so its names win
        for module in sorted(roots, key=_count):
            self.add(module)
        for module in self.called:
            for parameter in module.parameters():
                self.name_of(parameter)

    def buffers(self) -> Iterator[tuple[str, Tensor, Box, bool]]:
        """Yield the buffers that ``state_dict`` has, of the called models.

        A buffer is left out if it is bool or nested, if its layout is hidden, or if its
        numbers have no plain bits.

        Yields:
            name, local tensor, box, and true for a running statistic of a batch norm.
        """
        for number, module in enumerate(self.called, 1):
            end = "" if number == 1 else f" (model {number})"
            for name, buffer, owner in buffers_of(module):
                is_statistic = isinstance(owner, NORMS) and name.endswith(STATISTICS)
                if buffer.is_nested:
                    continue
                with suppress(HiddenLayoutError):
                    local, box = place(buffer)
                    if has_plain_bits(local) and local.dtype != torch.bool:
                        yield bare(name) + end, local, box, is_statistic

    def name_of(self, parameter: Tensor) -> str | None:
        """Return the name of a parameter in the job, or None if no module has it.

        A job may train two models of one class, such as two critics. If models share a
        name, they get numbers: called models in the order of their first calls, then
        others in the order in which an optimizer needs them. Models that no optimizer
        steps have no number.
        """
        key = id(parameter)
        name = self.names.get(key)
        if name is None:
            return None
        ids = self.owners.setdefault(name, [])
        if key not in ids:
            ids.append(key)
        number = ids.index(key) + 1
        return name if number == 1 else f"{name} (model {number})"

    def learn(self, module: nn.Module) -> None:
        """Read the layout of a Megatron module; ignore other modules."""
        try:
            if pieces := _pieces_of_megatron(module):
                self.checkpointed |= pieces
                self.distributed = _distributed_optimizers()
        # the method is code of the job, and may fail outside of a checkpoint
        except Exception as error:
            text = f"sharded_state_dict: {type(error).__name__}: {error}"
            self.notes = [text[:400]]

    def pieces(self, name: str, parameter: Any, box: Box) -> list[Piece]:
        """Return the pieces of a parameter.

        The layout comes from the user's ``places``, else from Megatron's checkpoint
        format, else from the tensor itself.

        Args:
            name: name of the parameter, without the names of wrappers.
            parameter: parameter of the model.
            box: result of :func:`place` for the parameter.
        """
        # the user's function may return anything
        declared: Any = None if self.places is None else self.places(name, parameter)
        is_one_place = bool(declared) and isinstance(declared[0], str)
        if isinstance(declared, list) and not is_one_place:
            return _declared_ranges(name, declared, parameter, box.local)
        if declared is not None:
            return [_declared(name, declared, box.local)]
        if id(parameter) in self.checkpointed:
            return self.checkpointed[id(parameter)][1]
        return [Piece(name, 0, box)]

    def unstepped(self, stepped: Iterable[str]) -> list[str]:
        """Return the sorted names of trainable parameters that no optimizer steps.

        All found models count if no module was called, as in compiled code. Otherwise
        only models with a called module count.

        Args:
            stepped: names of all parameters that optimizers step.
        """
        called = {id(module) for module in self.called}
        models = [
            root
            for root in self.modules
            # compiled code calls no module
            if not called or not called.isdisjoint(map(id, root.modules()))
        ]
        every = (p for module in models for p in module.parameters())
        return sorted(self.names_of(every).difference(stepped))

    def names_of(self, parameters: Iterable[Tensor]) -> set[str]:
        """Return the names of the pieces of trainable parameters."""
        named = ((self.name_of(p), p) for p in parameters if p.requires_grad)
        trained = ((name, p, place(p)[1]) for name, p in named if name is not None)
        return {piece.name for each in trained for piece in self.pieces(*each)}


def _declared_ranges(
    name: str, declared: list[Any], parameter: Tensor, local: tuple[int, ...]
) -> list[Piece]:
    """Return the pieces of a tensor; elements after the last one are padding.

    Raises:
        ValueError: if a range does not lie in its whole tensor, or in ``parameter``.
    """
    pieces: list[Piece] = []
    first, size = 0, math.prod(local)
    for each in declared:
        try:
            whole, *numbers = each
            shape, start, *lengths = map(_integers, numbers)
            # a range of a flat tensor ends with this tensor or with the whole one
            rest = size - first, math.prod(shape) - math.prod(start)
            (length,) = lengths or [(min(rest),)]
            is_right = 0 < math.prod(length) <= size - first
            is_right &= bool(lengths) or len(local) == len(start) == 1
        except (TypeError, ValueError):
            is_right = False
        if not is_right or not parameter.is_contiguous():
            raise ValueError(
                f"places returned {each!r:.200} in a list for {name}, whose part has "
                f"shape {[*local]}. Expected for each range of a contiguous tensor: "
                "(name in the whole model, shape of the whole tensor, position of the "
                "range's first element, shape of the range)"
            )
        piece = _declared(name, (whole, shape, start), length)
        pieces.append(Piece(piece.name, first, piece.box))
        first += piece.box.size
    return pieces


def _declared(name: str, declared: Any, local: tuple[int, ...]) -> Piece:
    """Return the piece that ``places`` declares.

    Raises:
        ValueError: if the part does not lie in the whole tensor.
    """
    try:
        whole, shape, offsets = declared
        box = Box(_integers(shape), _integers(offsets), local)
        first, sizes, room = box.offsets, local, box.shape
        if box.is_flat:  # a range of the flattened tensor
            sizes, room = (box.size,), (math.prod(box.shape),)
        dims = zip(first, sizes, room, strict=True)
        is_right = all(0 <= at <= n - size for at, size, n in dims)
        is_right = is_right and isinstance(whole, str)
    except (TypeError, ValueError):
        is_right = False
    if not is_right:
        raise ValueError(
            f"places returned {declared!r:.200} for {name}, whose part has shape "
            f"{[*local]}. Expected: (name in the whole model, shape of the whole "
            "tensor, position of the part's first element)"
        )
    return Piece(whole, 0, box)


def _integers(values: Iterable[Any]) -> tuple[int, ...]:
    """Convert integers, also tensors of one integer, to Python's ``int``."""
    return tuple(map(index, values))


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _pieces_of_megatron(module: nn.Module) -> dict[int, tuple[Any, list[Piece]]]:
    """Read the layout of a Megatron model from its ``sharded_state_dict``.

    The method describes pipeline stages, experts, tensor parallelism, and gated layers,
    whose two halves are sharded separately.

    Returns:
        id of a parameter -> the parameter and its pieces.
    """
    pieces: dict[int, tuple[Any, list[Piece]]] = {}
    prefix = ""
    for path, each in module.named_modules():
        if hasattr(each, "sharded_state_dict") and not (
            prefix and f"{path}.".startswith(prefix)
        ):
            prefix = f"{path}." if path else ""
            named = {bare(name): p for name, p in each.named_parameters()}
            for name, sharded in each.sharded_state_dict().items():
                if (parameter := named.get(bare(name))) is not None:
                    of_parameter = [
                        _piece_of(prefix, name, parameter, shard)
                        for shard in _shards(sharded)
                        if shard.data.is_contiguous()
                    ]
                    pieces[id(parameter)] = parameter, of_parameter
            if not path:
                break
    return pieces


def _shards(sharded: Any) -> list[Any]:
    """Return the shards of one checkpoint entry, which may be a factory of shards."""
    if hasattr(sharded, "build"):
        sharded = sharded.build()
    if isinstance(sharded, dict):
        sharded = [*sharded.values()]
    nested = sharded if isinstance(sharded, list | tuple) else [sharded]
    return [shard for shard in nested if isinstance(shard.data, Tensor)]


def _piece_of(prefix: str, name: str, parameter: Tensor, shard: Any) -> Piece:
    axes = shard.prepend_axis_num  # axes of layers and experts, with one number each
    numbers, offsets = shard.global_offset[:axes], shard.global_offset[axes:]
    path = name.split(".")
    local = [place for place, word in enumerate(path) if word.isdigit()]
    if axes and len(local) == axes:
        for index, number in zip(local, numbers, strict=True):
            path[index] = str(number)
    # a tied weight of the last stage has the key of the weight of the first stage
    else:
        path = [shard.key, *map(str, numbers)]
    name = bare(f"{prefix}{'.'.join(path)}")
    first = shard.data.data_ptr() - parameter.data_ptr()
    box = Box(tuple(shard.global_shape[axes:]), offsets, tuple(shard.data.shape))
    return Piece(name, first // parameter.element_size(), box)


def _distributed_optimizers() -> list[Any]:
    module = sys.modules.get("megatron.core.optimizer.distrib_optimizer")
    if module is None:
        return []
    return living(module.DistributedOptimizer)
