"""Outputs of a model's blocks, and the gradients of these outputs.

Each element is identified by the digest of its row of the model's inputs, and by its
position in that row. So numbers add up over micro-batches and ranks, whichever rows
they have. Forward and backward hooks read outputs and gradients and change neither.
The recomputed forward of an activation checkpoint is not read.

A model may be called with the same rows again, such as by a pipeline that infers its
shapes: the last of these calls counts. A block whose output is the same for different
rows, such as a positional embedding, is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .kept import Box, Kept, keep_values
from .parts import WRAPPERS, bare, place
from .rows import MOST, tensors_in

__all__ = ["GRADIENT", "OUTPUT", "Blocks", "blocks_of", "is_traced"]

OUTPUT, GRADIENT = "output", "output-gradient"
COMPILED = "_orig_mod"
"""Attribute in which a compiled module keeps the original one."""
Key = tuple[int, str, str]
"""(step, kind, name of a block)."""
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


class _Noting(Protocol):
    def __call__(self, what: str, /) -> AbstractContextManager[None]: ...


def blocks_of(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks of a model with their names, in the order of definition.

    Blocks are the elements of module lists and, outside of lists, the outermost modules
    that contain no list. Modules inside compiled code are not blocks, because their
    hooks would be compiled.
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


@dataclass(frozen=True)
class _Batch:
    """Rows with which this rank calls the model."""

    rows: Tensor
    """(rows,) int64 digests."""
    size: int
    """Number of rows of the whole batch, which a DTensor shows."""
    first: int
    """Position of this rank's first row in the whole batch."""

    @classmethod
    def of(cls, rows: Tensor, inputs: Sequence[Any]) -> _Batch:
        """Create a batch; a DTensor input shows its whole size and position."""
        tensors = [t for each in inputs for t in tensors_in(each)]
        boxes = [place(t)[1] for t in tensors if hasattr(t, "to_local")]
        for box in boxes:
            if box.local[:1] == (len(rows),):
                return cls(rows, box.shape[0], box.offsets[0])
        return cls(rows, len(rows), 0)

    def of_rank(self, box: Box) -> Box | None:
        """Return where a part of an output lies in the output of this rank's rows.

        Dim 0 of an output has one element for each row. If it has two dims, dim 0 may
        instead have one element for each token of each row. Returns None if the part
        does not belong to these rows.
        """
        count = len(self.rows)
        if not box.shape:
            return None
        if box.local[0] == count:
            return _moved(box, count, 0)
        for size, first in ((self.size, self.first), (count, 0)):
            tokens, rest = divmod(box.shape[0], size)
            at = box.offsets[0] - tokens * first
            is_inside = 0 <= at and at + box.local[0] <= tokens * count
            if not rest and (tokens == 1 or len(box.shape) == 2) and is_inside:
                return _moved(box, tokens * count, at)
        return None


def _moved(box: Box, size: int, first: int) -> Box:
    """Return a box whose whole size and position in dim 0 are replaced."""
    shape, offsets = (size, *box.shape[1:]), (first, *box.offsets[1:])
    return Box(shape, offsets, box.local, box.summand)


@dataclass
class Blocks:
    """Hooks that read the outputs of a model's blocks in recorded steps."""

    noting: _Noting
    of_loss: Callable[[Tensor], Tensor] = lambda gradient: gradient
    """Function from a gradient in the backward pass to the gradient of the job's own
    loss."""
    kept: dict[Key, dict[int, tuple[Box, Kept]]] = field(default_factory=dict)
    """Box and numbers of each block's tensor, by key and by number of the model's call.
    A block called again in one forward has the number of that call in its name."""
    rows: dict[int, list[Tensor]] = field(default_factory=dict)
    """Step -> digests of the rows of the model's first input, for each call."""
    _step: int = 0
    _batch: _Batch | None = None
    """Batch of a running call of the model."""
    _calls: Counter[str] = field(default_factory=Counter)
    _handles: list[Any] = field(default_factory=list)

    def hook(self, model: nn.Module) -> None:
        """Begin to read the blocks of a model.

        Raises:
            ValueError: if the model is compiled as a whole or has no blocks.
        """
        blocks = [] if hasattr(model, COMPILED) else [*blocks_of(model)]
        if not blocks:
            raise ValueError("the model is compiled as a whole, or has no blocks")
        for name, block in blocks:
            hook = partial(self._returns, bare(name))
            self._handles.append(block.register_forward_hook(hook))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def begin(self, step: int, rows: list[Tensor], inputs: Sequence[Any] = ()) -> None:
        """Note a call of the model: its inputs and the digests of their rows.

        Outputs of a batch of ``MOST`` rows or more are not read.
        """
        self._calls.clear()
        self._step, self._batch = step, None
        if rows and len(rows[0]) < MOST:
            self._batch = _Batch.of(rows[0], inputs)
            self.rows.setdefault(step, []).append(rows[0])

    def end(self) -> None:
        """Note that the model has returned."""
        self._batch = None

    def _returns(self, name: str, _: nn.Module, args: Any, output: Any) -> None:
        if self._batch is None or torch.compiler.is_compiling():
            return
        with self.noting("outputs of modules"):
            tensor = next(tensors_in(output), None)
            if tensor is None or not tensor.is_floating_point():
                return
            self._calls[name] += 1
            which = name
            if self._calls[name] > 1:
                which = f"{name} (call {self._calls[name]})"
            call = len(self.rows[self._step]) - 1
            keep = partial(self._keep, self._step, which, call, self._batch)
            keep(OUTPUT, tensor)
            # hooks of a leaf, such as a parameter that is returned, would stay on it
            if tensor.requires_grad and not tensor.is_leaf:
                tensor.register_hook(lambda each: keep(GRADIENT, self.of_loss(each)))

    def _keep(
        self, step: int, name: str, call: int, batch: _Batch, kind: str, tensor: Tensor
    ) -> None:
        with self.noting("outputs of modules"), torch.no_grad():
            part, whole = place(tensor)
            box = batch.of_rank(whole)
            if not part.numel() or box is None:
                return
            sums_by_call = self.kept.setdefault((step, kind, name), {})
            sums_by_call[call] = box, keep_values(part, box, rows=batch.rows)

    def read(self) -> tuple[dict[int, list[Tensor]], dict[Key, tuple[Box, Kept]]]:
        """Add up the numbers of the model's calls in each step.

        Of several calls with the same rows only the last counts.

        Returns:
            Step -> digests of the rows of each call that counts; and (step, kind, name)
            -> box and numbers of a block's output, or of the output's gradient.
        """
        rows_by_step, sums_by_key = dict[int, list[Tensor]](), {}
        for step, rows in self.rows.items():
            last = {tuple(each.tolist()): call for call, each in enumerate(rows)}
            rows_by_step[step] = [rows[call] for call in last.values()]
            of_calls = {
                (kind, name): [calls[n] for n in last.values() if n in calls]
                for (at, kind, name), calls in self.kept.items()
                if at == step
            }
            for (kind, name), sums in of_calls.items():
                outputs = [kept for _, kept in of_calls.get((OUTPUT, name), ())]
                if sums and not _are_any_alike(outputs):
                    sums_by_key[step, kind, name] = reduce(_joined, sums)
        return rows_by_step, sums_by_key


def _are_any_alike(outputs: Sequence[Kept]) -> bool:
    """Return True if two outputs have equal elements that are not all zero.

    The sums of squares are compared, because they do not depend on the keys of rows.
    For different elements they would not agree in so many digits.
    """
    sizes = [kept.numbers.tolist() for kept in outputs]
    return any(one == other and any(one) for one, other in pairwise(sorted(sizes)))


def is_traced() -> bool:
    """Return True during compilation or tracing."""
    tracing: Any = torch.jit.is_tracing  # type: ignore[attr-defined]  # not listed
    return torch.compiler.is_compiling() or bool(tracing())


def _joined(one: tuple[Box, Kept], other: tuple[Box, Kept]) -> tuple[Box, Kept]:
    """Concatenate two parts along dim 0."""
    (before, sums), (box, more) = one, other
    shape = (before.shape[0] + box.shape[0], *before.shape[1:])
    local = (before.local[0] + box.local[0], *before.local[1:])
    return Box(shape, before.offsets, local, before.summand), sums.plus(more)
