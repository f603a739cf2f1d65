"""Compare two recordings: the same start, rows and settings first, then numbers.

[Note: Bounds]
The reference side was recorded again as it is, and with its weights moved by a unit in
the last place. What these runs differ by from the first is the noise of the job. A
tensor may differ by ``FACTOR`` times the largest noise that it showed up to this step,
and by no less than that of the median tensor of the step. A bound as large as the
tensor compares nothing. An update may besides be off by a unit in the last place of
each weight: a few elements round to the other side, which two nudged runs need not
show. A second test takes the step as a whole: the median over tensors of distance over
noise, above ``WHOLE``, is a difference that is spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from ..status import counted
from .merge import Run, Whole
from .modules import GRADIENT, OUTPUT

__all__ = ["Comparison", "Row", "Side", "compare"]

FACTOR = 8.0
"""Right variants of a job came to 0.17 of this bound at most."""
WHOLE = 3.0
"""Right variants came to 1.6 noises at most; faults that are spread to 5 or more."""
UNIT = 2.0**-24
"""Unit roundoff of fp32: no tensor has less noise, relative to its size."""
KINDS = ("gradient", "update")
NO_STEP = (
    "the two sides recorded no step in common: give record the same --steps, and "
    "--first N for a job that goes on from step N"
)
SAME, DIFFERENT, NOT_COMPARABLE, BROKEN, UNDECIDED = range(5)
"""Exit codes."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison."""

    name: str
    run: Run
    noisy: Sequence[Run] = ()
    """The same job again, as it is and nudged."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor at one step."""

    step: int
    kind: str
    name: str
    distance: float
    """Norm of the difference, relative to the tensor of the first side."""
    bound: float
    """The largest distance that noise explains, relative, too."""
    noise: float
    """The distance that correct runs have."""
    words: str = ""
    """The second side in words: a multiple of the first, zeros, the step before."""

    @property
    def differs(self) -> bool:
        """True if the noise of the job does not explain the difference."""
        # written so that nan differs
        return not self.distance <= self.bound

    @property
    def ratio(self) -> float:
        """Distance over bound."""
        return self.distance / self.bound if self.bound else math.inf


@dataclass(kw_only=True)
class Comparison:
    """The result of comparing two recordings."""

    code: int
    lines: list[str] = field(default_factory=list)
    """Sentences, the decisive one first."""
    rows: list[Row] = field(default_factory=list)
    """Every tensor that was compared."""
    blocks: list[Row] = field(default_factory=list)
    """Outputs of blocks, and their gradients, at the first step that differs."""


def compare(one: Side, other: Side) -> Comparison:
    """Compare numbers, if all that must be equal exactly is.

    Args:
        one: the reference; it has noise.
        other: the side in question; its noise is added, if it was measured.
    """
    names, start = _names(one.run, other.run)
    steps = sorted({*one.run.steps} & {*other.run.steps})
    comparison = Comparison(code=SAME, lines=[start])
    if not names or not steps:
        comparison.code = NOT_COMPARABLE
        if not steps:
            comparison.lines.insert(0, NO_STEP)
        return comparison
    first = _first_difference(one.run, other.run, names, steps)
    comparison.lines += first.same
    if first.text:
        comparison.code, comparison.lines = (
            NOT_COMPARABLE,
            [first.text, *comparison.lines],
        )
        return comparison
    if text := _lacking(one, other, names, steps):
        comparison.code, comparison.lines = DIFFERENT, [text, *comparison.lines]
        return comparison
    if drew := one.run.drew | other.run.drew:
        where = f": {', '.join(other.run.drops[:4])}" if other.run.drops else ""
        comparison.code = UNDECIDED
        comparison.lines.insert(
            0,
            f"random numbers were drawn in forward at step {min(drew)}{where}. Set all "
            "dropout to 0 and record both sides again",
        )
        return comparison
    elements = {
        n: one.run.tensors[min(steps), "weight", n].size
        for n in one.run.names("weight", min(steps))
    }
    proved = sum(elements[n] for n in names)
    if proved < sum(elements.values()) / 2:
        comparison.code = UNDECIDED
        comparison.lines.insert(
            0,
            f"too little was compared: {len(names)} of {len(elements)} tensors have "
            "a partner on the other side. Begin both from one checkpoint",
        )
        return comparison
    if not one.noisy:
        comparison.code = UNDECIDED
        comparison.lines.insert(
            0, f"{one.name} has no noise: record it with --noise 2, or compare --exact"
        )
        return comparison
    comparison.rows = list(_rows(one, other, names, steps))
    _decide(comparison, steps)
    if comparison.code == DIFFERENT:
        at = min((row.step for row in comparison.rows if row.differs), default=steps[0])
        comparison.blocks, where = _where(one, other, at)
        comparison.lines[1:1] = [where] if where else []
    comparison.lines += _losses(one.run, other.run, steps)
    comparison.lines += _left_out(one.run, other.run, names, comparison.rows, steps)
    return comparison


def _losses(one: Run, other: Run, steps: Sequence[int]) -> Iterator[str]:
    """Losses, which nothing asks for.

    A mean over ranks is not the loss of the batch if ranks have unequal tokens.
    """
    seen = [step for step in steps if step in one.losses and step in other.losses]
    if seen:
        pairs = (f"{one.losses[s]:.6g} and {other.losses[s]:.6g}" for s in seen)
        yield f"loss, a mean over ranks, at steps {_listed(seen)}: {', '.join(pairs)}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _decide(found: Comparison, steps: Sequence[int]) -> None:
    compared = [row for row in found.rows if row.bound < 1 or row.differs]
    if not compared:
        found.code = UNDECIDED
        found.lines.insert(0, "noise is as large as every tensor: nothing was compared")
        return
    wrong = [row for row in compared if row.differs]
    spread = {step: _spread(found.rows, step) for step in steps}
    far = [step for step, ratio in spread.items() if ratio > WHOLE]
    if wrong:
        first = min(row.step for row in wrong)
        at_first = [row for row in wrong if row.step == first]
        worst = max(at_first, key=lambda row: (row.kind == "gradient", row.ratio))
        found.code = DIFFERENT
        found.lines.insert(0, _sentence(worst, len(at_first), len(compared)))
    elif far:
        found.code = DIFFERENT
        found.lines.insert(
            0,
            f"step {far[0]} differs as a whole: the median tensor by "
            f"{spread[far[0]]:.1f} times its noise, more than {WHOLE:g}",
        )
    else:
        largest = max(compared, key=lambda row: row.ratio)
        found.lines.insert(
            0,
            f"same: {len(compared)} tensors of {len(steps)} steps, the largest "
            f"difference {largest.ratio:.2f} of its bound ({largest.kind} of "
            f"{largest.name}, step {largest.step})",
        )
    spreads = ", ".join(f"{spread[step]:.1f} at step {step}" for step in steps)
    found.lines.append(f"median difference over noise (at most {WHOLE:g}): {spreads}")


def _sentence(row: Row, count: int, of: int) -> str:
    others = f"; {counted(count - 1, 'more tensor')} there" if count > 1 else ""
    what = f": {row.words}" if row.words else ""
    return (
        f"step {row.step}: the {row.kind} of {row.name} differs by {row.distance:.2g} "
        f"of its size, noise explains {row.bound:.2g}{what}{others} (of {of} compared)"
    )


def _spread(rows: Sequence[Row], step: int) -> float:
    ratios = [
        row.distance / row.noise
        for row in rows
        if row.step == step and row.kind == "gradient" and row.noise > 0
    ]
    return median(ratios) if ratios else 0.0


# - What must be equal exactly


def _names(one: Run, other: Run) -> tuple[dict[str, str], str]:
    """Names of the first side -> those of the other, proved by the start, and words."""
    at = min([*one.steps, *other.steps], default=0)
    starts = {n: one.tensors[at, "weight", n] for n in one.names("weight", at)}
    theirs = {n: other.tensors[at, "weight", n] for n in other.names("weight", at)}
    proved, rounded, renamed, differ = dict[str, str](), 0, 0, []
    by_digest: dict[tuple[Any, ...], list[str]] = {}
    for name, whole in theirs.items():
        by_digest.setdefault((whole.shape, whole.digest), []).append(name)
    taken = set[str]()
    for name, mine in starts.items():
        its = theirs.get(name)
        if its is not None and its.shape == mine.shape and its.is_whole:
            if its.digest == mine.digest:
                proved[name] = name
            elif its.rounded == mine.rounded and (its.is_rounded or mine.is_rounded):
                proved[name], rounded = name, rounded + 1
            else:
                differ.append(name)
            taken.add(name)
    for name, mine in starts.items():
        if name in proved or name in differ:
            continue
        same = [
            n for n in by_digest.get((mine.shape, mine.digest), ()) if n not in taken
        ]
        ends = [n for n in same if n.endswith(name) or name.endswith(n)] or same
        if ends:  # equal tensors, such as all ones: the order decides
            proved[name] = ends[0]
            taken.add(ends[0])
            renamed += 1
    words = f"start: {len(proved)} of {len(starts)} tensors have equal bits"
    if rounded:
        words += f", {rounded} of them after rounding to bf16"
    if renamed:
        words += f", {renamed} under another name"
    if differ:
        words = (
            f"another start: {len(differ)} of {len(starts)} tensors began with other "
            f"values, {differ[0]} first. Begin both from one checkpoint"
        )
        return {}, words
    return proved, words


@dataclass(kw_only=True)
class _Exact:
    """The first exact difference in words, else what was equal."""

    text: str = ""
    same: list[str] = field(default_factory=list)


def _first_difference(
    one: Run, other: Run, names: Mapping[str, str], steps: Sequence[int]
) -> _Exact:
    exact = _Exact()
    seen = [step for step in steps if step in one.rows and step in other.rows]
    cut = 0
    for step in seen:
        if one.rows[step] != other.rows[step]:
            if one.bags.get(step, 0) == other.bags.get(step, 1):
                cut += 1
                continue
            shared = len(one.rows[step] & other.rows[step])
            exact.text = (
                f"other rows: at step {step} {shared} of {len(one.rows[step])} rows of "
                f"the model's inputs are on both sides. Give both the same data in the "
                "same order, such as without shuffling"
            )
            return exact
    rows = f"rows: equal at {len(seen)} of {len(steps)} steps"
    if cut:
        rows += f"; at {cut} their tokens are, in other pieces"
    exact.same.append(rows if seen else "rows: not seen, no model was called as one")
    compared = set[int]()
    for step in steps:
        for mine, its in names.items():
            values = one.settings.get((step, mine), {})
            theirs = other.settings.get((step, its), {})
            for key in filter(theirs.__contains__, values):  # in their order
                compared.add(step)
                if key in _FREE or values[key] == theirs[key]:
                    continue
                exact.text = (
                    f"other settings: {key} of {mine} is {values[key]} and "
                    f"{theirs[key]} at step {step}"
                )
                return exact
    settings = f"settings: equal at {len(compared)} of {len(steps)} steps"
    exact.same.append(settings if compared else "settings: not seen")
    return exact


def _lacking(
    one: Side, other: Side, names: Mapping[str, str], steps: Sequence[int]
) -> str:
    """Return what one side lacks, or which replicas differ, or an empty string."""
    for has, lacks in ((one, other), (other, one)):
        stepped = {*has.run.names("weight", min(steps))}
        left = [name for name in lacks.run.unstepped if name in stepped]
        if left:
            return f"no optimizer of {lacks.name} steps {left[0]}, {has.name} has one"
    for step in steps:
        for mine, its in names.items():
            first = (step, mine) not in one.run.without_gradient
            second = (step, its) not in other.run.without_gradient
            if first != second:
                side = other if first else one
                return f"step {step}: {side.name} has no gradient of {mine}"
    for side in (one, other):
        for (step, kind, name), ranks in side.run.replicas.items():
            if kind == "weight":
                end = ". If these are other tensors, give them other names"
                return (
                    f"step {step}: replicas of {name} have other bits on rank "
                    f"{_listed(ranks)} of {side.name} than on the first rank that has "
                    f"it{end if step == min(steps) else ''}"
                )
    return ""


_FREE = frozenset({"foreach", "fused", "capturable", "differentiable", "initial_lr"})
"""Settings that choose an implementation, and not what is computed."""


# - Numbers


def _rows(
    one: Side,
    other: Side,
    names: Mapping[str, str],
    steps: Sequence[int],
    kinds: Sequence[str] = KINDS,
) -> Iterator[Row]:
    worst: dict[tuple[str, str], float] = {}
    for step in steps:
        for kind in kinds:
            pairs = dict(_pairs(one.run, other.run, names, step, kind))
            noises = {name: _noise(one, name, step, kind) for name in pairs}
            for name, its in names.items():
                if name in pairs and other.noisy:
                    noises[name] += _noise(other, its, step, kind)
            for name, noise in noises.items():
                worst[kind, name] = max(worst.get((kind, name), 0.0), noise)
            sizes = {name: mine.norm for name, (mine, _) in pairs.items()}
            shares = [noises[n] / size for n, size in sizes.items() if size]
            least = max(median(shares) if shares else 0.0, UNIT)
            for name, (mine, theirs) in pairs.items():
                size = sizes[name]
                distance = mine.distance(theirs)
                noise = max(worst[kind, name], size * least)
                bound = FACTOR * noise
                if kind == "update":  # see [Note: Bounds]
                    bound = max(bound, math.sqrt(max(mine.square, theirs.square)))
                yield Row(
                    step=step,
                    kind=kind,
                    name=name,
                    distance=distance / (size or 1.0),
                    bound=bound / (size or 1.0),
                    noise=noise / (size or 1.0),
                    words=_words(one.run, mine, theirs, name, step, kind),
                )


def _pairs(
    one: Run, other: Run, names: Mapping[str, str], step: int, kind: str
) -> Iterator[tuple[str, tuple[Whole, Whole]]]:
    for mine, its in names.items():
        a = one.tensors.get((step, kind, mine))
        b = other.tensors.get((step, kind, its))
        if a is not None and b is not None and a.is_whole and b.is_whole:
            yield mine, (a, b)


def _noise(side: Side, name: str, step: int, kind: str) -> float:
    plain = side.run.tensors[step, kind, name]
    again = [run.tensors.get((step, kind, name)) for run in side.noisy]
    return max((plain.distance(each) for each in again if each), default=0.0)


def _words(one: Run, mine: Whole, its: Whole, name: str, step: int, kind: str) -> str:
    """Return what the second side is, where a sketch shows it."""
    if its.bad or mine.bad:
        return f"{its.bad} elements are not finite, and {mine.bad} on the first side"
    if not its.norm and mine.norm:
        return "it is zero"
    if not mine.norm:
        return "it is zero on the first side"
    assert mine.sketch is not None and its.sketch is not None
    factor = float(mine.sketch @ its.sketch) / mine.norm**2
    rest = float(np.linalg.norm(its.sketch - factor * mine.sketch)) / mine.norm
    if rest <= 0.01 * abs(factor) and abs(factor - 1) > 0.01:
        return f"it is {factor:.3f} x the first side"
    before = one.tensors.get((step - 1, kind, name))
    if before is not None and before.norm:
        late = its.distance(before) / before.norm
        if late <= 0.01:
            return "it is that of the step before"
    return ""


def _where(one: Side, other: Side, step: int) -> tuple[list[Row], str]:
    """Where a step begins to differ, from the outputs of blocks, if any were recorded.

    Nothing is decided by them. The loss of a rank may be a mean over its own rows, and
    of a micro-batch too: gradients are compared up to one factor, that of the last.
    """
    every = one.run.names(OUTPUT, step)
    names = {name: name for name in every}
    forward = list(_rows(one, other, names, [step], [OUTPUT]))
    if not forward:
        return [], "where: no output of a block is known on both sides" if every else ""
    start = f"where: step {step}: "
    of = f"{len(forward)} of {len(every)} blocks"
    wrong = [row for row in forward if row.differs]
    if wrong:
        row, number = wrong[0], forward.index(wrong[0])
        before = f", after {forward[number - 1].name}" if number else ""
        return forward, (
            f"{start}in forward. {row.name} is the first of {of} whose output differs"
            f"{before}: by {row.distance:.2g} of its size, noise explains "
            f"{row.bound:.2g}{f': {row.words}' if row.words else ''}"
        )
    same = f"{start}outputs of {of} are the same. "
    last = [n for n in every if (step, GRADIENT, n) in one.run.tensors][-1:]
    scaled = _scaled(other, one.run, step, last[0]) if last else None
    if scaled is None:
        return forward, f"{same}Their gradients are not known on both sides"
    backward = list(_rows(one, scaled, names, [step], [GRADIENT]))[::-1]
    wrong = [row for row in backward if row.differs]
    rows = forward + backward
    if not wrong:
        return rows, (
            f"{same}So are the gradients of outputs: what differs is how gradients of "
            "parameters are made from them, summed or kept"
        )
    number = backward.index(wrong[0])
    if not number:
        return rows, f"{same}In backward, the loss or what follows {wrong[0].name}"
    return rows, (
        f"{same}In backward through {backward[number - 1].name}: the gradient of the "
        f"output of {wrong[0].name} is the first that differs"
    )


def _scaled(side: Side, reference: Run, step: int, last: str) -> Side | None:
    """The side with all gradients of outputs times one number, that of the last one."""
    mine = reference.tensors.get((step, GRADIENT, last))
    its = side.run.tensors.get((step, GRADIENT, last))
    if mine is None or its is None or not its.is_whole or not its.norm:
        return None
    assert mine.sketch is not None and its.sketch is not None
    factor = float(mine.sketch @ its.sketch) / its.norm**2

    def scaled(run: Run) -> Run:
        tensors = {
            key: replace(whole, sketch=whole.sketch * np.float32(factor))
            if key[1] == GRADIENT and whole.sketch is not None
            else whole
            for key, whole in run.tensors.items()
        }
        return replace(run, tensors=tensors)

    return replace(side, run=scaled(side.run), noisy=[scaled(n) for n in side.noisy])


def _left_out(
    one: Run,
    other: Run,
    names: Mapping[str, str],
    rows: Sequence[Row],
    steps: Sequence[int],
) -> Iterator[str]:
    """Yield what was not compared, and why."""
    every = [*one.names("weight", min(steps))]
    if unproved := [name for name in every if name not in names]:
        yield (
            f"not compared: {len(unproved)} of {len(every)} tensors, no tensor of the "
            f"other side has their start ({unproved[0]} first)"
        )
    compared = {(row.step, row.kind, row.name) for row in rows}
    absent = [
        (step, name)
        for step in steps
        for name in names
        if (step, "gradient", name) in one.tensors
        and (step, "gradient", name) not in compared
    ]
    if absent:
        step, name = absent[0]
        yield (
            f"not compared: {len(absent)} gradients, of which not all elements were "
            f"recorded on both sides ({name}, step {step}, first)"
        )
    blind = [row for row in rows if row.bound >= 1 and not row.differs]
    if blind:
        yield (
            f"not compared: {len(blind)} of {len(rows)}, noise is as large as the "
            f"tensor ({blind[0].kind} of {blind[0].name}, step {blind[0].step}, first)"
        )
    gradients = [key for key in other.replicas if key[1] == "gradient"]
    if gradients:
        step, _, name = min(gradients)
        listed = _listed(other.replicas[step, "gradient", name])
        yield (
            f"replicas differ: the gradient of {name} at step {step} has other bits on "
            f"rank {listed} than on the first rank that holds it"
        )
    partial = [
        name
        for (step, kind, name), whole in other.tensors.items()
        if kind == "gradient" and step == min(steps) and not whole.is_summed
    ]
    if partial:
        yield (
            f"{len(partial)} gradients are not summed when the optimizer is called, "
            f"{partial[0]} first: their sums over ranks were compared"
        )
    if other.unnamed:
        yield f"not compared: {other.unnamed} parameters that no module names"
    for side in (one, other):
        if side.notes:
            yield f"the recorder noted: {side.notes[0]}"
