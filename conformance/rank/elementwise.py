"""Optimizers that use whole matrices: which parameters have one, and their noise.

An elementwise optimizer (SGD, Adam) computes the update of an element from that element
alone, so rounding in a gradient stays in its element. Muon and similar optimizers make
a matrix orthogonal: every element of the update depends on the whole gradient, and they
compute in half precision for any dtype of the parameters. The distance of correct runs
is then measured by rounding the optimizer's own operations differently.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...fixtures import judged_parameters, resolve_workload
from .torch_internals import TorchDispatchMode, makes_view

__all__ = ["HalfNoise", "not_elementwise"]

STEPS = 4
"""Steps of the probe. SOAP only prepares in its first one; the third uses what the
second has left in the state, the fourth what a use of that has."""
EQUAL = 1e-9
"""Relative difference in fp64 up to which two updates are the same. Elementwise
operations on permuted elements differ by a few units of 2^-53, where vectors end
elsewhere; a sum over the matrix changes the update by its own size."""


@cache
def not_elementwise(spec: str, optimizer: str) -> frozenset[str]:
    """Matrices whose optimizer does not treat each element separately.

    The probe steps with gradients and with a permutation of them: an elementwise
    optimizer gives the same updates, permuted. Where a state is rounded by blocks of
    elements, a permutation changes the blocks; there only the last element is changed,
    and distant elements must move by the same bits.

    Args:
        spec: a workload.
        optimizer: one of its optimizers.
    """
    workload = resolve_workload(spec)

    def update(name: str, gradients: list[Tensor]) -> Tensor:
        # zeros, so that weight decay, which no permutation of gradients moves, adds
        # nothing
        parameter = nn.Parameter(torch.zeros_like(gradients[0]))
        probed = workload.optimizers[optimizer]([(name, parameter)])
        for gradient in gradients:
            parameter.grad = gradient.clone()
            with workload.calling("optimizer"):
                probed.step()
        return parameter.detach().flatten()

    names = set()
    eager = torch.compiler.set_stance("force_eager")  # as references run
    with eager, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, parameter in judged_parameters(workload.model()).items():
            if parameter.ndim < 2 or not parameter.requires_grad:
                continue
            shape, order = parameter.shape, torch.randperm(parameter.numel())
            gradients = [torch.randn(shape, dtype=torch.float64) for _ in range(STEPS)]
            moved = update(name, gradients)
            if workload.rounds_state:
                last = torch.zeros(shape, dtype=torch.float64)
                last.view(-1)[-1] = 1.0
                again = update(name, [g + last for g in gradients])
                far = parameter.numel() // 2
                coupled = not torch.equal(moved[:far], again[:far])
            else:
                permuted = [g.flatten()[order].view(shape) for g in gradients]
                off = (moved[order] - update(name, permuted)).norm()
                coupled = bool(off > EQUAL * moved.norm())
            if coupled:
                names.add(name)
    return frozenset(names)


class HalfNoise(TorchDispatchMode):
    """Rounds results in half precision once more, at random."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.generator = generator

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run ``func`` and change half-precision results by up to a unit roundoff."""
        result = func(*args, **(kwargs or {}))
        half = isinstance(result, Tensor) and result.dtype in _HALF
        if half and not makes_view(func):
            noise = torch.rand(result.shape, generator=self.generator, dtype=_WIDE)
            unit = torch.finfo(result.dtype).eps / 2
            result.copy_(result.to(_WIDE) * (1 + unit * (2 * noise - 1)))
        return result


_HALF = (torch.bfloat16, torch.float16)
_WIDE = torch.float64
