"""Find the first module whose output or gradient differs from the reference.

Steps: run the scenario once more up to the first bad step, with hooks on every module
(:mod:`..rank.watched_step`). Run the reference with the same hooks, in fp64 and in the
scenario's precision. Compare every tensor at a module boundary. Return the first module
that differs (:func:`locate`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ...fixtures import REFERENCE_LINE, OfWorkload
from ..formulas import clip_factor
from ..rank.modules import Watched
from ..rank.trace import RankTrace
from ..report.records import Location
from ..space.facts import facts_of
from ..space.scenario import Scenario
from ..status import rank_list
from .boundaries import BACKWARD, FORWARD, Boundaries
from .compare import SAFETY_FACTOR, multiple_of
from .diagnosis import Facts, Replica, causes_of, is_sum_of, missing_reduction
from .measured import ORDER, Parity, gradient_of
from .one_rank import one_rank_references
from .parity import followed_schedule, mean_loss
from .reference import Schedule, train_reference
from .variants import TRUTH

__all__ = ["first_bad_step", "locate"]

Doubles = NDArray[np.float64]
PROPORTIONAL = 2.0**-10
"""Largest relative residual of a gradient that counts as a multiple of the truth. A
wrong factor is often a number of ranks or micro-batches. This limit is small enough to
distinguish all whole numbers up to 1,024."""
NAMED = 4
"""Largest number of parameters that a message names."""


def first_bad_step(parity: Parity) -> int | None:
    """Return the first step at which a compared value differs, or None."""
    return min((row.step for row in parity.first_bad.values()), default=None)


@np.errstate(over="ignore", invalid="ignore")  # values in masks are huge
def locate(
    scenario: Scenario,
    traces: Sequence[RankTrace],
    parity: Parity,
    step: int,
    watched: Sequence[Watched],
) -> Location:
    """Find where a run first differs from the truth.

    Args:
        scenario: scenario that the ranks trained.
        traces: traces of the first run.
        parity: comparison of that run with the reference.
        step: first bad step, or any step if there is none.
        watched: for each rank, the tensors at module boundaries in this step of a
            second run.
    """
    schedule = followed_schedule(scenario, traces)
    boundaries = Boundaries(scenario, schedule, step, watched)
    gradients = _Gradients(scenario, traces, schedule, step, parity, boundaries)
    parts = sorted({0, *boundaries.after.values()})
    # differences inside modules alone do not fail a check
    if first_bad_step(parity) is None:
        ways = ((way, after) for after in parts for way in (FORWARD, BACKWARD))
        inside = (boundaries.first_departure(*each) for each in ways)
        inner = next(filter(None, inside), None)
        ending = f"; {boundaries.agreed}"
        if inner is not None:
            ending = f", though a tensor inside does: {inner.text}"
        if setting := parity.other_setting(step):
            ending = f"{ending}; {setting}"
        return Location(
            where="nowhere",
            text=f"nothing differs at step {step}{ending}",
            step=step,
            compared=boundaries.compared,
            not_compared=boundaries.not_compared,
        )
    # The order in which a fault spreads: forward, loss, backward, gradients, update. A
    # step of an inner optimizer carries it to the passes that follow.
    for after in parts:
        location = boundaries.first_departure(FORWARD, after)
        if location is None and after == parts[-1]:
            if gradients.departed["loss"]:
                location = gradients.loss()
            elif gradients.departed["gradient"]:
                location = boundaries.uneven()
        location = location or boundaries.first_departure(BACKWARD, after)
        if location is not None:
            break
    if location is None and gradients.departed["gradient"]:
        location = gradients.own()
    if location is None:
        location = gradients.update()
    within = location.where in ("forward", "backward")
    text = f"{location.text}; {gradients.also if within else boundaries.agreed}"
    text += gradients.circumstances(location.where) + gradients.way_out(location)
    return msgspec.structs.replace(
        location,
        step=step,
        text=text,
        parameters=tuple(gradients.names),
        compared=boundaries.compared,
        not_compared=boundaries.not_compared,
    )


# - Losses, gradients and updates


class _Gradients:
    """Loss, gradients and updates that differ in one step, and their factors."""

    def __init__(
        self,
        scenario: Scenario,
        traces: Sequence[RankTrace],
        schedule: Schedule,
        step: int,
        parity: Parity,
        boundaries: Boundaries,
    ) -> None:
        self.scenario = scenario
        self.departed = {
            kind: [row for row in parity.departed.get(kind, ()) if row.step == step]
            for kind in ORDER
        }
        if scenario.workload.one_rank:
            truth = one_rank_references(scenario, schedule).truth
        else:
            truth = train_reference(scenario, schedule, TRUTH)
        self.facts = Facts(
            axes=scenario.parsed_topology.mesh_shape(scenario.world_size),
            passes=max(len(each.batches) for each in boundaries.ranks.values()),
            scales=schedule.scales[step::-1][:2],
            clip_norm=parity.clip_norm,
            norm=parity.reference_norm[step],
            may_clip=OfWorkload.LOOP not in scenario.workload.has,
        )
        self.step = step
        self.setting = parity.other_setting(step)
        self.setting_before = parity.other_setting(step - 1)
        """Setting that already differed in an earlier step; else empty."""
        # largest rest that rounding explains, for proportional tensors
        self.rest = max(
            PROPORTIONAL, SAFETY_FACTOR * scenario.parsed_precision.roundoff
        )
        self.missed = parity.not_compared["gradient"]
        self.compares_updates = bool(parity.compared.get("update"))
        self.truth_loss = truth.losses[step]
        self.truth, self.updates = truth.gradients[step], truth.updates
        self.seen = [
            (trace, at) for trace in traces for at in trace.steps if at.step == step
        ]
        rows = self.departed["gradient"] or self.departed["update"]
        # the largest differences come first
        rows = sorted(rows, key=lambda row: row.ratio, reverse=True)
        self.names = list(dict.fromkeys(row.parameter for row in rows))
        wrong = bool(self.departed["gradient"])
        self.factor = self._factor(self.truth) if wrong else None
        self.holds = ""
        if wrong and self.factor is None:
            self.holds = self._holds(boundaries)
        alike = self.factor is not None or self.holds
        self.of_ranks = self._of_ranks() if wrong and not alike else ""

    @property
    def also(self) -> str:
        """Sentence about the parameter gradients that differ."""
        if not self.departed["gradient"]:
            return "no gradient of a parameter differs"
        return self._all_of_them()

    def loss(self) -> Location:
        row = self.departed["loss"][0]
        mean = mean_loss(at for _, at in self.seen)
        assert mean is not None  # at least one loss differs
        factor = mean / (self.truth_loss or 1.0)
        finite = bool(np.isfinite(factor))
        size = _times(factor) if finite else "not finite"
        size += self._share(factor)
        return Location(
            where="loss",
            text=f"the loss of step {self.step} differs: it is {size}; {self.also}",
            factor=factor if finite else None,
            error=row.error,
            bound=row.bound,
        )

    def _share(self, factor: float) -> str:
        """Say that each rank or pass returned a share of the loss; "" if none did."""
        due = (
            "Return the mean of what was counted here (sum / count of this rank), or "
            "of the whole batch on every rank"
        )
        if (
            facts_of(self.scenario.workload.name).counted
            and abs(self._unweighted() - 1) <= self.rest
        ):
            return (
                ", and the plain mean over ranks is right: each rank returned sum x "
                "ranks / count of the whole batch, from which backward starts, and "
                f"not a mean. {due}"
            )
        axes = [n for n in self.facts.axes.values() if n > 1]
        parts = {*axes, math.prod(axes), self.facts.passes} - {1}
        if not any(abs(factor * n - 1) <= self.rest for n in parts):
            return ""
        return (
            ": a share of it, as if the sum were divided by the count of the whole "
            f"batch. {due}"
        )

    def _unweighted(self) -> float:
        """Return the plain mean of the ranks' losses, divided by the true loss."""
        losses = [at.loss for _, at in self.seen if at.loss is not None]
        return sum(losses) / len(losses) / (self.truth_loss or 1.0)

    def circumstances(self, where: str) -> str:
        """Return likely causes: settings, a resume, sums in 16 bits, or frozen weights.

        Args:
            where: kind of the location that was found, as in ``Location``.
        """
        scenario, texts = self.scenario, []
        if self.setting_before and where != "update":
            texts.append(self.setting_before)
        if scenario.parsed_recipe.resume and self.step == scenario.resume_step:
            texts.append("a checkpoint was loaded just before this step")
        if self._is_rounded(where):
            texts.append(
                "the errors are as small as the rounding of sums in 16 bits: if "
                "gradients are to be reduced in 16 bits, declare it by reduce_dtype"
            )
        if scenario.parsed_recipe.training.frozen:
            texts.append(
                "half of the model is frozen here: run the scenario without "
                "recipe=frozen first, which compares all gradients"
            )
        return "".join(f"; {text}" for text in texts)

    def _is_rounded(self, where: str) -> bool:
        """Return True if only gradients are wrong, by no more than sums in bf16 are.

        Rounding goes in all directions, so a difference with a common factor is not
        rounding.
        """
        rows = self.departed["gradient"]
        if where != "gradient" or self.departed["loss"]:
            return False
        # largest error of a sum in bf16
        small = SAFETY_FACTOR * torch.finfo(torch.bfloat16).eps / 2
        promised = self.scenario.promised_dtype is not None
        if not rows or promised or max(r.error for r in rows) > small:
            return False
        pairs = (pair for name in self.names for pair in self._values(name, self.truth))
        factors = [multiple_of(mine, whole) for _, mine, whole in pairs if whole.any()]
        return all(abs(factor - 1) <= rest for factor, rest in factors)

    def way_out(self, found: Location) -> str:
        """Return the line that declares a one-rank reference if that may help; else "".

        The line may help if no other explanation was found, and the workload can use
        ``reference = "one rank"``. Such a reference does not detect a fault that also
        occurs on one rank.
        """
        workload = self.scenario.workload
        # a workload cannot declare these beside it
        may = not (workload.one_rank or workload.scheduler)
        is_explained = (
            self.setting or self.holds or self.of_ranks or self._is_rounded(found.where)
        )
        if workload.train_step is None or not may or is_explained:
            return ""
        rows = self.departed["gradient"] or self.departed["update"]
        if found.where in ("gradient", "update"):
            holders = {t.rank for t, _ in self.seen if {*self.names} & t.index.keys()}
            # true if only some ranks are wrong
            odd = holders != {row.rank for row in rows}
            missing = found.where == "gradient" and not self.departed["gradient"]
            reduced = not self._unreduced(rows[0].parameter) if rows else True
            explained = odd or missing or not reduced
        else:
            # A second forward at other weights (SAM) differs though the loss is right.
            explained = found.where != "forward" or bool(self.departed["loss"])
        if explained or found.factor is not None or not rows:
            return ""
        return (
            "; if this is not a single step from averaged gradients (SAM, PowerSGD), "
            + REFERENCE_LINE
        )

    def own(self) -> Location:
        """Return the location if gradients differ and no activation does."""
        rows = self.departed["gradient"]
        first = max(rows, key=lambda row: row.ratio)
        same = [row for row in rows if row.parameter == first.parameter]
        ranks = tuple(sorted({row.rank for row in same}))
        text, module = self._all_of_them(), first.parameter.rpartition(".")[0]
        everything = 1 < len(self.names) == self._compared_count()
        others = None
        if self.factor is None and not self.holds:
            others = self._factor(self.truth, without=first.parameter)
        if everything and others is not None:
            more = f"the others are {_times(others)}"
            if self.facts.clip_norm is not None:
                more += ", as if clipped by a norm that contains it"
            text = f"{text}; {more}"
        elif everything:  # all gradients differ, so no single parameter is the cause
            ranks, module = tuple(sorted({row.rank for row in rows})), ""
        if not (everything and (self.holds or self.factor is not None)):
            text = (
                f"the gradient of {first.parameter} itself differs on "
                f"{rank_list(ranks)}, step {self.step}, by {first.error:.2g} (bound "
                f"{first.bound:.1g}){self._unreduced(first.parameter)}; {text}"
            )
        if first.parameter not in self.truth:
            text += (
                f"; no gradient of {first.parameter} is due: the model freezes it, or "
                "does not use it"
            )
        return Location(
            where="gradient",
            module=module,
            ranks=ranks,
            factor=self.factor,
            error=first.error,
            bound=first.bound,
            text=text,
        )

    def update(self) -> Location:
        """Return the location if the update differs and no gradient does."""
        row = max(self.departed["update"], key=lambda row: row.ratio)
        missing = [name for name in self.names if self._never_trained(name)]
        if missing:
            return Location(
                where="gradient",
                module=missing[0].rpartition(".")[0],
                ranks=tuple(
                    sorted({t.rank for t, _ in self.seen if missing[0] in t.index})
                ),
                text=f"no rank has a gradient of {_some(missing)} at step {self.step}, "
                "and nothing has moved it: backward does not reach it, or its "
                "requires_grad is off",
            )
        moves = (pair for name in self.names for pair in self._moves(name))
        factor = _common((multiple_of(*pair) for pair in moves), self.rest)
        differs = f"differs by {row.error:.2g} (bound {row.bound:.1g})"
        if not np.isfinite(row.error):
            differs = "is not finite"
        elif factor is not None:
            differs = f"is {_times(factor)}"
        look = "look at the optimizer, and at what comes between it and the gradients"
        parameters = {name for trace, _ in self.seen for name in trace.index}
        if parameters.isdisjoint(self.names):
            look = "look at how ranks move a buffer"
        elif self.truth.keys().isdisjoint(self.names):
            look = "no gradient is due there: look at what else moves it"
        did, did_not = (
            [trace.rank for trace, at in self.seen if at.parameters_changed is changed]
            for changed in (True, False)
        )
        if did and did_not:
            look = f"{rank_list(did)} stepped, {rank_list(did_not)} did not"
        seen = any(at.gradients for _, at in self.seen)
        start = "no gradient was seen"
        if seen:
            compared = " that were compared" if self.missed else ""
            start = f"all gradients of step {self.step}{compared} are right"
        return Location(
            where="update",
            module=row.parameter.rpartition(".")[0],
            ranks=tuple(sorted({r.rank for r in self.departed["update"]})),
            factor=factor,
            error=row.error,
            bound=row.bound,
            text=f"{start}, the update of {_some(self.names)} {differs}: "
            f"{self.setting or look}",
        )

    def _never_trained(self, name: str) -> bool:
        """Return True if no rank has the expected gradient or moves the parameter."""
        due = name in self.truth and bool(self.truth[name].any())
        had = any(name in at.gradients for _, at in self.seen)
        return due and not had and not any(m.any() for m, _ in self._moves(name))

    def _moves(self, name: str) -> Iterator[tuple[Doubles, Doubles]]:
        """Yield the actual and the right update of a parameter in this step.

        There is one pair for each rank that holds the parameter.
        """
        before = self.updates[self.step - 1][name] if self.step else 0.0
        for trace, at in self.seen:
            if name not in trace.index:
                continue
            earlier = [s.parameters for s in trace.steps if s.step == self.step - 1]
            start = (earlier or [trace.start])[0][name]
            whole = (self.updates[self.step][name] - before)[trace.index[name]]
            yield at.parameters[name].astype(np.float64) - start, whole

    def _compared_count(self) -> int:
        """Count the gradients that differ, or are multiples of the true ones.

        All others are zero or consist of rounding, so they have no factor.
        """
        return sum(
            name in self.names
            or any(
                multiple_of(mine, whole)[1] <= self.rest
                for _, mine, whole in self._values(name, self.truth)
            )
            for name in {*self.truth, *self.names}
        )

    def _all_of_them(self) -> str:
        count, of = len(self.names), self._compared_count()
        which = f"all {of} gradients" if count == of else f"{count} of {of} gradients"
        listed = "" if count == of else f" ({_some(self.names)})"
        if self.holds:
            return f"{which}{listed} {self.holds}"
        if self.factor is None:
            return f"{which}{listed} differ{self.of_ranks}"
        causes = causes_of(self.factor, self.rest, self.facts)
        why = f", as if {causes}" if causes else ""
        return f"{which}{listed} are {_times(self.factor)}{why}"

    def _values(
        self, name: str, of: Mapping[str, Doubles]
    ) -> Iterator[tuple[RankTrace, Doubles, Doubles]]:
        """Yield (rank, its gradient of a parameter, the same elements of ``of``)."""
        for trace, at in self.seen:
            if name in trace.index and name in at.gradients and name in of:
                whole = of[name][trace.places(at, name)]
                mine = gradient_of(self.seen, trace, at, name).astype(np.float64)
                yield trace, mine, whole

    def _factor(self, of: Mapping[str, Doubles], without: str = "") -> float | None:
        """Return the factor of all differing gradients relative to ``of``, or None.

        The parameter ``without`` is left out.
        """
        factors = (
            multiple_of(mine, whole)
            for name in self.names
            for _, mine, whole in self._values(name, of)
            if whole.any() and name != without
        )
        return _common(factors, self.rest)

    def _holds(self, boundaries: Boundaries) -> str:
        """Say if gradients lack rows, or include the gradients of the step before.

        Returns "" in any other case.
        """
        values = [v for name in self.names for v in self._values(name, self.truth)]
        if sum(mine.size for _, mine, _ in values) < 2:
            return ""  # any number is a multiple of any other
        if self._holds_last_step():
            return (
                f"still contain the gradients of step {self.step - 1}: zero_grad() is "
                "missing, or comes late"
            )
        for part, gradients in boundaries.gradients_of_parts():
            if self._factor(gradients) is not None:
                return f"come from {part}"
        return ""

    def _holds_last_step(self) -> bool:
        """Return True if each gradient is a sum of the right one and the last step's.

        The two summands may have positive factors.
        """
        for trace, at in self.seen:
            last = next((s for s in trace.steps if s.step == at.step - 1), None)
            for name in self.names:
                if name not in at.gradients or name not in self.truth:
                    continue
                if last is None or name not in last.gradients:
                    return False
                mine = gradient_of(self.seen, trace, at, name).astype(np.float64)
                parts = [
                    self.truth[name][trace.places(at, name)],
                    last.gradients[name].astype(np.float64),
                ]
                if {p.size for p in parts} != {mine.size}:
                    return False
                if not is_sum_of(parts, mine, self.rest):
                    return False
        return bool(self.names)

    def _of_ranks(self) -> str:
        """Say that each rank is off by its own factor; else return ""."""
        pairs: dict[int, list[tuple[Doubles, Doubles]]] = {}
        for name in self.names:
            for trace, mine, whole in self._values(name, self.truth):
                if whole.any():
                    pairs.setdefault(trace.rank, []).append((mine, whole))
        factors = {
            rank: _common((multiple_of(*pair) for pair in of), self.rest)
            for rank, of in pairs.items()
            if sum(whole.size for _, whole in of) > 1  # else each is a multiple
        }
        factor_by_rank = {rank: f for rank, f in factors.items() if f is not None}
        if len(factor_by_rank) < max(2, len(pairs)):
            return ""
        rank = max(factor_by_rank, key=lambda each: abs(factor_by_rank[each] - 1))
        times = _times(factor_by_rank[rank])
        text = f": each rank has its own multiple, rank {rank} {times}"
        if self.facts.clip_norm is None or not self.facts.norm:
            return text
        due = clip_factor(self.facts.norm, self.facts.clip_norm)
        norms = {
            r: math.hypot(*(_size(w) for _, w in pairs[r])) / due
            for r in factor_by_rank
        }
        own = {r: clip_factor(n, self.facts.clip_norm) for r, n in norms.items()}
        if any(
            abs(factor_by_rank[r] * due - own[r]) > self.rest * own[r]
            for r in factor_by_rank
        ):
            return text
        return f"{text}: it clips by {norms[rank]:.6g}, the norm of its own part"

    def _unreduced(self, name: str) -> str:
        """Say that replicas hold parts that were not reduced; else return ""."""
        replicas: dict[str, list[Replica]] = {}
        for trace, mine, whole in self._values(name, self.truth):
            replica = trace.rank, mine, whole
            replicas.setdefault(trace.shards[name], []).append(replica)
        return missing_reduction(
            [*replicas.values()],
            self.rest,
            is_clipped=self.facts.clip_norm is not None,
            moves_rightly=self.compares_updates and not self.departed["update"],
        )


def _common(found: Iterable[tuple[float, float]], most: float) -> float | None:
    """Return the median factor, or None if the pairs do not share one.

    Args:
        found: (factor, rest) pairs. The rest is what the factor does not explain.
        most: largest rest, and largest relative difference of a factor.
    """
    factors = []
    for factor, rest in found:
        if not rest <= most:  # written so that nan is no multiple
            return None
        factors.append(factor)
    middle = median(factors or [0.0])
    far = any(abs(f - middle) > most * abs(middle) for f in factors)
    return None if far or not factors else middle


def _size(values: Doubles) -> float:
    return float(np.linalg.norm(values))


def _times(factor: float) -> str:
    """Format a factor with enough digits to distinguish it from 1 and 0."""
    off = abs(factor - 1)
    if 0 < off <= 0.01:
        digits = min(2 - math.floor(math.log10(off)), 15)
        return f"{factor:.{digits}f} x the truth"
    if 0 < abs(factor) < 0.01:
        whole = round(1 / factor)
        # for a power of two, a scale, demand more: any factor is near the reciprocal of
        # some whole number
        power = whole > 0 and whole & (whole - 1) == 0
        near = power and abs(factor * whole - 1) <= PROPORTIONAL
        part = f"1/{whole}" if near else ""
        return f"{part or format(factor, '.3g')} x the truth"
    return f"{factor:.3f} x the truth"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
