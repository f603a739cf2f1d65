"""Starts, rows, settings and replicas of two recordings, which must be equal.

If any of them differs, the difference is the result, and numbers are not compared.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np

from ..status import counted, rank_list
from .kept import ORIGINAL
from .merge import AGAIN, Run, Side
from .parts import UNNAMED
from .rows import MOST, NEAR

__all__ = [
    "equal_inputs",
    "listed",
    "no_step",
    "other_again",
    "other_inputs",
    "other_on_ranks",
    "proved_names",
    "replicas_at_start",
    "same_start",
    "step_on_ranks",
    "unlike_replicas",
    "unmoved",
    "unplaced",
]

MOVED = (
    "Rounded to bf16 they are equal: weights are computed in another order, or moved "
    "and restored before the first step (SAM: restore them from a copy). "
)
STEP_ITS_WEIGHTS = "For the recordings, let it step the weights of the model, in fp32"
PLACES = (
    "declare them: gradparity.record(model, optimizer, places=...), see "
    "docs/record-details.md"
)
SKIPPED = (
    ". Fewer rows come from a step that only one scaler skips, from a lost micro-"
    "batch, or from steps after fewer micro-batches"
)
RESUMED = ". If one job resumes the other at step N, record it with --first N"
OTHER_DATA = ". If one job resumes the other, does it go on at its place in the data?"
FREE = frozenset(
    {"foreach", "fused", "capturable", "differentiable", "initial_lr"}
    | {"is_expert_parallel"}  # Megatron: tells which ranks hold the group
)
"""Settings that choose an implementation or a layout and do not change the result."""


def no_step(one: Side, other: Side) -> str:
    """Return why no step can be compared."""
    for side in (one, other):
        if side.run.unnamed and not side.run.tensors:
            tensors = counted(side.run.unnamed, "tensor")
            return (
                f"the optimizers of {side.name} step {tensors} that no module has, "
                "with other values on each rank. If these are shards of the weights, "
                f"{PLACES}"
            )
    return (
        "the two sides recorded no step in common: give record the same --steps, and "
        "--first N for a job that goes on from step N"
    )


def same_start(step: int) -> str:
    """Return advice on how to begin both sides with the same weights.

    Args:
        step: first recorded step.
    """
    if step:
        return (
            f"The first recorded step is {step}, and rounding has moved the weights "
            "of the two sides apart before it. Record step 0, or let both resume from "
            "one checkpoint"
        )
    return (
        "Begin both from the same weights: the same seed, a checkpoint, or record "
        "--start"
    )


def proved_names(one: Run, other: Run) -> tuple[dict[str, str], str]:
    """Match parameters of the two sides by their initial weights.

    Returns:
        Name on the first side -> name on the second, and a sentence about the start. No
        names if the sides began with different weights.
    """
    first = {*one.steps[:1], *other.steps[:1]}
    starts, theirs = one.starts, other.starts
    proved, rounded, late, differ = dict[str, str](), 0, 0, []
    taken = set[str]()
    for name, (step, mine) in starts.items():
        step_there, its = theirs.get(name, (0, None))
        if its is not None and its.shape == mine.shape and its.is_whole:
            if its.digest == mine.digest:
                proved[name] = name
            elif its.rounded == mine.rounded and (its.is_rounded or mine.is_rounded):
                proved[name], rounded = name, rounded + 1
            elif AGAIN in name or (
                {step, step_there} != first and len(first) == 1
            ):  # another optimizer may have moved the parameter before
                proved[name], late = name, late + 1
            else:
                differ.append(name)
            taken.add(name)
    rest = [name for name in starts if name not in proved and name not in differ]
    renamed = _renamed(one, other, rest, [n for n in theirs if n not in taken])
    proved |= renamed
    equal = len(proved) - late
    words = f"start: {equal} of {len(starts)} tensors have equal bits"
    if rounded:
        words += f", {rounded} of them after rounding to bf16"
    if late:
        words += f", and {late} that join later are matched by their names"
    if renamed:
        words += f", {len(renamed)} under another name"
    if differ:
        near = all(starts[n][1].rounded == theirs[n][1].rounded for n in differ)
        words = (
            f"starts differ: {len(differ)} of {len(starts)} tensors began with other "
            f"values, {differ[0]} first. {MOVED if near else ''}"
            f"{same_start(min(first))}"
        )
        return {}, words
    return proved, words


def _renamed(
    one: Run, other: Run, mine: Sequence[str], theirs: Sequence[str]
) -> dict[str, str]:
    """Match tensors by their initial bits, whatever their names.

    Several tensors may have equal bits, such as all ones. Among them, tensors are
    matched if one name ends with the other, then by the nearest first gradients.
    """

    def bits(run: Run, name: str) -> tuple[Any, ...]:
        step, start = run.starts[name]
        return step, start.shape, start.digest

    def distance(pair: tuple[str, str]) -> tuple[bool, float]:
        first, second = pair
        gradients = [
            run.tensors.get((run.starts[name][0], "gradient", name))
            for run, name in zip((one, other), pair, strict=True)
        ]
        ends = first.endswith(second) or second.endswith(first)
        finite = [g for g in gradients if g is not None and g.is_finite]
        return not ends, finite[0].distance(finite[1]) if len(finite) > 1 else math.inf

    partners = dict[str, str]()
    its_by_bits: dict[tuple[Any, ...], list[str]] = {}
    for name in theirs:
        its_by_bits.setdefault(bits(other, name), []).append(name)
    mine_by_bits: dict[tuple[Any, ...], list[str]] = {}
    for name in mine:
        mine_by_bits.setdefault(bits(one, name), []).append(name)
    for key, alike in mine_by_bits.items():
        pairs = itertools.product(alike, its_by_bits.get(key, ()))
        for first, second in sorted(pairs, key=distance):
            if first not in partners and second not in partners.values():
                partners[first] = second
    return {name: partners[name] for name in mine if name in partners}


def replicas_at_start(side: Side) -> Iterator[str]:
    """Yield a sentence on the first tensor whose replicas begin with different bits."""
    for name, (step, _) in side.run.starts.items():
        if ranks := side.run.replicas.get((step, "weight", name)):
            yield f"replicas of {name} differ at the start: {_unlike(side, ranks)}"
            return


def _unlike(side: Side, ranks: Sequence[int]) -> str:
    which = f"rank {listed(ranks)} of {side.name}"
    return f"other bits on {which} than on the first rank with it"


def other_on_ranks(side: Side) -> Iterator[str]:
    """Yield sentences on settings or steps that differ between ranks of one side."""
    for step in side.run.steps:
        yield from step_on_ranks(side, step)
    for name, ranks in side.run.left.items():
        _, start = side.run.starts.get(name, (0, None))
        if start is not None and not start.is_whole:
            yield (
                f"rank {listed(ranks)} of {side.name} does not step its elements of "
                f"{name}, and other ranks step theirs"
            )


def step_on_ranks(side: Side, step: int) -> Iterator[str]:
    """Yield sentences on settings that differ between ranks, and on absent ranks."""
    for (at, name), by_rank in side.run.other_settings.items():
        (first, mine), *others = by_rank.items()
        for rank, its in others if at == step else ():
            for key in mine.keys() & its.keys() - FREE:
                if not _equal(mine[key], its[key]):
                    yield (
                        f"step {step}: ranks of {side.name} have different settings "
                        f"for {name}: {key} is {_shown(mine[key])} on rank "
                        f"{first} and {_shown(its[key])} on rank {rank}"
                    )
    # if the job failed, its own error says why
    absent = {} if side.code else side.run.absent
    for why, idle in (("", absent), ("has found an inf and ", side.run.skipping)):
        for (at, name), ranks in idle.items():
            if at == step:
                yield (
                    f"step {step}: rank {listed(ranks)} of {side.name} {why}does not "
                    f"step {name}, and other ranks do"
                )


def other_inputs(
    one: Side, other: Side, names: Mapping[str, str], step: int
) -> Iterator[str]:
    """Yield differences in the inputs of a step: rows, and settings of parameters."""
    if not _same_rows(one.run, other.run, step):
        mine, its = one.run.rows[step], other.run.rows[step]
        yield (
            f"rows differ at step {step}: the model was given {_counted(mine)} in "
            f"{one.name} and {_counted(its)} in {other.name}, {len(mine & its)} of "
            "them on both sides"
            + (
                "".join(_crowded(side, step) for side in (one, other))
                or _odd_ranks(one, step, its)
                + _odd_ranks(other, step, mine)
                + ". Give both the same data in the same order, for example without "
                "shuffling"
                + ("" if mine & its else _resumed(one.run, other.run))
            )
        )
    different = [
        setting
        for setting in _settings(one.run, other.run, names, step)
        if not _equal(setting[2], setting[3])
    ]
    for name, key, mine, its in different[:1]:
        more = f"; {len(different) - 1} more differ" if len(different) > 1 else ""
        yield (
            f"settings differ at step {step}: {key} of {name} is {_shown(mine)} in "
            f"{one.name} and {_shown(its)} in {other.name}{more}"
        )


def _resumed(one: Run, other: Run) -> str:
    """Return a hint for a resumed job that got none of the rows of the other one."""
    return OTHER_DATA if min(*one.steps, *other.steps) else RESUMED


def _counted(rows: Sized) -> str:
    """Describe a number of recorded rows; from ``MOST`` on, a job may have more."""
    least = "at least " if len(rows) >= MOST else ""
    return f"{least}{counted(len(rows), 'row')}"


def _crowded(side: Side, step: int) -> str:
    """Return a hint if a few ranks had at least twice the rows of the others; else "".

    These few are at most half of the ranks, and all ranks had equally many rows in the
    first step.
    """
    counts, first = (side.run.counts.get(s, {}) for s in (step, min(side.run.steps)))
    if step == min(side.run.steps) or len({*first.values()}) > 1:
        return ""
    most = max(counts.values(), default=0)
    others = [count for count in counts.values() if count < most]
    ranks = [rank for rank, count in counts.items() if count == most]
    if not ranks or len(others) < len(ranks) or most < 2 * max(others):
        return ""
    return (
        f". Rank {listed(ranks)} of {side.name} had {most} rows in this step, and the "
        f"others at most {max(others)}: does it leave out an earlier step?"
    )


def _odd_ranks(side: Side, step: int, theirs: frozenset[int]) -> str:
    """Return a sentence on the ranks that got rows of their own, or too few; else "".

    Args:
        side: side of the ranks.
        step: step at which rows differ.
        theirs: all rows of the other side.
    """
    of_ranks = side.run.rows_of_ranks[step]
    odd = [rank for rank, rows in of_ranks.items() if not rows <= theirs]
    if odd and len(odd) < len(of_ranks):
        return f". {rank_list(odd).capitalize()} of {side.name} got other rows"
    if odd or not side.run.rows[step] < theirs:
        return ""
    sets = [*of_ranks.values()]
    repeated = next((each for each in sets if sets.count(each) > 1), None)
    if repeated is None:
        return SKIPPED
    same = [rank for rank, rows in of_ranks.items() if rows == repeated]
    ranks = f"{rank_list(same).capitalize()} of {side.name}"
    return f". {ranks} got the same rows: are they data parallel?{SKIPPED[1:]}"


def _shown(value: Any) -> str:
    """Return a setting as text; 9 digits distinguish all numbers of fp32."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def other_again(side: Side, steps: Sequence[int]) -> Iterator[str]:
    """Yield sentences on noise runs that differ from the plain run that they repeat.

    Weights are compared only at step 0: later ones may differ by noise, and nudged runs
    begin with moved weights.
    """
    advice = (
        "so its noise cannot be used. Seed the job. If it resumes from files that it "
        "wrote, remove them before each run"
    )
    for number, run in enumerate(side.noisy):
        name = f"nudged-{number} of {side.name}" if number else f"again of {side.name}"
        if absent := [step for step in steps if step not in run.steps]:
            yield f"{name} has no step {absent[0]}, which plain has, {advice}"
        for weight in side.run.names("weight", 0) if number == 0 else ():
            key = (0, "weight", weight)
            its = run.tensors.get(key)
            if its is not None and its.digest != side.run.tensors[key].digest:
                yield f"{name} began with other values of {weight} than plain, {advice}"
        for step in steps:
            if not _same_rows(side.run, run, step):
                yield f"{name} had other rows at step {step} than plain, {advice}"


def unmoved(side: Side) -> str:
    """Return why nudged runs of a side measure no noise; empty if they do."""
    first = min(side.run.steps)
    digests = {
        key: each.digest
        for key, each in side.run.tensors.items()
        if key[:2] == (first, "gradient") and each.is_summed
        if each.is_finite and each.norm
    }
    for number, run in enumerate(side.noisy[1:], 1):
        sizes = {True: 0, False: 0}
        for name, (step, mine) in side.run.starts.items():
            its = run.tensors.get((step, "weight", name))
            if step == 0 and its is not None:
                sizes[its.digest == mine.digest] += mine.size
        seen = digests.keys() & run.tensors.keys()
        if sizes[True] > sizes[False]:
            what = "began with the weights of plain"
            why = (
                f"the optimizer steps copies that are in no module. {STEP_ITS_WEIGHTS}"
                if all(name.startswith(UNNAMED) for name in side.run.starts)
                else "the training step was compiled as a function, functional_call "
                "ran the model, weights were loaded after a first forward, or no "
                "module has some of them. Put the loop into "
                "`with gradparity.record(model, optimizer):`"
            )
        elif seen and all(run.tensors[key].digest == digests[key] for key in seen):
            what = (
                "began with other weights than plain and computed the same gradients "
                f"at step {first}"
            )
            rounds = "its numbers of 16 bits round the moved weights away, or "
            why = (
                f"{rounds if side.run.in_16_bits else ''}the model does not compute "
                f"with the tensors that the optimizer steps. {STEP_ITS_WEIGHTS}"
            )
        else:
            continue
        name = f"nudged-{number} of {side.name}"
        return f"{name} {what}, so there is no noise: {why}"
    return ""


def equal_inputs(
    first: Side, second: Side, names: Mapping[str, str], steps: Sequence[int]
) -> Iterator[str]:
    """Yield sentences that count the steps with equal rows, and with equal settings."""
    one, other = first.run, second.run
    seen = [step for step in steps if step in one.rows and step in other.rows]
    same = [_same_rows(one, other, step) for step in seen]
    unlike = [step for step in seen if one.rows[step] != other.rows[step]]
    padded = [step for step in unlike if _padded_alike(one, other, step)]
    computed = [step for step in unlike if _computed_alike(one, other, step)]
    cut = len(unlike) - len(padded) - len(computed)
    end = f"; at {cut} only as a whole, cut in other pieces" if cut else ""
    end += f"; at {len(padded)} but for padding" if padded else ""
    if computed:
        end += f"; at {len(computed)} up to rounding: the job computed some of them"
    rows = f"rows: equal at {sum(same)} of {len(steps)} steps{end}"
    if all(same):
        why = "no model was called as one, or nothing it was given has rows"
        yield rows if seen else f"rows: not seen, {why}"
    pairs = [[*_settings(one, other, names, step)] for step in steps]
    same = [all(_equal(*each[2:]) for each in of_step) for of_step in pairs if of_step]
    settings = f"settings: equal at {sum(same)} of {len(steps)} steps"
    # a recording keeps the settings of one rank, which may equal the other side's
    ranks_differ = any(any(other_on_ranks(side)) for side in (first, second))
    if all(same) and not ranks_differ:
        yield settings if same else "settings: not recorded"


def _same_rows(one: Run, other: Run, step: int) -> bool:
    """Return False if both sides recorded a step and trained on different rows.

    Rows that are cut into pieces, padded or rounded differently count as the same.
    """
    if step not in one.rows or step not in other.rows:
        return True
    in_pieces = _same_in_pieces(one, other, step)
    equal = one.rows[step] == other.rows[step]
    alike = _padded_alike, _computed_alike
    return equal or in_pieces or any(are(one, other, step) for are in alike)


def _same_in_pieces(one: Run, other: Run, step: int) -> bool:
    """Return True if the inputs have the same elements, whatever pieces ranks got.

    An input that never changes, such as a table, is ignored unless all inputs are so.
    If inputs are tokens, the first of the others must be equal. If they are floats, at
    least one must be equal, and each other one must have been equal at the first step:
    a job may compute an input, such as a hidden state, which later differs by rounding.
    """
    both = sorted(one.bags.keys() & other.bags.keys())
    pairs = {at: [*zip(one.bags[at], other.bags[at], strict=False)] for at in both}
    same = [mine == its for mine, its in pairs.get(step, ())]
    changes = [
        len({bags[n] for bags in one.bags.values() if n < len(bags)}) > 1
        for n in range(len(same))
    ]
    decisive = [equal for equal, moves in zip(same, changes, strict=True) if moves]
    if one.has_tokens:
        return any((decisive or same)[:1])
    if not decisive:
        return bool(same) and all(same)
    at_first = [mine == its for mine, its in pairs[both[0]]]
    none_is_other = all(map(operator.or_, same, at_first))
    return any(decisive) and none_is_other and len(at_first) >= len(same)


def _padded_alike(one: Run, other: Run, step: int) -> bool:
    """Return True if the rows of both sides are equal after removing padding."""
    names = []
    for run in (one, other):
        unpadded = run.unpadded.get(step, {})
        if not run.rows[step] <= unpadded.keys():
            return False
        names.append([{row, *unpadded[row]} for row in run.rows[step]])
    every = [set[int]().union(*of_rows) for of_rows in names]
    return all(row & every[1] for row in names[0]) and all(
        row & every[0] for row in names[1]
    )


def _computed_alike(one: Run, other: Run, step: int) -> bool:
    """Return True if unequal rows differ by no more than rounding."""
    mine, its = one.rows[step], other.rows[step]
    sums, theirs = one.sums.get(step, {}), other.sums.get(step, {})
    apart = sorted(mine - its), sorted(its - mine)
    if not mine <= sums.keys() or not its <= theirs.keys() or not all(apart):
        return False
    rows = np.array([sums[row] for row in apart[0]], dtype=float)
    free = np.array([theirs[row] for row in apart[1]], dtype=float)
    size = free[:, 0] + np.finfo(float).tiny
    near = [(np.abs(free - row).max(1) <= NEAR * size) for row in rows]
    # each value has a partner on the other side; nan equals nothing
    return all(n.any() for n in near) and bool(np.logical_or.reduce(near).all())


def _settings(
    one: Run, other: Run, names: Mapping[str, str], step: int
) -> Iterator[tuple[str, str, Any, Any]]:
    """Yield (parameter, key, first value, second value) of settings on both sides."""
    for mine, its in names.items():
        values = one.settings.get((step, mine), {})
        theirs = other.settings.get((step, its), {})
        for key in values:
            if key in theirs and key not in FREE:
                yield mine, key, values[key], theirs[key]


def _equal(mine: Any, its: Any) -> bool:
    """Return True if two settings are equal; floats are compared in fp32."""
    if isinstance(mine, list) and isinstance(its, list):
        return len(mine) == len(its) and all(map(_equal, mine, its))
    if isinstance(mine, float) and isinstance(its, float):
        return bool(np.float32(mine) == np.float32(its))
    return bool(mine == its)


def unplaced(one: Side, other: Side) -> Iterator[str]:
    """Yield sentences on tensors whose ranks may hold parts rather than replicas.

    Such a tensor has different values on ranks of one side, and another shape on the
    other side. An expert or a shard in a plain tensor has the name of the whole.
    """
    for side, its in ((one, other), (other, one)):
        theirs = its.run.starts
        for name, (step, here) in side.run.starts.items():
            differs = (step, "weight", name) in side.run.replicas
            if differs and name in theirs and theirs[name][1].shape != here.shape:
                yield (
                    f"{name} has shape {[*theirs[name][1].shape]} in {its.name}, and "
                    f"{[*here.shape]} with other values on each rank of {side.name}. "
                    f"If these are parts of one tensor, {PLACES}"
                )


def unlike_replicas(
    one: Side, other: Side, steps: Sequence[int]
) -> Iterator[tuple[int, str, bool]]:
    """Yield each weight whose replicas differ between ranks of one side.

    Yields:
        Step before which the replicas differ, a sentence, and a flag. The flag is true
        if most weights differ after the last step, and the gradients of these weights
        differ for the first time in that step. The job may still make them equal.
    """
    for side in (one, other):
        # first step at which the gradient differs, by name
        first_by_name = dict[str, int]()
        for step, kind, name in sorted(side.run.replicas):
            if kind == "gradient":
                first_by_name.setdefault(name, step)
        distances = {
            name: side.run.tensors[step, "gradient", name].apart
            for name, step in first_by_name.items()
        }
        kinds = ("weight", ORIGINAL)
        weights = [key for key in side.run.replicas if key[1] in kinds]
        # largest difference first: with a wrong norm, all gradients differ
        weights.sort(key=lambda key: (key[0], -distances.get(key[2], 0.0)))
        last = max(steps)
        new = {n for s, _, n in weights if s - 1 == first_by_name.get(n) == last}
        are_most = 2 * len(new) > len(side.run.starts)
        for key in weights:
            step, _, name = key
            end = ""
            if (first := first_by_name.get(name, step)) < step:
                end = f". Its gradient differs from step {first} on"
                size = distances[name]
                end += f", by {size:.2g} of its size" if size else ""
            elif step == min(steps):
                end = f". If these are different tensors, {PLACES}"
            yield (
                step,
                f"step {step}: replicas of {name} differ: "
                f"{_unlike(side, side.run.replicas[key])}{end}",
                are_most and step == last + 1,
            )


def listed(numbers: Sequence[int]) -> str:
    """Join numbers with commas."""
    return ", ".join(map(str, numbers))
