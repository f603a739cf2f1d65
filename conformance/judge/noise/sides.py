"""Sides: where rounding decides between two results that are far apart.

The sign of its input decides whether a ReLU passes a gradient. Of some million inputs a
few are no further from zero than their error, so a right run takes the other side than
the truth in one or two of them. Each such gradient departs by as much as one element of
a batch contributes, thousands of times the rounding, and none of five noisy runs need
have taken the other side at that element.

So in two further runs the inputs whose side rounding may decide are moved by the
largest error that a run shows there: half of them up and half down, and in the second
run each the other way. Each is then on the other side in one of both. Of a call with
more than a few of them, such as most in half precision, a few are moved, at random:
there every noisy run has some on the other side by itself.

The direction of a step that divides by a gradient is also such a side: both runs flip
signs of small gradients, each for another half. See [Note: Sides] in bounds.
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
    from ..reference import ReferenceRun

__all__ = ["BOTH", "STAY", "Inputs", "JumpLog", "Limits", "Sides", "sides_of"]

BOTH = (1, -1)
"""Runs that take what rounding decides to the other side, each another half of it."""
Distances = tuple[tuple[tuple[float, bool], ...], ...]
"""Per step, input by input of functions whose derivative jumps, in the order of calls:
how far it moves, and whether elements that are zero move."""
Limits = tuple[tuple[tuple[str, float], ...], ...]
"""Per step: (parameter, size of a gradient's element); hashable, as runs are cached."""
Inputs = tuple[NDArray[np.float64], ...]
"""Some elements of the inputs of each call."""
SAMPLE = 1024
"""How many elements of each input are kept. Of 1024 normal errors the largest is about
3.2 standard deviations."""
FURTHER = 1.5
"""Inputs move by this multiple of the largest error that is seen, about 4.8 standard
deviations: of the elements that change sides in a right run, one of 10**6 is missed."""
JUMP = 1 / 8
"""Least change of a derivative at a jump, as a share of the largest one: a
smooth one changes by as little as the input."""
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
"""Names of functions, as torch has them in several places and forms."""


@dataclass(frozen=True, kw_only=True)
class Sides(Perturbation):
    """Takes inputs and gradients to the other side; see [Note: Sides] in bounds."""

    side: int = BOTH[0]
    """One of two runs, in each of which another half is on the other side."""
    distances: Distances = ()
    """Inputs of functions whose derivative jumps; empty: none moves."""
    signs: Limits = ()
    """The signs of gradient elements that are no larger than this; empty: of none."""

    @property
    def moves_scores(self) -> bool:
        """True if inputs move."""
        return bool(self.distances)

    def passes(self, run: ReferenceRun, step: int) -> AbstractContextManager[object]:
        """Move inputs near a jump."""
        return JumpLog(self, step) if self.distances else nullcontext()

    def gradients(self, run: ReferenceRun, step: int) -> None:
        """Flip the signs of small elements."""
        for name, limit in self.signs[step] if self.signs else ():
            gradient = run.parameters[name].grad
            if gradient is not None:
                # alike in both runs, so that each element is flipped in one of them
                order = torch.Generator().manual_seed(step)
                part = torch.randint(len(BOTH), gradient.shape, generator=order)
                here = part == BOTH.index(self.side)
                gradient[here & (gradient.abs() <= limit)] *= -1


STAY = Sides()
"""Nothing is on the other side."""


class JumpLog(TorchFunctionMode):
    """Notes inputs of functions whose derivative jumps, and moves them if told to."""

    def __init__(self, sides: Sides = STAY, step: int = 0) -> None:
        """Take how inputs move in which step; by default they stay."""
        super().__init__()
        self._distances = sides.distances[step] if sides.distances else ()
        self._side = sides.side
        self._inputs: list[NDArray[np.float64]] = []
        # alike in both runs
        self._generator = torch.Generator().manual_seed(0)

    @property
    def inputs(self) -> Inputs:
        """Some elements of each input, in the order of calls."""
        return tuple(self._inputs)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, with other inputs where its derivative jumps."""
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        # what writes its result elsewhere has no derivative
        if name.strip("_") not in _JUMPS or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        arguments = [*args, *kwargs.values()]

        def call(values: Sequence[Any]) -> Any:
            named = zip(kwargs, values[len(args) :], strict=True)
            return func(*values[: len(args)], **dict(named))

        def call_with(place: int, value: Any) -> Any:
            """The result with another value in one place."""
            return call([*arguments[:place], value, *arguments[place + 1 :]])

        in_place = writes(func, kwargs) or kwargs.get("inplace")
        for place, value in enumerate(arguments):
            if isinstance(value, Tensor) and value.is_floating_point():
                steps = self._steps(value, partial(call_with, place))
                if steps is not None:
                    arguments[place] = value.add_(steps) if in_place else value + steps
        return call(arguments)

    def _steps(self, value: Tensor, called: Callable[[Tensor], Any]) -> Tensor | None:
        """How far the elements of an input are moved.

        Args:
            value: the input.
            called: the function of this input.
        """
        number = len(self._inputs)
        try:
            elements = _some_of(value)
        except RuntimeError:
            return None  # without values, as inside torch.func or on the meta device
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
    """At most ``2 * SAMPLE`` of this rank's elements of a tensor."""
    flat = local(value.detach()).reshape(-1)
    elements = flat[:: max(1, len(flat) // SAMPLE)].double().cpu().numpy()
    return elements.copy()  # the function may write into it


def _as_part_of(value: Tensor, part: Tensor) -> Tensor:
    """A tensor with the layout of another one, from this rank's elements."""
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
    """Derivative of the sum of all results, or the result of a comparison."""
    with torch.enable_grad():
        leaf = value.clone().requires_grad_()
        result = called(leaf * 1)  # what works in place must not get a leaf
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
    """Find the choices that both runs flip; empty if rounding decides none.

    Args:
        truth: per step, the inputs of the truth.
        plain: per step, the inputs of a run with the same calls.
        signs: gradient elements whose signs rounding decides.
    """
    distances: Distances = tuple(map(_distances, truth, plain))
    if not any(distance for step in distances for distance, _ in step):
        distances = ()  # no run has an error there
    if not (distances or signs):
        return ()
    return [Sides(side=side, distances=distances, signs=signs) for side in BOTH]


def _distances(truth: Inputs, plain: Inputs) -> tuple[tuple[float, bool], ...]:
    distances = []
    for true, mine in zip(truth, plain, strict=False):
        if true.shape != mine.shape:  # other calls: nothing says which belong together
            break
        unmasked = (np.abs(true) < -MASKED) & (np.abs(mine) < -MASKED)
        largest = np.abs(true - mine).max(initial=0.0, where=unmasked)
        # where the truth has zeros, such as what another ReLU cut off, they are no
        # chance and are zeros in all runs
        distances.append((FURTHER * float(largest), bool(true.all())))
    return tuple(distances)
