"""Sides: choices between two distant results that rounding decides.

The sign of its input decides whether a ReLU passes a gradient. Of a million inputs a
few are closer to zero than their rounding error. At one or two of these inputs a
correct run has the opposite sign of the truth, which is called the other side. Each of
these gradients differs by the contribution of one element of a batch, thousands of
times the rounding error. Probably none of five noisy runs took the other side at that
element.

So two further runs move the inputs whose side rounding may decide, by the largest error
that a run shows there. In the first run half of them move up and half down, and in the
second run the other way. So each input changes its side in one of the runs. If a call
has many such inputs, as in half precision, only a few random ones are moved: there
every noisy run changes some sides by itself.

The direction of a step that divides by a gradient is also such a choice: both runs flip
signs of small gradients, each in another half. See [Note: Sides] in bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from ....fixtures import local
from ...rank.routing import MASKED
from ...space.facts import writes
from .perturbation import Perturbation
from .ties import FLIPPED

if TYPE_CHECKING:
    from ..reference_run import ReferenceRun

__all__ = ["BOTH", "STAY", "Inputs", "JumpLog", "Limits", "Sides", "sides_of"]

BOTH = (1, -1)
"""Values of ``Sides.side``: two runs, which flip opposite halves of the choices."""
Distances = tuple[tuple[tuple[float, bool], ...], ...]
"""For each step, a pair for each input of a function whose derivative jumps, in the
order of calls: the distance to move the input, and True if its zeros are moved as
well."""
Limits = tuple[tuple[tuple[str, float], ...], ...]
"""For each step: (parameter, largest gradient element whose sign may be flipped). The
type is a tuple because cached runs must be hashable."""
Inputs = tuple[NDArray[np.float64], ...]
"""Sampled elements of each input, in the order of calls."""
SAMPLE = 1024
"""Least number of elements kept of each larger input; fewer than twice as many are
kept. The largest of 1,024 normally distributed errors is about 3.2 standard
deviations."""
FURTHER = 1.5
"""Inputs move by this multiple of the largest observed error, about 4.8 standard
deviations. Of the elements that change sides in a correct run, one in 10**6 is
missed."""
JUMP = 1 / 8
"""Least change of a derivative that counts as a jump, relative to the largest
derivative. A smooth derivative changes as little as the input does."""
_JUMPS = frozenset(
    """
    relu relu6 threshold hardtanh hardsigmoid hardswish hardshrink softshrink
    leaky_relu prelu elu selu celu abs absolute clamp clip clamp_min clamp_max
    max min amax amin aminmax maximum minimum fmax fmin median nanmedian quantile
    sort msort kthvalue cummax cummin
    gt greater ge greater_equal lt less le less_equal
    max_pool1d max_pool2d max_pool3d
    max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
    adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices
    adaptive_max_pool3d_with_indices
    l1_loss hinge_embedding_loss margin_ranking_loss multi_margin_loss
    multilabel_margin_loss triplet_margin_loss cosine_embedding_loss
    """.split()
)
"""Names of functions with jumping derivatives; torch has each in several modules."""


@dataclass(frozen=True, kw_only=True)
class Sides(Perturbation):
    """Moves inputs and gradients to the other side; see [Note: Sides] in bounds."""

    side: int = BOTH[0]
    """Selects one of two runs, which flip different halves."""
    distances: Distances = ()
    """Distances by which inputs of functions with jumping derivatives move; no input
    moves if empty."""
    signs: Limits = ()
    """Sizes up to which gradient elements get the other sign; no sign is flipped if
    empty."""

    @property
    def moves_scores(self) -> bool:
        """True if inputs are moved."""
        return bool(self.distances)

    def passes(self, run: ReferenceRun, step: int) -> AbstractContextManager[object]:
        """Return a context that moves inputs near a jump of a derivative."""
        return JumpLog(self, step) if self.distances else nullcontext()

    def gradients(self, run: ReferenceRun, step: int) -> None:
        """Flip the signs of small gradient elements."""
        for name, limit in self.signs[step] if self.signs else ():
            gradient = run.parameters[name].grad
            if gradient is not None:
                # the same order in both runs, so that each element is flipped in one of
                # them
                order = torch.Generator().manual_seed(step)
                part = torch.randint(len(BOTH), gradient.shape, generator=order)
                here = part == BOTH.index(self.side)
                gradient[here & (gradient.abs() <= limit)] *= -1


STAY = Sides()
"""Perturbation that moves no input and flips no sign."""


class JumpLog(TorchFunctionMode):
    """Records inputs of functions whose derivative jumps, and may move them."""

    def __init__(self, sides: Sides = STAY, step: int = 0) -> None:
        """Record inputs; ``sides`` also moves them, by default not at all."""
        super().__init__()
        self._distances = sides.distances[step] if sides.distances else ()
        self._side = sides.side
        self._inputs: list[NDArray[np.float64]] = []
        # the same numbers in both runs
        self._generator = torch.Generator().manual_seed(0)

    @property
    def inputs(self) -> Inputs:
        """Samples of each input, in the order of calls."""
        return tuple(self._inputs)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``; move its inputs first if its derivative jumps."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        # with out=, the result has no derivative
        if name.strip("_") not in _JUMPS or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        arguments = [*args, *kwargs.values()]

        def call(values: Sequence[Any]) -> Any:
            named = zip(kwargs, values[len(args) :], strict=True)
            return func(*values[: len(args)], **dict(named))

        def call_with(place: int, value: Any) -> Any:
            """Call the function with one argument replaced."""
            return call([*arguments[:place], value, *arguments[place + 1 :]])

        in_place = writes(func, kwargs) or kwargs.get("inplace")
        for place, value in enumerate(arguments):
            if isinstance(value, Tensor) and value.is_floating_point():
                steps = self._steps(value, partial(call_with, place))
                if steps is not None:
                    arguments[place] = value.add_(steps) if in_place else value + steps
        return call(arguments)

    def _steps(self, value: Tensor, called: Callable[[Tensor], Any]) -> Tensor | None:
        """Return how far to move each element of an input; None to move none.

        Args:
            value: the input.
            called: the function of this input, with all its other arguments fixed.
        """
        number = len(self._inputs)
        try:
            elements = _some_of(value)
        except RuntimeError:
            return None  # no values, as inside torch.func or on the meta device
        self._inputs.append(elements)
        is_noted = number < len(self._distances)
        distance, zeros = self._distances[number] if is_noted else (0.0, False)
        if not distance:
            return None
        mine = local(value.detach())
        signs = torch.randint(2, mine.shape, generator=self._generator) * 2 - 1
        steps = (self._side * distance * signs).to(mine)
        steps[((mine == 0) & (not zeros)) | (mine.abs() > -MASKED)] = 0.0
        moved = value.detach() + _as_part_of(value, steps)
        here, beyond = (local(_derivative(v, called)) for v in (value.detach(), moved))
        least = JUMP * torch.stack([here, beyond]).abs().max()
        places = ((here - beyond).abs() > least).reshape(-1).nonzero().view(-1)
        if not len(places):
            return None
        chosen = torch.randperm(len(places), generator=self._generator)[:FLIPPED]
        few = torch.zeros_like(steps).view(-1)
        few[places[chosen.to(places.device)]] = 1.0
        return _as_part_of(value, steps * few.view(steps.shape))


def _some_of(value: Tensor) -> NDArray[np.float64]:
    """Return a sample of this rank's elements of a tensor: at most ``2 * SAMPLE``."""
    flat = local(value.detach()).reshape(-1)
    elements = flat[:: max(1, len(flat) // SAMPLE)].double().cpu().numpy()
    return elements.copy()  # a copy, because the function may write into it


def _as_part_of(value: Tensor, part: Tensor) -> Tensor:
    """Wrap this rank's elements in the layout of another tensor."""
    if not isinstance(value, DTensor):
        return part
    return DTensor.from_local(
        part,
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


def _derivative(value: Tensor, called: Callable[[Tensor], Any]) -> Tensor:
    """Return the derivative of the sum of ``called(value)``.

    A function such as a comparison has no derivative. Then its result is returned
    instead, or zeros if the result has another shape than the input.
    """
    with torch.enable_grad():
        leaf = value.clone().requires_grad_()
        result = called(leaf * 1)  # a function that works in place must not get a leaf
        first: Tensor = result if isinstance(result, Tensor) else result[0]
        if first.requires_grad:
            (derivative,) = torch.autograd.grad(
                first.sum(), leaf, allow_unused=True, materialize_grads=True
            )
            return derivative
    alike = first.shape == value.shape
    return first.to(value.dtype) if alike else torch.zeros_like(value)


def sides_of(
    truth: Sequence[Inputs], plain: Sequence[Inputs], signs: Limits = ()
) -> Sequence[Sides]:
    """Return the two side runs; empty if rounding decides no choice.

    Args:
        truth: for each step, the sampled inputs of the truth.
        plain: for each step, the sampled inputs of a noisy run with the same calls.
        signs: gradient elements whose signs rounding decides.
    """
    distances: Distances = tuple(map(_distances, truth, plain))
    if not any(distance for step in distances for distance, _ in step):
        distances = ()  # no run differs there
    if not (distances or signs):
        return ()
    return [Sides(side=side, distances=distances, signs=signs) for side in BOTH]


def _distances(truth: Inputs, plain: Inputs) -> tuple[tuple[float, bool], ...]:
    distances = []
    for true, mine in zip(truth, plain, strict=False):
        if true.shape != mine.shape:  # the calls do not correspond
            break
        unmasked = (np.abs(true) < -MASKED) & (np.abs(mine) < -MASKED)
        largest = np.abs(true - mine).max(initial=0.0, where=unmasked)
        # Zeros of the truth, such as what another ReLU set to zero, are zeros in all
        # runs.
        distances.append((FURTHER * float(largest), bool(true.all())))
    return tuple(distances)
