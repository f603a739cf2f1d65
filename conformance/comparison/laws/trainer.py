"""Trainer: schedules, averages and counters follow whether a step was taken."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ....fixtures import OfWorkload
from ...rank.trace import Floats, RankTrace
from ..law import (
    STOPPED,
    Evidence,
    Finding,
    Status,
    bad_gradient,
    count_or_inconclusive,
    failed,
    inconclusive,
    law,
    rank_list,
    skipped,
)
from ..settings import other_setting, other_than_reference


@dataclass(frozen=True, kw_only=True)
class _Beside:
    """A value before and after one step, as the workload on a rank reports it."""

    step: int
    rank: int
    before: Any
    after: Any
    taken: bool
    """True if the step was taken, False if it was skipped."""
    why: str
    """Reason of the skip, in parentheses."""

    def fail(self, message: str, compared: int, cause: str = "") -> Finding:
        return failed(
            message=message,
            step=self.step,
            ranks=(self.rank,),
            cause=cause,
            compared=compared,
        )


def _beside(evidence: Evidence, what: str) -> Iterator[_Beside]:
    """Yield values of ``what`` around each step that was clearly taken or skipped.

    A step with a bad gradient must be skipped, and any other step taken, by all
    optimizers. Steps that break this rule are left to the checks of skips.
    """
    for step, seen in evidence.steps():
        bad = any(s.non_finite for s in seen)
        # None: nothing of an optimizer trains on this rank
        changed = {d.parameters_changed for s in seen for d in s.decisions} - {None}
        if changed != {not bad}:
            continue
        why = f"({bad_gradient(evidence, seen)})" if bad else ""
        for s, trace in zip(seen, evidence.ranks, strict=True):
            values = getattr(s, what)
            if values is not None:
                yield _Beside(
                    step=step,
                    rank=trace.rank,
                    before=values[0],
                    after=values[1],
                    taken=not bad,
                    why=why,
                )


@dataclass(kw_only=True)
class _Loads:
    """Comparisons of saved values with those loaded after a resume."""

    compared: int = 0
    missed: int = 0
    stopped: bool = False
    """True if a comparison is missing because the run stopped before it."""
    lost: Finding | None = None

    def counted(self, others: int, what: str, unseen: int) -> Finding:
        """Return a finding that passes, with the number of comparisons.

        The finding is inconclusive if the run stopped before any load was compared.

        Args:
            others: number of further comparisons, all of which agreed.
            what: description of the compared values, for the message.
            unseen: number of further comparisons that could not be made.
        """
        if self.compared or self.missed:
            what += f", with {self.compared} loads from a checkpoint"
        total, missed = self.compared + others, self.missed + unseen
        finding = count_or_inconclusive(total, what, missed)
        # without a load, only half of the check was made
        if total and self.stopped and not self.compared:
            text = f"{finding.message}: the run stopped before one"
            return replace(finding, status=Status.INCONCLUSIVE, message=text)
        return finding


def _loads(evidence: Evidence, what: str, subject: str) -> _Loads:
    """Compare a value at the save of the workload's own checkpoint and after its load.

    Args:
        evidence: everything observed in the run.
        what: field of ``StepTrace`` with the value before and after a step.
        subject: name of the value, for the message.
    """
    scenario, loads = evidence.scenario, _Loads()
    if not scenario.parsed_recipe.resume:
        return loads
    for trace in evidence.ranks:
        at = {s.step: getattr(s, what) for s in trace.steps}
        at = {step: around for step, around in at.items() if around and any(around)}
        if not at:
            continue  # this rank keeps no average
        saved, loaded = at.get(scenario.resume_step - 1), at.get(scenario.resume_step)
        if saved is None or loaded is None:
            loads.missed += 1
            loads.stopped = True
        elif saved[1] != loaded[0]:
            loads.lost = failed(
                message=f"{subject} on rank {trace.rank} "
                "is not the one that was saved, once the stack is loaded from its own "
                "checkpoint",
                step=scenario.resume_step,
                ranks=(trace.rank,),
                cause="lost in the checkpoint",
                compared=loads.compared + 1,
            )
            return loads
        # a stack that saves nothing would have the same value
        elif saved[1] == next(iter(at.values()))[0]:
            loads.missed += 1
        else:
            loads.compared += 1
    return loads


COMPUTED = 1e-5
"""Largest relative difference of a setting that ``train_step`` computes in fp32 from
gradients or losses, on ranks and on one rank."""


@law(
    "trainer.schedule",
    "The learning-rate schedule moves on every step taken and on no skipped step, and "
    "a checkpoint restores it. Its rates are those of one rank.",
    "A warm-up that counts skipped steps is too short. Step the scheduler only if the "
    "scaler says that the optimizer stepped: a fused optimizer is also called on "
    "skipped steps. A scheduler that steps once for each rank ends too early.",
    of_stack=True,
)
def schedule(evidence: Evidence) -> Finding:
    """Check that the schedule advances only when a step is taken.

    Also compares its settings with those of the same training on one rank.
    """
    loads = _loads(evidence, "schedule", "the schedule")
    if loads.lost is not None:
        return loads.lost
    compared, alone, recipe = 0, evidence.alone, evidence.scenario.parsed_recipe
    is_full = evidence.scenario.parsed_precision.is_full
    # a schedule may count micro-batches; trainer.settings compares a resumed run
    is_due = is_full and recipe.parts == 1 and not recipe.resume
    if alone is not None and is_due:
        steps = [
            list(zip(evidence.ranks, seen, strict=True)) for _, seen in evidence.steps()
        ]
        other = other_than_reference(
            steps, alone.settings, "on one rank", tolerance=COMPUTED
        )
        compared = sum(map(len, alone.settings[: len(steps)])) * len(evidence.ranks)
        if other is not None:
            return Finding(
                status=Status.FAIL,
                message=f"{other[1]}: the schedule depends on the number of ranks",
                step=other[0],
                cause="differs from one rank",
                compared=compared,
            )
    for at in _beside(evidence, "schedule"):
        compared += 1
        if (at.before != at.after) == at.taken:
            continue
        subject = f"the schedule on rank {at.rank}"
        if at.taken:
            text = f"{subject} stayed at {at.before:.80} although the step was taken"
            return at.fail(text, compared, "stays on a step")
        text = f"{subject} moved from {at.before:.80} to {at.after:.80} although the "
        return at.fail(f"{text}step was skipped {at.why}", compared, "moves on a skip")
    parity = evidence.parity
    followed = parity.stack_schedule.followed if parity is not None else ""
    if evidence.alone_fails and followed and is_due:
        text = f"{followed} moves: it is compared with one rank, and "
        way_out = "let the workload declare its scheduler"
        finding = inconclusive(f"{text}{evidence.alone_fails}: {way_out}")
        return replace(finding, compared=compared)
    if not compared and evidence.scenario.workload.lr_schedule is None:
        return skipped("the workload has no lr_schedule")
    what = "moves and settings of the schedule" if alone else "moves of the schedule"
    return loads.counted(compared, what, evidence.unseen)


def _of_other_layout(evidence: Evidence) -> int:
    """Return the number of averages that cannot be compared with those of one rank.

    The elements of a parameter that such an average holds are unknown: an average may
    be flattened with others, or be cut differently from its parameter.
    """
    ranks = () if evidence.alone is None else evidence.ranks
    return sum(
        name not in at.averages
        for trace in ranks
        for at in trace.steps
        for name in (at.average or ({}, {}))[1]
    )


def _why_few_averages(evidence: Evidence) -> str:
    if evidence.alone_fails:
        return f"they are compared with one rank, and {evidence.alone_fails}"
    if not _of_other_layout(evidence):
        return STOPPED
    return (
        "an average has neither the elements of this rank's part of its parameter nor "
        "those of the whole: return one of the two from ema(stack)"
    )


@law(
    "trainer.average",
    "The running average of the weights does not move on a skipped step, and a "
    "checkpoint restores it. It is equal on ranks with equal weights, and equal to "
    "that of the same training on one rank, without accumulation or a resume.",
    "An average that counts skipped steps counts old weights twice. If ranks differ, "
    "the evaluated model depends on the rank that saves it. A rank that keeps no "
    "average returns {} from ema(stack).",
    of_stack=True,
    hidden=_why_few_averages,
)
def average(evidence: Evidence) -> Finding:
    """Check running averages of the weights in three ways.

    A skipped step must not change them. Ranks with equal weights must have equal
    averages. Training on one rank must give the same averages.
    """
    loads = _loads(evidence, "average", "the running average")
    if loads.lost is not None:
        return loads.lost
    compared, torn = _torn(evidence)
    if torn is not None:
        return torn
    beside, lost, moved = _beside_one_rank(evidence)
    if moved is None:
        moved = _lacks(evidence)
    if moved is not None:
        return moved
    compared += beside
    seen = 0
    for at in _beside(evidence, "average"):
        seen += 1
        if at.taken:
            continue
        compared += 1
        if at.before != at.after:
            return at.fail(
                f"the running average on rank {at.rank} moved although the step was "
                f"skipped {at.why}",
                compared,
            )
    if still := _still(evidence):
        return replace(inconclusive(still), compared=compared)
    if not seen and evidence.scenario.workload.ema is None:
        return skipped("the workload has no ema")
    missed = evidence.unseen + _of_other_layout(evidence) + lost
    if not compared and not loads.compared and not missed:
        return skipped("no step was skipped, and no two ranks move the same average")
    what = "averages untouched by a skip, or equal on two ranks"
    if beside:
        what += f", of which {beside} are those of one rank"
    return loads.counted(compared, what, missed)


def _beside_one_rank(evidence: Evidence) -> tuple[int, int, Finding | None]:
    """Compare averages with those of the same training on one rank.

    The one rank takes whole batches and does not resume. An average is a weighted mean
    of the weights so far. If two runs use the same factors for it, their averages are
    at most as far apart as their weights ever were, up to rounding.

    Returns:
        Number of compared averages, number of averages that could not be compared, and
        a failure or None.
    """
    alone = evidence.alone
    if alone is None:
        missed = sum(len(at.averages) for trace in evidence.ranks for at in trace.steps)
        return 0, missed if evidence.alone_fails else 0, None
    compared = missed = 0
    for trace in evidence.ranks:
        apart: dict[str, float] = {}
        steps = zip(trace.steps, alone.averages, alone.updates, strict=False)
        for at, averages, updates in steps:
            for name, values in at.averages.items():
                places = trace.places_of_average(name, len(values))
                if places is None or name not in averages:
                    continue
                start, due = alone.start[name][places], averages[name][places]
                if _is_narrow(values) and _is_narrow(start + due):
                    continue
                weights = _weights_at(evidence.ranks, trace, at.step, name, places)
                alone_weights = start + updates[name][places]
                if not np.isfinite([weights, alone_weights]).all():
                    continue
                far = max(apart.get(name, 0.0), _distance(weights, alone_weights))
                apart[name] = far
                rounding = (at.step + 1) * SAFETY * EPS * float(np.linalg.norm(values))
                bound, error = SAFETY * far + rounding, _distance(values, start + due)
                # with so large a bound, an average that stays at the start would pass
                if error <= bound and 0.0 < np.linalg.norm(due) <= bound:
                    missed += 1
                    continue
                compared += 1
                if error <= bound:
                    continue
                finding = failed(
                    message=f"the running average of {name} on rank "
                    f"{trace.rank} is {error:.3g} away from that of the same training "
                    "on one rank with whole batches, and the weights are at most "
                    f"{far:.3g} apart: it moves more or less often than once a step, "
                    "or by another rule",
                    step=at.step,
                    ranks=(trace.rank,),
                    parameter=name,
                    numbers={"error": error, "bound": bound},
                    cause="differs from one rank",
                    compared=compared,
                )
                return compared, missed, finding
    return compared, missed, None


def _lacks(evidence: Evidence) -> Finding | None:
    """Find an average that one rank has, and that all ranks together lack in part."""
    if (alone := evidence.alone) is None:
        return None
    for step, seen in evidence.steps():
        averages = alone.averages[step] if step < len(alone.averages) else {}
        if seen[0].average is None:
            continue
        for name, whole in averages.items():
            has = np.zeros(len(whole), bool)
            for trace, at in zip(evidence.ranks, seen, strict=True):
                if name in at.averages:
                    places = trace.places_of_average(name, len(at.averages[name]))
                    has[slice(None) if places is None else places] = True
                elif at.average is not None and name in at.average[1]:
                    has[:] = True  # its layout is unknown
            if not has.all():
                return failed(
                    message=f"all ranks together have {has.sum()} of {len(has)} "
                    f"elements of the running average of {name}, and one rank has all: "
                    "let ema(stack) return the average on each rank that keeps a part",
                    step=step,
                    parameter=name,
                    numbers={"got": float(has.sum()), "expected": float(len(has))},
                    cause="differs from one rank",
                )
    return None


def _weights_at(
    ranks: Sequence[RankTrace],
    trace: RankTrace,
    step: int,
    name: str,
    places: NDArray[np.int64],
) -> Floats:
    """Return some elements of a parameter after a step; nan for elements no rank has.

    Elements of the rank of ``trace`` come from ``trace``, all others from other ranks.

    Args:
        ranks: traces of all ranks.
        trace: trace of one rank.
        step: step after which the weights are read.
        name: name of the parameter.
        places: indices of the elements in the flat parameter.
    """
    whole = np.full(trace.sizes[name], np.nan)
    for holder in (*ranks, trace):  # the rank itself comes last
        for at in holder.steps:
            if at.step == step and name in at.parameters:
                whole[holder.index[name]] = at.parameters[name]
    weights: Floats = whole[places]
    return weights


SAFETY = 4.0
"""Factor in the permitted distance of two averages, of both terms: the distance of the
weights, and the rounding in each step."""
EPS = 2.0**-23


def _distance(one: Floats, other: Floats) -> float:
    return float(np.linalg.norm(one.astype(np.float64) - other.astype(np.float64)))


def _is_narrow(values: Floats) -> bool:
    """Return True if an average is kept in 16 bits: then ties may round either way."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # all numbers of fp16 and bf16 have these bits at zero
    return not (bits & 0x1FFF).any()


def _torn(evidence: Evidence) -> tuple[int, Finding | None]:
    """Compare a step's new averages on ranks whose weights and old averages are equal.

    An average that does not change on a rank is ignored: the rank may not keep one.
    """
    compared = 0
    for step, name, now_by_rank in _equal_before(evidence):
        moving = [(rank, now) for rank, now in now_by_rank.items() if now]
        for rank, now in moving[1:]:
            compared += 1
            first, expected = moving[0]
            if now != expected:
                return compared, failed(
                    message=f"the running average of {name} on rank "
                    f"{rank} differs from that on rank {first}, which has the same "
                    "weights and had the same average before",
                    step=step,
                    ranks=(rank,),
                    parameter=name,
                    cause="differs on ranks",
                    compared=compared,
                )
    return compared, None


def _still(evidence: Evidence) -> str:
    """Describe an average that a step changes on some ranks only; else "".

    All of these ranks have equal weights and had equal averages before the step.
    """
    for step, name, now_by_rank in _equal_before(evidence):
        still = [rank for rank, now in now_by_rank.items() if not now]
        moving = [rank for rank, now in now_by_rank.items() if now]
        if still and moving:
            return (
                f"step {step}: the running average of {name} moves on "
                f"{rank_list(moving)} and stays on {rank_list(still)}, with the same "
                "weights and the same average before: if it stays on purpose, let "
                "ema(stack) return {} there"
            )
    return ""


def _equal_before(evidence: Evidence) -> Iterator[tuple[int, str, dict[int, str]]]:
    """Yield averages that were equal before a step, on ranks with equal weights.

    An average may have another layout than the weights: it counts only if it has as
    many elements as the weight.

    Yields:
        Step, parameter, and rank -> digest after the step ("" if it did not change).
    """
    for step, seen in evidence.steps():
        groups: dict[tuple[str, str, str, str], dict[int, str]] = defaultdict(dict)
        for s, trace in zip(seen, evidence.ranks, strict=True):
            before, after = s.average or ({}, {})
            for name, (elements, was) in before.items():
                if name not in after or name not in trace.shards:
                    continue
                if elements == len(trace.index[name]):
                    now = after[name][1]
                    key = (name, trace.shards[name], s.digests.get(name, ""), was)
                    groups[key][trace.rank] = now if now != was else ""
        for (name, *_), now_by_rank in groups.items():
            yield step, name, now_by_rank


@law(
    "trainer.skips",
    "On every rank a trainer's count of skipped steps grows by one on every skipped "
    "step, and on no other.",
    "Schedules, averages, checkpoints and alarms use this count. Do not infer a skip "
    "from a missing optimizer call or a smaller scale: fused optimizers are called on "
    "skipped steps, and a scale at its limit stays.",
    of_stack=True,
)
def skips(evidence: Evidence) -> Finding:
    """Compare the workload's skip counter before and after each step."""
    compared = 0
    for at in _beside(evidence, "skips"):
        compared += 1
        if at.after - at.before == (not at.taken):
            continue
        did = "taken" if at.taken else f"skipped {at.why}"
        return at.fail(
            f"rank {at.rank} counts {at.after} skipped steps after {at.before}, and "
            f"the step was {did}",
            compared,
            "counts a step" if at.taken else "does not count a skip",
        )
    if not compared and evidence.scenario.workload.skipped_steps is None:
        return skipped("the workload has no skipped_steps")
    return count_or_inconclusive(compared, "counts of skipped steps", evidence.unseen)


@law(
    "trainer.checkpoint",
    "On every rank a new scaler that loads your checkpoint has the saved scale and "
    "growth tracker.",
    "A run that resumes with the initial scale overflows and skips steps again.",
)
def checkpoint(evidence: Evidence) -> Finding:
    """Compare the scaler's state before a save with that after the load."""
    restored_by_rank = {
        t.rank: t.restored for t in evidence.ranks if t.restored is not None
    }
    if not restored_by_rank and evidence.scenario.workload.save_checkpoint is None:
        return skipped("the workload has no save_checkpoint and load_checkpoint")
    if restored_by_rank and all(
        each.saved == each.new for each in restored_by_rank.values()
    ):
        return skipped("the state that was saved is that of a new scaler")
    for rank, each in restored_by_rank.items():
        if each.loaded != each.saved:
            lost = "that of a new scaler" if each.loaded == each.new else "another one"
            return failed(
                message=f"rank {rank} saved {_state(each.saved)}, and a new scaler has "
                f"{_state(each.loaded)} after the load: {lost}",
                ranks=(rank,),
                numbers={"saved": each.saved[0], "loaded": each.loaded[0]},
                cause="not saved" if each.loaded == each.new else "saved wrong",
                compared=len(restored_by_rank),
            )
    return count_or_inconclusive(
        len(restored_by_rank),
        "states saved and loaded",
        len(evidence.ranks) - len(restored_by_rank),
    )


@law(
    "trainer.settings",
    "After a resume the optimizers use the learning rates and other settings of the "
    "same training without the interruption.",
    "An unsaved schedule begins its warm-up again, and param groups created in "
    "another order exchange their rates. parity.update cannot detect this: its "
    "reference uses your settings.",
    of_stack=True,
)
def settings(evidence: Evidence) -> Finding:
    """Compare the settings of each step with those of an uninterrupted run."""
    if evidence.uninterrupted is None:
        return skipped("no stack has loaded its own checkpoint and stepped by itself")
    loaded, compared, missed = evidence.scenario.resume_step, 0, 0
    whole = dataclasses.replace(evidence, ranks=evidence.uninterrupted)
    for (step, seen), (_, other) in zip(evidence.steps(), whole.steps(), strict=False):
        # after other skips a schedule may have another value and be right
        if missed or [s.non_finite for s in seen] != [s.non_finite for s in other]:
            missed += len(seen)
            continue
        for at, uninterrupted, trace in zip(seen, other, evidence.ranks, strict=True):
            equal, differs = other_setting(at, uninterrupted)
            compared += equal if step >= loaded else 0
            if differs and step < loaded:
                text = f"{differs} in a second run, before anything was loaded"
                return inconclusive(f"step {step}, rank {trace.rank}: {text}")
            if differs:
                return failed(
                    message=f"{differs} in the same run without the "
                    f"interruption, on rank {trace.rank}; the stack's own checkpoint "
                    f"was loaded before step {loaded}",
                    step=step,
                    ranks=(trace.rank,),
                    cause="lost in the checkpoint",
                    compared=compared + 1,
                )
    if not compared and not missed:
        return skipped("no optimizer of the stack shows settings")
    return count_or_inconclusive(compared, "settings after a load", missed)


@law(
    "trainer.weights",
    "After a resume the weights are bitwise those that were saved, and each buffer has "
    "the bits that a rank had saved.",
    "fp32 weights saved in half precision, or made again from bf16 ones, lose the sum "
    "of many small steps. In one update the loss may be below the noise of bf16. "
    "Evaluation uses buffers, such as running statistics.",
    of_stack=True,
)
def weights(evidence: Evidence) -> Finding:
    """Compare the weights before a save with those after the load."""
    scenario, compared = evidence.scenario, 0
    loaded_by_rank = {t.rank: t.loaded for t in evidence.ranks if t.loaded is not None}
    loads_own = scenario.parsed_recipe.resume and (
        OfWorkload.LOOP not in scenario.workload.has
    )
    if not loaded_by_rank and not loads_own:
        return skipped("no stack goes on from its own checkpoint")
    for rank, (same, lost) in loaded_by_rank.items():
        compared += same
        if lost:
            return failed(
                message=f"{lost} on rank {rank} is "
                "not the weight that was saved, once the stack is loaded from its own "
                "checkpoint",
                step=scenario.resume_step,
                ranks=(rank,),
                parameter=lost,
                cause="lost in the checkpoint",
                compared=compared + 1,
            )
    for trace in evidence.ranks:
        if trace.lost_buffer:
            return failed(
                message=f"the buffer {trace.lost_buffer} on rank {trace.rank} is not "
                "the one that was saved, once the stack is loaded from its own "
                "checkpoint",
                step=scenario.resume_step,
                ranks=(trace.rank,),
                parameter=trace.lost_buffer,
                cause="lost in the checkpoint",
                compared=compared + 1,
            )
    if loaded_by_rank and not compared:
        return inconclusive("training had moved no weight before the load")
    return count_or_inconclusive(compared, "weights loaded as they were saved")


def _state(state: tuple[float, int | None]) -> str:
    return f"the scale {state[0]:g} and the growth tracker {state[1]}"
