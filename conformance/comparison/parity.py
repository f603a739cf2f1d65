"""Parity: compare a sharded run with the truth, within bounds.

Steps: derive from the traces which steps a correct run must skip. Train the fp64 truth
and the noisy references. Measure the noise for each step and parameter. Compare every
rank's local elements with the truth. Keep the row with the largest error / bound. The
bounds are those of ``bounds``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...fixtures import OfWorkload, ResolvedWorkload
from ..formulas import clip_factor
from ..rank.layout_checks import distinct
from ..rank.trace import RankTrace, StepTrace
from ..space.facts import clip_norm_of
from ..space.scenario import Scenario
from ..space.workload_checks import counts_equal, listed
from .bounds import ParityBounds, make_parity_bounds
from .compare import SAFETY_FACTOR, Doubles, compare, multiple_of, sizes
from .doubts import doubts_of
from .measured import ClipRow, Lack, Parity, ParityRow, Seen, gradient_of
from .reference import Reference, Schedule
from .reference_run import Idle, check_equal_start
from .settings import (
    OtherConstant,
    StackSchedule,
    other_constant,
    other_than_reference,
    stack_schedule,
)
from .shards import Shards

__all__ = [
    "demanded_schedule",
    "followed_schedule",
    "mean_loss",
    "measure_parity",
    "moved",
]


def demanded_schedule(traces: Sequence[RankTrace]) -> Schedule:
    """Return the skips that a correct run must make, the scales, and changed settings.

    The scales come from the first rank. Agreement checks compare them with the scales
    of the other ranks.
    """
    steps = list(_steps(traces))
    return Schedule(
        skipped=tuple(_held_still(seen) for seen in steps),
        scales=tuple(seen[0][1].scale_before for seen in steps),
        settings=stack_schedule(steps).settings,
    )


def _steps(traces: Sequence[RankTrace]) -> Iterator[Seen]:
    """Yield each step that all ranks completed."""
    # not strict, because a rank that stopped early has fewer steps
    for seen in zip(*(t.steps for t in traces), strict=False):
        yield list(zip(traces, seen, strict=True))


def _held_still(seen: Seen) -> frozenset[str]:
    """Return the parameters of each optimizer that has a bad gradient on any rank.

    If the workload itself skipped the step, returns the parameters of all optimizers.
    """
    bad = {
        number
        for _, at in seen
        for number, decision in enumerate(at.decisions)
        if decision.non_finite or at.own_skip
    }
    return frozenset(
        name for trace, _ in seen for number in bad for name in trace.owned[number]
    )


def followed_schedule(scenario: Scenario, traces: Sequence[RankTrace]) -> Schedule:
    """Return the schedule that references follow: the skips due, scales and settings.

    For a user's workload it also has the parameters without a gradient. If optimizers
    round their state, it has their shards, if known. Settings are left out if
    gradparity's loop or the workload's scheduler gives them.
    """
    schedule = demanded_schedule(traces)
    if _gives_settings(scenario.workload):
        schedule = replace(schedule, settings=())
    if OfWorkload.OF_USER in scenario.workload.has:
        idle = tuple(_idle(seen) for seen in _steps(traces))
        schedule = replace(schedule, idle=idle)
    # declared optimizers step copies, whose shards are unknown
    if scenario.workload.rounds_state and scenario.workload.owners is None:
        schedule = replace(schedule, shards=_shards(traces))
    return schedule


def _gives_settings(workload: ResolvedWorkload) -> bool:
    """Return True if gradparity's loop or the workload's scheduler gives the settings.

    The reference then takes no settings from the ranks.
    """
    return OfWorkload.LOOP in workload.has or workload.scheduler is not None


def _shards(ranks: Sequence[RankTrace]) -> Shards:
    """Return the shards in which optimizers hold parameters, as far as they are known.

    A rank's shard counts even if its parameter is stepped on other ranks only.
    """
    events = [e for trace in ranks for seen in trace.steps for e in seen.events]
    if any(event.groups and not event.names for event in events):
        return ()  # an optimizer of copies may also step these parameters
    stepped = {name for event in events for name in event.names}
    parts_by_name: dict[str, dict[bytes, None]] = {}
    for trace in ranks:
        for name, places in trace.index.items():
            if name in stepped and len(places):  # an empty shard is no shard
                parts_by_name.setdefault(name, {})[
                    places.astype(np.int64).tobytes()
                ] = None
    return tuple(
        (name, (*parts,))
        for name, parts in sorted(parts_by_name.items())
        if _apart(parts)
    )


def _apart(parts: Iterable[bytes]) -> bool:
    """Return True if the shards do not overlap."""
    places = np.frombuffer(b"".join(parts), np.int64)
    return distinct(places) == len(places)


def measure_parity(scenario: Scenario, traces: Sequence[RankTrace]) -> Parity:
    """Compare every rank and every step with the truth.

    Args:
        scenario: scenario that the ranks trained.
        traces: complete traces of all ranks.
    """
    schedule = followed_schedule(scenario, traces)
    returned = {at.loss_dtype for t in traces for at in t.steps}
    parity_bounds = make_parity_bounds(scenario, schedule, frozenset(returned - {""}))
    starts = [t.initial for t in traces if t.initial]
    initial = parity_bounds.truth.initial
    check_equal_start(scenario.model, "a rank and the reference", initial, starts)
    _check_counts(scenario, traces, parity_bounds.truth)
    steps = [*_steps(traces)]
    constant = _other_constant(scenario, steps, parity_bounds.truth)
    moved_by_stack = _schedule_of(scenario, steps, parity_bounds.truth, constant)
    alone = scenario.workload.one_rank
    # if draws have an effect, nothing could be decided
    draws_idly = bool(parity_bounds.truth.drew) and not parity_bounds.undecided
    parity = Parity(
        per_step=[0.0] * scenario.steps,
        reference_loss=list(parity_bounds.truth.losses),
        reference_norm=list(parity_bounds.truth.norms),
        norm_bound=[step["norm"][0] for step in parity_bounds.norm],
        # the reference on one rank clips by itself, and the result is compared
        clip_norm=None
        if alone
        else clip_norm_of(scenario.workload, scenario.parsed_recipe.training),
        reference=parity_bounds.reference,
        undecided=parity_bounds.undecided,
        doubts=doubts_of(
            scenario,
            steps,
            moved_by_stack.unclear,
            draws_idly=draws_idly,
        ),
        still=frozenset(_still(schedule, traces, parity_bounds)),
        unseen_buffer=_unseen_buffer(scenario, traces, parity_bounds.truth),
        moved_buffer=_moved_buffer(scenario, traces, parity_bounds.truth),
        narrow_loss=_narrow_loss(parity_bounds.noisy, returned),
        stack_schedule=moved_by_stack,
        other_constant=constant,
    )
    if parity.clip_norm is not None:
        factors = [
            clip_factor(norm, parity.clip_norm) for norm in parity_bounds.truth.norms
        ]
        least = scenario.parsed_precision.roundoff
        parity.clipped += _clip_rows(factors, schedule, traces, parity_bounds, least)
    unseen, seen = dict[str, None](), set[str]()
    for each in _measured(scenario, schedule, traces, parity_bounds):
        is_compared = parity.add(each.kind, each.rows, each.elements)
        if each.kind == "gradient":
            if each.lack is Lack.UNSEEN:
                unseen[each.name] = None
            else:
                seen.add(each.name)
        if each.elements and not is_compared:
            why = each.lack or (Lack.NOISE if each.rows else Lack.NOT_FINITE)
            parity.lacks(each.kind, why, each.step, each.elements)
        if each.left_out:
            parity.lacks(each.kind, Lack.DIRECTION, each.step, each.left_out)
    parity.unseen_gradients = tuple(name for name in unseen if name not in seen)
    return parity


def _other_constant(
    scenario: Scenario, steps: Sequence[Seen], truth: Reference
) -> OtherConstant | None:
    """Return the first setting of a rank that differs although no schedule changes it.

    Returns None if all such settings equal those of the reference.
    """
    alone = scenario.workload.one_rank
    whose = "on one rank" if alone else "by the workload's optimizer"
    return other_constant(steps, truth.constants, whose)


def _schedule_of(
    scenario: Scenario,
    steps: Sequence[Seen],
    truth: Reference,
    constant: OtherConstant | None,
) -> StackSchedule:
    """Return the settings that the reference follows, and the first wrong one.

    A setting is wrong if ranks differ in it, or if it differs from the reference's.
    """
    moved, workload = stack_schedule(steps), scenario.workload
    alone = workload.one_rank
    whose = "optimizer" if workload.scheduler is None else "scheduler"
    whose = "on one rank" if alone else f"by the workload's {whose}"
    others = [moved.differs, other_than_reference(steps, truth.settings, whose)]
    # then the reference follows no settings of the ranks
    if alone or _gives_settings(workload):
        moved = StackSchedule()
        others.reverse()
    if constant is not None:
        others.append((constant.step, constant.text))
    first = min(filter(None, others), key=lambda each: each[0], default=None)
    return replace(moved, differs=first)


def _unseen_buffer(
    scenario: Scenario, traces: Sequence[RankTrace], truth: Reference
) -> str:
    """Return the first buffer that the truth changes and no rank recorded; else ""."""
    recipe, precision = scenario.parsed_recipe, scenario.parsed_precision
    if recipe.recompute or not precision.is_full or not truth.updates:
        return ""  # buffers are not compared then
    seen = {
        n for t in traces for n in (*t.sizes, *(t.steps[-1].buffers if t.steps else ()))
    }
    moved = (name for name, update in truth.updates[-1].items() if update.any())
    return next((name for name in moved if name not in seen), "")


def _moved_buffer(
    scenario: Scenario, traces: Sequence[RankTrace], truth: Reference
) -> tuple[str, int, int] | None:
    """Return the first buffer that a rank changes and the truth leaves as it is."""
    if not scenario.parsed_precision.is_full or not truth.updates:
        return None  # rounding may move it
    still = {name for name, update in truth.updates[-1].items() if not update.any()}
    for trace in traces:
        for at in trace.steps:
            for name in still & at.buffer_digests.keys():
                if at.buffer_digests[name] != trace.buffer_digests.get(name):
                    return name, at.step, trace.rank
    return None


def _narrow_loss(runs: Sequence[Reference], returned: set[str]) -> str:
    """Note that ranks return the loss in a narrower dtype than references; else ""."""
    plain = runs[0].loss_dtype if runs else ""
    narrow = sorted(returned & {"bfloat16", "float16"} - {plain}) if plain else []
    if not narrow:
        return ""
    return f"ranks returned it in {', '.join(narrow)}, and loss() gives {plain} there"


def _still(
    schedule: Schedule,
    traces: Sequence[RankTrace],
    parity_bounds: ParityBounds,
) -> Iterator[tuple[int, int, int]]:
    """Yield (step, rank, optimizer) of steps that correctly move no parameter.

    One cause is a gradient of zeros: behind a layer that begins at zero, or in a shard
    of an embedding without tokens. Another is an optimizer that only prepares its state
    in its first step.
    """
    for seen, skipped, moves in zip(
        _steps(traces), schedule.skipped, parity_bounds.moves, strict=False
    ):
        for trace, at in seen:
            for number, names in enumerate(trace.owned[: len(at.decisions)]):
                own_names = [n for n in names if n in trace.index]
                if skipped.isdisjoint(own_names) and not any(
                    moves[n][trace.index[n]].any() for n in own_names
                ):
                    yield at.step, trace.rank, number


def _idle(seen: Seen) -> Idle:
    """Return which unused parameters had gradients of zeros, and which had None."""
    names = dict.fromkeys(name for trace, _ in seen for name in trace.index)
    zeros, absent = set(), set()
    for name in names:
        holders = [pair for pair in seen if len(pair[0].index.get(name, ()))]
        holders = [pair for pair in holders if name not in pair[0].left]
        had = [at.gradients[name] for _, at in holders if name in at.gradients]
        if not had:
            absent.add(name)
        elif len(had) == len(holders) and not any(values.any() for values in had):
            zeros.add(name)
    return Idle(zeros=frozenset(zeros), absent=frozenset(absent))


def _check_counts(
    scenario: Scenario, traces: Sequence[RankTrace], truth: Reference
) -> None:
    """Check that the loss's counts, summed over ranks, are those of the whole batch.

    Raises:
        WorkloadError: if rows or tokens were left out or counted twice.
    """
    for seen, whole in zip(_steps(traces), truth.counts, strict=False):
        for trace, at in seen:
            if not (at.counts and whole) or counts_equal(at.counts, whole):
                continue
            # a sum of weights may be rounded in half precision; fp32 has the same parts
            rounded = any(count != int(count) for count in whole)
            if not scenario.parsed_precision.is_full and rounded:
                continue
            what = "leave a hole" if sum(at.counts) < sum(whole) else "overlap"
            raise scenario.workload.refuse(
                "shard" if scenario.workload.shard else "loss",
                f"the parts of all ranks {what}: their counts add up to "
                f"{listed(at.counts)} on rank {trace.rank} at step {at.step}, that of "
                f"the whole batch is {listed(whole)}",
            )


class _Measured(NamedTuple):
    """Comparison of one tensor on one rank at one step."""

    kind: str
    step: int
    rows: Sequence[ParityRow]
    elements: int
    left_out: int = 0
    name: str = ""
    """Name of the parameter, for a gradient; else empty."""
    lack: Lack | None = None
    """Reason why ``rows`` is empty. None if there are rows, or if just the bound is
    missing."""


def _measured(
    scenario: Scenario,
    schedule: Schedule,
    traces: Sequence[RankTrace],
    parity_bounds: ParityBounds,
) -> Iterator[_Measured]:
    truth, is_full = parity_bounds.truth, scenario.parsed_precision.is_full
    for step, (seen, skipped) in enumerate(
        zip(_steps(traces), schedule.skipped, strict=True)
    ):
        yield from _loss(step, seen, parity_bounds)
        for trace, at in seen:
            if is_full:  # if rounding changes a count by one, a sign may change
                yield from _buffers(step, trace, at, parity_bounds)
            for name, index in trace.index.items():
                if name not in skipped or _is_unexplained(
                    scenario, at, name, parity_bounds
                ):
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
                yield _Measured("update", step, rows or (), live, len(index) - live)


def _is_unexplained(
    scenario: Scenario, at: StepTrace, name: str, parity_bounds: ParityBounds
) -> bool:
    """Return True if a gradient must be finite and is not.

    Three things may make a gradient inf or nan: a planted fault, an overflow through
    the scale or fp16, and a model that has such a gradient in a correct run.
    """
    may_overflow = scenario.parsed_precision.overflows or at.scale_before != 1.0
    if scenario.faults != "none" or may_overflow or name not in at.gradients:
        return False
    if np.isfinite(at.gradients[name]).all():
        return False
    correct_runs = (parity_bounds.truth, *parity_bounds.noisy)
    gradients = [run.gradients[at.step].get(name) for run in correct_runs]
    # a reference on one rank may skip the step, and then shows no gradient
    return all(g is not None and bool(np.isfinite(g).all()) for g in gradients)


def _buffers(
    step: int, trace: RankTrace, at: StepTrace, parity_bounds: ParityBounds
) -> Iterator[_Measured]:
    """Yield comparisons of the changes of buffers that training moves."""
    truth = parity_bounds.truth
    for name, values in at.buffers.items():
        # also nonzero in the last step; other buffers are caches
        if name not in truth.updates[-1] or not truth.updates[-1][name].any():
            continue
        places = np.arange(len(values))
        rows = _compare(
            ("update", step, name, trace.rank),
            values - truth.start[name],
            (truth.updates[step][name], places),
            parity_bounds.update[step][name],
        )
        # without buffers, because a share of the parameters must be compared
        n_compared = len(values) * any(r.compares for r in rows)
        yield _Measured("update", step, rows, n_compared)


def _gradient(
    step: int,
    seen: Seen,
    trace: RankTrace,
    at: StepTrace,
    name: str,
    parity_bounds: ParityBounds,
) -> Iterator[_Measured]:
    """Yield the comparison of one gradient with the truth.

    A gradient of None counts as zeros if the truth is zero. None is also right if
    another rank steps the parameter and sends the new weights.
    """
    true, had = parity_bounds.truth.gradients[step].get(name), name in at.gradients
    if not had and (true is None or name in trace.left):
        return
    places = trace.places(at, name)
    bound = (0.0, 0.0) if true is None else parity_bounds.gradient[step][name]
    whole = np.zeros(len(parity_bounds.weights[step][name])) if true is None else true
    # a gradient of zeros may be None
    values: NDArray[np.floating] | None = None
    if not whole.any():
        values = np.zeros(len(places))
    if had:
        values = gradient_of(seen, trace, at, name)
    rows = _compare(
        ("gradient", step, name, trace.rank), values, (whole, places), bound
    )
    lack = Lack.UNSEEN if values is None else None
    yield _Measured("gradient", step, rows, len(places), name=name, lack=lack)


def _clip_rows(
    factors: Sequence[float],
    schedule: Schedule,
    traces: Sequence[RankTrace],
    parity_bounds: ParityBounds,
    least: float,
) -> Iterator[ClipRow]:
    """Yield the factor from the true unclipped gradient to each rank's gradient.

    The noise of factors is at least ``least``, because the noise of runs may be 0.
    """
    steps = zip(_steps(traces), factors, schedule.skipped, strict=True)
    noisy, worst = parity_bounds.noisy, least
    for step, (seen, due, skipped) in enumerate(steps):
        rows = []
        # after a bad gradient, ranks clip by a norm that is not finite
        for trace, at in seen if not skipped and np.isfinite(due) else ():
            for name, true in parity_bounds.truth.gradients[step].items():
                if name not in at.gradients:
                    continue
                places = trace.places(at, name)
                # undoes the clipping of the reference's recorded gradients
                whole = true[places] / due
                size = sizes(whole)[0]
                noise, _ = parity_bounds.gradient[step][name]
                if not size or not np.isfinite(noise):
                    continue
                values = gradient_of(seen, trace, at, name).astype(np.float64)
                factor, share = multiple_of(values, whole)
                rest = share * sizes(values)[0]
                # a gradient no larger than its noise has no direction
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
                        # clipping also scales the noise of a gradient
                        above_noise=rest <= noise * max(1.0, abs(factor) / due),
                    )
                )
        yield from (_decided(row, SAFETY_FACTOR * worst) for row in rows)


def _factor_noise(
    runs: Iterable[Doubles | None], places: NDArray[np.int64], true: Doubles
) -> float:
    """Return the largest relative error of the factors of correct runs."""
    off = [multiple_of(g[places], true)[0] - 1 for g in runs if g is not None]
    return max((abs(x) for x in off if np.isfinite(x)), default=float("inf"))


def _decided(row: ClipRow, worst: float) -> ClipRow:
    """Decide whether a clip factor is known, and set its bound.

    Noise orthogonal to a gradient does not change its factor. So the bound is the
    smaller of two numbers: the bound of the gradient, and ``worst`` times the right
    factor.
    """
    bound = min(row.bound, worst * row.due)
    # with a larger bound, even half the due factor would pass
    above = row.above_noise and row.bound < row.due and bound < row.due / 2
    return replace(row, bound=bound, above_noise=above)


def mean_loss(seen: Iterable[StepTrace]) -> float | None:
    """Return the mean of the ranks' losses of a step, by their weights.

    Ranks without a loss are left out. A rank of unknown weight has weight 1. Returns
    None if no rank has a loss, or if all weights are 0.
    """
    weighted = [
        (at.loss, 1.0 if at.weight is None else at.weight)
        for at in seen
        if at.loss is not None
    ]
    # a rank without tokens has a mean of 0 / 0
    weighted_losses = [(loss, weight) for loss, weight in weighted if weight]
    total = sum(weight for _, weight in weighted_losses)
    return (
        sum(loss * weight for loss, weight in weighted_losses) / total
        if total
        else None
    )


def moved(trace: RankTrace, at: StepTrace, name: str) -> Doubles:
    """Return a rank's elements of a parameter minus their initial values."""
    start = trace.start[name].astype(np.float64)
    update: Doubles = at.parameters[name].astype(np.float64) - start
    return update


def _loss(step: int, seen: Seen, parity_bounds: ParityBounds) -> Iterator[_Measured]:
    mean = mean_loss(at for _, at in seen)
    if mean is not None:
        norm, largest = parity_bounds.loss[step]["loss"]
        # a train_step may divide the scaled losses by the scale
        scale = min(at.scale_before for _, at in seen)
        rounding = _SUBNORMAL / scale if scale > 0 else 0.0
        rows = _compare(
            ("loss", step, "loss", 0),
            np.array([mean]),
            (np.array([parity_bounds.truth.losses[step]]), np.array([0])),
            (norm + rounding, largest + rounding),
        )
        # with unknown weights the mean may be right, unless all ranks have one loss
        lost = [at for _, at in seen if at.loss is not None and at.weight is None]
        unknown = bool(lost) and len({at.loss for _, at in seen} - {None}) > 1
        departs = any(row.ratio > 1 for row in rows)
        lack = Lack.COUNTS if unknown and departs else None
        if not math.isfinite(mean) and any(at.non_finite for _, at in seen):
            lack = Lack.OVERFLOW
        yield _Measured("loss", step, [] if lack else rows, 1, lack=lack)


_SUBNORMAL = 4 * 2.0**-149
"""Largest rounding of the sum of up to eight scaled losses below the normal numbers of
fp32: half of their spacing each."""


def _compare(
    where: tuple[str, int, str, int],
    values: NDArray[np.floating] | None,
    truth: tuple[Doubles, NDArray[np.int64]],
    bounds: tuple[float, float],
) -> list[ParityRow]:
    """Return the measures of a tensor; empty if it is missing or has no bound."""
    kind, step, name, rank = where
    whole, index = truth
    if not len(index) or values is None or not all(np.isfinite(bounds)):
        return []
    return [
        ParityRow(kind=kind, step=step, parameter=name, rank=rank, **vars(measured))
        for measured in compare(values, whole[index], bounds, sizes(whole))
    ]
