"""Parts: what a rank holds of each parameter and gradient that an optimizer steps.

One function a kind of layout; each gives the name, the local tensors and their boxes. A
wrong adapter does no harm: names and places are proved by the digests of the start, and
what is not proved is not compared.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from .kept import Box

__all__ = [
    "Part",
    "Roots",
    "bare",
    "fp32_range_of",
    "parts_of",
    "place",
    "trains",
]

WRAPPERS = frozenset(
    {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)
"""Parts of names that wrappers add: DDP, compile, FSDP1, activation checkpointing."""


Places = Callable[[str, nn.Parameter], tuple[str, Sequence[int], Sequence[int]] | None]
"""(name, parameter) -> its name in the whole model, the shape of the whole tensor, and
the place of its first element there; None: as it looks."""


@dataclass(frozen=True)
class Part:
    """Elements of one parameter on this rank."""

    name: str
    weight: Tensor
    """Local elements; a view of what the optimizer steps."""
    box: Box
    parameter: Any
    """Parameter of the model."""
    stepped: Any
    """Tensor in the optimizer's param group: the parameter, or a flat tensor that it is
    a range of."""
    gradient: Callable[[], tuple[Tensor, Box] | None]
    """The local gradient that the optimizer is about to use, with its place."""


def place(tensor: Tensor) -> tuple[Tensor, Box]:
    """The local elements of a tensor or DTensor, and where they lie.

    Nothing is sent: a DTensor that is partial or sharded stays as it is.
    """
    # without this module, whose import takes long, there is no DTensor
    sharded = sys.modules.get("torch.distributed.tensor")
    if sharded is None or not isinstance(tensor, sharded.DTensor):
        return tensor.detach(), _whole(tuple(tensor.shape))
    with torch.no_grad():
        mesh, placements = tensor.device_mesh, tensor.placements
        local = tensor.to_local().detach()
        sums = [dim for dim, p in enumerate(placements) if p.is_partial()]
        if sums:  # its offsets are those of the replicated tensor
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
        return local, Box(
            shape,
            tuple(chunk.offsets) if local.numel() else (0,) * len(shape),
            tuple(local.shape),
            tuple(mesh.get_local_rank(dim) for dim in sums),
        )


@lru_cache(maxsize=100_000)  # each step asks for the same seven times
def _whole(shape: tuple[int, ...]) -> Box:
    """The place of a tensor that is held whole."""
    return Box(shape, (0,) * len(shape), shape)


class Roots:
    """Modules that no other module holds, and the names of their parameters.

    Found once in a scan of all objects: an optimizer does not know the names of what it
    steps. Scanned again when an optimizer comes with unknown parameters.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.names: dict[int, str] = {}
        """id of a parameter -> its name, without the names of wrappers."""
        self.kept: list[nn.Parameter] = []
        """The parameters: an id is that of a living object."""
        self.places: Places | None = None
        """Declares what no tensor shows: layouts made by hand, stages, experts."""

    def add(self, module: nn.Module) -> None:
        """Name the parameters of a module."""
        self.modules.append(module)
        for name, parameter in module.named_parameters():
            self.names[id(parameter)] = bare(name)
            self.kept.append(parameter)

    def find(self, wanted: Iterable[Tensor]) -> None:
        """Name these parameters, where a module has them."""
        if all(id(p) in self.names for p in wanted):
            return
        # not isinstance: a lazy proxy would be made
        modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
        children = {
            id(child) for m in modules for child in m.__dict__["_modules"].values()
        }
        roots = [m for m in modules if id(m) not in children and trains(m)]
        self.modules = []
        for module in sorted(roots, key=_count):  # the largest one names last
            self.add(module)

    def place(self, name: str, parameter: Any) -> tuple[str, Tensor, Box]:
        """Name, local elements and place of a parameter, as declared or as it looks."""
        local, box = place(parameter)
        declared = None if self.places is None else self.places(name, parameter)
        if declared is None:
            return name, local, box
        name, shape, offsets = declared
        return name, local, Box(tuple(shape), tuple(offsets), tuple(local.shape))

    def unstepped(self, stepped: Iterable[str]) -> list[str]:
        """Names of parameters that require a gradient and that no optimizer steps."""
        named = (item for m in self.modules for item in m.named_parameters())
        names = (self.place(bare(name), p)[0] for name, p in named if p.requires_grad)
        return sorted({*names}.difference(stepped))


def trains(module: nn.Module) -> bool:
    """Return True for a module with parameters that require a gradient."""
    return any(p.requires_grad for p in module.parameters())


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def bare(name: str) -> str:
    """The name of a parameter without the names of wrappers."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def parts_of(optimizer: Any, roots: Roots) -> Iterator[Part]:
    """Yield the parts that an optimizer steps on this rank, with names."""
    own = [p for group in optimizer.param_groups for p in group["params"]]
    roots.find(own)
    for adapter in (_of_deepspeed, _of_fsdp1):
        adapted = list(adapter(own, roots))
        if adapted:
            yield from adapted
            return
    for parameter in own:
        name = roots.names.get(id(parameter))
        if name is not None:
            name, weight, box = roots.place(name, parameter)
            gradient = _gradient_of(parameter, box)
            yield Part(name, weight, box, parameter, parameter, gradient)


def _gradient_of(parameter: Any, box: Box) -> Callable[[], tuple[Tensor, Box] | None]:
    def gradient() -> tuple[Tensor, Box] | None:
        if parameter.grad is None:
            return None
        local, own = place(parameter.grad)
        # a plain gradient lies as its weight does, which may be declared
        return local, own if own.shape == box.shape else box

    return gradient


# - Layouts that hide parameters in flat tensors; their attributes are not public


def _of_deepspeed(own: Sequence[Any], roots: Roots) -> Iterator[Part]:
    """ZeRO 1 to 3: ranges of the flat fp32 tensors that the optimizer steps."""
    for module in roots.modules:
        for name, parameter in module.named_parameters():
            range_of_parameter = fp32_range_of(parameter)
            if range_of_parameter is None:
                continue
            fragment, box = range_of_parameter
            for flat in own:
                # the fragment is a view of it
                first = (fragment.data_ptr() - flat.data_ptr()) // flat.element_size()
                if 0 <= first < flat.numel():
                    ranged = _range_of(flat, first, fragment.numel(), box)
                    yield Part(bare(name), fragment, box, parameter, flat, ranged)


def fp32_range_of(parameter: Any) -> tuple[Tensor, Box] | None:
    """The fp32 elements that this rank steps of a parameter of DeepSpeed, if any."""
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is not None:  # ZeRO 1 and 2
        start, shape = mapping.lp_fragment_address.start, tuple(parameter.shape)
        fragment = mapping.hp_fragment.detach().reshape(-1)
    elif (engine := getattr(parameter, "_z3_optimizer", None)) is not None:
        part = parameter.partition_numel()
        position = engine.grad_position.get(engine.get_param_id(parameter))
        if position is None:  # it does not train
            return None
        group, offset, _ = position
        shape = tuple(parameter.ds_shape)
        start = part * parameter.ds_process_group.rank()
        size = min(part, max(0, math.prod(shape) - start))  # the last one is padded
        flat = engine.fp32_partitioned_groups_flat[group].detach()
        start, fragment = min(start, math.prod(shape)), flat.narrow(0, offset, size)
    else:
        return None
    return fragment, Box(shape, (start,), (fragment.numel(),))


def _range_of(
    flat: Any, first: int, size: int, box: Box
) -> Callable[[], tuple[Tensor, Box] | None]:
    return lambda: (
        None if flat.grad is None else (flat.grad.narrow(0, first, size), box)
    )


def _of_fsdp1(own: Sequence[Any], roots: Roots) -> Iterator[Part]:
    """FSDP1 with original parameters: views of a range of a flat tensor."""
    infos: dict[int, tuple[Any, tuple[int, ...]]] = {}
    for module in {m for root in roots.modules for m in root.modules()}:
        handle = getattr(module, "_handle", None)
        flat = getattr(handle, "flat_param", None)
        for parameter, info, shape in zip(
            getattr(flat, "_params", None) or (),
            getattr(flat, "_shard_param_infos", ()),
            getattr(flat, "_shapes", ()),
            strict=False,
        ):
            infos[id(parameter)] = info, tuple(shape)
    for parameter in own if infos else ():
        name = roots.names.get(id(parameter))
        if name is None or id(parameter) not in infos:
            continue
        info, shape = infos[id(parameter)]
        weight = parameter.detach().reshape(-1)
        start = info.intra_param_start_idx if info.in_shard else 0
        box = Box(shape, (start,), (weight.numel(),))
        gradient = _flat_gradient_of(parameter, box)
        yield Part(name, weight, box, parameter, parameter, gradient)


def _flat_gradient_of(
    parameter: Any, box: Box
) -> Callable[[], tuple[Tensor, Box] | None]:
    def gradient() -> tuple[Tensor, Box] | None:
        grad = parameter.grad
        return None if grad is None else (grad.detach().reshape(-1), box)

    return gradient
