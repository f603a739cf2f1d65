"""Compare inputs and outputs of all modules, and their gradients, with the reference.

[Note: Part of a rank]
The placements of a DTensor say which part of the whole it is, and over which ranks it
is a partial sum. A plain tensor has no placements. If it is smaller than the whole, its
part is unknown. Then it is compared with each part that the rank's mesh coordinate
suggests, and the best match counts. A gradient is compared with the part that the rank
has of the tensor itself. Rows need no such search, because the reference runs on the
rank's own rows. If no part has the tensor's shape, the tensor is not compared.

[Note: Faulty module]
The first tensor that differs decides, in the order of the reference and over all ranks:
a collective carries a fault from one rank to others. A wrong output is the fault of its
module; a wrong input is the fault of the enclosing module, which computed it. In
forward inputs come in and outputs come out; in backward gradients of outputs come in
and gradients of inputs come out. Inside a module with right outputs, tensors are
ignored: they may have any value, such as a partial sum that is reduced before the
module returns. If no activation differs, the fault is in the loss, the gradients of the
parameters, or the optimizer.

[Note: Factors]
An objective may be normalised in many ways, and a scaler scales it. So gradients of
activations are compared up to one factor for each rank and micro-batch, taken from the
first gradient. If the reference runs on the whole batch, the first gradient that is
only a part of the reference's is preferred; see [Note: What all rows share]. A wrong
factor shows in the gradients of all parameters.

[Note: What all rows share]
An output may have no rows, such as the temperature of a contrastive loss. On each rank
its gradient comes from the rank's own rows. If the reference runs on the whole batch,
the gradients of ranks with different rows must add up to the truth. A rank may have
only a part of such an output, for example some positions of a sequence. Ranks with the
same part have equal outputs. Their gradients must add up to that part of the truth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ...fixtures import compared_parameters
from ..rank.modules import (
    INPUT,
    INPUT_GRADIENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    Boundary,
    Call,
    Watched,
)
from ..report.records import Location
from ..space.facts import facts_of
from ..space.scenario import Scenario
from ..status import rank_list
from .compare import Doubles, compare, multiple_of, sizes
from .cuts import cuts
from .reference import Schedule
from .reference_run import rows_apart
from .watched_references import Expected, OnOneProcess, OnOneRank, parts_of

__all__ = ["BACKWARD", "FORWARD", "Boundaries", "Direction"]

State = Literal["right", "partial", "wrong"]
FORWARD_OF = {INPUT_GRADIENT: INPUT, OUTPUT_GRADIENT: OUTPUT}
"""Maps a kind of gradient to the kind of tensor that has this gradient."""
UNEVEN = 4 * 2.0**-8
"""Permitted relative difference of equal factors. In bf16 (unit roundoff 2^-8)
each rank rounds an output's gradient twice: when it is computed and when scaled."""
MAX_PARTS = 4**4
"""Largest number of parts of a whole that are tried for a plain tensor: 4 dims with 4
cuts each. A dim is cut along mesh axes: in chunks, from both ends or strided."""
MULTIPLE = 0.5**0.5
"""Largest residual, relative to the norm of a tensor, with which the tensor still
counts as a multiple of the truth."""


_NORMALISED = {
    1: (
        "rank",
        "on rank",
        "micro-batch",
        "by what a rank sees, and not by what all see",
    ),
    0: (
        "micro-batch",
        "in",
        "rank",
        "by what is in a micro-batch, and not by what is in all of them",
    ),
}
"""Texts on factors that differ. The key is the index in (rank, micro-batch) of the item
that the factors have in common. The value has four texts: name of the item that
differs, its preposition, name of the common item, and how the loss is normalised."""


@dataclass(frozen=True, kw_only=True)
class Direction:
    """Forward or backward, with the kinds of tensors that enter and leave a module."""

    name: Literal["forward", "backward"]
    enters: str
    leaves: str


FORWARD = Direction(name="forward", enters=INPUT, leaves=OUTPUT)
BACKWARD = Direction(name="backward", enters=OUTPUT_GRADIENT, leaves=INPUT_GRADIENT)


@dataclass(frozen=True)
class _Found:
    """Comparison of one tensor on one rank."""

    state: State
    error: float
    """Error relative to the size of the whole tensor."""
    bound: float


class Boundaries:
    """Compares all tensors at module boundaries with the reference."""

    def __init__(
        self,
        scenario: Scenario,
        schedule: Schedule,
        step: int,
        watched: Sequence[Watched],
    ) -> None:
        self.step = step
        self.ranks = {each.rank: each for each in watched}
        self.dtype = scenario.parsed_precision.compute_dtype
        self.axes = scenario.parsed_topology.mesh_shape(scenario.world_size)
        self.shapes = {
            n: tuple(p.shape)
            for n, p in compared_parameters(scenario.workload.model()).items()
        }
        self.of_whole = False
        """True if the reference runs on whole batches: on one rank, or because parts
        cannot be run."""
        self.expected: dict[str, dict[Boundary, Expected]] = {}
        self.order: list[Boundary] = []
        self.after: dict[Boundary, int] = {}
        """Boundary -> number of ``optimizer.step`` calls in the watched training step
        before the boundary was recorded."""
        self.inside: dict[Call, Call] = {}
        one_rank = scenario.workload.one_rank
        references = OnOneRank if one_rank else OnOneProcess
        self.references = references(scenario, schedule, step)
        self.coupled = not one_rank and self._coupled(scenario)
        # with declared micro-batches, ranks together must give the result of the whole
        # batch
        declared = scenario.workload.micro_batches is not None
        if declared and self.coupled and isinstance(self.references, OnOneProcess):
            shares = [each.batches for each in watched]
            self.coupled = not self.references.run_on_whole(shares)
        for each in watched:
            # ranks that see the same rows share a reference
            if each.rows not in self.expected:
                self.expected[each.rows], truth = self.references.expected(each)
                self.of_whole |= self.references.of_whole
                self.order, self.inside = list(truth.passed), truth.inside
                self.after = {b: p.after for b, p in truth.passed.items()}
        self.coupled &= not self.of_whole
        self.place = {boundary: number for number, boundary in enumerate(self.order)}
        self.sides: dict[tuple[Call, str], list[Boundary]] = {}
        for boundary in self.order:
            self.sides.setdefault((boundary.of, boundary.kind), []).append(boundary)
        self.groups = list(_groups(watched))
        self.shares = list(_groups(watched, same_rows=False)) if self.of_whole else []
        self.one_factor = self.of_whole or facts_of(scenario.workload.name).counted
        """True if the reference's objective has the same factor on all ranks."""
        self.starts: dict[tuple[int, int], Boundary] = {}
        """(rank, micro-batch) -> boundary whose gradient gave the factor; see [Note:
        Factors]."""
        self.factors = self._factors()
        self.found = {
            (rank, boundary): tensor
            for rank, each in self.ranks.items()
            for boundary in each.log.passed
            if (tensor := self._compared(rank, boundary)) is not None
        }

    @property
    def compared(self) -> int:
        """Number of tensors that were compared, on all ranks."""
        return len(self.found)

    @property
    def not_compared(self) -> int:
        """Number of tensors that were recorded and could not be compared."""
        seen = sum(len(w.log.passed) + w.log.left_out for w in self.ranks.values())
        return seen - self.compared

    @property
    def agreed(self) -> str:
        """Sentence about the tensors that were compared and agree."""
        if not any(w.log.modules for w in self.ranks.values()):
            return "the stack shows no modules, so activations were not compared"
        if not self.compared:
            logs = [(r, w.log.unpaired) for r, w in self.ranks.items()]
            why = [f" on rank {r}: {text}" for r, text in logs if text]
            unpaired = why[0] if why else ""
            if self.coupled:
                unpaired = ": a layer looks at all rows at once, and the rows are cut"
            return f"no activation could be compared{unpaired}"
        missed = f", {self.not_compared} could not be" if self.not_compared else ""
        modules = {boundary.module for _, boundary in self.found}
        return (
            f"{self.compared} activations and their gradients at the boundaries of "
            f"{len(modules)} modules were compared{missed}: all agree"
            f"{self._without_gradient()}"
        )

    def _without_gradient(self) -> str:
        """Name the first module with a gradient on some ranks only; "" if none.

        Only ranks on which the module ran in forward count.
        """
        for boundary in self.order:
            came = FORWARD_OF.get(boundary.kind)
            if came is None:
                continue
            forward = replace(boundary, kind=came)
            ran = [r for r, w in self.ranks.items() if forward in w.log.passed]
            lacks = [r for r in ran if boundary not in self.ranks[r].log.passed]
            if 0 < len(lacks) < len(ran):
                return (
                    f"; but {boundary.module or 'the model'} has no {boundary.kind} on "
                    f"{rank_list(lacks)}, and it has one on other ranks: is it "
                    "detached there?"
                )
        return ""

    def gradients_of_parts(self) -> Iterator[tuple[str, dict[str, Doubles]]]:
        """Yield (description, true gradients) for parts of the step's rows.

        Each micro-batch, with the rows of all ranks, is a part. So are the rows of each
        rank. The gradients of a part come from its rows alone, and are right up to a
        factor. Yields nothing if the reference cannot run on the rows of one rank.
        """
        if not isinstance(self.references, OnOneProcess):
            return
        if self.of_whole or self.coupled:
            return
        ranks: dict[str, list[int]] = {}
        for rank, each in self.ranks.items():
            ranks.setdefault(each.rows, []).append(rank)
        shares = {rows: self.ranks[r[0]].batches for rows, r in ranks.items()}
        counts = {len(batches) for batches in shares.values()}
        gradients_of = self.references.truth.gradients_of
        if len(counts) == 1 and counts != {1}:
            for number in range(count := counts.pop()):
                last = number == count - 1
                yield (
                    f"{'the last micro-batch' if last else f'micro-batch {number}'} "
                    f"alone, of the {count} micro-batches of this step",
                    gradients_of([batches[number] for batches in shares.values()]),
                )
        if len(shares) > 1:
            for rows, batches in shares.items():
                whose = rank_list(ranks[rows])
                yield f"the rows of {whose} alone", gradients_of(batches)

    def first_departure(self, way: Direction, after: int = 0) -> Location | None:
        """Return the first module that differs, or None; see [Note: Faulty module].

        Args:
            way: forward or backward.
            after: compare only tensors that were recorded after this number of
                optimizer steps in the watched step.
        """
        kinds = (way.enters, way.leaves)
        for boundary in self.order:
            if boundary.kind in kinds and self.after[boundary] == after:
                for rank in self.ranks:
                    if self._counts(rank, boundary, way):
                        return self._describe(way, boundary, rank)
        return None

    def uneven(self) -> Location | None:
        """Return the location at which backward starts with different factors, or None.

        Factors may differ between ranks, or between the micro-batches of a rank.
        """
        if not self.one_factor:
            return None
        for place, (each, on, other, how) in _NORMALISED.items():
            for shared in sorted({key[place] for key in self.factors}):
                factors = {k: f for k, f in self.factors.items() if k[place] == shared}
                if not self._are_uneven(factors):
                    continue
                values = (f"{f:.3g} {on} {k[1 - place]}" for k, f in factors.items())
                where = f"{', '.join(values)}, step {self.step}, {other} {shared}"
                return Location(
                    where="backward",
                    micro_batch=min(batch for _, batch in factors),
                    ranks=tuple(dict.fromkeys(rank for rank, _ in factors)),
                    text="every output that was compared is right, but the gradient of "
                    f"the model's output starts with another factor on each {each} "
                    f"({where}): the loss is normalised {how}",
                )
        return None

    def _are_uneven(self, factors: dict[tuple[int, int], float]) -> bool:
        """Return True if right gradients were multiplied by too different factors.

        Args:
            factors: (rank, micro-batch) -> factor of the rank's gradients.
        """
        starts = [(at, start) for at in factors if (start := self.starts.get(at))]
        if {self._state(rank, start) for (rank, _), start in starts} != {"right"}:
            return False
        low, high = min(factors.values()), max(factors.values())
        return high - low > UNEVEN * abs(high)

    def _state(self, rank: int, boundary: Boundary) -> State | None:
        tensor = self.found.get((rank, boundary))
        return None if tensor is None else tensor.state

    def _counts(self, rank: int, boundary: Boundary, way: Direction) -> bool:
        """Return True if the difference of a tensor counts; see [Note: Faulty module].

        A difference does not count if an enclosing call has right outputs, or if the
        tensor is a partial sum that is reduced before its use.
        """
        state = self._state(rank, boundary)
        if state in (None, "right"):
            return False
        around = list(self._around(boundary.of))
        states = [self._side(rank, call, way.leaves) for call in around]
        if "right" in states:
            return False
        if state == "wrong":
            return True
        # a partial sum may be reduced before it is used
        if states and states[0] == "wrong":
            return False
        return not any(
            self._state(rank, later) == "right"
            and not self._within(later.of, boundary.of)
            for later in self.order[self.place[boundary] + 1 :]
            if later.kind == way.enters and later.micro_batch == boundary.micro_batch
        )

    def _side(self, rank: int, call: Call, kind: str) -> State | None:
        """Return the worst state of a call's tensors of one kind: inputs, or outputs.

        Returns None if none of these tensors was recorded.
        """
        states = [self._state(rank, b) for b in self.sides.get((call, kind), ())]
        return next((s for s in ("wrong", "partial", "right") if s in states), None)

    def _around(self, call: Call) -> Iterator[Call]:
        """Yield the enclosing calls of a call, the innermost first."""
        while call in self.inside:
            call = self.inside[call]
            yield call

    def _outermost(self, rank: int, entering: Boundary) -> Boundary:
        """Return the wrong tensor that enters the outermost of the enclosing calls.

        An enclosing module may pass a wrong input on to an inner module.
        """
        for call in self._around(entering.of):
            sides = self.sides.get((call, entering.kind), ())
            wrong = [b for b in sides if self._state(rank, b) == "wrong"]
            if not wrong:
                break
            entering = wrong[0]
        return entering

    def _within(self, call: Call, other: Call) -> bool:
        return call == other or other in self._around(call)

    def _describe(self, way: Direction, first: Boundary, rank: int) -> Location:
        """Describe the first tensor that differs."""
        if first.kind == way.enters:
            first = self._outermost(rank, first)
        state = self._state(rank, first)
        ranks = [r for r in self.ranks if self._state(r, first) == state]
        faulty, boundary = first.of, first
        if first.kind == way.enters:
            faulty = next(self._around(first.of), first.of)
            left = self.sides.get((faulty, way.leaves), ())
            wrong = [b for b in left if self._state(rank, b) == "wrong"]
            boundary = wrong[0] if wrong and faulty != first.of else first
        tensor = self.found[rank, boundary]
        micro_batch, module, _ = faulty
        subject = module or "the model"
        inside = "" if first.of == faulty else first.module
        at_step = f"step {self.step}, micro-batch {micro_batch}"
        differs = f"differs by {tensor.error:.2g} (bound {tensor.bound:.1g})"
        if not np.isfinite(tensor.error):
            differs = "is not finite"
        if tensor.state == "partial":
            differs = f"is a partial sum that nothing adds up ({differs})"
        what = f"{self._came_in(rank, faulty, way)}, the {boundary.kind} {differs}"
        if inside and boundary is first:
            what = f"inside it, at {inside}, the {first.kind} {differs}"
        elif inside:
            what += f"; inside it, at {inside}, the {first.kind} differs first"
        elif first.kind == way.enters:
            what = f"the {first.kind} {differs}"
        parts = [f"{way.name} of {subject} on {rank_list(ranks)}, {at_step}: {what}"]
        log = self.ranks[rank].log
        dtype = log.passed[first].dtype
        if torch.finfo(dtype).bits < torch.finfo(self.dtype).bits:
            text = f"it is in {dtype}, and the precision is {self.dtype}"
            parts.append(f"{text}: use policy.param_dtype, an argument of parallelize")
        if self.after[first]:
            parts.append(
                "an optimizer has stepped before it in this step, so weights may differ"
            )
        collective = log.last_collective(first)
        parts.append(f"last collective before it: {collective}")
        return Location(
            where=way.name,
            module=module,
            inside=inside,
            ranks=tuple(ranks),
            micro_batch=micro_batch,
            error=tensor.error,
            bound=tensor.bound,
            collective=collective,
            text="; ".join(parts),
        )

    def _came_in(self, rank: int, call: Call, way: Direction) -> str:
        """Say that a call's inputs are right, or that none could be compared."""
        sides = self.sides.get((call, way.enters), ())
        states = [self._state(rank, boundary) for boundary in sides]
        if any(state is not None for state in states):
            return "what came in is right"
        return "what came in could not be compared"

    def _coupled(self, scenario: Scenario) -> bool:
        """Return True if batches are cut although their rows depend on each other."""
        whole = parts_of(scenario.workload, self.step, scenario.seed)
        sizes_of_parts = {part.tensors[0].shape[0] for part in whole}
        cut = any(
            batch.tensors[0].shape[0] not in sizes_of_parts
            for each in self.ranks.values()
            for batch in each.batches
        )
        return cut and not rows_apart(scenario.model)

    # - One tensor

    def _compared(self, rank: int, boundary: Boundary) -> _Found | None:
        if self.coupled:
            return None
        each = self.ranks[rank]
        expected = self.expected[each.rows].get(boundary)
        if expected is None or not np.isfinite(expected.bound).all():
            return None
        factor = 1.0
        if boundary.kind in FORWARD_OF:
            factor = self.factors[rank, boundary.micro_batch]
        best = self._best(rank, boundary, expected, factor)
        if best is None or best.state == "right":
            return best
        # A plain tensor does not say whether it is a partial sum. Try sums only if the
        # tensor is wrong, since a sum of right replicas is a multiple of the truth.
        for group in self.groups:
            if rank in group:
                summed = self._best(rank, boundary, expected, factor, group)
                if summed is not None and summed.state == "right":
                    return replace(best, state="partial")
        is_whole = each.log.passed[boundary].values.shape == expected.truth.shape
        for group in self.shares:  # see [Note: What all rows share]
            if rank not in group or boundary.kind not in FORWARD_OF:
                continue
            if is_whole or self._is_shared(rank, boundary, group):
                summed = self._best(rank, boundary, expected, factor, group)
                if summed is not None and summed.state == "right":
                    return summed
        return best

    def _is_shared(self, rank: int, boundary: Boundary, group: Sequence[int]) -> bool:
        """Return True if the tensor with this gradient is equal on ranks of a group."""
        forward = replace(boundary, kind=FORWARD_OF[boundary.kind])
        mine, *others = (self.ranks[r].log.passed.get(forward) for r in (rank, *group))
        return mine is not None and all(
            each is not None and np.array_equal(each.values, mine.values)
            for each in others
        )

    def _best(
        self,
        rank: int,
        boundary: Boundary,
        expected: Expected,
        factor: float,
        group: Sequence[int] = (),
    ) -> _Found | None:
        """Compare a tensor, or its sum over ``group``, with the nearest true part.

        Returns None if no part of the truth has the tensor's shape, or if a rank of the
        group has no such tensor.
        """
        values = self._values(rank, boundary, group)
        if values is None:
            return None
        differences = [
            _compared(values, factor * part, expected, abs(factor))
            for part in self._parts(rank, boundary, expected.truth)
        ]
        return min(differences, key=lambda f: f.error / (f.bound or 1.0), default=None)

    def _values(
        self, rank: int, boundary: Boundary, group: Sequence[int]
    ) -> Doubles | None:
        """Return a rank's tensor, summed over the ranks on which it is partial.

        ``group`` holds these ranks. If ``group`` is empty, the placements of the
        DTensor give the ranks. Returns None if one of the ranks lacks the tensor.
        """
        mine = self.ranks[rank].log.passed[boundary]
        group = group or mine.summed_over
        if not group:
            return mine.values.astype(np.float64)
        all_ = [
            self.ranks[r].log.passed.get(boundary) for r in group if r in self.ranks
        ]
        parts = [
            p for p in all_ if p is not None and p.values.shape == mine.values.shape
        ]
        if len(parts) < len(group):
            return None
        total: Doubles = np.sum([p.values.astype(np.float64) for p in parts], axis=0)
        return total / (mine.divided_by if mine.summed_over else 1)

    def _parts(
        self, rank: int, boundary: Boundary, truth: Doubles
    ) -> Sequence[Doubles]:
        """Return the parts of the truth that a rank's tensor may hold.

        A gradient may be a multiple of several parts of the true gradient. So for a
        gradient, only the part that the rank has of the activation is returned, if
        known.
        """
        parts = list(self._cut(rank, boundary, truth))
        forward = replace(boundary, kind=FORWARD_OF.get(boundary.kind, ""))
        expected = self.expected[self.ranks[rank].rows].get(forward)
        mine = self.ranks[rank].log.passed.get(forward)
        if len(parts) < 2 or expected is None or mine is None:
            return parts
        of_tensor = [
            _compared(mine.values.astype(np.float64), part, expected, 1.0).state
            for part in self._cut(rank, forward, expected.truth)
        ]
        if len(of_tensor) != len(parts) or "right" not in of_tensor:
            return parts
        return [
            p for p, state in zip(parts, of_tensor, strict=True) if state == "right"
        ]

    def _cut(self, rank: int, boundary: Boundary, truth: Doubles) -> Iterator[Doubles]:
        """Yield the parts of the truth that have the shape of a rank's tensor."""
        mine = self.ranks[rank].log.passed[boundary]
        if mine.whole == truth.shape and mine.places is not None:
            yield truth.reshape(-1)[mine.places].reshape(mine.values.shape)
            return
        if mine.values.ndim != truth.ndim:
            return
        coordinate = self.ranks[rank].coordinate
        shapes = zip(mine.values.shape, truth.shape, strict=True)
        ranges = []
        for dim, (size, whole) in enumerate(shapes):
            rows = self.of_whole and dim == 0
            starts = self._row_starts(rank, boundary, size, whole) if rows else ()
            ranges.append([*cuts(size, whole, coordinate, self.axes, starts)])
        # Features may be interleaved, as query, key and value in one projection. The
        # module's own parameters show which features these are; the mesh coordinate
        # only suggests equal cuts.
        if ranges and mine.values.shape[-1] < truth.shape[-1]:
            own = self._features(rank, boundary, mine.values.shape[-1], truth.shape[-1])
            ranges[-1] = ranges[-1] if own is None else [own]
        for count, cut in enumerate(product(*ranges)):
            if count < MAX_PARTS:
                yield truth[np.ix_(*cut)] if cut else truth

    def _row_starts(
        self, rank: int, boundary: Boundary, size: int, whole: int
    ) -> list[int]:
        """Return the indices in a whole batch at which a micro-batch may begin.

        Equal parts begin at multiples of ``size``. If the reference is a plain one, a
        micro-batch may also begin in any rank's share of the batch, after the earlier
        micro-batches of that rank.
        """
        rows = [len(batch.tensors[0]) for batch in self.ranks[rank].batches]
        starts = [*range(0, whole, size)] if whole % size == 0 else []
        share, before = sum(rows), sum(rows[: boundary.micro_batch])
        if isinstance(self.references, OnOneProcess) and share > 0:
            starts += range(before, whole - size + 1, share)
        return starts

    def _features(
        self, rank: int, boundary: Boundary, size: int, whole: int
    ) -> NDArray[np.int64] | None:
        """Return the indices of the features that this rank's weight or bias has.

        Returns None if they are unknown.
        """
        index = self.ranks[rank].index
        comes_out = boundary.kind in (OUTPUT, OUTPUT_GRADIENT)
        for leaf, dim in (("bias", 0), ("weight", 0), ("weight", 1)):
            name = f"{boundary.module}.{leaf}".removeprefix(".")
            shape, places_held = self.shapes.get(name, ()), index.get(name)
            if places_held is None or len(shape) <= dim or shape[dim] != whole:
                continue
            places: NDArray[np.int64]
            rest = int(np.prod(shape[1:]))
            if dim == 0 and comes_out and len(places_held) == size * rest:
                places = places_held.reshape(size, rest)[:, 0] // rest
                return places
            if dim == 1 and len(shape) == 2 and len(places_held) == size * shape[0]:
                places = places_held.reshape(shape[0], size)[0] % whole
                return places
        return None

    def _factors(self) -> dict[tuple[int, int], float]:
        """Return the factor of each rank and micro-batch; see [Note: Factors]."""
        own: dict[tuple[int, int], float] = {}
        rounds = (False, True) if self.of_whole else (True,)
        for rank, whole_too, boundary in product(self.ranks, rounds, self.order):
            at = (rank, boundary.micro_batch)
            if at not in own and boundary.kind == OUTPUT_GRADIENT:
                factor = self._factor(rank, boundary, whole_too=whole_too)
                if factor is not None and factor != 0.0:
                    own[at], self.starts[at] = factor, boundary
        wholes = {
            (each.rows, batch): own[rank, batch]
            # reversed, so that the lowest of all ranks with the same rows counts
            for rank, each in reversed(self.ranks.items())
            for batch in {b.micro_batch for b in self.order}
            if (rank, batch) in own
        }
        return {
            (rank, batch): own.get((rank, batch), wholes.get((each.rows, batch), 1.0))
            for rank, each in self.ranks.items()
            for batch in {b.micro_batch for b in self.order}
        }

    def _factor(
        self, rank: int, boundary: Boundary, *, whole_too: bool
    ) -> float | None:
        """Return the factor by which a gradient is a multiple of the truth.

        Returns None if it is no multiple of any part of the truth, or if it is a whole
        gradient and ``whole_too`` is false.
        """
        expected = self.expected[self.ranks[rank].rows].get(boundary)
        if expected is None or boundary not in self.ranks[rank].log.passed:
            return None
        values = self._values(rank, boundary, ())
        if values is None or (values.shape == expected.truth.shape and not whole_too):
            return None
        ratios = [
            multiple_of(values, part)
            for part in self._parts(rank, boundary, expected.truth)
        ]
        ratio, rest = min(ratios, key=lambda f: f[1], default=(0.0, 1.0))
        return ratio if rest < MULTIPLE else None


def _compared(
    values: Doubles, truth: Doubles, expected: Expected, factor: float
) -> _Found:
    whole = factor * sizes(expected.truth)[0]
    spread = factor * expected.bound[0], factor * expected.bound[1]
    both = compare(values, truth, spread, (whole, whole))
    worst = max(both, key=lambda found: found.ratio)
    state: State = "right" if worst.ratio <= 1 else "wrong"
    return _Found(state=state, error=worst.error, bound=worst.bound)


def _groups(
    watched: Sequence[Watched], *, same_rows: bool = True
) -> Iterator[list[int]]:
    """Yield groups of ranks over which a tensor may be partial.

    Args:
        watched: records of all ranks.
        same_rows: true for groups of ranks with equal rows, false for groups in
            which every rank has different rows.
    """
    axes = list(watched[0].coordinate)
    for count in range(1, len(axes) + 1):
        for crossed in combinations(axes, count):
            lines: dict[Any, list[Watched]] = {}
            for each in watched:
                rest = [i for a, i in each.coordinate.items() if a not in crossed]
                rows = [each.rows] if same_rows else []
                lines.setdefault((*rows, *rest), []).append(each)
            for line in lines.values():
                n_rows = len({each.rows for each in line})
                if len(line) > 1 and (same_rows or n_rows == len(line)):
                    yield [each.rank for each in line]
