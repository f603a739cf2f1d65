"""Find parameters whose optimizer uses the whole matrix, and measure their noise.

An elementwise optimizer (SGD, Adam) computes the update of an element from that element
alone, so rounding in a gradient stays in its element. Muon and similar optimizers make
a matrix orthogonal. Then every element of the update depends on the whole gradient, and
the computation is in half precision for any dtype of the parameters. The noise of such
updates is measured by rounding the optimizer's own operations differently.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...fixtures import compared_parameters, resolve_workload
from .torch_internals import TorchDispatchMode, makes_view

__all__ = ["HalfNoise", "not_elementwise"]

STEPS = 4
"""Number of steps of the probe. SOAP only prepares in its first step. The third step
uses state of the second one, and only the fourth step shows if elements were mixed."""
EQUAL = 1e-9
"""Relative difference in fp64 up to which two updates are equal. Permuting elements
changes elementwise operations by a few units of 2^-53, because the processor's vectors
then hold other elements. If an optimizer sums over the matrix, the difference is as
large as the update."""


@cache
def not_elementwise(spec: str, optimizer: str) -> frozenset[str]:
    """Return the matrices whose optimizer mixes elements.

    The probe steps with gradients and with a permutation of them: an elementwise
    optimizer gives the same updates, permuted. If a state is rounded by blocks of
    elements, a permutation changes the blocks. Then the probe changes only the last
    element of the gradients. An elementwise optimizer keeps the bits of the first half
    of the updates.

    Args:
        spec: a workload.
        optimizer: name of one of its optimizers.
    """
    workload = resolve_workload(spec)

    def update(name: str, gradients: list[Tensor]) -> Tensor:
        # start at zero, so that weight decay does not depend on the order of elements
        parameter = nn.Parameter(torch.zeros_like(gradients[0]))
        probed = workload.optimizers[optimizer]([(name, parameter)])
        for gradient in gradients:
            parameter.grad = gradient.clone()
            with workload.calling("optimizer"):
                probed.step()
        return parameter.detach().flatten()

    names = set()
    eager = torch.compiler.set_stance("force_eager")  # as references do
    with eager, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, parameter in compared_parameters(workload.model()).items():
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
    """Dispatch mode that rounds half-precision results once more, at random."""

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
        """Run ``func``, and multiply a half-precision tensor that it returns.

        The factor is 1 plus up to a unit roundoff. Views and tuples stay as they are.
        """
        result = func(*args, **(kwargs or {}))
        half = isinstance(result, Tensor) and result.dtype in _HALF
        if half and not makes_view(func):
            noise = torch.rand(result.shape, generator=self.generator, dtype=_WIDE)
            unit = torch.finfo(result.dtype).eps / 2
            result.copy_(result.to(_WIDE) * (1 + unit * (2 * noise - 1)))
        return result


_HALF = (torch.bfloat16, torch.float16)
_WIDE = torch.float64
