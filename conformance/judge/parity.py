"""Parity: the errors of a sharded run against the truth, with their bounds.

Steps: derive the schedule that the rule demands from the traces; train the fp64 truth
and the noisy references; per step and parameter, measure the noise; compare every
rank's local elements with the truth; keep the row with the largest error / bound. The
bounds are those of ``bounds``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...fixtures import is_workload
from ..rank.trace import RankTrace, StepTrace
from ..space.scenario import Scenario
from ..space.workload_checks import clip_norm_of, counts_equal
from .bounds import SAFETY_FACTOR, ParityBounds, make_parity_bounds, sizes
from .doubts import Doubt, doubts_of
from .reference import Idle, Reference, Schedule, check_equal_start
from .settings import StackSchedule, against_planned, stack_schedule

__all__ = [
    "SAFETY_FACTOR",
    "ClipRow",
    "Parity",
    "ParityRow",
    "demanded_schedule",
    "followed_schedule",
    "gradient_of",
    "mean_loss",
    "measure_parity",
    "moved",
]

Doubles = NDArray[np.float64]
Seen = Sequence[tuple[RankTrace, StepTrace]]
"""One step of all ranks of a world."""


@dataclass(frozen=True, kw_only=True)
class ParityRow:
    """One comparison: a tensor on a rank at a step against the fp64 truth."""

    kind: str
    """``gradient``, ``update`` (parameter minus its initial value), ``loss`` or
    ``average`` (of the weights, minus the initial values)."""
    step: int
    parameter: str
    rank: int
    measure: str
    """``norm`` or ``largest element`` of the difference."""
    error: float
    """Size of the difference, relative to the truth's own size where that is not 0."""
    bound: float
    """Bound of the error, in the same unit."""
    size: float
    """The truth's own size, in the same measure."""

    @property
    def absolute(self) -> float:
        """The error before it is divided by the truth's size."""
        return self.error * (self.size or 1.0)

    @property
    def compares(self) -> bool:
        """Whether the bound tells a right value from one that is not there.

        With a bound as large as the truth, zeros would pass. Where the truth is zero
        they are right.
        """
        return self.ratio > 1 or self.bound < (1.0 if self.size else float("inf"))

    @property
    def ratio(self) -> float:
        """Error over bound; above 1 is a violation. 0 / 0 is 0."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.bound if self.bound else float("inf")


@dataclass(frozen=True, kw_only=True)
class ClipRow:
    """The factor by which a rank's gradient of a parameter was clipped."""

    step: int
    parameter: str
    rank: int
    factor: float
    """Of the truth's gradient before it is clipped, by least squares."""
    due: float
    """The factor by which the truth clips."""
    bound: float
    """By how much the factor may be off."""
    above_noise: bool
    """Whether the gradient is the truth's times a factor, and not lost in noise."""


@dataclass(kw_only=True)
class Parity:
    """The measured parity of one run."""

    compared: Counter[str] = field(default_factory=Counter)
    """kind -> number of elements that were compared, on all ranks at all steps."""
    not_compared: Counter[str] = field(default_factory=Counter)
    """kind -> elements that were due and could not be compared."""
    worst: dict[str, ParityRow] = field(default_factory=dict)
    """kind -> the row closest to, or furthest beyond, its bound."""
    first_bad: dict[str, ParityRow] = field(default_factory=dict)
    """kind -> the first row beyond its bound (the worst one of its step)."""
    departed: dict[str, list[ParityRow]] = field(default_factory=dict)
    """kind -> all rows of that first step that are beyond their bound."""
    per_step: list[float] = field(default_factory=list)
    """Largest ratio of each step."""
    per_parameter: dict[str, float] = field(default_factory=dict)
    """Largest ratio of each parameter."""
    reference_loss: list[float] = field(default_factory=list)
    """Loss of the fp64 truth at each step."""
    reference_norm: list[float] = field(default_factory=list)
    """Its norm of the whole unscaled gradient at each step, before it is clipped."""
    norm_bound: list[float] = field(default_factory=list)
    """Bound of the error of such a norm; infinite if not known."""
    clip_norm: float | None = None
    """The norm to which gradients are to be clipped, if they are."""
    doubts: Sequence[Doubt] = ()
    """Why the reference, and not the run, may be what departs."""
    still: frozenset[tuple[int, int, int]] = frozenset()
    """(step, rank, optimizer) of which the truth moves no parameter, either."""
    clipped: list[ClipRow] = field(default_factory=list)
    """Of each gradient of the steps in which none is bad, where they are clipped."""
    reference: str = ""
    """What the reference is, in words, if it is not the plain one."""
    undecided: str = ""
    """Why nothing can be compared with it, in words; else empty."""
    stack_schedule: StackSchedule = field(default_factory=StackSchedule)
    """What the stack's own schedules have moved, which the reference follows."""

    def add(
        self, kind: str, rows: Sequence[ParityRow], elements: int, left_out: int = 0
    ) -> None:
        """Add what was measured of one tensor on one rank at one step.

        Args:
            kind: as in ``ParityRow``.
            rows: its measures; those that compare nothing are dropped.
            elements: number of elements compared, if any measure compares.
            left_out: number of elements that were due and are in no measure.
        """
        known = [row for row in rows if row.compares]
        self.compared += Counter({kind: elements if known else 0})
        self.not_compared += Counter({kind: left_out + (0 if known else elements)})
        for row in known:
            self._keep(row)

    def _keep(self, row: ParityRow) -> None:
        worst = self.worst.get(row.kind)
        if worst is None or row.ratio > worst.ratio:
            self.worst[row.kind] = row
        first = self.first_bad.get(row.kind)
        if row.ratio > 1 and (first is None or first.step == row.step):
            self.departed.setdefault(row.kind, []).append(row)
        if row.ratio > 1 and (
            first is None or (first.step == row.step and row.ratio > first.ratio)
        ):
            self.first_bad[row.kind] = row
        self.per_step[row.step] = max(self.per_step[row.step], row.ratio)
        best = self.per_parameter.get(row.parameter, 0.0)
        self.per_parameter[row.parameter] = max(best, row.ratio)

    def doubt(self, step: int, kind: str, parameter: str | None) -> Doubt | None:
        """The doubt that makes a departure inconclusive, if there is one.

        Such a doubt covers all other departures, too: what departs before it began has
        another cause, which may also explain what departs later.
        """
        rows = [*self.departed.get("gradient", ()), *self.departed.get("update", ())]
        places = [(step, kind, parameter)]
        places += [(row.step, row.kind, row.parameter) for row in rows]
        return next((d for d in self.doubts if all(d.covers(*p) for p in places)), None)


def demanded_schedule(*phases: Sequence[RankTrace]) -> Schedule:
    """Skips and scales that the rule demands, and what the stack's schedules move.

    The scale is the one of the first rank; whether ranks agree on it is another law's
    business.

    Args:
        phases: one trace a rank for each world that the run was on, in order.
    """
    steps = list(_steps(phases))
    return Schedule(
        skipped=tuple(_held_still(seen) for seen in steps),
        scales=tuple(seen[0][1].scale_before for seen in steps),
        settings=stack_schedule(steps).settings,
    )


def _steps(phases: Iterable[Sequence[RankTrace]]) -> Iterator[Seen]:
    """Each step that all ranks of its world have."""
    for traces in phases:
        # not strict: a rank that stopped early has fewer steps
        for seen in zip(*(t.steps for t in traces), strict=False):
            yield list(zip(traces, seen, strict=True))


def _held_still(seen: Seen) -> frozenset[str]:
    """Parameters of the optimizers that have a bad gradient on any rank."""
    bad = {
        number
        for _, at in seen
        for number, decision in enumerate(at.decisions)
        if decision.non_finite
    }
    return frozenset(
        name for trace, _ in seen for number in bad for name in trace.owned[number]
    )


def followed_schedule(scenario: Scenario, *phases: Sequence[RankTrace]) -> Schedule:
    """The demanded schedule, and which gradients a user's own workload left out.

    Args:
        scenario: what was trained.
        phases: one trace a rank for each world that the run was on, in order.
    """
    schedule = demanded_schedule(*phases)
    if is_workload(scenario.model):
        idle = tuple(_idle(seen) for seen in _steps(phases))
        schedule = replace(schedule, idle=idle)
    return schedule


def measure_parity(scenario: Scenario, *phases: Sequence[RankTrace]) -> Parity:
    """Compare every rank and every step with the truth.

    Args:
        scenario: what was trained.
        phases: one complete trace a rank, for each world that it was on.
    """
    schedule = followed_schedule(scenario, *phases)
    parity_bounds = make_parity_bounds(scenario, schedule)
    starts = [t.initial for traces in phases for t in traces if t.initial]
    initial = parity_bounds.truth.initial
    check_equal_start(scenario.model, "a rank and the reference", initial, starts)
    _check_counts(scenario, phases, parity_bounds.truth)
    steps = [*_steps(phases)]
    moved_by_stack = stack_schedule(steps)
    alone = scenario.workload.one_rank
    if planned := parity_bounds.truth.settings:
        whose = "on one rank" if alone else "by the workload's scheduler"
        moved_by_stack = against_planned(moved_by_stack, steps, planned, whose)
    parity = Parity(
        per_step=[0.0] * scenario.steps,
        reference_loss=list(parity_bounds.truth.losses),
        reference_norm=list(parity_bounds.truth.norms),
        norm_bound=[step["norm"][0] for step in parity_bounds.norm],
        # one rank clips by itself: what comes of it is compared
        clip_norm=None
        if alone
        else clip_norm_of(scenario.workload, scenario.parsed_recipe.training),
        reference=parity_bounds.reference,
        undecided=parity_bounds.undecided,
        doubts=doubts_of(scenario, steps, moved_by_stack.unclear),
        still=frozenset(_still(schedule, phases, parity_bounds)),
        stack_schedule=moved_by_stack,
    )
    if parity.clip_norm is not None:
        # as torch.nn.utils.clip_grad_norm_ computes the factor
        factors = [
            min(1.0, parity.clip_norm / (n + 1e-6)) for n in parity_bounds.truth.norms
        ]
        parity.clipped += _clip_rows(factors, schedule, phases, parity_bounds)
    for each in _measured(schedule, phases, parity_bounds):
        parity.add(*each)
    return parity


def _still(
    schedule: Schedule,
    phases: Iterable[Sequence[RankTrace]],
    parity_bounds: ParityBounds,
) -> Iterator[tuple[int, int, int]]:
    """Steps that rightly move none of an optimizer's parameters on a rank.

    Their gradients may be zero there (behind a layer that begins at zero, a shard of an
    embedding without tokens), or the optimizer only prepares in its first step.
    """
    for seen, skipped, moves in zip(
        _steps(phases), schedule.skipped, parity_bounds.moves, strict=False
    ):
        for trace, at in seen:
            for number, names in enumerate(trace.owned[: len(at.decisions)]):
                held = [n for n in names if n in trace.index]
                if skipped.isdisjoint(held) and not any(
                    moves[n][trace.index[n]].any() for n in held
                ):
                    yield at.step, trace.rank, number


def _idle(seen: Seen) -> Idle:
    """How the optimizers received the parameters without a gradient."""
    names = dict.fromkeys(name for trace, _ in seen for name in trace.index)
    zeros, absent = set(), set()
    for name in names:
        held = [pair for pair in seen if len(pair[0].index.get(name, ()))]
        # a rank whose optimizer never takes this parameter says nothing about it
        held = [pair for pair in held if _hands_over(pair[0], name)] or held
        had = [at.gradients[name] for _, at in held if name in at.gradients]
        if not had:
            absent.add(name)
        elif len(had) == len(held) and not any(values.any() for values in had):
            zeros.add(name)
    return Idle(zeros=frozenset(zeros), absent=frozenset(absent))


def _hands_over(trace: RankTrace, name: str) -> bool:
    """Whether an optimizer of this rank is ever given the gradient of a parameter."""
    return any(name in at.gradients for at in trace.steps)


def _check_counts(
    scenario: Scenario, phases: Iterable[Sequence[RankTrace]], truth: Reference
) -> None:
    """Check that the counts of all ranks add up to that of the whole batch.

    Raises:
        WorkloadError: if rows or tokens were left out, or seen twice.
    """
    for seen, whole in zip(_steps(phases), truth.counts, strict=False):
        for trace, at in seen:
            if at.count is None or whole is None or counts_equal(at.count, whole):
                continue
            # a sum of weights may be rounded there; fp32 has the same parts
            if not scenario.parsed_precision.is_full and whole != int(whole):
                continue
            what = "leave a hole" if at.count < whole else "overlap"
            raise scenario.workload.refuse(
                "shard" if scenario.workload.shard else "loss",
                f"the parts of all ranks {what}: their counts add up to {at.count:g} "
                f"on rank {trace.rank} at step {at.step}, that of the whole batch is "
                f"{whole:g}",
            )


class _Measured(NamedTuple):
    """One tensor on one rank at one step."""

    kind: str
    rows: Sequence[ParityRow]
    elements: int
    left_out: int = 0


def _measured(
    schedule: Schedule,
    phases: Iterable[Sequence[RankTrace]],
    parity_bounds: ParityBounds,
) -> Iterator[_Measured]:
    truth = parity_bounds.truth
    for step, (seen, skipped) in enumerate(
        zip(_steps(phases), schedule.skipped, strict=True)
    ):
        yield from _loss(step, seen, parity_bounds)
        for trace, at in seen:
            for name, index in trace.index.items():
                if name not in skipped:
                    yield from _gradient(step, seen, trace, at, name, parity_bounds)
                # see [Note: Weights of updates] in bounds
                weight = parity_bounds.weights[step][name][index]
                live = int(np.count_nonzero(weight))
                rows = live and _compare(
                    ("update", step, name, trace.rank),
                    moved(trace, at, name) * weight,
                    (truth.updates[step][name], index),
                    parity_bounds.update[step][name],
                )
                yield _Measured("update", rows or (), live, len(index) - live)
                if truth.averages and name in at.averages:
                    rows = live and _compare(
                        ("average", step, name, trace.rank),
                        (at.averages[name] - trace.start[name].astype(np.float64))
                        * weight,
                        (truth.averages[step][name], index),
                        parity_bounds.average[step][name],
                    )
                    yield _Measured("average", rows or (), live, len(index) - live)


def _gradient(
    step: int,
    seen: Seen,
    trace: RankTrace,
    at: StepTrace,
    name: str,
    parity_bounds: ParityBounds,
) -> Iterator[_Measured]:
    """A gradient; where none is due, None and zeros are both right.

    None is due on a rank that leaves the parameter to another rank's optimizer and
    receives the new weights.
    """
    true, had = parity_bounds.truth.gradients[step].get(name), name in at.gradients
    if not had and (true is None or _left_to_another(seen, trace, name)):
        return
    places = trace.places(at, name)
    bound = (0.0, 0.0) if true is None else parity_bounds.gradient[step][name]
    whole = np.zeros(len(parity_bounds.weights[step][name])) if true is None else true
    # a gradient of zeros may also be None
    nothing = None if whole.any() else np.zeros(len(places))
    rows = _compare(
        ("gradient", step, name, trace.rank),
        gradient_of(seen, trace, at, name) if had else nothing,
        (whole, places),
        bound,
    )
    yield _Measured("gradient", rows, len(places))


def _left_to_another(seen: Seen, trace: RankTrace, name: str) -> bool:
    return not _hands_over(trace, name) and any(
        name in at.gradients and other.shards.get(name) == trace.shards.get(name)
        for other, at in seen
    )


def _clip_rows(
    factors: Sequence[float],
    schedule: Schedule,
    phases: Iterable[Sequence[RankTrace]],
    parity_bounds: ParityBounds,
) -> Iterator[ClipRow]:
    """The factor of each gradient against the truth's gradient before clipping."""
    steps = zip(_steps(phases), factors, schedule.skipped, strict=True)
    noisy, worst = parity_bounds.noisy, 0.0
    for step, (seen, due, skipped) in enumerate(steps):
        rows = []
        # with a bad gradient the ranks clip by a norm that is not finite
        for trace, at in seen if not skipped else ():
            for name, true in parity_bounds.truth.gradients[step].items():
                if name not in at.gradients:
                    continue
                places = trace.places(at, name)
                # the reference records clipped gradients: this undoes its factor
                whole = true[places] / due
                size = float(np.linalg.norm(whole))
                noise, _ = parity_bounds.gradient[step][name]
                if not size or not np.isfinite(noise):
                    continue
                values = gradient_of(seen, trace, at, name).astype(np.float64)
                factor = float(values @ whole) / size**2
                rest = float(np.linalg.norm(values - factor * whole))
                # a gradient that is not larger than its noise has no direction
                if noise < size * due:
                    runs = [run.gradients[step].get(name) for run in noisy]
                    worst = max(worst, _factor_noise(runs, places, true[places]))
                rows.append(
                    ClipRow(
                        step=step,
                        parameter=name,
                        rank=trace.rank,
                        factor=factor,
                        due=due,
                        bound=noise / size,
                        # clipping scales the noise of a gradient, too
                        above_noise=rest <= noise * max(1.0, abs(factor) / due),
                    )
                )
        yield from (_decided(row, SAFETY_FACTOR * worst) for row in rows)


def _factor_noise(
    runs: Iterable[Doubles | None], places: NDArray[np.int64], true: Doubles
) -> float:
    """By how much the factors of correct runs are off, relative to the due one."""
    off = [
        float(g[places] @ true) / float(true @ true) - 1 for g in runs if g is not None
    ]
    return max((abs(x) for x in off if np.isfinite(x)), default=float("inf"))


def _decided(row: ClipRow, worst: float) -> ClipRow:
    """Decide whether a factor is known, and by which bound.

    Noise in other directions than the gradient's does not change its factor. So where
    the bound of the gradient cannot tell the factor, that of factors may: the largest
    error that correct runs show so far, in any parameter.
    """
    bound = row.bound
    if row.due / 2 <= bound < row.due:
        bound = min(bound, worst * row.due)
    # with a larger bound even half the due factor would pass
    above = row.above_noise and bound < row.due / 2
    return replace(row, bound=bound, above_noise=above)


def gradient_of(
    seen: Seen, trace: RankTrace, at: StepTrace, name: str
) -> NDArray[np.floating]:
    """The gradient of ``trace``, summed over the ranks on which it is partial.

    Summed here and not on the ranks: an observer that sends collectives of its own
    would hang where ranks disagree whether to step.
    """
    ranks = at.partial.get(name)
    if not ranks:
        return at.gradients[name]
    places = trace.places(at, name)
    parts = [
        there.gradients[name].astype(np.float64)
        for other, there in seen
        if other.rank in ranks
        and name in there.gradients
        and np.array_equal(other.places(there, name), places)
    ]
    total: Doubles = np.sum(parts, axis=0)
    return total


def mean_loss(seen: Iterable[StepTrace]) -> float | None:
    """The loss of a step: the mean of the ranks that have one, by their weights."""
    # the mean of a rank without tokens is 0 / 0
    known = [(at.loss, at.weight) for at in seen if at.loss is not None and at.weight]
    total = sum(weight for _, weight in known)
    return sum(loss * weight for loss, weight in known) / total if total else None


def moved(trace: RankTrace, at: StepTrace, name: str) -> Doubles:
    """A rank's elements of a parameter minus their initial values."""
    start = trace.start[name].astype(np.float64)
    found: Doubles = at.parameters[name].astype(np.float64) - start
    return found


def _loss(step: int, seen: Seen, parity_bounds: ParityBounds) -> Iterator[_Measured]:
    mean = mean_loss(at for _, at in seen)
    if mean is not None:
        rows = _compare(
            ("loss", step, "loss", 0),
            np.array([mean]),
            (np.array([parity_bounds.truth.losses[step]]), np.array([0])),
            parity_bounds.loss[step]["loss"],
        )
        yield _Measured("loss", rows, 1)


def _compare(
    where: tuple[str, int, str, int],
    values: NDArray[np.floating] | None,
    truth: tuple[Doubles, NDArray[np.int64]],
    bounds: tuple[float, float],
) -> list[ParityRow]:
    """The measures of a tensor; none where it is not there, or has no bound."""
    kind, step, name, rank = where
    whole, index = truth
    if not len(index) or values is None or not all(np.isfinite(bounds)):
        return []
    errors, units = sizes(values.astype(np.float64) - whole[index]), sizes(whole)
    return [
        ParityRow(
            kind=kind,
            step=step,
            parameter=name,
            rank=rank,
            measure=measure,
            error=_finite(error / (unit or 1.0)),
            bound=bound / (unit or 1.0),
            size=unit,
        )
        for measure, error, bound, unit in zip(
            _MEASURES, errors, bounds, units, strict=True
        )
    ]


_MEASURES = ("norm", "largest element")


def _finite(error: float) -> float:
    """A nan difference counts as infinite."""
    return float("inf") if np.isnan(error) else float(error)
