"""The first difference of two recordings of a scenario; pure functions.

Bitwise equal is the same. Two correct runs may each miss the fp64 reference by their
own bound (docs/parity.md), so they may differ by the sum of both bounds: up to there
they are the same within the noise. Anything above is a difference. The first one is
named, by step and then in the order in which a step computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..report.records import Comparison
from ..status import Number, as_number, rank_list
from .recording import ArraysOf, Part, Run, Tensor

__all__ = ["ENOUGH", "RESULTS", "Difference", "Outcome", "compare_runs"]

RESULTS = {
    "equal": "pass",
    "noise": "pass",
    "different": "fail",
    "undecided": "inconclusive",
    "broken": "error",
}
"""Result of two runs -> the status, and so the exit code."""
ENOUGH = 0.5
"""The part of the comparisons that were due which ``noise`` must at least rest on."""
_MEASURES = ("norm", "largest element")
Values = NDArray[Any]


class Difference(Comparison, frozen=True, kw_only=True):
    """A tensor of B against that of A on one rank; ``error`` is what they differ by.

    ``bound`` is the sum of what both may miss the reference by. A kind may also be
    ``initial value`` or ``norm``.
    """

    allowed: tuple[Number, Number]
    """The relative errors that A and B may have."""

    @property
    def text(self) -> str:
        """One line in words."""
        of = "" if self.kind in ("loss", "norm") else f" of {self.parameter}"
        where = "" if self.kind == "loss" else f" on rank {self.rank}"
        when = "" if self.kind == "initial value" else f"step {self.step}: "
        error, a, b = map(float, (self.error, *self.allowed))
        measure = self.kind if self.kind in ("loss", "norm") else self.measure
        return (
            f"{when}the {self.kind}{of}{where} differs by {error:.3g} of the "
            f"{measure}; the noise of A explains {a:.3g}, that of B {b:.3g}"
        )


@dataclass(kw_only=True)
class Outcome:
    """The result of two runs of one scenario."""

    a: Run
    b: Run
    result: str = "equal"
    """A key of :data:`RESULTS`."""
    text: str = ""
    """One line in words."""
    compared: int = 0
    equal: int = 0
    """Of them bitwise."""
    not_compared: int = 0
    """Comparisons that could not be made: no bound, or no value on one side."""
    first: list[Difference] = field(default_factory=list)
    """All differences at the place of the first one, the largest first."""
    closest: Difference | None = None
    """The comparison within the noise that is closest to its limit."""

    def ended(self, result: str, text: str) -> Outcome:
        """A copy with the result filled in."""
        self.result, self.text = result, text
        return self


def compare_runs(a: Run, b: Run, arrays: tuple[ArraysOf, ArraysOf]) -> Outcome:
    """Compare one scenario of both sides.

    Args:
        a: the run of side A.
        b: that of side B.
        arrays: of both.
    """
    found = Outcome(a=a, b=b)
    if broke := [f"{n}: {run.broken}" for n, run in _named(a, b) if run.broken]:
        return found.ended("broken", "; ".join(broke))
    if apart := _models_differ(a, b):
        return found.ended("different", apart)
    for rows in _stages(a, b, arrays, found):
        if isinstance(rows, str):
            if rows:
                return found.ended("different", rows + _batches(a, b))
            continue
        beyond = sorted((r for r in rows if r.ratio > 1), key=lambda r: -r.ratio)
        if beyond:
            # of the two measures of a tensor the one that is further beyond its limit
            found.first = [*{(r.parameter, r.rank): r for r in beyond[::-1]}.values()]
            found.first.sort(key=lambda r: -r.ratio)
            more = f"; {len(found.first)} tensors differ there" * (len(found.first) > 1)
            text = f"{found.first[0].text}{more}{_batches(a, b)}"
            return found.ended("different", text)
        closest = max(rows, key=lambda r: r.ratio, default=None)
        if closest and (not found.closest or closest.ratio > found.closest.ratio):
            found.closest = closest
    return _no_difference(a, b, found)


def _no_difference(a: Run, b: Run, found: Outcome) -> Outcome:
    problems = [f"{n}: {run.problem}" for n, run in _named(a, b) if run.problem]
    if len(problems) == 1:
        return found.ended("different", f"only one came to its end. {problems[0]}")
    if problems:
        return found.ended("undecided", f"none came to its end. {'; '.join(problems)}")
    due = found.compared + found.not_compared
    counts = f"{found.compared} of {due} comparisons"
    if not found.compared or found.compared < ENOUGH * due:
        return found.ended("undecided", f"{counts} could be made")
    if found.equal == due:
        return found.ended("equal", f"bitwise equal ({counts})")
    if wild := [f"{n}: {run.unsteady}" for n, run in _named(a, b) if run.unsteady]:
        text = "made twice, a run differs from itself beyond the noise: "
        return found.ended("undecided", text + "; ".join(wild))
    worst = found.closest
    at = "" if worst is None else f"; at most {worst.ratio:.2g} of it: {worst.text}"
    text = f"the same within the noise ({counts}){at}{_batches(a, b)}"
    return found.ended("noise", text)


def _named(a: Run, b: Run) -> tuple[tuple[str, Run], tuple[str, Run]]:
    return ("A", a), ("B", b)


def _models_differ(a: Run, b: Run) -> str:
    """Which parameters only one side has, in words, or the empty string."""
    if not a.start or not b.start:
        return ""  # one run ended before it had parameters
    only = {
        "A": sorted(a.start.keys() - b.start.keys()),
        "B": sorted(b.start.keys() - a.start.keys()),
    }
    lone = [f"only in {n}: {', '.join(x[:5])}" for n, x in only.items() if x]
    if lone:
        return f"the parameters are others, {'; '.join(lone)}"
    for name, tensor in a.start.items():
        sizes = tensor.elements, b.start[name].elements
        if sizes[0] != sizes[1]:
            return f"{name} has {sizes[0]} elements in A and {sizes[1]} in B"
    return ""


def _batches(a: Run, b: Run) -> str:
    """A clause for the message if the sides had different batches, or nothing."""
    for step, (one, other) in enumerate(zip(a.steps, b.steps, strict=False)):
        if one.batch != other.batch:
            return f" (the batch of step {step} is not bitwise the same)"
    return ""


def _stages(
    a: Run, b: Run, arrays: tuple[ArraysOf, ArraysOf], tally: Outcome
) -> Iterator[list[Difference] | str]:
    """The comparisons in order; of exact values a text, empty where they are equal."""
    yield _rows(("initial value", 0), a.start, b.start, arrays, tally)
    for number, (one, other) in enumerate(zip(a.steps, b.steps, strict=False)):
        # in the order of a step: a later difference may follow from an earlier one
        for kind in ("loss", "gradient", "norm", "update"):
            if kind == "update":
                yield _exact("scale", number, one.scale, other.scale)
                yield _exact("decision to step", number, one.stepped, other.stepped)
            mine, theirs = one.tensors.get(kind, {}), other.tensors.get(kind, {})
            yield _rows((kind, number), mine, theirs, arrays, tally)


def _exact(what: str, step: int, a: Sequence[object], b: Sequence[object]) -> str:
    if len(a) != len(b):
        return ""  # on another number of ranks
    apart = [
        rank for rank, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]
    ]
    if not apart:
        return ""
    where = f"{rank_list(apart)}: {a[apart[0]]} in A, {b[apart[0]]} in B"
    return f"step {step}: the {what} differs on {where}"


def _rows(
    where: tuple[str, int],
    tensors: Mapping[str, Tensor],
    others: Mapping[str, Tensor],
    arrays: tuple[ArraysOf, ArraysOf],
    tally: Outcome,
) -> list[Difference]:
    """Both measures of each tensor on each rank."""
    rows = []
    for name in dict.fromkeys([*tensors, *others]):
        if name in tensors and name in others:
            pair = tensors[name], others[name]
            rows += _tensor_rows((*where, name), pair, arrays, tally)
        elif where[0] in ("gradient", "update"):
            # A stack need not report gradients that it frees, and need not have those
            # that are 0: the update shows their effect.
            tally.not_compared += 1
    return rows


def _tensor_rows(
    what: tuple[str, int, str],
    tensors: tuple[Tensor, Tensor],
    arrays: tuple[ArraysOf, ArraysOf],
    tally: Outcome,
) -> list[Difference]:
    rows = []
    a, b = tensors
    size = float(a.size[0]), float(a.size[1])
    allowed = [*zip(*(map(float, t.bound) for t in tensors), strict=True)]
    for rank, values, places, whole in _on_ranks(a, b, arrays):
        if values is None:
            tally.compared += 1
            tally.equal += 1
            continue
        if not whole:
            tally.not_compared += 1
        if not places.size:
            continue
        values = _weighted(values, places, tensors, arrays)
        rows += _counted(_measured((*what, rank), values, size, allowed), tally)
    return rows


def _weighted(
    values: tuple[Values, Values],
    places: Values,
    tensors: tuple[Tensor, Tensor],
    arrays: tuple[ArraysOf, ArraysOf],
) -> tuple[Values, Values]:
    """The smaller of the two weights of each element."""
    weights = [
        known[tensor.weights][places]
        for tensor, known in zip(tensors, arrays, strict=True)
        if tensor.weights
    ]
    if not weights:
        return values
    least = np.minimum.reduce(weights).astype(np.float64)
    return values[0] * least, values[1] * least


def _on_ranks(
    a: Tensor, b: Tensor, arrays: tuple[ArraysOf, ArraysOf]
) -> Iterator[tuple[int, tuple[Values, Values] | None, Values, bool]]:
    """(rank, values of A and B or None where equal, places, whether all are there).

    Where a rank holds the same elements on both sides they are compared as they are;
    else each rank's elements with what the ranks of the other side hold together.
    """
    nothing = np.empty(0, np.int64)
    mine = {part.rank: part for part in a.parts}
    left: list[Part] = []
    matched = set()
    for part in b.parts:
        twin = mine.get(part.rank)
        if twin is None or twin.places != part.places:
            left.append(part)
            continue
        matched.add(part.rank)
        if twin.values == part.values:
            yield part.rank, None, nothing, True
            continue
        values = arrays[0][twin.values], arrays[1][part.values]
        yield part.rank, values, arrays[1][part.places], True
    elements = max(a.elements, b.elements)
    for parts, other, side in (
        (left, a, 0),
        ([p for p in a.parts if p.rank not in matched], b, 1),
    ):
        if not parts:
            continue
        full, held = _assembled(other, arrays[side], elements)
        for part in parts:
            places = arrays[1 - side][part.places]
            known = held[places]
            own = arrays[1 - side][part.values][known]
            theirs = full[places[known]]
            # compared in the dtype of the rank: the full tensor is in fp64
            if own.tobytes() == theirs.astype(own.dtype).tobytes():
                yield part.rank, None, nothing, True
            else:
                pair = (theirs, own) if side == 0 else (own, theirs)
                yield part.rank, pair, places[known], bool(known.all())


def _assembled(
    tensor: Tensor, arrays: ArraysOf, elements: int
) -> tuple[Values, NDArray[np.bool_]]:
    """The full tensor, flattened, and which elements any rank holds."""
    full, held = np.zeros(elements), np.zeros(elements, bool)
    for part in tensor.parts:
        places = arrays[part.places]
        full[places] = arrays[part.values]
        held[places] = True
    return full, held


def _measured(
    where: tuple[str, int, str, int],
    values: tuple[Values, Values],
    size: tuple[float, float],
    allowed: Sequence[tuple[float, float]],
) -> list[Difference]:
    a, b = (v.astype(np.float64) for v in values)
    if np.array_equal(a, b, equal_nan=True):
        apart = (0.0, 0.0)
    else:
        apart = _sizes(b - a)
    return [
        _difference(where, measure, distance, unit, bounds)
        for measure, distance, unit, bounds in zip(
            _MEASURES, apart, size, allowed, strict=True
        )
    ]


def _difference(
    where: tuple[str, int, str, int],
    measure: str,
    distance: float,
    unit: float,
    bounds: Sequence[float],
) -> Difference:
    kind, step, name, rank = where
    size = unit if 0 < unit < np.inf else 1.0
    absolute = np.inf if np.isnan(distance) else distance
    shares = [float(bound) / size for bound in bounds]
    return Difference(
        kind=kind,
        step=step,
        parameter=name,
        rank=rank,
        measure=measure,
        absolute=as_number(absolute),
        error=as_number(absolute / size),
        bound=as_number(sum(shares)),
        allowed=(as_number(shares[0]), as_number(shares[1])),
    )


def _counted(rows: list[Difference], tally: Outcome) -> list[Difference]:
    """The values that can be compared, after counting the tensor."""
    # equal values count as compared even where no bound is known
    if all(row.absolute == 0.0 for row in rows):
        tally.compared += 1
        return rows
    known = [row for row in rows if np.isfinite(float(row.bound))]
    tally.compared += bool(known)
    tally.not_compared += not known
    return known


def _sizes(values: Values) -> tuple[float, float]:
    if not values.size:
        return 0.0, 0.0
    return float(np.linalg.norm(values)), float(np.abs(values).max())
