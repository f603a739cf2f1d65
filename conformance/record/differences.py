"""Differences of each tensor at each step between two sides, and their bounds.

[Note: Bounds]
The reference job was recorded again twice or more: unchanged, and with each weight
moved to a neighbouring number. The distances of these runs from the first one are the
noise of the job. The bound of a tensor is ``FACTOR`` times its largest noise up to this
step, or times the relative noise of the median tensor if that is larger. Its own noise
may be too small by chance: a small tensor in 16 bits may show none, and after a step
the moved weights may round like the unmoved ones. A bound as large as the tensor
compares nothing. The bound of an update also allows one unit in the last place of each
weight, because two nudged runs may miss a few elements that round the other way. In 16
bits, one in ``FLIPS`` numbers kept of an update may also differ by any amount: Lion
steps by the sign of a sum, which rounding may decide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from ..status import counted
from .merge import Run, Side, Whole

__all__ = ["KINDS", "Row", "rows_of_sides"]

FACTOR = 8.0
"""Factor from noise to bound; correct variants reached 0.17 of the bound at most."""
UNIT = 2.0**-24
"""Unit roundoff of fp32: the smallest noise of a tensor, relative to its norm."""
COARSE = 2.0**-13
"""Noise of the median gradient, relative to its norm, that only 16 bits cause: fp32
reached 1e-5."""
FLIPS = 32
"""Numbers kept of an update, of which one may differ by any amount in 16 bits."""
KINDS = ("gradient", "update")


@dataclass(frozen=True, kw_only=True)
class Row:
    """Difference of one tensor between the two sides at one step."""

    step: int
    kind: str
    name: str
    distance: float
    """Norm of the difference, relative to the norm of the first side's tensor."""
    bound: float
    """Largest distance that noise explains, relative to the same norm."""
    noise: float
    """Largest distance between correct runs of the job, relative to the same norm."""
    words: str = ""
    """Description of the second side's tensor, such as ``is zero``; else empty."""

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
    least = dict.fromkeys(kinds, UNIT)
    for step in steps:
        for kind in kinds:
            pairs = dict(_pairs(one.run, other.run, names, step, kind))
            noises = {name: _noise(one, name, step, kind) for name in pairs}
            for name, its in names.items():
                if name in pairs and other.noisy:
                    noises[name] += _noise(other, its, step, kind)
            for name, noise in noises.items():
                worst[kind, name] = max(worst.get((kind, name), 0.0), noise)
            sizes = {
                name: mine.norm if mine.is_finite else 0.0
                for name, (mine, _) in pairs.items()
            }
            shares = [noises[n] / size for n, size in sizes.items() if size]
            least[kind] = max(median(shares or [0.0]), least[kind])
            for name, (mine, theirs) in pairs.items():
                size = sizes[name]
                both = mine.is_finite and theirs.is_finite
                distance = mine.distance(theirs) if both else math.inf
                if kind == "update" and both and least.get("gradient", 0.0) > COARSE:
                    distance = _without_flips(mine, theirs)
                noise = max(worst[kind, name], size * least[kind])
                bound = FACTOR * noise
                if kind == "update" and both:  # see [Note: Bounds]
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

    Non-finite tensors: inf if only some of the runs have one, 0 if all have.
    """
    plain = side.run.tensors[step, kind, name]
    again = [run.tensors.get((step, kind, name)) for run in side.noisy]
    every = [plain, *(each for each in again if each)]
    if not all(each.is_finite for each in every):
        return math.inf if any(each.is_finite for each in every) else 0.0
    return max(plain.distance(each) for each in every)


def _words(one: Side, mine: Whole, its: Whole, name: str, step: int, kind: str) -> str:
    """Describe how the second side differs from the first, if the sketch shows it."""
    if its.bad or mine.bad:
        bad = counted(its.bad, "non-finite element")
        return f"has {bad}, and {mine.bad} in {one.name}"
    if not its.norm and mine.norm:
        return "is zero"
    if not mine.norm:
        return f"is zero in {one.name}"
    assert mine.sketch is not None and its.sketch is not None
    factor = float(mine.sketch @ its.sketch) / mine.norm**2
    rest = float(np.linalg.norm(its.sketch - factor * mine.sketch)) / mine.norm
    if rest <= 0.01 * abs(factor) and abs(factor - 1) > 0.01:
        return f"is {factor:.3f} x that of {one.name}"
    before = one.run.tensors.get((step - 1, kind, name))
    if before is not None and before.norm:
        late = its.distance(before) / before.norm
        if late <= 0.01:
            return "is the tensor of the step before"
    return ""
