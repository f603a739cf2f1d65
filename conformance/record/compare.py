"""Compare two recordings: the same start, rows and settings first, then numbers.

Each tensor at each step has a bound on its difference (``differences.py``). A second
test takes a step as a whole and finds differences that are spread over all tensors:
the median over tensors of distance / noise may not exceed ``WHOLE``.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from ..status import counted
from .beside import (
    batch_norms,
    factor_of_a_count,
    late,
    left_out,
    losses,
    narrower,
    padded_batches,
    precisions,
    shown_later,
    unequal_shares,
    wider,
)
from .clipping import clipped, norms_apart, uncompared_norms
from .differences import KINDS, Row, rows_of_sides, running_statistics
from .equal import (
    PLACES,
    equal_inputs,
    listed,
    no_step,
    other_again,
    other_inputs,
    other_on_ranks,
    proved_names,
    replicas_at_start,
    same_start,
    unlike_replicas,
    unmoved,
    unplaced,
)
from .kept import BUFFER
from .merge import Run, Side
from .one_sided import changed_between, copies, lacking
from .regions import Region, region_of
from .where import where_it_begins

__all__ = ["Comparison", "Row", "Side", "compare", "tell_steps"]

WHOLE = 3.0
"""Largest median over tensors of distance / noise. Correct variants of a job reached
1.6; faults that spread over many tensors reached 5 or more."""
SEARCH = 2
"""Largest number of closure evaluations in one step that does not amplify rounding.
Sharpness-aware optimizers make two, and a line search some twenty."""
NEAR = 10.0
"""Ratio of difference to bound below which the message also says how far the median
tensor of the step differs."""
LOOSE = 0.05
"""Bound of the median tensor above which the comparison says that it is loose."""
NOISY = 3
"""Number of noise runs of --noise 2: again, and two nudged ones. One nudged run alone
may miss the noise of a tensor by chance."""
MANY = 7
"""Number of noise runs of --noise 6, with which a job with Muon is decided."""
FEW = 2
"""Largest number of differing tensors whose names alone show where a difference begins.
Above it, the comparison advises to record with --modules."""
REGIONS = 100
"""Number of tensors for which the differing region is computed."""
PAD_ALIKE = "give both sides the same shape, padded or not"
SAME, DIFFERENT, NOT_COMPARABLE, BROKEN, UNDECIDED = range(5)
"""Exit codes of ``gradparity compare``."""


@dataclass(kw_only=True)
class Comparison:
    """Result of comparing two recordings."""

    code: int
    headline: str = ""
    """Sentence that states the result."""
    leads: list[str] = field(default_factory=list)
    """Sentences on where the sides begin to differ, and why."""
    facts: list[str] = field(default_factory=list)
    """Sentences on what is equal, and on what was not compared."""
    rows: list[Row] = field(default_factory=list)
    """All compared tensors."""
    blocks: list[Row] = field(default_factory=list)
    """Outputs of blocks, and their gradients, at the first step that differs."""
    regions: list[tuple[Row, Region]] = field(default_factory=list)
    """Tensors at the first step that differs, and the region of each, in the order of
    ``_first_wrong``."""

    @property
    def lines(self) -> list[str]:
        """Sentences that describe the comparison; the first one states the result."""
        return [self.headline, *self.leads, *self.facts]

    def decide(self, code: int, headline: str) -> None:
        """Set the result; an earlier headline becomes the first fact."""
        former = self.headline.replace("same: ", "numbers within their bounds: ", 1)
        self.facts[:0] = [former] if former else []
        self.code, self.headline = code, headline


def compare(one: Side, other: Side) -> Comparison:
    """Compare all numbers, unless inputs that must be equal differ.

    Args:
        one: the reference; it has noise runs.
        other: the side to check; its noise is added if it has noise runs.
    """
    names, start = proved_names(one.run, other.run)
    steps = sorted({*one.run.steps} & {*other.run.steps})
    sizes = (f"{side.run.ranks} in {side.name}" for side in (one, other))
    comparison = Comparison(code=SAME, facts=[start, f"ranks: {', '.join(sizes)}"])
    if names and steps:
        comparison.facts += equal_inputs(one, other, names, steps)
        comparison.facts += copies(one, other, names)
    obstacle = next(_obstacles(one, other, names, steps), None)
    if obstacle is not None:
        code, text = obstacle
        comparison.decide(code, text or comparison.facts.pop(0))
        if not names:
            sides = (one, other)
            comparison.leads += [t for side in sides for t in replicas_at_start(side)]
        if steps:
            tell_steps(comparison, one, other, steps)
        return comparison
    comparison.rows = list(rows_of_sides(one, other, names, steps))
    left = other.run.left
    if 2 * len(left) > len(other.run.starts):
        left = {}  # some ranks lack a parameter, as where ranks divide them (ZeRO)
    _decide(
        comparison,
        one.run,
        steps,
        {n: left[its] for n, its in names.items() if its in left},
    )
    if comparison.code == DIFFERENT and (why := _amplified(comparison, one, other)):
        comparison.code = UNDECIDED
        comparison.headline = f"{comparison.headline}. Not decided: {why}"
    if comparison.code == DIFFERENT:
        _locate(comparison, one, other, names, steps)
    elif comparison.code == SAME:
        for text in shown_later(one, other, steps):
            comparison.decide(UNDECIDED, f"{text}: record {_more(steps)}")
    differs = comparison.code == DIFFERENT
    norms = norms_apart(one, other, comparison.rows, steps, differs=differs)
    if norms and comparison.code == SAME:
        comparison.decide(DIFFERENT, norms)
    elif norms and differs:
        comparison.leads.insert(0, norms)
    if comparison.code == SAME and (text := narrower(one, other, names, steps[0])):
        comparison.decide(UNDECIDED, text)
    shape = next(_other_shapes(one, other, names), "")
    if comparison.code == SAME and shape:
        comparison.decide(UNDECIDED, f"{shape}, so it is not compared: {PAD_ALIKE}")
    comparison.facts += wider(one, other, names)
    tell_steps(comparison, one, other, steps)
    # norms that the job itself clips by say more
    clips = [] if norms else list(clipped(one, other, steps, differs=differs))
    if differs:
        comparison.leads[:0] = clips
    else:
        comparison.facts += clips
    comparison.facts += uncompared_norms(one, other, steps)
    comparison.facts += losses(one.run, other.run, steps)
    comparison.facts += left_out(one.run, other.run, names, comparison.rows, steps)
    comparison.facts += late(one, other)
    return comparison


def _locate(
    found: Comparison,
    one: Side,
    other: Side,
    names: Mapping[str, str],
    steps: Sequence[int],
) -> None:
    """Find where the sides begin to differ: by dtype, region, rank and block."""
    wrong = _first_wrong(found.rows)
    at = wrong[0].step if wrong else steps[0]
    found.leads += [*padded_batches(one, other, at), *precisions(one, other)]
    found.leads += unequal_shares(one, other, at)
    found.leads += changed_between(one, other, names, at - 1)
    every = {**names, **running_statistics(one.run, other.run, names)}
    found.regions = [(r, _region(one, other, every, r)) for r in wrong[:REGIONS]]
    for row, region in found.regions[:1]:
        found.leads += [f"where in {row.name}: {region}"] if str(region) else []
    if wrong and wrong[0].kind == BUFFER:
        found.leads.append(
            "no gradient and no update differs at that step: running statistics are "
            "computed otherwise, or one side makes a forward more, as checkpoints do, "
            "and pipelines that infer shapes"
        )
        return
    found.leads += batch_norms(one, other, wrong)
    factor = _one_factor(one.run, found.rows, at)
    found.leads += factor_of_a_count(one, other, names, at) if factor else []
    is_update = bool(wrong) and all(row.kind != "gradient" for row in wrong)
    found.blocks, where = where_it_begins(
        one, other, at, factor, is_update=is_update, is_first=at == steps[0]
    )
    found.leads += [where] if where else []
    if not (where or factor or is_update) and len({row.name for row in wrong}) > FEW:
        found.leads.append(
            "to learn in which block it begins, record both sides with --modules"
        )


def tell_steps(found: Comparison, one: Side, other: Side, steps: Sequence[int]) -> None:
    """Add lines on steps that only one side has, and on commands that failed.

    If the job of the shorter side failed and nothing differs, the result is undecided.
    """
    for side, longer in ((one, other), (other, one)):
        lost = sorted({*longer.run.steps} - {*steps})
        if not lost:
            if side.code:
                found.facts.append(
                    f"the command of {side.name} ended with {side.code} after its "
                    "recorded steps"
                )
            continue
        ended = f": {side.name} ended with {side.code}" if side.code else ""
        text = (
            f"compared: step {listed(steps)}; {longer.name} also has step "
            f"{listed(lost)}{ended}"
        )
        if side.code and found.code == SAME:
            found.decide(UNDECIDED, text)
        else:
            found.facts.insert(0, text)


def _obstacles(
    one: Side, other: Side, names: Mapping[str, str], steps: Sequence[int]
) -> Iterator[tuple[int, str]]:
    """Yield reasons why numbers cannot be compared: an exit code and a sentence."""
    if not steps:
        yield NOT_COMPARABLE, no_step(one, other)
        return
    for text in unplaced(one, other):
        yield NOT_COMPARABLE, text
    if not names:
        yield NOT_COMPARABLE, _no_names(one, other)
        return
    for side in (one, other):
        for text in other_on_ranks(side):
            yield DIFFERENT, text
    replicas = [*unlike_replicas(one, other, steps)]
    for step in steps:
        # unequal replicas may compute unequal inputs of a second model
        for at, text, _ in replicas:
            if at <= step:
                yield DIFFERENT, text
        for text in other_inputs(one, other, names, step):
            yield NOT_COMPARABLE, text
    for side in (one, other):
        for text in other_again(side, steps):
            yield NOT_COMPARABLE, text
    # replicas that differ before a step were reported above
    for _, text, is_new in replicas:
        if is_new or len(steps) == 1:
            later = "The job may make them equal after the step"
            later = f"{later}: record {_more(steps)}"
            yield UNDECIDED, f"{text}. {later}"
        yield DIFFERENT, text
    for text in lacking(one, other, names, steps):
        yield DIFFERENT, text
    if drew := one.run.drew | other.run.drew:
        drawing = [side.name for side in (one, other) if side.run.drew]
        where = f": {', '.join(other.run.drops[:4])}" if other.run.drops else ""
        way = (
            "Set all dropout to 0" if where else "Give the model its noise as an input"
        )
        yield (
            UNDECIDED,
            f"random numbers were drawn in forward at step {min(drew)} of "
            f"{' and '.join(drawing)}{where}. {way} and record both sides again",
        )
    elements = {name: start.size for name, (_, start) in one.run.starts.items()}
    if sum(elements[name] for name in names) < sum(elements.values()) / 2:
        way = same_start(min(steps))
        if shape := next(_other_shapes(one, other, names), ""):
            way = f"The tensor {shape}: {PAD_ALIKE}"
        yield (
            UNDECIDED,
            f"too little was compared: {len(names)} of {len(elements)} tensors have a "
            f"partner on the other side, and fewer than half of the elements. {way}",
        )
    for side in (one, other):
        if text := unmoved(side):
            yield UNDECIDED, text
    if len(one.noisy) < NOISY:
        way_out = "record it with --noise 2, or compare --exact"
        if len(other.noisy) >= NOISY:
            way_out = "give the side that has some first: "
            way_out += f"compare {other.name} {one.name}"
        lacks = "too few of its noise runs" if one.noisy else "no noise"
        yield UNDECIDED, f"{one.name} has {lacks}: {way_out}"


def _more(steps: Sequence[int]) -> str:
    """Return how many steps to record, so that a step follows the last one."""
    return "2 steps" if len(steps) == 1 else "one step more"


def _no_names(one: Side, other: Side) -> str:
    """Return why no tensors of the two sides match.

    Returns "" if tensors with one name and one shape have different values.
    """
    first, second = min(one.run.steps), min(other.run.steps)
    if first != second:
        return (
            f"the sides begin at steps {first} and {second}, so weights of the start "
            "cannot be matched: give record the same --steps"
        )
    both = one.run.starts.keys() & other.run.starts.keys()
    if not both:
        return f"starts differ: no tensor has equal bits. {same_start(first)}"
    shapes = [*_other_shapes(one, other, ())]
    if len(shapes) < len(both):
        return ""
    return f"starts differ: {shapes[0]}. If ranks hold parts of it, {PLACES}"


def _other_shapes(one: Side, other: Side, names: Container[str]) -> Iterator[str]:
    """Describe tensors with one name and two shapes; ``names`` are matched ones."""
    for name, (_, mine) in one.run.starts.items():
        _, its = other.run.starts.get(name, (0, mine))
        if its.shape != mine.shape and name not in names:
            yield (
                f"{name} has shape {[*mine.shape]} in {one.name}, and "
                f"{[*its.shape]} in {other.name}"
            )


def _decide(
    found: Comparison, one: Run, steps: Sequence[int], left: Mapping[str, Sequence[int]]
) -> None:
    nonzero = [row for row in found.rows if row.noise or row.differs]
    compared = [row for row in nonzero if row.bound < 1 or row.differs]
    if not compared:
        why = "noise is as large as every tensor" if nonzero else "see below"
        if found.rows and not nonzero:
            why = "all gradients and updates are zero on both sides"
        found.decide(UNDECIDED, f"nothing was compared: {why}")
        return
    wrong = [row for row in compared if row.differs]
    spread = {step: _spread(found.rows, step) for step in steps}
    far = [step for step, ratio in spread.items() if ratio > WHOLE]
    if wrong:
        at_first = _first_wrong(wrong)
        worst = at_first[0]
        of_gradient = worst.kind == "gradient"
        factor = _one_factor(one, found.rows, worst.step) if of_gradient else ""
        sentence = _sentence(worst, len(at_first), len(compared), factor)
        if worst.step in far and worst.ratio < NEAR:
            sentence += f". {_as_a_whole(spread[worst.step])}"
        if left:
            name = worst.name if worst.name in left else next(iter(left))
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            sentence = (
                f"rank {listed(left[name])} does not step {name}{more}, and other "
                f"ranks do. S{sentence[1:]}"  # it begins with "step"
            )
        found.decide(DIFFERENT, sentence)
    elif far:
        found.decide(
            DIFFERENT,
            f"step {far[0]} differs as a whole: {_as_a_whole(spread[far[0]])}",
        )
    else:
        largest = max(compared, key=lambda row: row.ratio)
        found.decide(
            SAME,
            f"same: {len(compared)} tensors of {len(steps)} steps, the largest "
            f"difference {largest.ratio:.2f} of its bound ({largest.what}, step "
            f"{largest.step})",
        )
    spreads = ", ".join(
        f"{ratio:.1f} at step {step}" if ratio < 1000 else f"{ratio:.1e} at step {step}"
        for step, ratio in spread.items()
    )
    found.facts.append(f"median difference over noise (at most {WHOLE:g}): {spreads}")
    bound = median(row.bound for row in compared)
    if bound > LOOSE:
        explained = f"noise explains {bound:.0%} of the median tensor's size"
        found.facts.append(f"loose: {explained}, and hides smaller differences")


def _one_factor(one: Run, rows: Sequence[Row], step: int) -> str:
    """Describe the factor that all gradients of a step have in common; else ""."""
    words = [
        row.words
        for row in rows
        if (row.step, row.kind) == (step, "gradient")
        and one.tensors[step, row.kind, row.name].norm
    ]
    return words[0] if len(words) > 1 and len({*words}) == 1 else ""


def _first_wrong(rows: Sequence[Row]) -> list[Row]:
    """Return the tensors that differ at the first step with a difference.

    The order is that of ``KINDS``, and within a kind worst first.
    """
    wrong = [row for row in rows if row.differs]
    first = min((row.step for row in wrong), default=0)
    at_first = [row for row in wrong if row.step == first]
    return sorted(at_first, key=lambda row: (KINDS.index(row.kind), -row.ratio))


def _amplified(found: Comparison, one: Side, other: Side) -> str:
    """Return why amplified rounding may explain a difference, with a way out; else "".

    A line search branches on rounding, so two nudged runs show too little noise. The
    sign of a line search is a step with many evaluations of the optimizer's closure, in
    which updates differ and gradients do not.

    After a step of Muon, weights differ by a hundredth of the update. Two nudged runs
    may show too little of the effect on a small gradient.
    """
    wrong = _first_wrong(found.rows)
    if wrong and wrong[0].kind != "gradient":
        counts = (side.run.evaluations.get(wrong[0].step, 1) for side in (one, other))
        if (most := max(counts)) > SEARCH:
            return (
                f"in that step the optimizer evaluated its closure {most} times, which "
                "amplifies rounding. Record both with one evaluation (for LBFGS "
                "max_iter=1 and no line search)"
            )
    first = min(row.step for row in found.rows)
    is_later = wrong[0].step > first if wrong else _spread(found.rows, first) <= WHOLE
    is_near = not wrong or wrong[0].ratio < NEAR
    if one.run.orthogonal and is_later and is_near and len(one.noisy) < MANY:
        return (
            "Muon amplifies rounding, and the noise runs are few. Record "
            f"{one.name} with --noise {MANY - 1}"
        )
    return ""


def _region(one: Side, other: Side, names: Mapping[str, str], row: Row) -> Region:
    mine = one.run.tensors[row.step, row.kind, row.name]
    its = other.run.tensors[row.step, row.kind, names[row.name]]
    bound = row.bound * ((mine.norm if mine.is_finite else 0.0) or 1.0)
    return region_of(mine.shape, mine.difference(its), bound, its.parts)


def _sentence(row: Row, count: int, of: int, factor: str) -> str:
    """Describe the worst tensor of the first step that differs.

    Args:
        row: the worst tensor.
        count: number of tensors of that step that differ.
        of: number of all compared tensors.
        factor: factor of all gradients of the step, in words; else empty.
    """
    others = f"; {counted(count - 1, 'more tensor')} there" if count > 1 else ""
    words = f"{row.words}: it " if row.words else ""
    subject = f"the {row.what} {words}"
    if factor:
        subject = f"each gradient {factor}. That of {row.name} "
    return (
        f"step {row.step}: {subject}differs by {row.distance:.2g} of its size, and "
        f"noise explains {row.bound:.2g}{others} (of {of} compared)"
    )


def _as_a_whole(ratio: float) -> str:
    return f"the median tensor differs by {ratio:.1f} times its noise (limit {WHOLE:g})"


def _spread(rows: Sequence[Row], step: int) -> float:
    ratios = [
        row.distance / row.noise
        for row in rows
        if row.step == step and row.kind == "gradient" and row.noise > 0
    ]
    return median(ratios) if ratios else 0.0
