"""Layouts: which elements of which parameters an optimizer steps on this rank.

One function for each kind of layout returns names, local tensors and their boxes. A
wrong adapter cannot cause a wrong result: names and boxes are verified by the digests
of the initial weights, and tensors that cannot be verified are not compared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .kept import Box
from .parts import (
    UNNAMED,
    HiddenLayoutError,
    Part,
    bare,
    cuts,
    has_plain_bits,
    place,
    range_of,
)
from .roots import Roots, living
from .torch_internals import parameters_in

__all__ = ["copies_of", "find_copies", "fp32_range_of", "parts_of"]


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
    copied = {id(s): [(p, first)] for s, p, first in copies_of(roots)}
    for position, stepped in enumerate(own):
        local, box_of_stepped = place(stepped)
        viewed = copied.get(id(stepped))
        if viewed is None and roots.name_of(stepped) is None:
            viewed = _viewed_by(local, roots)
        for parameter, first in viewed or [(stepped, 0)]:
            name = roots.name_of(parameter) or f"{UNNAMED}{position}"
            whole = box_of_stepped if parameter is stepped else place(parameter)[1]
            for piece in roots.pieces(name, parameter, whole):
                for cut, box in cuts(local, first, piece):
                    number = numbers[piece.name]
                    numbers[piece.name] += 1
                    part = cut(local)[0]
                    yield Part(piece.name, part, box, stepped, cut, number)


def _viewed_by(local: Tensor, roots: Roots) -> list[tuple[Any, int]]:
    """Find the parameters in whose storage a tensor lies, as in a job's own ZeRO.

    Returns:
        Each parameter, and the position of the tensor's first element in it. The
        position is negative if the tensor begins before the parameter.
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


def find_copies(model: nn.Module, roots: Roots) -> None:
    """Find the tensors that optimizers step in place of a model's parameters.

    A job may step fp32 copies of 16-bit weights, and write the results back. Such a
    copy is in no module. Before the first step it has the values of its parameter, in
    the parameter's dtype. Parameters with equal values, such as zeros, have their
    copies in the order of the model.
    """
    optimizers = living(Optimizer)
    groups = [g for each in optimizers for g in getattr(each, "param_groups", ())]
    stepped = {id(p): p for group in groups for p in group["params"]}
    left = [p for p in model.parameters() if p.requires_grad and id(p) not in stepped]
    left = [p for p in left if fp32_range_of(p) is None]
    if not left or not stepped:
        return
    named = {id(p) for each in living(nn.Module) for p in parameters_in(each)}
    roots.learn(model)
    named |= {id(copy) for copy, _, _ in copies_of(roots)}
    for copy in (p for p in stepped.values() if id(p) not in named):
        parameter = next((p for p in left if _has_values_of(copy, p)), None)
        if parameter is not None:
            roots.copies.append((copy, parameter))
            left = [p for p in left if p is not parameter]


def _has_values_of(copy: Tensor, parameter: Tensor) -> bool:
    """Return True if a tensor, in the dtype of a parameter, has its values."""
    try:
        mine, its = place(copy)[0], place(parameter)[0]
    except HiddenLayoutError:
        return False
    if mine.numel() != its.numel() or not all(map(has_plain_bits, (mine, its))):
        return False
    flat, own = mine.reshape(-1), its.reshape(-1)
    # most tensors of one size already differ at their beginning
    some = slice(0, 64)
    return torch.equal(flat[some].to(own), own[some]) and torch.equal(flat.to(own), own)


def copies_of(roots: Roots) -> list[tuple[Tensor, Any, int]]:
    """Return the tensors that optimizers step in place of parameters.

    Returns:
        The copy, or this rank's range of it; the parameter; and the position of the
        first element in the flattened parameter.
    """
    own = [(copy, parameter, 0) for copy, parameter in roots.copies]
    return [*own, *_copies_of_megatron(roots)]


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
                    cut = partial(range_of, first=first, box=box)
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
        cut = partial(range_of, first=0, box=box)
        yield Part(name, weight, box, parameter, cut)


def _of_flat(flat: Any, roots: Roots) -> Iterator[Part]:
    prefix = roots.names[id(flat)].rpartition("_flat_param")[0]
    local = flat.detach()
    lists = (getattr(flat, n) for n in ("_fqns", "_shapes", "_shard_param_infos"))
    for name, shape, info in zip(*lists, strict=True):
        if info.in_shard:
            first, size = info.offset_in_shard, info.numel_in_shard
            box = Box(tuple(shape), (info.intra_param_start_idx,), (size,))
            cut = partial(range_of, first=first, box=box)
            yield Part(bare(f"{prefix}{name}"), cut(local)[0], box, flat, cut)


GROUPS = (
    ("model_float16_groups", "shard_float16_groups", "shard_fp32_from_float16_groups"),
    ("model_fp32_groups", "shard_fp32_groups", "shard_fp32_groups"),
)
"""Names of attributes of Megatron's distributed optimizer. Each row names three lists:
the parameters, this rank's range of each parameter, and the tensors stepped in their
place."""


def _copies_of_megatron(roots: Roots) -> list[tuple[Tensor, Any, int]]:
    """Find the tensors that Megatron's optimizers step; see ``copies_of``."""
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
