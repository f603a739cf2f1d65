"""Bounds of errors, derived from the errors of correct runs.

[Note: Bounds]
A bound is ``SAFETY_FACTOR`` times the largest error of correct single-process runs in
the same precision, against fp64. All steps up to this one count, because errors of
training do not shrink again. Two minima apply: the median relative noise of all
parameters at that step, because a parameter may have tiny errors in all references by
chance; and one unit roundoff of the compute dtype, or of the loss's own dtype. No bound
has an absolute floor, so tiny gradients are bounded as tightly as large ones.
Parameters are stored in fp32, so an update may be off by half a unit in the last place:
its noise is at least that. Norm and largest element are bounded separately: a norm
hides one bad element, an element hides a drift. docs/parity.md derives
``SAFETY_FACTOR``.

[Note: Quantisation]
Rounding to 8 bits changes values by 3 to 12 %. Most of this error is the same in every
correct run, whatever the order of its sums. Eight times that error is as large as the
value itself. So the error that all runs share counts ``SHARED`` times: once for the
rounding, and once for values at a tie, which a run may round the other way. Such ties
move a result by no more than the rounding of all values did. The part of the error that
differs between runs (for example through a scale per group of rows) counts
``SAFETY_FACTOR`` times, as all noise.

[Note: Weights of updates]
Adam and similar optimizers divide a gradient by its own size. So the error of an
element's update is the error of its gradient over the gradient. Elements with small
gradients have larger errors. The largest error would then be that of a single element,
and five references are too few to measure it. So each element of an update is
multiplied by the smallest gradient it had, which makes the errors of all elements
similar. If the true gradient of an element was smaller than the bound on gradient
errors, rounding decided the direction of a full step: the weight of the element is 0
from that step on. Its gradient is still compared. If a gradient is exactly 0 in the
truth and in all noisy runs, nothing was rounded. Then this step does not lower the
element's weight. Examples are a layer behind one that begins at zero, and a row of an
embedding without tokens. The exception is a tensor whose whole gradient is within its
bound, that is, nothing but rounding. Under SGD all weights are 1.

[Note: Sides]
Rounding may decide between two results that are far apart, and five noisy runs may all
get the same one. So two further runs take the other result, each in half of the places:

- the derivative of a function that jumps, at an input near the jump;
- the direction of a step that divides by the gradient, as above. Such a flip changes
  later gradients by far more than rounding: one weight that moves in the opposite
  direction changes the gradients of its neighbours by some percent. In half precision
  the noise of a gradient is large enough for this to happen by chance. So signs of
  elements within the noise are flipped. In fp32 such a flip was never observed, and a
  bound that allowed for it would hide real faults.

The change of such a run against the plain run is not rounding. The change says nothing
about the noise of other tensors, so it does not enter the median. A correct run may
show any part of the effects of both runs, and to first order these add. Half of the
larger effect, times 8, is at least twice the sum of both.

[Note: Bias corrections]
``torch.compile(optimizer.step)`` and ``capturable=True`` compute Adam's ``1 - beta**t``
in fp32. All elements of a step then have one relative error, of which ``bias_error``
is the largest possible value. A workload that steps its own optimizers may use one of
them. So in fp32 it gets one more reference, whose steps are longer by that error
divided by ``SAFETY_FACTOR``. The bound on an update is then the error itself, and later
gradients are bounded by its effect on them. In half precision the noise is far larger.

[Note: Whole matrices]
An optimizer that makes a matrix orthogonal (Muon) mixes all elements, and computes in
half precision. Its updates are compared without weights. In all noisy runs but the
plain one it rounds each half-precision result once more, at random.

[Note: Rounded state]
An optimizer that keeps its state in 8 bits rounds it by blocks of elements. The blocks
of a rank's shards are not those of the whole parameter; shards may also be too small to
be rounded at all. Such a difference is not noise: eight times it would hide whole
tensors of a 4-bit state. So if a workload declares ``rounds_state``, all references
give the optimizer each parameter in the shards of the ranks' optimizers. The shards of
an optimizer that steps fp32 copies are unknown. Then further references cut parameters
along dim 0 into several numbers of parts, and their differences are noise. A value at a
tie is rounded to the other side by any noise, but seldom in one of five runs. So each
noisy run moves the optimizers' inputs just enough to take some elements of a state past
a tie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray

from ...fixtures import OfWorkload, Precision
from ..rank.elementwise import not_elementwise
from ..rank.routing import MASKED, Choices
from ..space.scenario import Scenario
from .compare import (
    HALF,
    SAFETY_FACTOR,
    Doubles,
    Pair,
    Spread,
    relative_floor,
    sizes,
)
from .kept import Kept, bytes_of
from .noise.sides import Limits, sides_of
from .one_rank import one_rank_references
from .reference import Reference, Schedule, train_reference
from .reference_run import check_equal_start
from .variants import NOISY, TRUTH, in_shards, longer, on_sides

__all__ = [
    "ParityBounds",
    "expected_choices",
    "make_parity_bounds",
]

SHARED = 2.0
"""Factor in a bound of the part of an 8-bit rounding error that is the same in all
correct runs; see [Note: Quantisation]."""
SHARDS = (2, 3, 8)
"""Numbers of parts into which parameters are cut if the shards of a rounded state are
unknown. Among them are powers of two and others, so rounding blocks end in different
places."""
Tensors = dict[str, Doubles]


@dataclass(frozen=True, kw_only=True)
class ParityBounds:
    """The truth and the bounds of losses, gradients, updates and norms.

    A bound is ``[step][name] -> (norm, largest element)``.
    """

    truth: Reference
    """Reference run in fp64; its updates are multiplied by ``weights``."""
    weights: Sequence[dict[str, Doubles]]
    """[step][parameter] -> weight of each element of the update; 0: not compared."""
    gradient: Sequence[dict[str, Pair]]
    update: Sequence[dict[str, Pair]]
    loss: Sequence[dict[str, Pair]]
    norm: Sequence[dict[str, Pair]] = ()
    """[step]["norm"] -> bounds of the norm of the whole unscaled gradient before
    clipping."""
    noisy: Sequence[Reference] = ()
    """Correct runs from which the bounds are derived."""
    moves: Sequence[dict[str, NDArray[np.bool_]]] = ()
    """[step][parameter] -> True for elements that this step of the truth moves by at
    least one fp32 spacing."""
    reference: str = ""
    """Description of the reference; empty for the plain one."""
    undecided: str = ""
    """Reason why nothing can be compared with the reference; else empty."""

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes, including those of the references."""
        own = bytes_of((*self.weights, *self.moves))
        return own + sum(run.nbytes for run in (self.truth, *self.noisy))


def make_parity_bounds(
    scenario: Scenario, schedule: Schedule, loss_dtypes: frozenset[str] = frozenset()
) -> ParityBounds:
    """Train the references and derive truth and bounds; see [Note: Bounds].

    Args:
        scenario: scenario that the ranks trained.
        schedule: skips and scales that the references follow.
        loss_dtypes: dtypes of the losses that ranks returned as tensors.
    """
    precision, skipped = scenario.parsed_precision, schedule.skipped
    adaptive = scenario.workload.adaptive(scenario.optimizer)
    if scenario.workload.one_rank:
        alone = one_rank_references(scenario, schedule)
        truth, runs, sides = alone.truth, alone.noisy, alone.sides
        bounds = _derived(
            *(truth, (*runs,), (*sides,), precision, skipped, frozenset(), adaptive),
            _loss_roundoff(precision, runs[0], loss_dtypes),
        )
        return replace(bounds, reference=alone.text, undecided=alone.undecided)
    truth = train_reference(scenario, schedule, TRUTH)
    runs = _noisy_runs(scenario, schedule, truth)
    sides = _sides(scenario, schedule, truth, runs)
    matrices = not_elementwise(scenario.model, scenario.optimizer)
    return _derived(
        *(truth, (*runs,), (*sides,), precision, skipped, matrices, adaptive),
        _loss_roundoff(precision, runs[0], loss_dtypes),
    )


def _loss_roundoff(
    precision: Precision, plain: Reference, dtypes: frozenset[str]
) -> float:
    """Return the unit roundoff of the narrowest dtype in which a loss was returned.

    A loss in fp32 counts as fp32 even if it comes from half-precision outputs, because
    the noise of the outputs is measured. A loss in fp64 also counts as fp32, because it
    may be a converted fp32 number.
    """
    if not plain.loss_dtype:
        return precision.roundoff
    names = {"float32", plain.loss_dtype, *dtypes}
    return min(precision.roundoff, max(map(_unit, names)))


def _unit(dtype: str) -> float:
    return float(torch.finfo(getattr(torch, dtype)).eps) / 2


# cached, because most topologies and scalers of a scenario share references
@partial(Kept, least=1)
def _derived(
    truth: Reference,
    runs: tuple[Reference, ...],
    sides: tuple[Reference, ...],
    precision: Precision,
    skipped: tuple[frozenset[str], ...],
    matrices: frozenset[str],
    adaptive: bool,
    loss_roundoff: float,
) -> ParityBounds:
    """Derive the bounds from the errors of the given references."""
    always = (frozenset[str](),) * len(skipped)  # every step computes a loss
    no_norm = [frozenset({"norm"}) if names else frozenset[str]() for names in skipped]
    every = [*runs, *sides]

    def bound(
        values: Callable[[Reference], Sequence[Tensors]],
        unused: Sequence[frozenset[str]],
        hidden: Sequence[Tensors] | None = None,
        roundoff: float = precision.roundoff,
    ) -> list[dict[str, Pair]]:
        noisy, moved = (
            [values(run) for run in references] for references in (runs, sides)
        )
        return _bound(values(truth), noisy, moved, precision, unused, hidden, roundoff)

    gradient = bound(lambda run: run.gradients, skipped)
    weights = _weights(truth, every, gradient, skipped, matrices, adaptive=adaptive)
    updates = _weighted(truth.updates, weights)
    return ParityBounds(
        truth=replace(truth, updates=updates),
        weights=weights,
        gradient=gradient,
        update=bound(
            lambda run: _weighted(run.updates, weights),
            skipped,
            _weighted(_hidden(truth, truth.updates), weights),
        ),
        loss=bound(
            _losses, always, roundoff=max(loss_roundoff, _typical_noise(truth, runs))
        ),
        norm=bound(_norms, no_norm),
        noisy=every,
        moves=_moves(truth),
    )


def expected_choices(
    scenario: Scenario, schedule: Schedule
) -> tuple[dict[str, Choices], ...]:
    """Return the experts that learned routers choose at each step, by kind of call.

    Each choice has the bound of the routers' scores: near a tie a correct run may
    choose differently.

    Args:
        scenario: scenario that the ranks trained.
        schedule: skips and scales that the references follow.
    """
    truth = train_reference(scenario, schedule, TRUTH)
    runs = _noisy_runs(scenario, schedule, truth)
    # noise of scores comes only from runs that do not move them
    sides = _sides(scenario, schedule, truth, runs, inputs=False)
    worst: dict[str, float] = {}
    expected = []
    for step, choices in enumerate(truth.choices):
        for kind, expected_choice in choices.items():
            errors = [run.errors[step].get(kind, 0.0) for run in runs]
            errors += [HALF * side.errors[step].get(kind, 0.0) for side in sides]
            # a score near 0 has the rounding error of its summands
            scored = expected_choice.scores > MASKED
            largest = float(
                np.abs(expected_choice.scores).max(initial=0.0, where=scored)
            )
            floor = scenario.parsed_precision.roundoff * largest
            worst[kind] = max(worst.get(kind, 0.0), floor, *errors)
        expected.append(
            {
                kind: replace(
                    expected_choice,
                    noise=worst[kind],
                    limit=SAFETY_FACTOR * worst[kind],
                )
                for kind, expected_choice in choices.items()
            }
        )
    return tuple(expected)


def _noisy_runs(
    scenario: Scenario, schedule: Schedule, truth: Reference
) -> list[Reference]:
    """Train correct runs in the scenario's precision."""
    runs = [train_reference(scenario, schedule, v) for v in NOISY]
    adaptive = scenario.workload.adaptive(scenario.optimizer)
    has = scenario.workload.has
    if adaptive and not scenario.in_half and OfWorkload.LOOP not in has:
        # see [Note: Bias corrections]
        other = longer(1 / SAFETY_FACTOR)
        runs.append(train_reference(scenario, schedule, other))
    unseen = {n for step in truth.gradients for n in step}.difference(
        dict(schedule.shards)
    )
    if scenario.workload.rounds_state and unseen:  # see [Note: Rounded state]
        for shards in SHARDS:
            runs.append(train_reference(scenario, schedule, in_shards(shards)))
    starts = [run.initial for run in runs]
    check_equal_start(scenario.model, "two references", truth.initial, starts)
    return runs


def _sides(
    scenario: Scenario,
    schedule: Schedule,
    truth: Reference,
    runs: Sequence[Reference],
    *,
    inputs: bool = True,
) -> list[Reference]:
    """Train runs in which choices that rounding decides go the other way.

    See [Note: Sides].

    Args:
        scenario: scenario to train.
        schedule: skips and scales to follow.
        truth: reference run in fp64.
        runs: noisy runs, the plain one first.
        inputs: true to also move inputs of functions whose derivative jumps.
    """
    signs: Limits = ()
    if scenario.workload.adaptive(scenario.optimizer) and scenario.in_half:
        gradients = [run.gradients for run in runs]
        precision, skipped = scenario.parsed_precision, schedule.skipped
        signs = _noise(_bound(truth.gradients, gradients, (), precision, skipped))
    seen = (truth.inputs, runs[0].inputs) if inputs else ((), ())
    return [
        train_reference(scenario, schedule, on_sides(sides))
        for sides in sides_of(*seen, signs)
    ]


def _noise(bounds: Sequence[dict[str, Pair]]) -> Limits:
    """Convert each bound of a largest element back to the noise it was derived from."""
    return tuple(
        tuple(
            (name, largest / SAFETY_FACTOR)
            for name, (_, largest) in step.items()
            if np.isfinite(largest)
        )
        for step in bounds
    )


def _spacings(truth: Reference, moved: Sequence[Tensors]) -> list[Tensors]:
    """Return the distance to the next fp32 number at each stored value."""
    return [
        {n: np.spacing(np.abs(truth.start[n] + t).astype(np.float32)) for n, t in u}
        for u in (updates.items() for updates in moved)
    ]


def _hidden(truth: Reference, moved: Sequence[Tensors]) -> list[Tensors]:
    """Return the largest rounding error of each stored fp32 value, by step.

    This is half the distance to the next number. ``moved`` holds the updates of steps.
    """
    return [{n: s / 2.0 for n, s in step.items()} for step in _spacings(truth, moved)]


def _moves(truth: Reference) -> list[dict[str, NDArray[np.bool_]]]:
    """Return the elements that a step moves by at least one fp32 spacing."""
    before = {n: np.zeros(t.shape) for n, t in truth.start.items()}
    moving = []
    for now, least in zip(truth.updates, _spacings(truth, truth.updates), strict=True):
        moving.append({n: np.abs(now[n] - before[n]) >= least[n] for n in now})
        before = now
    return moving


def _typical_noise(truth: Reference, runs: Sequence[Reference]) -> float:
    """Return the median over steps of the largest relative error of a loss.

    All runs may be close to the truth at one step by chance. Other tensors use the
    median over all tensors of a step, but each step has only one loss.
    """
    steps = zip(truth.losses, *(run.losses for run in runs), strict=True)
    errors = [
        max(abs(x - true) for x in losses) / abs(true)
        for true, *losses in steps
        if true  # a loss of 0, as of advantages that cancel, has no relative error
    ]
    finite = [error for error in errors if np.isfinite(error)]
    return median(finite) if finite else 0.0


def _losses(run: Reference) -> list[Tensors]:
    return [{"loss": np.array([x])} for x in run.losses]


def _norms(run: Reference) -> list[Tensors]:
    return [{"norm": np.array([x])} for x in run.norms]


def _weights(
    truth: Reference,
    runs: Sequence[Reference],
    bounds: Sequence[dict[str, Pair]],
    skipped: Sequence[frozenset[str]],
    matrices: frozenset[str],
    *,
    adaptive: bool,
) -> list[Tensors]:
    """Compute the weights of update elements; see [Note: Weights of updates]."""
    ones = {n: np.ones(t.shape) for n, t in truth.updates[0].items()}
    smallest: Tensors = {}
    steps = []
    for step, gradients in enumerate(truth.gradients):
        due = gradients.keys() - skipped[step] - matrices
        for n in due if adaptive else ():
            size = np.abs(gradients[n])
            # written so that a bound of nan counts as too large
            size[~(size > bounds[step][n][1])] = 0.0
            others = sum(np.abs(run.gradients[step].get(n, 0.0)) for run in runs)
            exact = (gradients[n] == 0.0) & (others == 0.0)
            # a gradient that consists of rounding may be zero in all runs by chance
            if exact.all() or sizes(gradients[n])[0] > bounds[step][n][0]:
                size[exact] = np.inf
            smallest[n] = np.minimum(smallest.get(n, np.inf), size)
        # relative to the largest, so that weights of updates are at most 1; infinite
        # before a parameter's first gradient
        largest = {
            n: s.max(initial=0.0, where=np.isfinite(s)) or 1.0
            for n, s in smallest.items()
        }
        weights = {n: np.minimum(s / largest[n], 1.0) for n, s in smallest.items()}
        steps.append(ones | weights)
    return steps


def _weighted(
    steps: Sequence[Tensors], weights: Sequence[Tensors]
) -> tuple[Tensors, ...]:
    return tuple(
        {n: t * weight[n] for n, t in tensors.items()}
        for tensors, weight in zip(steps, weights, strict=True)
    )


def _bound(
    truth: Sequence[Tensors],
    runs: Sequence[Sequence[Tensors]],
    sides: Sequence[Sequence[Tensors]],
    precision: Precision,
    skipped: Sequence[frozenset[str]],
    hidden: Sequence[Tensors] | None = None,
    roundoff: float | None = None,
) -> list[dict[str, Pair]]:
    """Compute bounds; see [Note: Bounds], [Note: Sides] and [Note: Quantisation]."""
    spreads: dict[str, Spread] = {}
    bounds: list[dict[str, Pair]] = []
    for step, tensors in enumerate(truth):
        for name, tensor in tensors.items():
            # gradients that are not used may be infinite
            if name not in skipped[step]:
                # in one run a router may choose otherwise, and an expert have no
                # gradient
                values = [run[step].get(name, 0.0 * tensor) for run in runs]
                # a reference that itself overflowed does not measure noise
                values = [v for v in values if np.isfinite(v).all()]
                effects = [
                    sizes(side[step][name] - runs[0][step][name])
                    for side in sides
                    if name in side[step] and name in runs[0][step]
                ]
                before = spreads.get(name, Spread())
                errors = _noise_of(values, tensor, precision)
                spreads[name] = before.widened(errors, effects)
        own = {name: sizes(t) for name, t in tensors.items()}
        floor = relative_floor(spreads, own, roundoff or precision.roundoff)
        bounds.append({})
        for name, size in own.items():
            least = [(floor[0] * size[0], floor[1] * size[1])]
            if hidden is not None:
                least.append(sizes(hidden[step][name]))
            bounds[-1][name] = spreads.get(name, Spread()).bound(*least)
    return bounds


def _noise_of(
    values: Sequence[Doubles], truth: Doubles, precision: Precision
) -> list[Pair]:
    """Return the noise of each correct run, as (norm, largest element)."""
    if not precision.quantises or not values:
        return [sizes(v - truth) for v in values]
    middle: Doubles = np.mean(values, axis=0)
    norm, largest = sizes(middle - truth)
    share = SHARED / SAFETY_FACTOR
    apart = [sizes(v - middle) for v in values]
    return [(share * norm + a[0], share * largest + a[1]) for a in apart]
