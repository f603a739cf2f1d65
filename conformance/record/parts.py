"""Parts: a rank's elements of each parameter and gradient that an optimizer steps.

One function for each kind of layout returns names, local tensors and their boxes. A
wrong adapter cannot cause a wrong verdict: names and boxes are verified by the digests
of the initial weights, and tensors that cannot be verified are not compared.
"""

from __future__ import annotations

import gc
import math
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from .kept import Box
from .torch_internals import buffers_of, children_of

__all__ = [
    "UNNAMED",
    "WRAPPERS",
    "HiddenLayoutError",
    "Part",
    "Piece",
    "Roots",
    "bare",
    "boxes_of_range",
    "copies_of_megatron",
    "cuts",
    "fp32_range_of",
    "has_plain_bits",
    "parts_of",
    "place",
    "trains",
]

WRAPPERS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)
"""Name components added by wrappers: DDP, compile, FSDP1, activation checkpointing."""


NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
STATISTICS = "running_mean", "running_var"
"""Buffers of ``NORMS`` that are compared. They follow from the rows of a forward as its
output does. That is not known of other buffers: those of an ``InstanceNorm`` differ
with the number of micro-batches, and its outputs do not."""
UNNAMED = "parameter "
"""Prefix of the name of a parameter that is in no module; its index follows."""
Place = tuple[str, Sequence[int], Sequence[int]]
"""Name in the whole model, shape of the whole tensor, position of the first element."""
Places = Callable[[str, nn.Parameter], Place | list[Place] | None]
"""Maps (name, parameter) to its place; None: take the layout from the tensor. Of a flat
tensor with ranges of several tensors, one after the other, it returns a list."""


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a local parameter that form a box of a whole tensor."""

    name: str
    first: int
    """Position of its first element in the flattened local parameter."""
    box: Box


@dataclass(frozen=True)
class Part:
    """Elements of one parameter on this rank."""

    name: str
    weight: Tensor
    """Local elements: a view of the tensor that the optimizer steps."""
    box: Box
    stepped: Any
    """Tensor in the optimizer's param group: the parameter, or a flat tensor that
    contains it."""
    cut: Callable[[Any], tuple[Tensor, Box]]
    """Function that takes a tensor with the layout of ``stepped``, such as its
    gradient. It returns the elements of this part, and their box."""
    number: int = 0
    """Index among this rank's parts with the same name."""

    @property
    def key(self) -> str:
        """Number and name of the part."""
        return f"{self.number}/{self.name}"


class HiddenLayoutError(ValueError):
    """Raised for a DTensor that does not say which elements a rank holds."""


def place(tensor: Tensor) -> tuple[Tensor, Box]:
    """Return the local elements of a tensor or DTensor, and their box.

    There is no communication: a partial or sharded DTensor stays as it is. A complex
    number counts as two elements.

    Raises:
        HiddenLayoutError: if the placements of a DTensor give another local shape.
    """
    local, box = _place(tensor)
    if local.is_complex():
        more = (*box.shape, 2), (*box.offsets, 0), (*box.local, 2)
        return torch.view_as_real(local), Box(*more, box.summand)
    return local, box


def _place(tensor: Tensor) -> tuple[Tensor, Box]:
    # a process that has not imported this slow module has no DTensor
    sharded = sys.modules.get("torch.distributed.tensor")
    if sharded is None or not isinstance(tensor, sharded.DTensor):
        return tensor.detach(), _whole(tuple(tensor.shape))
    with torch.no_grad():
        mesh, placements = tensor.device_mesh, tensor.placements
        local = tensor.to_local().detach()
        sums = [dim for dim, p in enumerate(placements) if p.is_partial()]
        if sums:  # offsets of the replicated tensor are offsets of the sum
            whole = sharded.Replicate()
            tensor = sharded.DTensor.from_local(
                local,
                mesh,
                [whole if p.is_partial() else p for p in placements],
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
        shape = tuple(tensor.shape)
        (chunk,) = tensor.__create_chunk_list__()  # type: ignore[attr-defined]  # of checkpoints
        if local.numel() and tuple(chunk.sizes) != tuple(local.shape):
            raise HiddenLayoutError(
                f"a DTensor of shape {shape} has {tuple(local.shape)} on this rank, "
                f"and {tuple(chunk.sizes)} by its placements: it is sharded unevenly. "
                "After the layout, let each parameter say where its part lies. "
                "Megatron-FSDP: for p in model.parameters(): "
                "megatron_fsdp.uneven_dtensor.update_uneven_dtensor_chunk_metadata(p)"
            )
        return local, Box(
            shape,
            tuple(chunk.offsets) if local.numel() else (0,) * len(shape),
            tuple(local.shape),
            tuple(mesh.get_local_rank(dim) for dim in sums),
        )


@lru_cache(maxsize=100_000)  # each step asks seven times with equal arguments
def _whole(shape: tuple[int, ...]) -> Box:
    """Return the box of a tensor that is held whole."""
    return Box(shape, (0,) * len(shape), shape)


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
        # isinstance would create the object behind a lazy proxy
        modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
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
        """Yield the saved buffers of the called models.

        A buffer is left out if its layout is hidden, or its numbers have no plain bits.

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
        others in the order in which an optimizer needs them. Models that nobody trains
        have no number.
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
            if pieces := pieces_of_megatron(module):
                self.checkpointed |= pieces
                self.distributed = _distributed_optimizers()
        # the method is the job's code, and not made for this call
        except Exception as error:
            text = f"sharded_state_dict: {type(error).__name__}: {error}"
            self.notes = [text[:400]]

    def pieces(self, name: str, parameter: Any, box: Box) -> list[Piece]:
        """Return the pieces of a parameter.

        The layout comes from the user's ``places``, else from Megatron's checkpoint
        format, else from the tensor itself.

        Args:
            name: name without those of wrappers.
            parameter: parameter of the model.
            box: result of :func:`place` for the parameter.
        """
        declared = None if self.places is None else self.places(name, parameter)
        is_one = isinstance(declared, list) and isinstance([*declared, 0][0], str)
        if isinstance(declared, list) and not is_one:
            return _declared_ranges(name, declared, box.local)
        if declared is not None:
            return [_declared(name, declared, box.local)]
        if id(parameter) in self.checkpointed:
            return self.checkpointed[id(parameter)][1]
        return [Piece(name, 0, box)]

    def unstepped(self, stepped: Iterable[str]) -> list[str]:
        """Return the trainable parameters of called models that no optimizer has."""
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
    name: str, declared: list[Any], local: tuple[int, ...]
) -> list[Piece]:
    """Return the pieces of a flat tensor; its elements after the last one are padding.

    Raises:
        ValueError: if a range does not lie in its whole tensor, or in the flat one.
    """
    pieces: list[Piece] = []
    first, size = 0, math.prod(local)
    for each in declared:
        try:
            _, shape, (start,) = each
            length = min(math.prod(shape) - start, size - first)
        except (TypeError, ValueError):
            length = 0
        if length <= 0 or len(local) != 1:
            raise ValueError(
                f"places returned {each!r:.200} in a list for {name}, whose part has "
                f"shape {[*local]}. Expected for each range of a flat tensor: (name in "
                "the whole model, shape of the whole tensor, (position of the range's "
                "first element in the flattened whole tensor,))"
            )
        piece = _declared(name, each, (length,))
        pieces.append(Piece(piece.name, first, piece.box))
        first += length
    return pieces


def _declared(name: str, declared: Any, local: tuple[int, ...]) -> Piece:
    """Return the piece that ``places`` declares.

    Raises:
        ValueError: if the part does not lie in the whole tensor.
    """
    try:
        whole, shape, offsets = declared
        box = Box(tuple(shape), tuple(offsets), local)
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


def has_plain_bits(tensor: Tensor) -> bool:
    """Return True for a dense local tensor whose numbers can be read from memory."""
    odd = tensor.is_quantized, tensor.is_meta, tensor.is_conj(), tensor.is_neg()
    is_dense = tensor.layout == torch.strided and not tensor.is_nested
    return type(tensor) in (Tensor, nn.Parameter) and is_dense and not any(odd)


def trains(module: nn.Module) -> bool:
    """Return True if a module has parameters that require a gradient."""
    return any(p.requires_grad for p in module.parameters())


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def bare(name: str) -> str:
    """Remove the names of wrappers from the name of a parameter."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def parts_of(optimizer: Any, roots: Roots) -> Iterator[Part]:
    """Yield the parts that an optimizer steps on this rank."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    roots.find(own)
    adapted = list(_of_deepspeed(own, roots))
    yield from adapted
    if adapted:
        return
    adapted = list(_of_fsdp1(own, roots))
    yield from adapted
    # FSDP1 leaves its ignored modules as they are
    flat = {id(part.stepped) for part in adapted}
    own = [p for p in own if id(p) not in flat and not hasattr(p, "_fqns")]
    numbers = Counter[str]()
    copied = {id(s): [(p, first)] for s, p, first in copies_of_megatron(roots)}
    for position, stepped in enumerate(own):
        local, _ = place(stepped)
        viewed = copied.get(id(stepped))
        if viewed is None and roots.name_of(stepped) is None:
            viewed = _viewed_by(local, roots)
        for parameter, first in viewed or [(stepped, 0)]:
            name = roots.name_of(parameter) or f"{UNNAMED}{position}"
            for piece in roots.pieces(name, parameter, place(parameter)[1]):
                for cut, box in cuts(local, first, piece):
                    number = numbers[piece.name]
                    numbers[piece.name] += 1
                    part = cut(local)[0]
                    yield Part(piece.name, part, box, stepped, cut, number)


def _viewed_by(local: Tensor, roots: Roots) -> list[tuple[Any, int]]:
    """Find the parameters that a tensor of no module is a view of, as in an own ZeRO.

    Returns:
        Each parameter, and the position of the tensor's first element in it, which is
        negative if the tensor begins before it.
    """
    viewed: list[tuple[Any, int]] = []
    parameters = {id(each): each for each in roots.kept}  # each scan adds them again
    for parameter in parameters.values() if local.is_contiguous() else ():
        try:
            whole, _ = place(parameter)
        except HiddenLayoutError:
            continue
        if not whole.is_contiguous() or whole.dtype != local.dtype:
            continue
        if whole.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
            first = (local.data_ptr() - whole.data_ptr()) // local.element_size()
            if -local.numel() < first < whole.numel():
                viewed.append((parameter, first))
    return viewed


Cut = Callable[[Any], tuple[Tensor, Box]]


def cuts(local: Tensor, first: int, piece: Piece) -> Iterator[tuple[Cut, Box]]:
    """Yield the boxes of the elements that a tensor and a piece share.

    Args:
        local: consecutive elements of a local parameter, or all of them.
        first: position of the first of them in the flattened local parameter.
        piece: piece of the same parameter.
    """
    box = piece.box
    if piece.first == first == 0 and box.size == local.numel():
        yield partial(_placed, local=tuple(local.shape), box=box), box
        return
    start = max(first, piece.first)
    end = min(first + local.numel(), piece.first + box.size)
    if start >= end:
        return
    for offsets, sizes in boxes_of_range(
        box.local, start - piece.first, end - piece.first
    ):
        offset = start - first
        start += math.prod(sizes)
        within = tuple(map(operator.add, box.offsets, offsets))
        each = Box(box.shape, within, sizes)
        yield partial(_range_of, first=offset, box=each), each


def _placed(tensor: Any, *, local: tuple[int, ...], box: Box) -> tuple[Tensor, Box]:
    """Return the local elements and box of a tensor, such as a gradient.

    If the tensor is plain, or hides its layout, it has the box of its weight.
    """
    try:
        part, own = place(tensor)
    except HiddenLayoutError:
        part = tensor.to_local().detach()
        if tuple(part.shape) != local:
            raise
        return part, box
    if own.shape == box.shape:
        return part, own
    return part.view(box.local) if tuple(part.shape) == local else part, box


def _range_of(tensor: Any, *, first: int, box: Box) -> tuple[Tensor, Box]:
    part = tensor.detach().reshape(-1).narrow(0, first, box.size)
    return part.view(box.local), box


def boxes_of_range(
    shape: Sequence[int], start: int, end: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a range of a flattened tensor into boxes, in the order of their elements.

    Returns:
        Offsets and sizes of each box; 2 x dims - 1 boxes at most.
    """
    if start >= end:
        return []
    if len(shape) < 2:
        return [((start,) * len(shape), (end - start,) * len(shape))]
    row = math.prod(shape[1:])
    head, tail = -(-start // row), end // row
    if head > tail:  # the fragment lies within one row
        return _boxes_in_row(shape, tail, start, end)
    boxes = _boxes_in_row(shape, head - 1, start, head * row)
    if head < tail:
        zeros = (0,) * (len(shape) - 1)
        boxes.append(((head, *zeros), (tail - head, *shape[1:])))
    return boxes + _boxes_in_row(shape, tail, tail * row, end)


def _boxes_in_row(
    shape: Sequence[int], row: int, start: int, end: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    before = row * math.prod(shape[1:])
    boxes = boxes_of_range(shape[1:], start - before, end - before)
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes]


# - Layouts that hide parameters in flat tensors; their attributes are not public


def _of_deepspeed(own: Sequence[Any], roots: Roots) -> Iterator[Part]:
    """Yield parts of ZeRO 1 to 3: ranges of the flat fp32 tensors that are stepped."""
    for module in roots.modules:
        for parameter in module.parameters():
            range_of_parameter = fp32_range_of(parameter)
            if range_of_parameter is None or (name := roots.name_of(parameter)) is None:
                continue
            fragment, box = range_of_parameter
            for flat in own:
                # the fragment is a view of the flat tensor
                first = (fragment.data_ptr() - flat.data_ptr()) // flat.element_size()
                if 0 <= first < flat.numel():
                    cut = partial(_range_of, first=first, box=box)
                    yield Part(name, fragment, box, flat, cut)


def fp32_range_of(parameter: Any) -> tuple[Tensor, Box] | None:
    """Return the fp32 elements of a DeepSpeed parameter that this rank steps.

    Returns None for other parameters, and if the parameter is not trained.
    """
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:  # ZeRO 1 and 2
        start, shape = mapping.lp_fragment_address.start, tuple(parameter.shape)
        fragment = mapping.hp_fragment.detach().reshape(-1)
    elif (engine := getattr(parameter, "_z3_optimizer", None)) is not None:
        part = parameter.partition_numel()
        position = engine.grad_position.get(engine.get_param_id(parameter))
        if position is None:  # a parameter that does not train has no position
            return None
        group, offset, _ = position
        shape = tuple(parameter.ds_shape)
        start = part * parameter.ds_process_group.rank()
        size = min(part, max(0, math.prod(shape) - start))  # the last part is padded
        flat = engine.fp32_partitioned_groups_flat[group].detach()
        start, fragment = min(start, math.prod(shape)), flat.narrow(0, offset, size)
    else:
        return None
    return fragment, Box(shape, (start,), (fragment.numel(),))


def _of_fsdp1(own: Sequence[Any], roots: Roots) -> Iterator[Part]:
    """Yield parts of FSDP1: views of a flat parameter, or ranges of a stepped one."""
    flats = {id(parameter): parameter for parameter in own}
    infos: dict[int, tuple[Any, tuple[int, ...]]] = {}
    for module in {m for root in roots.modules for m in root.modules()}:
        handle = getattr(module, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        if id(flat) in flats:
            yield from _of_flat(flat, roots)
        for parameter, info, shape in zip(
            getattr(flat, "_params", None) or (),
            getattr(flat, "_shard_param_infos", ()),
            getattr(flat, "_shapes", ()),
            strict=False,
        ):
            infos[id(parameter)] = info, tuple(shape)
    for parameter in own if infos else ():
        name = roots.name_of(parameter)
        if name is None or id(parameter) not in infos:
            continue
        info, shape = infos[id(parameter)]
        weight = parameter.detach().reshape(-1)
        start = info.intra_param_start_idx if info.in_shard else 0
        box = Box(shape, (start,), (weight.numel(),))
        cut = partial(_range_of, first=0, box=box)
        yield Part(name, weight, box, parameter, cut)


def _of_flat(flat: Any, roots: Roots) -> Iterator[Part]:
    prefix = roots.names[id(flat)].rpartition("_flat_param")[0]
    local = flat.detach()
    lists = (getattr(flat, n) for n in ("_fqns", "_shapes", "_shard_param_infos"))
    for name, shape, info in zip(*lists, strict=True):
        if info.in_shard:
            first, size = info.offset_in_shard, info.numel_in_shard
            box = Box(tuple(shape), (info.intra_param_start_idx,), (size,))
            cut = partial(_range_of, first=first, box=box)
            yield Part(bare(f"{prefix}{name}"), cut(local)[0], box, flat, cut)


# - Megatron: the model describes its layout for its own checkpoints


def pieces_of_megatron(module: nn.Module) -> dict[int, tuple[Any, list[Piece]]]:
    """Read the layout of a Megatron model from its ``sharded_state_dict``.

    It describes pipeline stages, experts, tensor parallelism, and gated layers, whose
    two halves are sharded separately.

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


GROUPS = (
    ("model_float16_groups", "shard_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups", "shard_fp32_groups"),
)
"""Names of attributes of Megatron's distributed optimizer. Each row names three lists:
the parameters, this rank's range of each parameter, and the tensors stepped in their
place."""


def copies_of_megatron(roots: Roots) -> list[tuple[Tensor, Any, int]]:
    """Find the tensors that Megatron's optimizers step in place of parameters.

    Returns:
        The fp32 copy, or this rank's range of it; the parameter; and the position of
        the first element in the flattened parameter.
    """
    copies: list[tuple[Tensor, Any, int]] = []
    for parameter, _ in roots.checkpointed.values():
        main = getattr(parameter, "main_param", None)
        # the optimizer has it in the lists below
        is_range = getattr(parameter, "main_param_sharded", False)
        if isinstance(main, Tensor) and not is_range:
            copies.append((main, parameter, 0))
    for optimizer in roots.distributed:
        for names in GROUPS:
            for groups in zip(*(getattr(optimizer, n) for n in names), strict=True):
                for parameter, part, stepped in zip(*groups, strict=True):
                    if stepped is not None:
                        first = part.data_ptr() - parameter.data_ptr()
                        copies.append(
                            (stepped, parameter, first // part.element_size())
                        )
    return copies


def _distributed_optimizers() -> list[Any]:
    module = sys.modules.get("megatron.core.optimizer.distrib_optimizer")
    if module is None:
        return []
    kind = module.DistributedOptimizer
    return [each for each in gc.get_objects() if issubclass(type(each), kind)]
