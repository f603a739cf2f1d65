"""Record inputs and outputs of modules, and their gradients, in order.

One recorder serves both sides of a comparison. On a rank of the sharded run, a tensor
is recorded with its position in the whole tensor. In the reference on one process,
every tensor is whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MemberDescriptorType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...fixtures import Batch, local
from .local_parts import full_name
from .observe import CallLog, numbers_laid_out_as, partial_ranks
from .torch_internals import in_backward
from .trace import Collective

__all__ = [
    "INPUT",
    "INPUT_GRADIENT",
    "OUTPUT",
    "OUTPUT_GRADIENT",
    "Boundary",
    "Call",
    "ModuleLog",
    "Passed",
    "Watched",
    "is_whole",
    "module_names",
    "modules_in",
    "names_of",
    "watch_modules",
    "with_layers_beside",
]

INPUT, OUTPUT = "input", "output"
OUTPUT_GRADIENT, INPUT_GRADIENT = "gradient of its output", "gradient of its input"
DEPTH = 4
"""Depth to which attributes are searched for modules. Lightning's trainer has its model
as ``trainer.strategy.model``, and one more level holds the trainer."""
MAX_ELEMENTS = 2**26
"""Largest number of elements that a rank records in one step: 256 MiB in fp32. Further
tensors are counted as left out."""


Call = tuple[int, str, int]
"""(micro-batch, module, number of the call within this micro-batch)."""


@dataclass(frozen=True)
class Boundary:
    """Key of an input or output of a module; the same on ranks and in the reference."""

    micro_batch: int
    module: str
    """Name in the full model; empty for the model itself."""
    call: int
    """Number of the module's call within this micro-batch."""
    kind: str
    slot: int
    """Index among the floating-point inputs or outputs of the call."""

    @property
    def of(self) -> Call:
        """Call of the module that the tensor enters or leaves."""
        return self.micro_batch, self.module, self.call


@dataclass(frozen=True, kw_only=True)
class Passed:
    """Recorded input, output or gradient of a module."""

    values: NDArray[Any]
    """Local elements, in the local shape."""
    whole: tuple[int, ...] | None = None
    """Global shape of a DTensor; None for a plain tensor."""
    places: NDArray[np.int64] | None = None
    """For a DTensor: position of each local element in the flat whole tensor."""
    summed_over: tuple[int, ...] = ()
    """For a DTensor: ranks whose values must still be added up."""
    divided_by: int = 1
    """Divisor of the sum over ``summed_over``: more than 1 for a partial mean."""
    collectives: int = 0
    """Number of collectives that this rank had issued in this step before the tensor
    was recorded."""
    after: int = 0
    """Number of ``optimizer.step`` calls in this training step before the tensor was
    recorded."""
    dtype: torch.dtype = torch.float32
    """Dtype in which the tensor was computed."""


@dataclass(kw_only=True)
class ModuleLog:
    """Recorded tensors of one rank in one step, in order."""

    passed: dict[Boundary, Passed] = field(default_factory=dict)
    inside: dict[Call, Call] = field(default_factory=dict)
    """Call of a module -> call of the enclosing module, which made it."""
    collectives: list[Collective] = field(default_factory=list)
    left_out: int = 0
    """Number of tensors beyond the limit of recorded elements."""
    modules: int = 0
    """Number of recorded modules; 0 if the workload's object has none."""
    rows: list[list[int]] = field(default_factory=list)
    """For each outermost module: number of rows in each of its calls."""
    unpaired: str = ""
    """Reason why calls cannot be matched with rows; else empty."""

    def without_calls(self, dropped: Collection[int]) -> None:
        """Drop the outermost calls with these numbers and renumber the others."""
        self.passed = {
            replace(
                b, micro_batch=b.micro_batch - sum(n < b.micro_batch for n in dropped)
            ): passed
            for b, passed in self.passed.items()
            if b.micro_batch not in dropped
        }

    def last_collective(self, boundary: Boundary) -> str:
        """Return the last collective before a tensor was recorded, as text."""
        count = self.passed[boundary].collectives
        return str(self.collectives[count - 1]) if count else "none"


@dataclass(kw_only=True)
class Watched:
    """A rank's record of one step with hooks on its modules."""

    rank: int
    coordinate: dict[str, int]
    index: Mapping[str, NDArray[np.int64]]
    """Parameter -> position of each local element in the flat full tensor."""
    rows: str
    """Text that identifies the rank's rows; equal on ranks with the same rows."""
    log: ModuleLog
    batches: list[Batch]
    """Micro-batches of this rank."""


def is_whole(module: nn.Module, name: str, model: nn.Module) -> bool:
    """Return True if a module has all submodules that it has in the full model.

    A pipeline stage has only some of them.
    """
    twin = model.get_submodule(name)
    mine = {full_name(n, module_names(twin)) for n, _ in module.named_modules()}
    return mine >= module_names(twin)


def modules_in(stack: object) -> list[nn.Module]:
    """Return the outermost modules in an object, such as an engine or a trainer.

    Args:
        stack: result of ``parallelize``. Its attributes are searched recursively, with
            the contents of lists and dicts.

    Returns:
        The modules; empty if none is found.
    """
    modules: dict[int, nn.Module] = {}
    seen: set[int] = set()
    level: list[Any] = [stack]
    for _ in range(DEPTH):
        below: list[Any] = []
        for each in level:
            if id(each) in seen:
                continue
            seen.add(id(each))
            if isinstance(each, nn.Module):
                modules[id(each)] = each
            elif isinstance(each, Mapping):
                below.extend(each.values())
            elif isinstance(each, list | tuple | set):
                below.extend(each)
            elif not isinstance(each, Tensor | type):
                below.extend(getattr(each, "__dict__", {}).values())
                below.extend(_slots_of(each))
        level = below
    parts = {id(p) for m in modules.values() for p in m.modules() if p is not m}
    return [module for key, module in modules.items() if key not in parts]


def _slots_of(value: object) -> Iterator[Any]:
    """Yield the values of an object's ``__slots__``."""
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if isinstance(base.__dict__.get(name), MemberDescriptorType):
                with suppress(AttributeError):  # not set
                    yield getattr(value, name)


def module_names(module: nn.Module) -> set[str]:
    """Return the names of all modules in a module, including itself ("")."""
    return {name for name, _ in module.named_modules()}


def names_of(
    root: nn.Module, whole: Set[str], parameters: Mapping[str, Tensor]
) -> dict[nn.Module, str]:
    """Return module of the laid-out model -> its name in the full model.

    A module is identified by the names of its parameters, because a pipeline stage may
    number its layers from 0 again. A module without parameters is identified by its
    name or its children.

    Args:
        root: root of the laid-out model.
        whole: names of the modules of the full model.
        parameters: name in the full model -> laid-out parameter.
    """
    # a stack may report weights as new tensors that share the parameters' memory
    module_by_memory = {
        _memory(p): name.rpartition(".")[0] for name, p in parameters.items()
    }
    local_names = {name: m for name, m in root.named_modules()}
    name_by_module: dict[str, str] = {}
    for name, module in local_names.items():
        owners = {
            module_by_memory[_memory(p)]
            for p in module.parameters(recurse=False)
            if module_by_memory.get(_memory(p)) in whole
        }
        if len(owners) == 1:
            name_by_module[name] = owners.pop()
    # a stage that numbers its layers from 0 uses names of other layers
    renamed = any(full_name(n, whole) != f for n, f in name_by_module.items())
    for name in reversed(local_names):  # children first
        if name in name_by_module:
            continue
        if not renamed:
            plain = full_name(name, whole)
            if plain in whole:
                name_by_module[name] = plain
            continue
        prefix = f"{name}." if name else ""
        parents = {
            name_by_module[prefix + child].removesuffix(child).removesuffix(".")
            for child, _ in local_names[name].named_children()
            if prefix + child in name_by_module
            and name_by_module[prefix + child].endswith(f".{child}")
        }
        if len(parents) == 1 and parents <= whole:
            name_by_module[name] = parents.pop()
    # a wrapper and the module inside have one name: count the module inside
    inner = {full: name for name, full in name_by_module.items()}
    for name, full in name_by_module.items():
        if len(name) > len(inner[full]):
            inner[full] = name
    return {local_names[name]: full for full, name in inner.items()}


def with_layers_beside(
    root: nn.Module, names: Mapping[nn.Module, str], whole: Set[str]
) -> dict[nn.Module, str]:
    """Add modules that :func:`names_of` could not name, and return all names.

    Such modules have no parameters, in a stage that numbers its layers from 0. The
    name of the parent, or the numbers of neighbours, give the name in the full model.
    """
    local_names = dict(root.named_modules())
    full_by_name = {n: names[m] for n, m in local_names.items() if m in names}
    for name in local_names:  # parents first
        parent, _, last = name.rpartition(".")
        if name in full_by_name:
            continue
        if parent in full_by_name:
            suggested = {f"{full_by_name[parent]}.{last}".strip(".")}
        else:
            suggested = _by_neighbours(parent, last, full_by_name)
        if len(suggested) == 1 and suggested <= whole - {*full_by_name.values()}:
            full_by_name[name] = suggested.pop()
    return {local_names[name]: full for name, full in full_by_name.items()}


def _by_neighbours(
    parent: str, number: str, full_by_name: Mapping[str, str]
) -> set[str]:
    """Return full-model names of a numbered module, counted from its siblings.

    If sibling 0 is ``blocks.4`` in the full model, module 2 is ``blocks.6``.
    """
    names = set()
    for other, full in full_by_name.items():
        place, _, at = other.rpartition(".")
        above, _, full_at = full.rpartition(".")
        if place == parent and number.isdecimal() and at.isdecimal():
            if full_at.isdecimal():
                moved = int(number) + int(full_at) - int(at)
                names.add(f"{above}.{moved}".strip("."))
    return names


def _memory(tensor: Tensor) -> tuple[int, int]:
    part = local(tensor.detach())
    # empty tensors all have the null pointer
    return (part.data_ptr(), part.numel()) if part.numel() else (id(tensor), 0)


@contextmanager
def watch_modules(
    roots: Sequence[nn.Module],
    names: Mapping[nn.Module, str],
    calls: CallLog | None = None,
) -> Iterator[ModuleLog]:
    """Record inputs and outputs of modules, and their gradients.

    Args:
        roots: outermost modules. Each call that is inside no other call begins a
            micro-batch: a call of a root, of the module that it wraps, or of a stage.
        names: module to record -> its name in the full model.
        calls: active log of collectives, if any.
    """
    watch = _Watch(calls)
    with ExitStack() as hooks:
        hooks.callback(register_optimizer_step_post_hook(watch.step).remove)
        for module in dict.fromkeys(m for root in roots for m in root.modules()):
            # of modules without a name, only those that enclose others matter
            if any(inner in names for inner in module.modules()):
                for added in watch.hook(module, names.get(module)):
                    hooks.callback(added.remove)
        try:
            yield watch.log
        finally:
            watch.end()


class _Watch:
    """Hooks and state while one step is recorded."""

    def __init__(self, calls: CallLog | None) -> None:
        self.log = ModuleLog()
        self.calls = calls
        self.room = MAX_ELEMENTS
        self.stepped = 0
        self.calls_of: dict[nn.Module, list[int]] = {}
        """Outermost module -> number of rows in each of its calls."""
        self.depth = 0
        self.micro_batch = 0
        self.counts: Counter[Call] = Counter()
        self.open: list[tuple[nn.Module, Call]] = []
        self.first: int | None = None
        """Number of collectives before the first forward, which belong to no pass."""
        self.places: dict[Any, NDArray[np.int64]] = {}

    def end(self) -> None:
        if self.calls is not None and self.first is not None:
            self.log.collectives = self.calls.collectives[self.first :]
        self.log.rows = list(self.calls_of.values())
        if self.log.modules and not self.log.rows:
            self.log.unpaired = "no call of its modules was seen: they are compiled as "
            self.log.unpaired += "a whole, or called by other means"

    def step(self, *_: Any) -> None:
        self.stepped += 1

    def hook(self, module: nn.Module, name: str | None) -> list[Any]:
        begin = module.register_forward_pre_hook(
            self._begin, prepend=True, with_kwargs=True
        )
        handles: list[Any] = [begin]
        if name is not None:
            self.log.modules += 1
            # registered after the hooks of the layout, to see inputs after these have
            # cast and laid them out, and outputs, too
            enter, leave = partial(self._enter, name), partial(self._leave, name)
            handles += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, with_kwargs=True),
            ]
        # always_call: if forward raises, depth must still return to 0
        return [*handles, module.register_forward_hook(self._end, always_call=True)]

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._ignored():
            return
        if self.depth == 0:
            self.open.clear()
            shapes = [t.shape for t in _tensors((args, kwargs))]
            rows = self.calls_of.setdefault(module, [])
            self.micro_batch = len(rows)
            rows.append(shapes[0][0] if shapes and shapes[0] else 0)
            if self.first is None and self.calls is not None:
                self.first = len(self.calls.collectives)
        self.depth += 1

    def _end(self, *_: Any) -> None:
        if not self._ignored():
            self.depth -= 1

    def _ignored(self) -> bool:
        # While Dynamo traces a module, a hook must add nothing to the graph. A forward
        # during backward is a recomputation, which was recorded before.
        return (
            torch.compiler.is_compiling()
            or in_backward()
            or not torch.is_grad_enabled()
        )

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._ignored():
            return None
        micro_batch = self.micro_batch
        number = self.counts[micro_batch, name, 0]
        self.counts[micro_batch, name, 0] += 1
        call = (micro_batch, name, number)
        if self.open:
            self.log.inside[call] = self.open[-1][1]
        self.open.append((module, call))
        slots = iter(range(2**30))
        seen: dict[int, Tensor] = {}

        def see(tensor: Tensor) -> Tensor:
            boundary = Boundary(micro_batch, name, number, INPUT, next(slots))
            # attention takes another path if its three inputs are one tensor
            if id(tensor) in seen:
                return seen[id(tensor)]
            self._keep(boundary, tensor)
            own = tensor
            if tensor.requires_grad:
                # Each module gets a view, so that gradients which other modules add
                # stay out. Sums then round differently, so no check uses a watched
                # run.
                own = tensor.view_as(tensor)
                self._on_gradient(own, boundary, INPUT_GRADIENT)
            seen[id(tensor)] = own
            return own

        return _changed(args, see), _changed(kwargs, see)

    def _leave(
        self,
        name: str,
        module: nn.Module,
        _args: Any,
        _kwargs: Any,
        output: Any,
    ) -> None:
        if self._ignored():
            return
        # drop calls that raised: they have no end
        while self.open:
            entered, (micro_batch, _, number) = self.open.pop()
            if entered is module:
                break
        else:
            return
        floating = (t for t in _tensors(output) if t.is_floating_point())
        for slot, tensor in enumerate(floating):
            boundary = Boundary(micro_batch, name, number, OUTPUT, slot)
            self._keep(boundary, tensor)
            if tensor.requires_grad:
                self._on_gradient(tensor, boundary, OUTPUT_GRADIENT)

    def _on_gradient(self, tensor: Tensor, at: Boundary, kind: str) -> None:
        boundary = Boundary(at.micro_batch, at.module, at.call, kind, at.slot)

        def keep(gradient: Tensor) -> None:
            before = self.log.passed.get(boundary)
            self._keep(boundary, gradient)
            now = self.log.passed.get(boundary)
            # several losses have one graph and several backward passes
            if before is not None and now is not None and now is not before:
                total = replace(now, values=before.values + now.values)
                self.log.passed[boundary] = total

        tensor.register_hook(keep)

    def _keep(self, boundary: Boundary, tensor: Tensor) -> None:
        with torch.no_grad():
            part = local(tensor.detach()).clone()
            self.room -= part.numel()
            if self.room < 0:
                self.log.left_out += 1
                return
            # numpy has no bf16
            wide = part.double() if part.dtype == torch.float64 else part.float()
            layout: dict[str, Any] = {}
            if isinstance(tensor, DTensor):
                layout["whole"] = tuple(tensor.shape)
                layout["places"] = self._laid_out_as(tensor)
                layout["summed_over"], layout["divided_by"] = partial_ranks(tensor)
        issued = len(self.calls.collectives) - (self.first or 0) if self.calls else 0
        self.log.passed[boundary] = Passed(
            values=wide.cpu().numpy(),
            collectives=issued,
            after=self.stepped,
            dtype=part.dtype,
            **layout,
        )

    def _laid_out_as(self, tensor: DTensor) -> NDArray[np.int64]:
        key = (tensor.device_mesh, tensor.placements, tensor.shape)
        if key not in self.places:
            self.places[key] = numbers_laid_out_as(tensor)
        return self.places[key]


def _changed(tree: Any, change: Any) -> Any:
    """Apply ``change`` to the floating-point tensors in ``tree``."""
    if isinstance(tree, Tensor):
        return change(tree) if tree.is_floating_point() else tree
    if type(tree) in (tuple, list):
        return type(tree)(_changed(branch, change) for branch in tree)
    if type(tree) is dict:
        return {key: _changed(branch, change) for key, branch in tree.items()}
    return tree


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output, also of a dataclass that is a mapping."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for branch in tree.values():
            yield from _tensors(branch)
    elif isinstance(tree, tuple | list):
        for branch in tree:
            yield from _tensors(branch)
