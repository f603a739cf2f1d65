"""Change the rounding errors of backward passes, to measure the noise of their sums.

Runs with slightly moved weights do not show all of this noise. The gradient of a bias
is a sum over rows. If the loss is piecewise linear (L1, WGAN), the summands do not
depend on the weights, and all runs make the same rounding errors. If the summands also
cancel, only these errors are left. So some nudged runs

- multiply the loss by ``FACTOR``, which is not a power of two, and divide the gradient
  of each leaf by ``FACTOR``: all sums get different rounding errors;
- move each element of the gradients of a model's outputs up to the next fp32 or fp64
  number: a sum whose summands cancel then changes by about its rounding errors.

Jobs of several processes skip this: pipeline stages send gradients to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from .parts import has_plain_bits
from .rows import tensors_in
from .torch_internals import register_first

__all__ = ["Rounding"]

FACTOR = 255 / 256
"""Factor of the loss, exact in bf16. It is near 1, because the job may read
gradients that contain it: hooks may clip them, and an fp16 scaler skips on overflow."""


class Rounding:
    """Changes the rounding errors of backward passes from ``install`` to ``remove``."""

    def __init__(self, noting: Callable[[str], AbstractContextManager[None]]) -> None:
        """Keep torch's own backward function, for ``remove``.

        Args:
            noting: takes the name of an action and returns a context manager, which
                notes an error of the action and lets the job go on.
        """
        self.noting = noting
        self.passes = torch.autograd.backward
        """Torch's own function."""
        self.depth = 0
        """Number of nested passes: checkpointing may start one inside another."""

    def install(self) -> None:
        """Replace ``torch.autograd.backward``, which ``Tensor.backward`` calls."""

        @wraps(self.passes)
        def backward(
            tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            roots = tensors
            if not isinstance(tensors, Tensor | GradientEdge):
                tensors = roots = tuple(tensors)  # it may be read only once
            with ExitStack() as stack:
                self.depth += 1
                stack.callback(self._leave)
                if _is_alone():
                    with self.noting("the rounding of a backward pass"):
                        roots = (roots,) if isinstance(roots, Tensor) else roots
                        grad_tensors = self._rounded(stack, roots, grad_tensors)
                return self.passes(tensors, grad_tensors, *args, **kwargs)

        torch.autograd.backward = backward

    def remove(self) -> None:
        """Put torch's function back."""
        torch.autograd.backward = self.passes

    def see(self, output: Any) -> None:
        """Register hooks that move gradients of these outputs up to the next number."""
        if not _is_alone():
            return
        with self.noting("the rounding of the gradient of an output"):
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.register_hook(_up)

    def of_loss(self, gradient: Tensor) -> Tensor:
        """Divide a gradient by ``FACTOR`` during a pass; else return it unchanged."""
        return gradient / FACTOR if self.depth and _is_alone() else gradient

    def _leave(self) -> None:
        self.depth -= 1

    def _rounded(self, stack: ExitStack, roots: Any, grads: Any) -> Any:
        """Multiply root gradients by ``FACTOR``; hooks divide leaf gradients by it."""
        if not all(isinstance(root, Tensor) for root in roots):
            return grads  # edges of a graph
        is_inner = self.depth > 1
        leaves = [
            leaf
            for leaf in _leaves(roots)
            # the job may have frozen a leaf since its forward
            if leaf.requires_grad
            # an inner pass hands gradients of other leaves back to the outer one
            and (isinstance(leaf, nn.Parameter) or not is_inner)
        ]
        with ExitStack() as own:  # after an error no gradient is divided
            for leaf in leaves:
                own.callback(register_first(leaf, _divided).remove)
            stack.push(own.pop_all())
        if not is_inner:  # the gradients of an inner pass are multiplied already
            if grads is None or isinstance(grads, Tensor):
                grads = [grads] * len(roots)
            grads = [
                _multiplied(root, grad) for root, grad in zip(roots, grads, strict=True)
            ]
        return grads


def _is_alone() -> bool:
    return not dist.is_initialized() or dist.get_world_size() == 1


def _multiplied(root: Tensor, grad: Tensor | None) -> Tensor | None:
    if grad is not None:
        return grad * FACTOR
    # torch raises an error for a root of several elements
    return torch.full_like(root, FACTOR) if root.numel() == 1 else None


def _divided(gradient: Tensor) -> Tensor:
    return gradient / FACTOR


def _up(gradient: Tensor) -> Tensor:
    """Move each element up to the next number; zeros stay.

    16-bit gradients stay unchanged: the next number is further than a rounding error.
    """
    is_real = gradient.is_floating_point() and has_plain_bits(gradient)
    if not is_real or gradient.element_size() < 4:
        return gradient
    with torch.no_grad():
        up = torch.nextafter(gradient, gradient.new_tensor(torch.inf))
        distance = torch.where(gradient == 0, 0.0, up - gradient)
    return gradient + distance  # which may be differentiated again


def _leaves(roots: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield each leaf that a backward pass from these roots reaches, once."""
    seen = {root.grad_fn for root in roots if root.grad_fn is not None}
    left = [*seen]
    while left:
        node: Any = left.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
