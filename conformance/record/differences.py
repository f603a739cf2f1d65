"""Differences of each tensor at each step between two sides, and their bounds.

[Note: Bounds]
The reference job was recorded again twice or more: unchanged, and with each weight
moved to a neighbouring number. The distances of these runs from the first one are the
noise of the job. The bound of a tensor is ``FACTOR`` times its noise: its largest noise
up to this step, or the relative noise of the median tensor if that is larger. A
tensor's own noise may be too small by chance: a small tensor in 16 bits may show none,
and after a step the moved weights may round like the unmoved ones. A bound as large as
the tensor compares nothing.

If the module of a parameter returns numbers of 16 bits, its gradient is rounded to
them. Nudged runs of a small model may repeat that rounding exactly, but micro-batches
and ranks round each summand instead. So the relative noise of such a gradient is at
least ``ROUNDING``. The relative noise of its update is at least twice that: a recorded
update is multiplied by the gradient, and may be a multiple of it already.

[Note: Orthogonal updates]
Muon makes an update orthogonal by a chain of products in bf16. Its noise is measured
with nudged gradients, and is some hundredths of the update. So the median noise is
taken over tensors that other optimizers update.

[Note: Idle elements]
Where a gradient is zero, an update comes from decay or momentum: in rows of an
embedding whose tokens are not in the batch, or in experts without tokens. Such an
update is compared without factors. But rounding may decide whether a sum is zero, and
Adam's step is as large for a tiny gradient as for a large one. So a tensor's idle
elements are compared only while they are the same elements in all runs, from the first
recorded step on.

[Note: Running statistics]
A step of training does not use the running statistics of a batch norm, so no gradient
shows whether they are right. Statistics are compared if all ranks of a side have equal
ones.
Nudged weights do not move statistics of the inputs, which then show no noise. So the
relative noise of a statistic is at least that of the median gradient. The mean of
standardised inputs is near 0. So the noise of a mean is relative to its norm and to the
standard deviations together.

[Note: Bounds of updates]
The bound of an update also allows one unit in the last place of each weight: two nudged
runs may miss a few elements that round the other way. In 16 bits, one in ``FLIPS``
recorded numbers of an update may differ by any amount: Lion steps by the sign of a sum,
which rounding may decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from ..status import counted
from .kept import BUFFER, IDLE
from .merge import Run, Side
from .whole import Whole

__all__ = [
    "COARSE",
    "KINDS",
    "UPDATES",
    "Row",
    "rows_of_sides",
    "running_statistics",
]

FACTOR = 8.0
"""Factor from noise to bound; correct variants reached 0.17 of the bound at most."""
UNIT = 2.0**-24
"""Unit roundoff of fp32: the smallest noise of a tensor, relative to its norm."""
COARSE = 2.0**-13
"""Noise of the median gradient, relative to its norm, above which the job computes in
16 bits: in fp32 the noise reached 1e-5."""
ROUNDING = {"bfloat16": 0.42 * 2.0**-8, "float16": 0.42 * 2.0**-11}
"""Noise of a rounded gradient, relative to its norm: the root mean square of rounding
errors. Errors are uniform within half a unit in the last place, and the numbers are
spread evenly on a logarithmic scale."""
ROUNDED = {"gradient": 1, "update": 2, IDLE: 2}
"""Kind of tensor -> factor of ``ROUNDING`` in its noise."""
CANCELS = {1: 8, 2: 2}
"""Number of elements -> factor of ``ROUNDING``. The summands of a gradient are rounded,
and may cancel. For one element, the sum of independent summands is below 1/64 of their
size once in 80 times. For two elements, it is below 1/16 once in 500 times."""
FLIPS = 32
"""One in this many recorded numbers of an update may differ by any amount, if a job
computes in 16 bits."""
SMALL = 0.1
"""Absolute factor below which a message has its first three digits that are not 0."""
UPDATES = ("update", IDLE)
KINDS = ("gradient", *UPDATES, BUFFER)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Difference of one tensor between the two sides at one step."""

    step: int
    kind: str
    name: str
    distance: float
    """Norm of the difference, relative to the norm of the first side's tensor."""
    bound: float
    """Largest distance that noise explains, relative to the norm of the first side's
    tensor."""
    noise: float
    """Largest distance between correct runs of the job, relative to the norm of the
    first side's tensor."""
    words: str = ""
    """Description of the second side's tensor, such as ``is zero``; may be empty."""

    @property
    def what(self) -> str:
        """Kind and name of the tensor, in words."""
        if self.kind == IDLE:
            return f"update of elements of {self.name} without a gradient"
        if self.kind == BUFFER:
            return self.name
        return f"{self.kind} of {self.name}"

    @property
    def differs(self) -> bool:
        """True if the distance is above its bound."""
        # written so that a distance of nan differs
        return not self.distance <= self.bound

    @property
    def ratio(self) -> float:
        """Distance divided by bound; 0 if the distance is 0."""
        if not self.distance:
            return 0.0
        return self.distance / self.bound if self.bound else math.inf


def rows_of_sides(
    one: Side,
    other: Side,
    names: Mapping[str, str],
    steps: Sequence[int],
    kinds: Sequence[str] = KINDS,
) -> Iterator[Row]:
    """Compare the sketches of all tensors that both sides have; see [Note: Bounds].

    Args:
        one: the reference; it has noise runs.
        other: the side to check; its noise is added if it has noise runs.
        names: name on the first side -> name on the second one.
        steps: steps that both sides have, in order.
        kinds: kinds of tensors.
    """
    worst: dict[tuple[str, str], float] = {}
    idle = {*names}
    if BUFFER in kinds:
        names = {**names, **running_statistics(one.run, other.run, names)}
    units = [
        {name: ROUNDING[dtype] for name, dtype in run.in_16_bits.items()}
        for run in (one.run, other.run)
    ]
    orthogonal = one.run.orthogonal | {
        name for name, its in names.items() if its in other.run.orthogonal
    }
    least = dict.fromkeys(kinds, UNIT)
    for step in steps:
        for kind in kinds:
            pairs = dict(_pairs(one.run, other.run, names, step, kind))
            if kind == IDLE:  # see [Note: Idle elements]
                idle &= _idle_alike(one, other, names, step)
                pairs = {
                    name: pair
                    for name, pair in pairs.items()
                    if name in idle and pair[0].digest
                }
            sizes = {
                name: mine.norm if mine.is_finite else 0.0
                for name, (mine, _) in pairs.items()
            }
            noises = dict[str, float]()
            for name, size in sizes.items():
                noise, its = _noise(one, name, step, kind), names[name]
                if other.noisy:
                    noise += _noise(other, its, step, kind)
                unit = max(units[0].get(name, 0.0), units[1].get(its, 0.0))
                unit *= ROUNDED.get(kind, 0) * CANCELS.get(pairs[name][0].size, 1)
                noise = noises[name] = max(noise, unit * size)
                worst[kind, name] = max(worst.get((kind, name), 0.0), noise)
            # see [Note: Orthogonal updates]
            shares = [
                noises[name] / size
                for name, size in sizes.items()
                if size and not (name in orthogonal and kind in UPDATES)
            ]
            least[kind] = max(median(shares or [0.0]), least[kind])
            if kind == BUFFER:  # see [Note: Running statistics]
                least[kind] = max(least[kind], least.get("gradient", 0.0))
            for name, (mine, theirs) in pairs.items():
                size = sizes[name]
                both = mine.is_finite and theirs.is_finite
                distance = mine.distance(theirs) if both else math.inf
                is_update = kind in UPDATES and both
                if is_update and least.get("gradient", 0.0) > COARSE:
                    distance = _without_flips(mine, theirs)
                scale = size
                if kind == BUFFER:  # see [Note: Running statistics]
                    scale = math.hypot(size, _spread_of(one.run, step, name))
                noise = max(worst[kind, name], scale * least[kind])
                bound = FACTOR * noise
                if is_update:  # see [Note: Bounds of updates]
                    bound = max(bound, math.sqrt(max(mine.square, theirs.square)))
                yield Row(
                    step=step,
                    kind=kind,
                    name=name,
                    distance=distance / (size or 1.0),
                    bound=bound / (size or 1.0),
                    noise=noise / (size or 1.0),
                    words=_words(one, mine, theirs, name, step, kind),
                )


def running_statistics(
    one: Run, other: Run, names: Mapping[str, str]
) -> dict[str, str]:
    """Match running statistics of the two sides that are equal on all ranks of a side.

    Statistics are matched like the weight of their batch norm. A batch norm without a
    weight is matched by its name, if all parameters have the same names on both sides.

    Returns:
        Name on the first side -> name on the second one.
    """

    def statistics(run: Run) -> set[str]:
        buffers = [(k[2], each) for k, each in run.tensors.items() if k[1] == BUFFER]
        unlike = {name for name, each in buffers if each.unlike}
        return {name for name, each in buffers if each.sketch is not None} - unlike

    mine, its = statistics(one), statistics(other)
    are_same = all(name == partner for name, partner in names.items())
    pairs = dict[str, str]()
    for name in sorted(mine):
        leaf = name.rpartition(".")[2]
        path = name.removesuffix(leaf)
        if f"{path}weight" in names:
            partner = names[f"{path}weight"].removesuffix("weight") + leaf
        else:
            partner = name if are_same else ""
        if partner in its:
            pairs[name] = partner
    return pairs


def _spread_of(run: Run, step: int, name: str) -> float:
    """Return an upper limit of the norm of standard deviations, for a running mean.

    Returns 0 for any other tensor, and if the variances are unknown or not finite.
    """
    beside = name.removesuffix("mean") + "var" if name.endswith("mean") else ""
    variances = run.tensors.get((step, BUFFER, beside))
    if variances is None or not math.isfinite(variances.largest):
        return 0.0
    return math.sqrt(variances.size * variances.largest)


def _idle_alike(
    one: Side, other: Side, names: Mapping[str, str], step: int
) -> set[str]:
    """Return the tensors whose gradient is zero at the same elements in all runs."""

    def positions(side: Side, name: str) -> set[int | None]:
        wholes = (
            run.tensors.get((step, IDLE, name)) for run in (side.run, *side.noisy)
        )
        return {None if whole is None else whole.digest for whole in wholes}

    return {
        name
        for name, its in names.items()
        if len(positions(one, name) | positions(other, its)) == 1
    }


def _pairs(
    one: Run, other: Run, names: Mapping[str, str], step: int, kind: str
) -> Iterator[tuple[str, tuple[Whole, Whole]]]:
    for mine, its in names.items():
        a = one.tensors.get((step, kind, mine))
        b = other.tensors.get((step, kind, its))
        if a is None or b is None or not (a.is_whole and b.is_whole):
            continue
        skipped = (step, mine) in one.skipped and (step, its) in other.skipped
        if not skipped and (a.is_finite or b.is_finite):
            yield mine, (a, b)


def _without_flips(mine: Whole, its: Whole) -> float:
    """Return the distance of two updates, ignoring the numbers that differ most.

    One in ``FLIPS`` numbers is ignored, and at least one. Of fewer than four numbers
    all count, so that a scalar is compared.
    """
    differences = np.sort(np.abs(mine.difference(its)))
    size = len(differences)
    flips = max(size // FLIPS, size > 3)
    return float(np.linalg.norm(differences[: size - flips]))


def _noise(side: Side, name: str, step: int, kind: str) -> float:
    """Return the largest distance of a noise run from the plain run.

    If the tensor is not finite in some of the runs, returns inf; if in all, returns 0.
    """
    plain = side.run.tensors[step, kind, name]
    again = [run.tensors.get((step, kind, name)) for run in side.noisy]
    every = [plain, *(each for each in again if each)]
    if not all(each.is_finite for each in every):
        return math.inf if any(each.is_finite for each in every) else 0.0
    return max(plain.distance(each) for each in every)


def _words(one: Side, mine: Whole, its: Whole, name: str, step: int, kind: str) -> str:
    """Describe how the second side's tensor differs; "" if sketches do not show it."""
    if its.bad or mine.bad:
        bad = counted(its.bad, "non-finite element")
        return f"has {bad}, and {mine.bad} in {one.name}"
    if not its.norm and mine.norm:
        return "is zero"
    if not mine.norm:
        return f"is zero in {one.name}"
    assert mine.sketch is not None and its.sketch is not None
    first, second = mine.sketch.astype(np.float64), its.sketch.astype(np.float64)
    factor = float(first @ second) / mine.norm**2
    rest = float(np.linalg.norm(second - factor * first)) / mine.norm
    # a factor is named to three digits: it must explain nine tenths of a difference
    off = abs(factor - 1)
    if off >= 0.001 and rest <= min(0.01 * abs(factor), 0.1 * off):
        digits = ".3f" if abs(factor) >= SMALL else ".3g"
        return f"is {factor:{digits}} x that of {one.name}"
    before = one.run.tensors.get((step - 1, kind, name))
    if before is None or not before.is_finite or not before.norm:
        return ""
    if its.distance(before) <= 0.01 * before.norm:
        return "is the tensor of the step before"
    return _sum_of_steps(one, mine, its, before, kind)


def _sum_of_steps(one: Side, mine: Whole, its: Whole, before: Whole, kind: str) -> str:
    """Say if the second side's tensor is a sum over two steps of the first side.

    The summands are multiples of the first side's tensors at this step and at the step
    before, for example because gradients were not zeroed. Clipping changes the two
    factors. Returns "" if there is no such sum.
    """
    assert mine.sketch is not None and before.sketch is not None
    if its.sketch is None or its.sketch.size <= 8:
        return ""  # two factors explain any few numbers
    steps = np.stack([mine.sketch, before.sketch], 1).astype(np.float64)
    factors = np.linalg.lstsq(steps, its.sketch.astype(np.float64))[0]
    rest = np.linalg.norm(its.sketch - steps @ factors)
    if rest > 0.01 * its.norm or abs(factors[1]) * before.norm < 0.05 * its.norm:
        return ""
    end = ", as without zero_grad()" if kind == "gradient" else ""
    return (
        f"is {factors[0]:.3f} x that of {one.name} plus {factors[1]:.3f} x that of the "
        f"step before{end}"
    )
