"""Randomness: equal draws for one activation, different draws for different ones."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from itertools import permutations

from msgspec.structs import replace

from ...rank.trace import Draw, RankTrace, StepTrace
from ..law import (
    ANY_SHARE,
    Evidence,
    Finding,
    count_or_inconclusive,
    failed,
    inconclusive,
    law,
    rank_list,
    skipped,
)

# The checks of replicas and data pass after one comparison (``ANY_SHARE``). A draw may
# have no partner by design, and one compared pair shows how its layer is seeded.


Check = Callable[[Evidence], Finding]
_Place = tuple[int, RankTrace, Draw]
"""(step, rank, draw)."""
_Activation = tuple[int, tuple[int, ...], str, str]
"""(step, rows, module, digest of the tensor to which random numbers were applied)."""


def _where_drawn(check: Check) -> Check:
    """Wrap a check so that it applies only if random layers are on and ranks draw."""

    @wraps(check)
    def decide(evidence: Evidence) -> Finding:
        if not evidence.scenario.parsed_recipe.training.random:
            return skipped("random layers, where there are any, are off: recipe=random")
        steps = [s for _, seen in evidence.steps() for s in seen]
        if steps and not any(
            s.drawn_outside or any(draw.state for draw in s.draws) for s in steps
        ):
            return inconclusive(
                "random layers draw numbers on one process, and none were drawn on any "
                "rank: is the model in eval mode there? Seen are torch's generators "
                "and those that a module has as an attribute"
            )
        return check(evidence)

    return decide


def _draws(evidence: Evidence) -> Iterator[tuple[int, RankTrace, Draw]]:
    """Yield (step, rank, draw) for each draw outside of recomputation."""
    for step, seen in evidence.steps():
        for trace, s in zip(evidence.ranks, seen, strict=True):
            yield from ((step, trace, draw) for draw in _drawn(s))


def _outside(evidence: Evidence) -> int:
    """Return the number of draws outside of any module's call.

    Such draws may belong to a recomputed forward.
    """
    return sum(s.drawn_outside for _, seen in evidence.steps() for s in seen)


def _rows(evidence: Evidence, trace: RankTrace) -> tuple[int, ...]:
    """Return the rank's coordinate on the data axes.

    Ranks with the same coordinate have the same rows.
    """
    data_axes = evidence.scenario.parsed_topology.data_axes
    return tuple(at for axis, at in trace.coordinate.items() if axis in data_axes)


def _drawn(seen: StepTrace) -> Iterator[Draw]:
    return (draw for draw in seen.draws if draw.state and not draw.recomputed)


def _wrong(
    message: str, step: int, rank: RankTrace, draw: Draw, compared: int
) -> Finding:
    return failed(
        message=f"{draw}: {message}",
        step=step,
        ranks=(rank.rank,),
        cause=f"{draw}",
        compared=compared,
    )


def _passed(
    evidence: Evidence, compared: int, missed: int, what: str, otherwise: str
) -> Finding:
    """Return a pass, or skipped if nothing was compared.

    Both state the number of comparisons that are missing; ``otherwise`` is the reason
    for skipped.
    """
    if compared or evidence.unseen:
        return count_or_inconclusive(compared, what, evidence.unseen + missed)
    left = f"; {missed} draws could not be: {_OUT_OF_SIGHT}" if missed else ""
    return replace(skipped(otherwise + left), not_compared=missed)


_OUT_OF_SIGHT = (
    "they are in modules with parameters, in compiled code or in no module's call"
)


@law(
    "random.replicas",
    "Ranks with the same data draw the same numbers for a replicated activation.",
    "If ranks drop different elements of one activation, they compute parts of "
    "different models.",
    of_stack=True,
    least=ANY_SHARE,
)
@_where_drawn
def replicas(evidence: Evidence) -> Finding:
    """Compare random numbers applied to bitwise equal tensors in one module."""
    compared = missed = 0
    rows = [_rows(evidence, trace) for trace in evidence.ranks]
    traces = {trace.rank: trace for trace in evidence.ranks}
    by_activation: dict[_Activation, dict[int, list[Draw]]] = {}
    for step, trace, draw in _draws(evidence):
        mine = _rows(evidence, trace)
        if draw.applied and draw.varied:
            activation = (step, mine, draw.module, draw.applied)
            by_rank = by_activation.setdefault(activation, {})
            by_rank.setdefault(trace.rank, []).append(draw)
        else:
            missed += rows.count(mine) > 1
    for (step, *_), by_rank in by_activation.items():
        # compare each rank with the first one, since equality is transitive
        (first, theirs), *others = by_rank.items()
        for rank, draws in others:
            # different numbers of draws cannot be paired
            if len(theirs) != len(draws):
                missed += len(draws)
                continue
            for draw, their_draw in zip(draws, theirs, strict=True):
                compared += 1
                if draw.state != their_draw.state:
                    text = (
                        f"applied to one activation, rank {rank} drew other numbers "
                        f"than rank {first}, which sees the same data"
                    )
                    return _wrong(text, step, traces[rank], draw, compared)
    return _passed(
        evidence,
        compared,
        missed,
        "draws for replicated activations equal on their ranks",
        "no two ranks that see the same data drew for the same activation",
    )


@law(
    "random.data",
    "Ranks with different data draw different numbers, and each forward of a rank "
    "draws new ones.",
    "If all ranks share one seed, they drop the same elements, and the noise does not "
    "average out over the batch.",
    of_stack=True,
    least=ANY_SHARE,
)
@_where_drawn
def data(evidence: Evidence) -> Finding:
    """Look for equal random numbers applied to different tensors in one module."""
    compared, missed = 0, _outside(evidence)
    resumed = evidence.scenario.parsed_recipe.resume and evidence.scenario.resume_step
    places_by_draw: dict[object, list[_Place]] = defaultdict(list)
    unknown: dict[object, list[_Place]] = defaultdict(list)
    for step, trace, draw in _draws(evidence):
        if not draw.applied:
            unknown[draw.module, draw.state].append((step, trace, draw))
            continue
        if not draw.by_row:
            missed += 1
            continue
        compared += 1
        # compare with all steps, because a rank must not repeat its own numbers either
        alike = places_by_draw[draw.module, draw.state]
        for before, other, theirs in alike:
            if theirs.applied == draw.applied or not _apart(evidence, trace, other):
                continue
            way = "seed ranks that see different data differently, once"
            if resumed and before < resumed <= step:
                way = (
                    f"have the checkpoint, which was loaded before step {resumed}, "
                    "hold the states of each rank's generators"
                )
            text = (
                f"rank {trace.rank} drew the numbers that rank {other.rank} drew at "
                f"step {before}, for other data: {way}"
            )
            return _wrong(text, step, trace, draw, compared)
        alike.append((step, trace, draw))
    alike_unknown = [*filter(partial(_are_apart, evidence), unknown.values())]
    missed += sum(map(len, alike_unknown))
    if alike_unknown and not compared:
        (step, trace, draw), *others = alike_unknown[0]
        whose = rank_list(sorted({trace.rank, *(other.rank for _, other, _ in others)}))
        text = (
            f"step {step}: {draw}, a module with parameters, draws the same numbers "
            f"for different data ({whose}). If it drops elements, seed ranks that see "
            "different data differently. If all ranks shall draw alike, as for a layer "
            "that is dropped, draw in a module without parameters"
        )
        return replace(inconclusive(text), not_compared=missed)
    # other states give other numbers, whatever they are applied to
    compared += sum(map(len, unknown.values())) - sum(map(len, alike_unknown))
    return _passed(
        evidence,
        compared,
        missed,
        "draws for different data, all different",
        "no layer dropped other elements in one row than in another",
    )


def _are_apart(evidence: Evidence, places: Sequence[_Place]) -> bool:
    """Return True if draws with equal numbers are on different data."""
    (_, first, _), *others = places
    return any(_apart(evidence, trace, first) for _, trace, _ in others)


def _apart(evidence: Evidence, trace: RankTrace, other: RankTrace) -> bool:
    """Return True if draws of two traces are on different data.

    Two draws of one trace come from different forwards. Draws of two traces are on
    different data if their ranks have different rows.
    """
    return other is trace or _rows(evidence, trace) != _rows(evidence, other)


@law(
    "random.size",
    "A dropout multiplies what it keeps by 1 / (1 - p), with the p of the model on "
    "one process.",
    "A layer that replaces a dropout may lack the factor or use another p. Then "
    "activations differ in size between training and evaluation.",
    of_stack=True,
    least=ANY_SHARE,
)
@_where_drawn
def size(evidence: Evidence) -> Finding:
    """Compare the factor by which each dropout multiplies the kept elements."""
    off = 8 * evidence.scenario.parsed_precision.roundoff
    compared = missed = 0
    draws = (
        (step, trace, draw)
        for step, seen in evidence.steps()
        for trace, s in zip(evidence.ranks, seen, strict=True)
        for draw in s.draws
        if not draw.recomputed
    )
    for step, trace, draw in draws:
        probability = trace.dropouts.get(draw.module)
        if probability is None or probability == 1 or draw.kept is None:
            missed += 1
            continue
        compared += 1
        due = 1 / (1 - probability)
        if abs(draw.kept - due) > off * due:
            text = (
                f"rank {trace.rank} multiplies what it keeps by {draw.kept:.4g}, and "
                f"with the model's p = {probability:g} that is 1 / (1 - p) = {due:.4g}"
            )
            if not draw.state:
                text += ". It drops nothing: is it in eval mode there?"
            return _wrong(text, step, trace, draw, compared)
    if (silent := _silent(evidence)) is not None:
        return replace(silent, compared=compared)
    dropouts = [n for n, p in evidence.ranks[0].dropouts.items() if 0 < p < 1]
    if dropouts and not compared and not any(True for _ in _draws(evidence)):
        return inconclusive(
            f"the model has the dropout {dropouts[0]}, and gradparity saw none draw: "
            "it sees modules that parallelize returns, or that are in attributes, "
            "lists and dicts of the result, and nothing inside compiled code"
        )
    return _passed(
        evidence,
        compared,
        missed,
        "draws of dropouts with the factor of their probability",
        "no dropout of the model was seen to drop anything",
    )


def _silent(evidence: Evidence) -> Finding | None:
    """Return a failure if a module draws on a rank at each step, and never on another.

    Only ranks that hold the same layers are compared: those whose coordinates differ
    only on the data axes.
    """
    steps = [seen for _, seen in evidence.steps()]
    drawing = [
        (trace, [{draw.module: draw for draw in _drawn(seen[n])} for seen in steps])
        for n, trace in enumerate(evidence.ranks)
    ]
    data_axes = evidence.scenario.parsed_topology.data_axes
    for (trace, mine), (other, theirs) in permutations(drawing, 2):
        has_other_layers = any(
            other.coordinate[axis] != at
            for axis, at in trace.coordinate.items()
            if axis not in data_axes
        )
        # with one step, a layer that is dropped by chance looks the same
        if has_other_layers or len(steps) < 2:
            continue
        never = set.intersection(*map(set, theirs)).difference(*mine)
        if never:
            text = (
                f"rank {trace.rank} draws no number there in any step, and rank "
                f"{other.rank} does in each: is the module in eval mode there?"
            )
            return _wrong(text, 0, trace, theirs[0][min(never)], 0)
    return None


@law(
    "random.recompute",
    "A forward that runs again in backward draws the same numbers as before.",
    "If activation checkpointing does not restore the generator, the gradients belong "
    "to another loss.",
    of_stack=True,
)
@_where_drawn
def recompute(evidence: Evidence) -> Finding:
    """Check that each recomputed draw repeats a draw of the step's first forward."""
    compared, missed, outside = 0, 0, _outside(evidence)
    for step, seen in evidence.steps():
        for trace, s in zip(evidence.ranks, seen, strict=True):
            for draw in s.draws:
                before = _first_runs(draw, s) if draw.recomputed else []
                compared += bool(before)
                missed += draw.recomputed and not before
                if before and draw.state not in {d.state for d in before}:
                    text = (
                        f"drawn anew in backward on rank {trace.rank}: the forward "
                        "that runs again must begin with the generator's state as it "
                        "was (preserve_rng_state=True)"
                    )
                    return _wrong(text, step, trace, before[0], compared)
    return _passed(
        evidence,
        compared,
        missed if compared else missed + outside,
        "recomputed draws equal to those of forward",
        "no draw was seen in a forward that ran again in backward",
    )


def _first_runs(draw: Draw, seen: StepTrace) -> list[Draw]:
    """Return draws of the first forward, one of which a recomputed ``draw`` repeats."""
    # a layer may be called twice; the activation, if known, shows which call it was
    alike = [d for d in _drawn(seen) if d.module == draw.module]
    same = [d for d in alike if draw.applied and d.applied == draw.applied]
    return same or alike
