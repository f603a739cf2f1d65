"""Activation checkpointing: recompute parts of a model's forward in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...fixtures import CannotError, local

__all__ = ["Recomputed", "recompute_in_backward"]

_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)


def _nothing(_: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(kw_only=True)
class Recomputed:
    """Recomputed parts of one model."""

    parts: dict[str, nn.Module]
    """Name in the full model -> recomputed part."""
    again: int = 0
    """Number of recomputed forwards."""
    around: Callable[[nn.Module], AbstractContextManager[None]] = _nothing
    """Context of every forward of a part, the first one and recomputed ones: the part's
    own hooks run only in the first."""

    def add(self, name: str, part: nn.Module) -> None:
        """Make one part drop its activations and recompute them in backward."""
        # any other method is the wrapper of another library
        if "forward" not in vars(part):
            self.parts[name] = part
            part.forward = MethodType(_checkpointed(type(part), self), part)


def recompute_in_backward(model: nn.Module) -> Recomputed:
    """Make the parts of a model drop their activations and recompute in backward.

    Parts are the members of each ``ModuleList``, ``ModuleDict`` and ``Sequential``, and
    elsewhere the largest modules that contain none of these. A module without
    parameters is not recomputed. Only the ``forward`` of a part is replaced: names,
    types and hooks stay, so that any layout can follow. The hooks of a part then run
    outside of the recomputation, as in ``fully_shard(checkpoint(block))``.

    Args:
        model: model before ``parallelize``.

    Returns:
        The parts, with a count of recomputed forwards.
    """
    counted, parts = Recomputed(parts={}), {*_parts(model)}
    for name, module in model.named_modules():
        if module in parts:
            counted.add(name, module)
    return counted


def _checkpointed(kind: type[nn.Module], counted: Recomputed) -> Any:
    # A method, which a deep copy binds to the copy. It reads the class in each call,
    # because fully_shard replaces the class.
    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # a part that the user compiles is not recomputed
        if torch.compiler.is_compiling():
            return type(self).forward(self, *args, **kwargs)
        runs, weights = 0, [(p, local(p).detach().clone()) for p in self.parameters()]

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal runs
            counted.again += runs > 0
            if runs and _are_others(self, weights):
                raise CannotError(SWAPPED)
            runs += 1
            with counted.around(self):
                return type(self).forward(self, *args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    return forward


SWAPPED = (
    "a part has other parameters when it runs again in backward than in forward, as "
    "with torch.func.functional_call. Activation checkpointing needs the same ones"
)


def _are_others(part: nn.Module, weights: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Return True if new tensors with other values have replaced the parameters.

    A parameter that was written since the forward still counts as the same: writing it
    is a fault of the user's code.
    """
    # not strict, because a layout may then hold the parameters in another form
    for now, (was, value) in zip(part.parameters(), weights, strict=False):
        here = local(now).detach()
        same_form = (here.shape, here.dtype) == (value.shape, value.dtype)
        if now is not was and same_form and not torch.equal(here, value):
            return True
    return False


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if not any(True for _ in child.parameters()):
            continue
        member = isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS)
        if member or not any(isinstance(m, _CONTAINERS) for m in child.modules()):
            yield child
        else:
            yield from _parts(child)
