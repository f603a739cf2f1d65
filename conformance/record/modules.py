"""Modules: outputs of a model's blocks, and their gradients, in a job.

Each element is keyed by the digest of its row of the model's inputs and by its place in
that row. So numbers add up over micro-batches and over ranks, whichever rows these
have. A hook reads an output when its block returns it, and its gradient when backward
comes to it; neither is changed. The forward of a checkpoint that runs again in backward
is not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .kept import Box, Kept, keep_values
from .parts import WRAPPERS, bare, place
from .rows import MOST, tensors_in

__all__ = ["GRADIENT", "OUTPUT", "Blocks", "blocks_of", "is_traced"]

OUTPUT, GRADIENT = "output", "output-gradient"
COMPILED = "_orig_mod"
"""Name of the module that a compiled one wraps."""
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class _Noting(Protocol):
    def __call__(self, what: str, /) -> AbstractContextManager[None]: ...


def blocks_of(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of a model with their names, in the order of definition.

    Elements of lists are blocks, and so are modules beside the lists. Modules inside
    compiled code are not blocks, because their hooks would be compiled.
    """
    if _is_compiled_in_place(model):
        return
    for name, child in model.named_children():
        here = f"{path}.{name}" if path else name
        if _is_compiled_in_place(child):
            continue
        if isinstance(model, LISTS) or hasattr(child, COMPILED):
            yield here, child
        elif name in WRAPPERS or any(isinstance(m, LISTS) for m in child.modules()):
            yield from blocks_of(child, here)
        else:
            yield here, child


def _is_compiled_in_place(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


@dataclass
class Blocks:
    """Reads the blocks of one model in the steps that are recorded."""

    noting: _Noting
    kept: dict[tuple[int, str, str], tuple[Box, Kept]] = field(default_factory=dict)
    """(step, kind, name of a block) -> what is kept; a later call of a block in one
    forward has its number in the name."""
    rows: dict[int, list[Tensor]] = field(default_factory=dict)
    """Step -> digests of the rows of each call, by the model's first input."""
    _step: int = 0
    _rows: Tensor | None = None
    """(rows,) int64 digests while the model runs; None between its calls."""
    _calls: Counter[str] = field(default_factory=Counter)
    _handles: list[Any] = field(default_factory=list)

    def hook(self, model: nn.Module) -> None:
        """Read the blocks of a model from now on.

        Raises:
            ValueError: if none can be seen.
        """
        blocks = [] if hasattr(model, COMPILED) else [*blocks_of(model)]
        if not blocks:
            raise ValueError("the model is compiled as a whole, or has no blocks")
        for name, block in blocks:
            hook = partial(self._returns, bare(name))
            self._handles.append(block.register_forward_hook(hook))

    def remove(self) -> None:
        """Read these blocks no more."""
        for handle in self._handles:
            handle.remove()

    def begin(self, step: int, rows: list[Tensor]) -> None:
        """The model is called in a step, with these digests of its inputs' rows."""
        self._calls.clear()
        seen = rows[0] if rows and len(rows[0]) < MOST else None
        self._step, self._rows = step, seen
        if seen is not None:
            self.rows.setdefault(step, []).append(seen)

    def end(self) -> None:
        """The model returns."""
        self._rows = None

    def _returns(self, name: str, _: nn.Module, args: Any, output: Any) -> None:
        if self._rows is None or torch.compiler.is_compiling():
            return
        with self.noting("outputs of modules"):
            tensor = next(tensors_in(output), None)
            if tensor is None or not tensor.is_floating_point():
                return
            self._calls[name] += 1
            which = name
            if self._calls[name] > 1:
                which = f"{name} (call {self._calls[name]})"
            keep = partial(self._keep, self._step, which, self._rows)
            keep(OUTPUT, tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(keep, GRADIENT))

    def _keep(
        self, step: int, name: str, rows: Tensor, kind: str, tensor: Tensor
    ) -> None:
        with self.noting("outputs of modules"), torch.no_grad():
            part, box = place(tensor)
            tokens = box.shape[0] % len(rows) == 0 and len(box.shape) == 2
            if not part.numel() or (box.shape[0] != len(rows) and not tokens):
                return
            sums_here, key = keep_values(part, box, rows=rows), (step, kind, name)
            if key in self.kept:
                before, sums = self.kept[key]
                box, sums_here = _longer(before, box), sums.plus(sums_here)
            self.kept[key] = box, sums_here


def is_traced() -> bool:
    """True while a compiler looks at what modules do."""
    tracing: Any = torch.jit.is_tracing  # type: ignore[attr-defined]  # not listed
    return torch.compiler.is_compiling() or bool(tracing())


def _longer(one: Box, other: Box) -> Box:
    """The place of two parts whose rows follow each other."""
    shape = (one.shape[0] + other.shape[0], *one.shape[1:])
    local = (one.local[0] + other.local[0], *one.local[1:])
    return Box(shape, one.offsets, local, one.summand)
