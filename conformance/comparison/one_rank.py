"""References on one rank, for a workload with ``reference = "one rank"``.

Such a workload is compared with its own ``train_step`` over the whole batch, on a mesh
with the same axes, all of size 1. Such a reference does not show a fault that also
occurs on one rank.

[Note: Truth on one rank]
The truth is the run in fp64. A workload that raises in fp64, or that keeps another
dtype, has no such run. Then the truth is the plain run in the scenario's precision. The
plain run, the noisy runs and a correct run on the ranks differ by rounding only. So the
noise is the largest distance between the plain run and a noisy run. This noise, and
with it the bound, is larger than the noise against fp64, because both runs are rounded.

[Note: Variations]
Each noisy run makes one or more of three changes. It permutes the rows of each
micro-batch, cuts micro-batches differently, or moves all initial weights by one unit
roundoff in random directions. If a reduction in half precision is promised, each noisy
run also changes gradients by up to a unit roundoff of that dtype
(``variation.Reduction``). Rows are permuted and cut only if that changes nothing but
rounding: in fp64 the gradients of two steps must stay the same. A workload that accepts
only one micro-batch, or whose loss couples rows, is not cut.

[Note: Draws without effect]
Random numbers of a ``train_step`` depend on the number of ranks, so its results may
differ between one rank and several. Then the check is undecided. But the numbers may
have no effect, as in a trainer that shuffles the rows of a sum. To test this, two runs
in fp64 draw different numbers in each step: their gradients must be the same. If they
are, each noisy run draws different numbers. A workload that seeds the generator itself
draws the same numbers in both runs, so the test shows nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...fixtures import (
    OWN,
    CannotError,
    WorkloadError,
    compared_parameters,
    resolve_workload,
)
from ...multiprocess.rank.global_state import seed_everything
from ..formulas import equal_but_for_rounding
from ..rank.engine import Engine
from ..rank.fold import fold
from ..rank.layout_checks import distinct
from ..rank.modules import ModuleLog, Watched
from ..rank.observe import digest
from ..rank.scaler_spec import NO_SCALER
from ..rank.trace import RankTrace, StepTrace
from ..rank.variation import Alone, Variation
from ..space.scenario import Scenario
from .kept import Kept
from .noise.sides import STAY, Inputs, JumpLog, Sides, sides_of
from .reference import Reference, Schedule
from .settings import INITIAL_RATE

__all__ = [
    "OneRank",
    "first_norm_on_one_rank",
    "one_rank_references",
    "plain_on_one_rank",
    "watched_on_one_rank",
]

Doubles = NDArray[np.float64]
PLAIN = Variation()
TRUTH = Variation(double=True)
SHIFTED = Variation(moved=1)
"""Variation that moves only the weights. It makes the same calls on the same rows as
the truth."""
NOISY = (
    PLAIN,
    Variation(permuted=True),
    Variation(parts=2),
    Variation(parts=4, permuted=True),
    SHIFTED,
    Variation(moved=2, permuted=True),
    Variation(moved=3, parts=2),
    Variation(moved=4, permuted=True),
)
"""Variations of the correct runs from which the noise is measured."""
TRIED = 2
"""Number of steps in which permuting and cutting must change nothing. The second step
has weights that the first one moved."""


@dataclass(frozen=True, kw_only=True)
class OneRank:
    """Runs of the reference on one rank: in fp64, with noise, and as side runs."""

    truth: Reference
    noisy: Sequence[Reference]
    sides: Sequence[Reference]
    """Runs with moved inputs where derivatives jump; see ``noise/sides.py``."""
    text: str
    """Description of the runs."""
    undecided: str = ""
    """Reason why nothing can be compared with these references; else empty."""

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return sum(each.nbytes for each in (self.truth, *self.noisy, *self.sides))


def one_rank_references(scenario: Scenario, schedule: Schedule) -> OneRank:
    """Train the references of a workload with ``reference = "one rank"``.

    Must be called in a process group of one rank.

    Args:
        scenario: scenario that the ranks trained.
        schedule: skips and scales, which the one rank follows.

    Raises:
        WorkloadError: if ``train_step`` fails on one rank.
    """
    # settings of the scaler and faults come with the schedule
    alike = replace(scenario, faults="none", init_scale=1.0, growth_interval=1)
    return _references(alike, schedule.skipped, schedule.scales)


def first_norm_on_one_rank(model: str) -> float:
    """Return the norm of all gradients in the first ``train_step`` on one rank.

    Must be called in a process group of one rank. Returns 0 if the workload cannot
    train there; its own runs report the error.
    """
    layouts = resolve_workload(model).topologies.values()
    topology = next(t for t in layouts if t.parallel and not t.narrowed)
    place = f"{topology.name}/{topology.default_world_size}/fp32/{OWN}/none"
    scenario = Scenario.parse(f"{place}/model={model},steps=1")
    alone = Alone(variation=PLAIN, skipped=(frozenset[str](),), scales=(1.0,))
    try:
        reference = _train(scenario, alone, 1)
    except (WorkloadError, CannotError):
        return 0.0
    (gradients,) = reference.gradients
    return math.sqrt(sum(float((g * g).sum()) for g in gradients.values()))


def plain_on_one_rank(scenario: Scenario, schedule: Schedule) -> Reference:
    """Train a workload on one rank without accumulation, in the scenario's precision.

    Must be called in a process group of one rank. The workload may have any reference.

    Args:
        scenario: scenario that the ranks trained.
        schedule: scales, which the one rank follows; it must not skip a step.

    Returns:
        The run, without its gradients.

    Raises:
        WorkloadError: if ``train_step`` fails on one rank.
    """
    # a recipe that accumulates has the plain one's mathematics
    recipe = "plain" if scenario.parsed_recipe.parts > 1 else scenario.recipe
    plain = replace(scenario, recipe=recipe, init_scale=1.0, growth_interval=1)
    alone = Alone(variation=PLAIN, skipped=schedule.skipped, scales=schedule.scales)
    return replace(_train(plain, alone, scenario.steps), gradients=())


def watched_on_one_rank(
    scenario: Scenario, schedule: Schedule, step: int
) -> tuple[ModuleLog, Sequence[ModuleLog], Sequence[ModuleLog]]:
    """Record the tensors at module boundaries in one step on one rank.

    Must be called in a process group of one rank, for a workload with ``reference =
    "one rank"``.

    Args:
        scenario: scenario that the ranks trained.
        schedule: skips and scales, which the one rank follows.
        step: step to record.

    Returns:
        The log of the truth, the logs of noisy runs beginning with the plain one, and
        the logs of side runs. See [Note: Truth on one rank].
    """
    watched: list[Watched] = []
    alone = partial(Alone, skipped=schedule.skipped, scales=schedule.scales)

    def trained(variation: Variation, sides: Sides = STAY) -> Reference:
        this = alone(variation=variation)
        return _train(scenario, this, step + 1, watched=watched, sides=sides)

    in_fp64 = _in_fp64(scenario, alone(variation=TRUTH), step + 1, watched)
    wide = None if in_fp64 is None else watched[-1].log
    watched.clear()
    plain, moved = trained(PLAIN), trained(SHIFTED)
    for sides in sides_of((in_fp64 or moved).inputs, plain.inputs):
        trained(PLAIN, sides)
    logs = [each.log for each in watched]
    return wide or logs[0], logs[:2], logs[2:]


@partial(Kept, least=1)
def _references(
    scenario: Scenario,
    skipped: tuple[frozenset[str], ...],
    scales: tuple[float, ...],
) -> OneRank:
    def trained(variation: Variation, sides: Sides = STAY) -> Reference:
        alone = Alone(variation=variation, skipped=skipped, scales=scales)
        return _train(scenario, alone, scenario.steps, sides=sides)

    plain = trained(PLAIN)
    in_fp64 = Alone(variation=TRUTH, skipped=skipped, scales=scales)
    truth = _in_fp64(scenario, in_fp64, scenario.steps)
    # only a run in fp64 shows whether a variation changes more than rounding
    first = None if truth is None else _first_steps(scenario, TRUTH)
    draws_idly = bool(plain.drew) and _changes_nothing(
        scenario, first, replace(TRUTH, redrawn=1)
    )
    undecided = ""
    if _changes_nothing(scenario, first, replace(TRUTH, halved=True)):
        undecided = (
            "train_step computes the same gradients from half of its rows, so it does "
            "not train on the micro_batches that it gets, and ranks cannot be compared "
            "with one rank: take the rows of micro_batches"
        )
    elif plain.drew and not draws_idly:
        undecided = (
            f"on one rank {plain.drew} drew random numbers in the passes, which depend "
            "on the number of ranks: draw them in batch(), where they have rows, or "
            "set the size of the noise to 0 in the workload"
        )
    elif differs := _difference(plain, trained(PLAIN)):
        undecided = (
            f"two runs of train_step on one rank with the same seed differ in {differs}"
            ": draw all random numbers in batch(), or from torch's generator, and keep "
            "nothing from one stack to the next"
        )
    variations = list(NOISY)
    if draws_idly:  # all runs except the plain one
        variations = [replace(v, redrawn=n) for n, v in enumerate(NOISY)]
    if not _changes_nothing(scenario, first, replace(TRUTH, permuted=True)):
        variations = [replace(v, permuted=False) for v in variations]
    # each number by itself: two parts may have equal rows, and four may not
    for parts in sorted({v.parts for v in variations} - {1}):
        if not _changes_nothing(scenario, first, replace(TRUTH, parts=parts)):
            variations = [
                replace(v, parts=1) if v.parts == parts else v for v in variations
            ]
    variations = list(dict.fromkeys(variations))
    noisy = [plain, *(trained(v) for v in variations if v != PLAIN)]
    words = dict.fromkeys(word for v in variations for word in v.words)
    if scenario.reduced_in is not None:
        words["gradients changed by a unit roundoff of what they are reduced in"] = None
    # without fp64 any two runs show the sides
    other_sides = sides_of((truth or noisy[1]).inputs, plain.inputs)
    sides = [trained(PLAIN, each) for each in other_sides]
    where = "in fp64" if truth is not None else f"in {scenario.precision} (no fp64)"
    text = f"one rank, {where}; noise of {len(noisy)} runs: {', '.join(words)}"
    return OneRank(
        truth=truth or plain, noisy=noisy, sides=sides, text=text, undecided=undecided
    )


def _in_fp64(
    scenario: Scenario, alone: Alone, steps: int, watched: list[Watched] | None = None
) -> Reference | None:
    """Train in fp64; return None if that fails, see [Note: Truth on one rank]."""
    for widens in (False, True):
        variation = replace(alone.variation, widens=widens)
        wide = replace(alone, variation=variation)
        try:
            return _train(scenario, wide, steps, torch.float64, watched)
        # if fp32 raises the same error, the plain run has already raised it
        except (WorkloadError, CannotError):
            continue
    return None


def _changes_nothing(
    scenario: Scenario, first: Reference | None, variation: Variation
) -> bool:
    """Return True if a variation leaves the gradients of the first steps unchanged."""
    varied = first and _first_steps(scenario, variation)
    if not (first and varied):
        return False  # for example if the stack accepts only one micro-batch
    if variation.redrawn and {*first.generators} & {*varied.generators}:
        return False  # the stack seeds the generators itself
    steps = zip(first.gradients, varied.gradients, strict=True)
    return all(equal_but_for_rounding(one, other) for one, other in steps)


def _first_steps(scenario: Scenario, variation: Variation) -> Reference | None:
    """Train the first steps, without skips; return None if the workload cannot."""
    steps = min(TRIED, scenario.steps)
    alone = Alone(
        variation=variation,
        # these few steps need no skips
        skipped=(frozenset[str](),) * steps,
        scales=(1.0,) * steps,
    )
    return _in_fp64(scenario, alone, steps)


def _train(
    scenario: Scenario,
    alone: Alone,
    steps: int,
    dtype: torch.dtype | None = None,
    watched: list[Watched] | None = None,
    sides: Sides = STAY,
) -> Reference:
    """Train on this rank.

    Args:
        scenario: scenario that the ranks trained.
        alone: how this run differs from the plain one.
        steps: number of steps.
        dtype: dtype that all parameters and gradients must have; None for any.
        watched: receives the tensors at module boundaries in the last step.
        sides: how to move inputs of functions whose derivative jumps.
    """
    # imported here, because checks need no code that makes a run
    from ..rank.watched_step import watched_step
    from ..rank.worker import observe_rank

    generators: list[str] = []
    inputs: list[Inputs] = []

    @contextmanager
    def around(engine: Engine, step: int) -> Iterator[None]:
        if alone.variation.redrawn:
            seed_everything(1000 * alone.variation.redrawn + step)
        watching = (
            watched_step(engine, step, watched)
            if watched is not None and step == steps - 1
            else nullcontext()
        )
        new_tensors = alone.variation.new_tensors()
        with watching, new_tensors, JumpLog(sides, step) as jumps:
            yield
        inputs.append(jumps.inputs)
        generators.append(digest(torch.get_rng_state()))

    # begin with the generators' states of the ranks
    seed_everything(0)
    # The reference runs eagerly: compiled code is what is tested.
    with torch.compiler.set_stance("force_eager"):
        try:
            seen = observe_rank(
                scenario,
                NO_SCALER,
                os.getcwd(),
                last=steps - 1,
                around=around,
                alone=alone,
            )
        except WorkloadError as error:
            text = f"the reference, on one rank: {error}"
            named_error = WorkloadError(text)
            named_error.call = error.call
            raise named_error from error
    (trace,) = fold([seen])
    arrays = [
        *trace.start.values(),
        *(g for s in trace.steps for g in s.gradients.values()),
    ]
    if dtype is torch.float64 and any(values.dtype != np.float64 for values in arrays):
        raise CannotError("the stack keeps another dtype than fp64")
    return replace(
        _as_reference(scenario, trace),
        generators=tuple(generators),
        inputs=tuple(inputs),
    )


def _as_reference(scenario: Scenario, trace: RankTrace) -> Reference:
    named = compared_parameters(scenario.workload.model())
    sizes = {n: p.numel() for n, p in named.items()}
    for name, size in sizes.items():
        n_elements = distinct(trace.index.get(name, np.array([], dtype=np.int64)))
        if n_elements < size:
            text = (
                f"on one rank it leaves out {size - n_elements} of {size} elements of"
            )
            raise scenario.workload.refuse("parallelize", f"{text} {name}")

    def whole(
        name: str, values: NDArray[np.floating], places: NDArray[np.int64]
    ) -> Doubles:
        full = np.zeros(sizes[name])
        full[places] = values
        return full

    def gradients(at: StepTrace) -> dict[str, Doubles]:
        return {n: whole(n, g, trace.places(at, n)) for n, g in at.gradients.items()}

    start = {n: whole(n, values, trace.index[n]) for n, values in trace.start.items()}
    start |= {n: values.astype(np.float64) for n, values in trace.buffers.items()}
    after = [
        {n: whole(n, values, trace.index[n]) for n, values in at.parameters.items()}
        | {n: v.astype(np.float64) for n, v in at.buffers.items() if n in start}
        for at in trace.steps
    ]
    return Reference(
        averages=tuple(
            {n: whole(n, v, trace.index[n]) - start[n] for n, v in at.averages.items()}
            for at in trace.steps
        ),
        losses=tuple(_number(at.loss) for at in trace.steps),
        loss_dtype=next((at.loss_dtype for at in trace.steps if at.loss_dtype), ""),
        gradients=tuple(gradients(at) for at in trace.steps),
        updates=tuple({n: now[n] - start[n] for n in now} for now in after),
        start=start,
        initial=trace.initial,
        drew=next((_drawn(at) for at in trace.steps if at.drew), ""),
        norms=tuple(_number(at.reported_norm) for at in trace.steps),
        settings=tuple(
            tuple(
                (name, key, value)
                for name, values in at.settings.items()
                for key, value in values.items()
                if key != INITIAL_RATE
            )
            for at in trace.steps
        ),
        constants=tuple(at.constants for at in trace.steps),
    )


def _drawn(at: StepTrace) -> str:
    return str(at.draws[0]) if at.draws else "train_step itself"


def _number(value: float | None) -> float:
    """Return a reported number, or nan if none was reported: nan gets no bound."""
    return float("nan") if value is None else value


def _difference(one: Reference, other: Reference) -> str:
    """Describe the first bitwise difference of two runs; else ""."""
    for step in range(len(one.losses)):
        values: list[tuple[str, Any, Any]] = [
            ("the loss", one.losses[step], other.losses[step])
        ]
        for what, mine, theirs in (
            ("gradient", one.gradients[step], other.gradients[step]),
            ("update", one.updates[step], other.updates[step]),
        ):
            values += [
                (f"the {what} of {n}", mine.get(n, ()), theirs.get(n, ()))
                for n in {**mine, **theirs}
            ]
        for subject, mine, theirs in values:
            if not np.array_equal(mine, theirs, equal_nan=True):
                return f"{subject} at step {step}"
    return ""
