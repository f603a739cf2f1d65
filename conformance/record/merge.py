"""Merge the recordings of all ranks of a run into whole tensors.

[Note: Parts by box]
Parts are identified by their box, that is, their position in the whole tensor. Ranks
with the same box hold replicas, whatever their mesh: a DTensor on a part of the mesh
does not know that other ranks hold the same elements. One replica counts, and the
others must have its digest. For a tensor that is still to be summed, only the sketches
of its parts add up. An optimizer may average gradients in its own step. Then replicas
differ in their gradients before the step and agree in their weights after it; the mean
of the replicas is the gradient. A job may also send the weights of one rank to all.
Then the gradient of that rank counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from .batches import (
    WORD,
    bags_of_inputs,
    by_row,
    every_row,
    inputs_of,
    repeated_rows,
    rows_of_blocks,
)
from .files import Recording, Stored, read_run
from .kept import IDLE, RESULT, Box
from .modules import GRADIENT, OUTPUT
from .parts import UNNAMED

__all__ = ["Run", "Side", "Whole", "merge", "read_merged"]

AGAIN = " (optimizer "
"""Suffix of a parameter's name if a second optimizer steps the parameter as well."""


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A whole tensor, merged from the parts of all ranks."""

    shape: tuple[int, ...]
    digest: int | None
    """Digest of the bits; None if the tensor is still to be summed, so that no rank
    holds its values."""
    rounded: int | None
    sketch: NDArray[np.float32] | None
    """Sketch; None if only digests were kept, as for weights."""
    square: float
    largest: float
    bad: int
    held: int
    """Number of elements that some rank holds."""
    unlike: tuple[int, ...] = ()
    """Ranks whose replica differs in its bits from that of the first rank."""
    odd: frozenset[int] = frozenset()
    """Digests of these replicas."""
    apart: float = 0.0
    """Largest distance of a replica from the first rank's, relative to its norm."""
    parts: tuple[tuple[int, Box], ...] = ()
    """(rank, box of its part); empty for outputs of blocks and if only bits were
    kept."""

    @property
    def size(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """True if every element is held by some rank."""
        return self.held == self.size

    @property
    def is_summed(self) -> bool:
        """True if ranks hold values; False if they hold parts of a sum."""
        return self.digest is not None

    @property
    def is_finite(self) -> bool:
        """True if the tensor has no inf or nan."""
        sketch = self.sketch
        return not self.bad and (sketch is None or bool(np.isfinite(sketch).all()))

    @property
    def is_rounded(self) -> bool:
        """True if each element is exactly a bf16 number.

        The fp32 form of such a number is its bf16 form followed by 16 zero bits.
        """
        return self.rounded is not None and self.digest in (
            self.rounded,
            (self.rounded << 16) % WORD,
        )

    @property
    def norm(self) -> float:
        """Estimate of the norm, from the sketch."""
        return 0.0 if self.sketch is None else _norm(self.sketch.astype(np.float64))

    def difference(self, other: Whole) -> NDArray[np.float64]:
        """Return the sketch of the difference of two tensors, from their sketches."""
        assert self.sketch is not None and other.sketch is not None
        return self.sketch.astype(np.float64) - other.sketch

    def distance(self, other: Whole) -> float:
        """Estimate the norm of the difference of two tensors, from their sketches."""
        return _norm(self.difference(other))


def _norm(sketch: NDArray[np.float64]) -> float:
    return math.sqrt(sketch @ sketch)


def merge(parts: Iterable[tuple[int, Stored]], *, averages: bool = False) -> Whole:
    """Merge the parts of one tensor; see [Note: Parts by box].

    Args:
        parts: (rank, numbers of its part).
        averages: true to use the mean of all replicas.
    """
    by_rank = sorted(parts, key=lambda part: part[0])
    boxes: dict[tuple[Any, ...], Stored] = {}
    unlike: list[int] = []
    odd: set[int] = set()
    apart = 0.0
    if averages:
        replicas = Counter(part.place for _, part in by_rank)
        by_rank = [
            (rank, _share_of(part, rank, replicas[part.place]))
            for rank, part in by_rank
        ]
    for rank, part in by_rank:
        where = part.place
        if not math.prod(where.local):
            continue
        key = (where.offsets, where.local, where.summand)
        first = boxes.setdefault(key, part)
        if first.digest != part.digest:
            unlike.append(rank)
            odd.add(part.digest)
            apart = max(apart, _distance(first, part))
    counted = [*boxes.values()] or [by_rank[0][1]]
    summed = not any(part.place.summand for part in counted)
    elements_by_box = {
        (p.place.offsets, p.place.local): math.prod(p.place.local) for p in counted
    }
    return Whole(
        shape=counted[0].place.shape,
        digest=sum(p.digest for p in counted) % WORD if summed else None,
        rounded=sum(p.rounded for p in counted) % WORD if summed else None,
        sketch=_added(part.sketch for part in counted),
        square=sum(p.square for p in counted) if summed else math.nan,
        largest=max(p.largest for p in counted) if summed else math.nan,
        bad=sum(p.bad for p in counted),
        held=sum(elements_by_box.values()),
        unlike=tuple(unlike),
        odd=frozenset(odd),
        apart=apart,
        parts=tuple((r, p.place) for r, p in by_rank if p.sketch is not None),
    )


def _distance(first: Stored, other: Stored) -> float:
    """Return the distance of two replicas, divided by the norm of the first.

    It is 0 if no sketches were recorded.
    """
    if first.sketch is None or other.sketch is None:
        return 0.0
    mine, its = first.sketch.astype(np.float64), other.sketch.astype(np.float64)
    if not (np.isfinite(mine).all() and np.isfinite(its).all()):
        return math.inf
    return _norm(its - mine) / (_norm(mine) or 1.0)


def _share_of(part: Stored, rank: int, replicas: int) -> Stored:
    """Return a replica divided by ``replicas``, marked as a summand of the mean."""
    where = replace(part.place, summand=(rank,))
    sketch = None if part.sketch is None else part.sketch / np.float32(replicas)
    return msgspec.structs.replace(part, place=where, sketch=sketch)


def _merge_outputs(
    parts: Iterable[tuple[int, Stored]],
    rows: Mapping[int, frozenset[int]],
) -> Whole:
    """Merge the outputs of one block; outputs of different rows add up.

    Ranks with the same rows must hold replicas, or parts with known boxes. If they do
    not, or if some rows were recorded on no rank, ``held`` is 0. The same applies if
    ranks with different rows have equal outputs: such an output does not depend on
    rows.

    Args:
        parts: (rank, numbers of its part).
        rows: rank -> digests of the rows that its model was called with.
    """
    of_rows: dict[frozenset[int], list[tuple[int, Stored]]] = {}
    for rank, part in parts:
        of_rows.setdefault(rows.get(rank, frozenset()), []).append((rank, part))
    every = frozenset[int]().union(*rows.values())
    wholes = [merge(each) for each in of_rows.values()]
    shapes = {whole.shape[1:] for whole in wholes}
    is_covered = len(shapes) == 1 and sum(map(len, of_rows)) == len(every)
    is_covered &= frozenset[int]().union(*of_rows) == every
    is_covered &= all(whole.is_whole and not whole.unlike for whole in wholes)
    sizes = [(whole.square, whole.largest) for whole in wholes if whole.largest]
    is_covered &= len({*sizes}) == len(sizes)
    shape = (sum(whole.shape[0] for whole in wholes), *wholes[0].shape[1:])
    return Whole(
        shape=shape,
        digest=sum(whole.digest or 0 for whole in wholes) % WORD,
        rounded=None,
        sketch=_added(whole.sketch for whole in wholes),
        square=sum(whole.square for whole in wholes),
        largest=max(whole.largest for whole in wholes),
        bad=sum(whole.bad for whole in wholes),
        held=math.prod(shape) if is_covered else 0,
    )


def _added(
    sketches: Iterable[NDArray[np.float32] | None],
) -> NDArray[np.float32] | None:
    sketches_there = [sketch for sketch in sketches if sketch is not None]
    if len(sketches_there) < 2:
        return sketches_there[0] if sketches_there else None
    return np.asarray(
        np.sum(sketches_there, axis=0, dtype=np.float64), dtype=np.float32
    )


Key = tuple[int, str, str]
"""(step, kind, name)."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a job, merged over its ranks."""

    ranks: int
    tensors: Mapping[Key, Whole]
    settings: Mapping[tuple[int, str], Mapping[str, Any]]
    """(step, parameter) -> settings of its param group, such as the rate."""
    rows: Mapping[int, frozenset[int]]
    """Step -> digests of the rows of the model's inputs, on all ranks."""
    unpadded: Mapping[int, Mapping[int, Sequence[int]]]
    """Two digests without padding of each row of tokens, by step and by the row's
    digest."""
    sums: Mapping[int, Mapping[int, Sequence[float | None]]]
    """Sums of each floating-point row, by step and by the row's digest."""
    bags: Mapping[int, Sequence[int]]
    """Step -> a hash of all elements of each input; equal rows of ranks count once."""
    has_tokens: bool
    """True if rows are rows of tokens."""
    shares: Mapping[int, Sequence[Sequence[int]]]
    """Step -> for each call of the model on any rank: see ``Recording.shares``."""
    losses: Mapping[int, float]
    """Step -> mean loss over ranks and micro-batches, if the model returns a loss."""
    drew: frozenset[int]
    drops: tuple[str, ...]
    outputs: frozenset[str]
    """Dtypes of the model's outputs, on all ranks."""
    in_16_bits: Mapping[str, str]
    """Parameter -> dtype of its own module's output, if that has 16 bits."""
    unstepped: tuple[str, ...]
    without_gradient: frozenset[tuple[int, str]]
    """(step, parameter) pairs without a gradient on any rank."""
    unnamed: int
    notes: tuple[str, ...]
    replicas: Mapping[Key, tuple[int, ...]] = field(default_factory=dict)
    """Ranks whose replica has other bits than the first rank's, by tensor; only for
    tensors with such ranks."""
    other_settings: Mapping[tuple[int, str], Mapping[int, Mapping[str, Any]]] = field(
        default_factory=dict
    )
    """Settings by rank, for each (step, parameter) in which ranks differ."""
    left: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter -> ranks that hold it but do not step it, although other ranks do."""
    absent: Mapping[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    """(step, parameter) -> ranks that step the parameter, but not in this step,
    although other ranks do."""
    skipped: frozenset[tuple[int, str]] = frozenset()
    """(step, parameter) of steps that all ranks skip because of an inf or nan."""
    skipping: Mapping[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    """(step, parameter) -> ranks that skip the step for an inf, although others step
    the parameter."""
    counts: Mapping[int, Mapping[int, int]] = field(default_factory=dict)
    """Step -> rank -> number of its rows."""
    repeated: Mapping[int, int] = field(default_factory=dict)
    """Step -> number of rows that several ranks got, each beside other rows."""
    leaders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter -> ranks whose weights other ranks take over after each step. Only
    their gradients and updates count."""
    early: tuple[str, ...] = ()
    """Tensors whose weights after the last step were read before the job made them
    equal on all ranks."""
    evaluations: Mapping[int, int] = field(default_factory=dict)
    """Step -> largest number of times that an optimizer's gradients were computed."""

    @property
    def steps(self) -> list[int]:
        """Recorded steps in order; includes steps in which no tensor had a gradient."""
        steps = {step for step, kind, _ in self.tensors if kind == "gradient"}
        return sorted(steps.union(step for step, _ in self.without_gradient))

    @cached_property
    def starts(self) -> dict[str, tuple[int, Whole]]:
        """Parameter -> its first recorded step, and the weight before that step."""
        stepped, starts = {*self.steps}, dict[str, tuple[int, Whole]]()
        for (step, kind, name), whole in sorted(self.tensors.items(), key=_by_step):
            if kind == "weight" and step in stepped:
                starts.setdefault(name, (step, whole))
        return starts

    def names(self, kind: str, step: int) -> list[str]:
        """Return the names of a kind of tensors at a step, in the model's order."""
        return [n for s, k, n in self.tensors if (s, k) == (step, kind)]


def _by_step(item: tuple[Key, Whole]) -> int:
    return item[0][0]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One side of a comparison: a run, its noise runs and its exit code."""

    name: str
    run: Run
    noisy: Sequence[Run] = ()
    """Noise runs: the same job again, unchanged and nudged."""
    code: int = 0
    """Exit code of the recorded job."""
    late: str = ""
    """Optimizer that first stepped after all recorded steps; may be empty."""


def read_merged(*folders: Path, exact: bool = False) -> Run:
    """Read the recording of a run and merge its ranks.

    Args:
        folders: folder of the run; several if each host wrote its own.
        exact: true to keep the bits of gradients that ranks do not share, which are
            otherwise averaged.

    Raises:
        ValueError: if a rank is missing or a file is broken.
    """
    ranks = dict(read_run(*folders))
    parts: dict[Key, list[tuple[int, Stored]]] = {}
    for rank, recording in ranks.items():
        scales = {(call.optimizer, call.step): call.scale for call in recording.calls}
        owner = dict[str, str]()
        for key, stored in recording.tensors.items():
            optimizer, step, kind, _, name = key.split("/", 4)
            if owner.setdefault(name, optimizer) != optimizer:
                name = f"{name}{AGAIN}{optimizer})"
            if kind == "gradient" and stored.sketch is not None:
                scale = scales.get((int(optimizer), int(step)))
                stored.sketch = stored.sketch / np.float32(scale or 1.0)
            parts.setdefault((int(step), kind, name), []).append((rank, stored))
    whole = {
        key: merge(each)
        if key[1] not in (OUTPUT, GRADIENT)
        else _merge_outputs(each, rows_of_blocks(ranks, key[0]))
        for key, each in parts.items()
    }
    for which, each in whole.items():
        if which[1] == "gradient" and not each.is_whole:
            whole[which] = merge([*parts[which], *_not_stepped(parts, which)])
    last = max((step for step, kind, _ in whole if kind == "gradient"), default=0)
    early, leaders = list[str](), dict[str, tuple[int, ...]]()
    if not exact:
        early, leaders = _replicas_with_other_gradients(whole, parts, last)
    # a tensor that no module has: unless ranks begin equal, their shares are unknown
    firsts = {k[2]: w for k, w in sorted(whole.items(), reverse=True) if _is_unnamed(k)}
    hidden = {name for name, first in firsts.items() if first.unlike}
    whole = {key: each for key, each in whole.items() if key[2] not in hidden}
    had = {(step, name) for step, kind, name in whole if kind == "gradient"}
    lacking = {
        (call.step, name)
        for recording in ranks.values()
        for call in recording.calls
        for name in call.without_gradient
    }
    first, inputs = ranks[min(ranks)], inputs_of(ranks)
    stepped = {name for _, kind, name in whole if kind == "weight"}
    settings: dict[tuple[int, str], dict[int, Mapping[str, Any]]] = {}
    skipping: dict[tuple[int, str], set[int]] = {}
    unstepped: dict[str, list[int]] = {}
    for rank, recording in ranks.items():
        for call in recording.calls:
            for group in call.settings:
                for name in group.names:
                    by_rank = settings.setdefault((call.step, name), {})
                    by_rank[rank] = group.values
                    if call.found_inf:
                        skipping.setdefault((call.step, name), set()).add(rank)
        for name in recording.unstepped:
            unstepped.setdefault(name, []).append(rank)
    return Run(
        ranks=len(ranks),
        tensors=whole,
        settings={
            key: next(iter(by_rank.values())) for key, by_rank in settings.items()
        },
        other_settings={
            key: by_rank
            for key, by_rank in settings.items()
            if any(each != by_rank[min(by_rank)] for each in by_rank.values())
        },
        left={n: tuple(ranks) for n, ranks in unstepped.items() if n in stepped},
        absent=_absent(settings, ranks),
        rows={
            step: frozenset[int]().union(*map(every_row, by_rank.values()))
            for step, by_rank in inputs.items()
        },
        counts={
            step: {rank: sum(map(len, rows)) for rank, rows in by_rank.items()}
            for step, by_rank in inputs.items()
        },
        unpadded=by_row((r.rows, r.unpadded) for r in ranks.values()),
        sums=by_row((r.rows_of_floats, r.sums_of_rows) for r in ranks.values()),
        repeated=repeated_rows(ranks, inputs),
        bags=bags_of_inputs(ranks, inputs),
        shares={
            step: sorted(
                each for r in ranks.values() for each in r.shares.get(step, ())
            )
            for step in inputs
        },
        has_tokens=any(recording.rows for recording in ranks.values()),
        losses=_losses(ranks.values()),
        drew=frozenset(step for r in ranks.values() for step in r.drew),
        drops=tuple(first.drops),
        outputs=frozenset(dtype for r in ranks.values() for dtype in r.outputs),
        in_16_bits={
            name: dtype
            for recording in ranks.values()
            for dtype, names in recording.in_16_bits.items()
            for name in names
        },
        unstepped=tuple(sorted(unstepped.keys() - stepped)),
        without_gradient=frozenset(lacking - had),
        unnamed=len(hidden)
        + max((c.unnamed for r in ranks.values() for c in r.calls), default=0),
        notes=tuple(f"rank {n}: {text}" for n, r in ranks.items() for text in r.notes),
        replicas={key: each.unlike for key, each in whole.items() if each.unlike},
        evaluations=_evaluations(ranks.values()),
        early=tuple(early),
        leaders=leaders,
        skipped=frozenset(k for k, r in skipping.items() if r == settings[k].keys()),
        skipping={
            key: tuple(sorted(by))
            for key, by in skipping.items()
            if by != settings[key].keys()
        },
    )


def _replicas_with_other_gradients(
    whole: dict[Key, Whole], parts: Mapping[Key, list[tuple[int, Stored]]], last: int
) -> tuple[list[str], dict[str, tuple[int, ...]]]:
    """Find the gradients by which a job steps, if ranks that step alike have others.

    Weights are then equal on all ranks when the next step begins. If they are the
    result of some ranks, the gradients of these ranks count. Otherwise the job sums
    gradients in its optimizer, or averages weights after each step, and the mean of all
    gradients counts.

    Weights after step ``last`` are read inside of it, before the job makes them equal.
    In a job that made most of its weights equal after each step before, those that
    differ between ranks are removed.

    Returns:
        Names of the removed weights, and the ranks whose gradients count, by parameter.
    """
    leaders = dict[str, tuple[int, ...]]()
    equal, apart = dict[int, list[str]](), set[str]()

    def merge_again(at: int, name: str) -> None:
        ranks = leaders.get(name)
        for kind in ("gradient", "update", IDLE, RESULT) if ranks else ("gradient",):
            every = parts.get((at, kind, name), ())
            of_ranks = [part for part in every if not ranks or part[0] in ranks]
            if of_ranks:
                whole[at, kind, name] = merge(of_ranks, averages=not ranks)
        if not ranks:  # the step's weights were gradients before the sum
            for kind in ("update", IDLE):
                whole.pop((at, kind, name), None)

    for at, what, name in sorted(key for key, each in whole.items() if each.unlike):
        before, after = (whole.get((s, "weight", name)) for s in (at, at + 1))
        if what != "gradient" or before is None or after is None:
            continue
        if after.unlike and at < last:
            apart.add(name)
        # a step that moved nothing does not show how gradients are summed
        if not after.unlike and before.digest != after.digest:
            equal.setdefault(at, []).append(name)
    for at, names in equal.items():
        ranks_by_name = {name: _leaders(parts, at, name) for name in names}
        # the mean of a tensor of few bits may be the result of one rank by chance
        leaders = ranks_by_name if all(ranks_by_name.values()) else {}
        for name in names:
            merge_again(at, name)
    every = {name for _, kind, name in whole if kind == "weight"}
    if apart or 2 * len({*chain(*equal.values())}) <= len(every):
        return [], leaders
    ends = ((name, whole.get((last + 1, "weight", name))) for name in every)
    early = sorted(name for name, end in ends if end is not None and end.unlike)
    for name in early:
        del whole[last + 1, "weight", name]
        if (last, "gradient", name) in whole:
            merge_again(last, name)
    return early, leaders


def _leaders(
    parts: Mapping[Key, Sequence[tuple[int, Stored]]], step: int, name: str
) -> tuple[int, ...]:
    """Return the ranks whose result of a step other ranks have taken over.

    Returns no ranks if each rank keeps its own result, or if an element has no leader.
    """
    results = parts.get((step, RESULT, name), ())
    after = dict(parts.get((step + 1, "weight", name), ()))
    leaders = {r: p for r, p in results if r in after and after[r].digest == p.digest}
    places = ({each.place for each in of} for of in (leaders.values(), after.values()))
    if len(leaders) == len(results) or len({*map(frozenset, places)}) > 1:
        return ()
    return tuple(leaders)


def _not_stepped(
    parts: Mapping[Key, Sequence[tuple[int, Stored]]], key: Key
) -> Iterator[tuple[int, Stored]]:
    """Yield zeros for the elements of a gradient of None, if no rank steps them.

    The weight stays then. It moves if another rank steps the elements, and sends them.
    """
    step, _, name = key
    stepped = {part.place for _, part in parts[key]}
    after = dict(parts.get((step + 1, "weight", name), ()))
    for rank, weight in parts.get((step, "weight", name), ()):
        moved = rank not in after or after[rank].digest != weight.digest
        if weight.place in stepped or moved:
            continue
        sketch = parts[key][0][1].sketch
        zeros = None if sketch is None else np.zeros_like(sketch)
        numbers = {"square": 0.0, "largest": 0.0, "bad": 0, "sketch": zeros}
        yield rank, msgspec.structs.replace(weight, **numbers)


def _absent(
    settings: Mapping[tuple[int, str], Mapping[int, object]],
    ranks: Mapping[int, Recording],
) -> dict[tuple[int, str], tuple[int, ...]]:
    """Return the ranks that leave out steps; not those without rows, as in a join."""
    trains: dict[int, set[int]] = {}
    for rank, recording in ranks.items():
        for step in recording.rows.keys() | recording.rows_of_floats.keys():
            trains.setdefault(step, set()).add(rank)
    ever: dict[str, set[int]] = {}
    for (_, name), by_rank in settings.items():
        ever.setdefault(name, set()).update(by_rank)
    absent: dict[tuple[int, str], tuple[int, ...]] = {}
    for (step, name), by_rank in settings.items():
        idle = ever[name] & trains.get(step, ever[name]) - by_rank.keys()
        if idle:
            absent[step, name] = tuple(sorted(idle))
    return absent


def _is_unnamed(key: Key) -> bool:
    return key[1] == "weight" and key[2].startswith(UNNAMED)


def _evaluations(ranks: Iterable[Recording]) -> dict[int, int]:
    most: dict[int, int] = {}
    for call in (call for recording in ranks for call in recording.calls):
        most[call.step] = max(call.evaluations, most.get(call.step, 1))
    return most


def _losses(ranks: Iterable[Recording]) -> dict[int, float]:
    losses_by_step: dict[int, list[float]] = {}
    for recording in ranks:
        for step, losses in recording.losses.items():
            losses_by_step.setdefault(step, []).extend(losses)
    return {step: sum(each) / len(each) for step, each in losses_by_step.items()}
