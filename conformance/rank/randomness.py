"""Random layers: the numbers that they draw on a rank, and what these are applied to.

A draw is identified by the first tensor that its numbers are combined with. Ranks on
which that tensor is bitwise equal hold the same activation, whatever the layout, and
ranks on which it differs hold different ones. So no knowledge of placements is needed
to say which masks must be equal and which must differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from .observe import digest
from .torch_internals import (
    AsyncCollectiveTensor,
    Observer,
    arguments_of,
    in_backward,
    overload_of,
)
from .trace import Draw

__all__ = ["DrawLog"]

SAMPLE = 4096
"""Numbers of a draw that are looked at to say how random they are."""
VARIED = 64
"""Values of a tensor that are looked at to say whether it is like no other one."""
_WRAPPERS = {"module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_APPLIES = {"gather", "index", "index_select", "masked_fill_", "where"}
"""Calls that use numbers as dropout does, beside the pointwise ones: not a product of
matrices, since random matrices are parameters and not noise."""


class DrawLog(Observer):
    """Notes the random numbers that are drawn while it is active, in order.

    A dispatch mode sees every call of a random operator, torch's own layers and a
    user's functions alike, and below DTensor the numbers of this rank. Numbers drawn in
    backward count where gradients are enabled: that is a forward that runs again
    (activation checkpointing). Those of hooks and of optimizers are left out.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.draws: list[Draw] = []
        # storage -> (a tensor in it, kept so that its memory is not used again; the
        # draw that its values are made of, and of nothing else)
        self._pending: dict[int, tuple[Tensor, Draw]] = {}
        self._calls: list[nn.Module] = []
        self._hooks = ExitStack()

    def __enter__(self) -> Self:
        """Begin, and follow which modules are called."""
        before = register_module_forward_pre_hook(lambda m, _: self._calls.append(m))
        after = register_module_forward_hook(self._leave, always_call=True)
        self._hooks.callback(before.remove)
        self._hooks.callback(after.remove)
        super().__enter__()  # type: ignore[no-untyped-call]  # untyped in torch
        return self

    def __exit__(self, *error: Any) -> None:
        """End, and let go of the tensors."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # as above
        self._hooks.close()
        self._pending.clear()

    def _leave(self, module: nn.Module, *_: Any) -> None:
        # an exception that stops a recomputation may leave several at once
        while self._calls and self._calls.pop() is not module:
            pass

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; note what it draws, or what it does with numbers drawn."""
        if any(issubclass(t, DTensor | AsyncCollectiveTensor) for t in types):
            return NotImplemented  # its inner calls, on local tensors, come here
        kwargs = kwargs or {}
        if not set(types) <= {Tensor, nn.Parameter}:
            return func(*args, **kwargs)  # tensors without numbers: DTensor plans so
        if torch.Tag.nondeterministic_seeded in func.tags:
            return self._draw(func, args, kwargs)
        if self._pending:
            return self._use(func, args, kwargs)
        return func(*args, **kwargs)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        written, read = _written_and_read(func, args, kwargs)
        name = func.overloadpacket.__name__
        if name.endswith("_like") or overload_of(func) in ("p", "p_out"):
            read = []  # of these only the shape matters
        applied, varied = _applied(read)
        found = func(*args, **kwargs)
        # of several results, as of a fused dropout, the mask is the last
        drawn = written or [*_tensors(found)][-1:]
        if not drawn or not drawn[0].numel() or drawn[0].is_meta:
            return found
        recomputes = in_backward()
        # a hook or an optimizer in backward, and no forward that runs again
        if recomputes and not torch.is_grad_enabled():
            return found
        draw = Draw(
            module=self._path(),
            call=f"{name}{list(drawn[0].shape)}",
            numbers=digest(drawn[0]),
            bits=_bits(drawn[0]),
            recomputed=recomputes,
        )
        self.draws.append(draw)
        if read:
            draw.used, draw.applied, draw.varied = draw.numbers, applied, varied
            draw.by_row = _by_row(drawn[0], read[0])
        else:
            self._follow(drawn[0], draw)
        return found

    def _use(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = [*_tensors((args, kwargs))]
        numbers = [t for t in given if self._draw_of(t)]
        if not numbers:
            return func(*args, **kwargs)
        draw = self._draw_of(numbers[0])
        assert draw is not None
        name = func.overloadpacket.__name__
        # a factor for all numbers of a row, or for all of them, is no activation
        others = [
            t
            for t in given
            if not self._draw_of(t)
            and t.numel() >= numbers[0].numel()
            and name != "copy_"  # what it is written over does not matter
        ]
        if others and (torch.Tag.pointwise in func.tags or name in _APPLIES):
            draw.used = digest(numbers[0])
            draw.applied, draw.varied = _applied(others)
            draw.by_row = _by_row(numbers[0], others[0])
        # the numbers are used now: what is computed from them are no draws any more
        if others:
            kept = self._pending.items()
            self._pending = {k: v for k, v in kept if v[1] is not draw}
            return func(*args, **kwargs)
        found = func(*args, **kwargs)
        for tensor in (*_tensors(found), *_written_and_read(func, args, kwargs)[0]):
            self._follow(tensor, draw)
        return found

    def _follow(self, tensor: Tensor, draw: Draw) -> None:
        if tensor.numel() and not tensor.is_meta:
            # by storage, so that views of the numbers are followed, too
            self._pending[tensor.untyped_storage().data_ptr()] = tensor, draw

    def _draw_of(self, tensor: Tensor) -> Draw | None:
        if not self._pending or not tensor.numel() or tensor.layout != torch.strided:
            return None
        held = self._pending.get(tensor.untyped_storage().data_ptr())
        return held[1] if held else None

    def _path(self) -> str:
        """Name of the innermost module that is being called."""
        names: list[str] = []
        for outer, inner in zip(self._calls, self._calls[1:], strict=False):
            found = [n for n, m in outer.named_modules() if m is inner]
            names += found[0].split(".") if found else [type(inner).__name__]
        return ".".join(name for name in names if name not in _WRAPPERS)


def _written_and_read(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that a call writes into, and those whose values it takes."""
    written: list[Tensor] = []
    read: list[Tensor] = []
    declared = arguments_of(func)
    given = [*zip(declared, args, strict=False)]
    given += [(d, kwargs[d.name]) for d in declared if d.name in kwargs]
    for argument, value in given:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        (written if writes else read).extend(_tensors(value))
    return written, read


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors([*tree.values()])
    elif isinstance(tree, list | tuple):
        for branch in tree:
            yield from _tensors(branch)


def _applied(tensors: list[Tensor]) -> tuple[str, bool]:
    """Digest of what numbers are applied to, and whether that is like no other tensor.

    Heads of an attention that starts at zero, or zeros themselves, are equal by
    accident on ranks that hold different ones: they say nothing.
    """
    if not tensors:
        return "", False
    largest = max(tensors, key=Tensor.numel).detach()
    values = largest[largest != 0].reshape(-1)[:VARIED]
    # a third of the values differ, and at least three do
    varied = 3 * values.unique().numel() >= max(values.numel(), 8)
    return "-".join(map(digest, tensors)), varied


def _by_row(numbers: Tensor, other: Tensor) -> bool:
    """Whether each row has numbers of its own; else they are a parameter of a kind."""
    return numbers.ndim == other.ndim and numbers.shape[:1] == other.shape[:1]


def _bits(numbers: Tensor) -> float:
    """How many random bits there are in ``numbers``, at least: by their entropy."""
    sample = numbers.detach().reshape(-1)[:SAMPLE]
    counts = sample.unique(return_counts=True)[1].double() / sample.numel()
    return max(0.0, float(-(counts * counts.log2()).sum()) * sample.numel())
