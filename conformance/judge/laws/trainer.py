"""Trainer: what goes on beside the step knows whether the step was taken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...rank.trace import StepTrace
from ..law import (
    Evidence,
    Finding,
    Status,
    bad_gradient,
    count_or_inconclusive,
    law,
    skipped,
)


def _decided(evidence: Evidence) -> Iterator[tuple[int, Sequence[StepTrace], bool]]:
    """(step, one trace a rank, whether it was taken) where that is beyond doubt.

    A step that was taken or skipped against the rule, or by some optimizers only, is
    for the laws on skips: what goes on beside it is not judged.
    """
    for step, seen in evidence.steps():
        bad = any(s.non_finite for s in seen)
        changed = {d.parameters_changed for s in seen for d in s.decisions} - {None}
        if changed == {not bad}:
            yield step, seen, not bad


@law(
    "trainer.schedule",
    "The schedule of the learning rate moves on every step that is taken, and on no "
    "step that is skipped.",
    "A warm-up that counts skipped steps is shorter than planned, and fp16 runs skip "
    "most steps at their start. Step the scheduler only if the scaler says that the "
    "optimizer has stepped. A call of the optimizer is no proof: a fused optimizer is "
    "called on skipped steps, too.",
)
def schedule(evidence: Evidence) -> Finding:
    """Compare where the schedule is before and after each step."""
    compared = 0
    for step, seen, taken in _decided(evidence):
        for s, trace in zip(seen, evidence.ranks, strict=True):
            if s.schedule is None:
                continue
            before, after = s.schedule
            compared += 1
            if (before != after) == taken:
                continue
            which = (
                f"stayed at {before:.80} although the step was taken"
                if taken
                else f"moved from {before:.80} to {after:.80} although the step was "
                f"skipped ({bad_gradient(evidence, seen)})"
            )
            return Finding(
                status=Status.FAIL,
                message=f"step {step}: the schedule on rank {trace.rank} {which}",
                step=step,
                ranks=(trace.rank,),
                cause="stays on a step" if taken else "moves on a skip",
                compared=compared,
            )
    if not _tells(evidence, "schedule"):
        return skipped("the workload tells no schedule")
    return count_or_inconclusive(compared, "moves of the schedule", evidence.unseen)


@law(
    "trainer.average",
    "The running average of the weights does not move on a step that is skipped.",
    "If a skipped step counts, the weights before it count twice, and the warm-up of "
    "the average is shorter than planned. Ranks that count differently drift apart.",
)
def average(evidence: Evidence) -> Finding:
    """Compare the average's bits before and after each skipped step."""
    if not _tells(evidence, "average"):
        return skipped("the workload returns no running average")
    compared = 0
    for step, seen, taken in _decided(evidence):
        for s, trace in zip(seen, evidence.ranks, strict=True):
            if taken or s.average is None:
                continue
            compared += 1
            if s.average[0] != s.average[1]:
                return Finding(
                    status=Status.FAIL,
                    message=f"step {step}: the running average on rank {trace.rank} "
                    "moved although the step was skipped "
                    f"({bad_gradient(evidence, seen)})",
                    step=step,
                    ranks=(trace.rank,),
                    compared=compared,
                )
    if not compared and evidence.unseen == 0:
        return skipped("no step was skipped")
    return count_or_inconclusive(
        compared, "averages untouched by a skip", evidence.unseen
    )


@law(
    "trainer.skips",
    "On every rank a trainer's count of skipped steps grows by one on every step that "
    "is skipped, and on no other.",
    "Schedules, averages, checkpoints and alarms depend on this number. A trainer that "
    "infers a skip from a missing call or from a smaller scale is wrong with fused "
    "optimizers and wherever the scale is at its limit.",
)
def skips(evidence: Evidence) -> Finding:
    """Compare the count before and after each step."""
    compared = 0
    for step, seen, taken in _decided(evidence):
        for s, trace in zip(seen, evidence.ranks, strict=True):
            if s.skips is None:
                continue
            before, after = s.skips
            compared += 1
            if after - before == (not taken):
                continue
            did = "taken" if taken else f"skipped ({bad_gradient(evidence, seen)})"
            return Finding(
                status=Status.FAIL,
                message=f"step {step}: rank {trace.rank} counts {after} skipped steps "
                f"after {before}, and the step was {did}",
                step=step,
                ranks=(trace.rank,),
                cause="counts a step" if taken else "does not count a skip",
                compared=compared,
            )
    if not _tells(evidence, "skips"):
        return skipped("the workload counts no skipped steps")
    return count_or_inconclusive(compared, "counts of skipped steps", evidence.unseen)


@law(
    "trainer.checkpoint",
    "On every rank a new scaler that is loaded from the stack's own checkpoint has the "
    "scale and the growth tracker of the saved one.",
    "A run that resumes with the initial scale overflows again, and skips steps until "
    "the scale is low enough.",
)
def checkpoint(evidence: Evidence) -> Finding:
    """Compare the scaler's state before the save with that after the load."""
    found = {t.rank: t.restored for t in evidence.ranks if t.restored is not None}
    if not found:
        return skipped("the workload has no save and load, or did not come to them")
    if all(each.saved == each.new for each in found.values()):
        return skipped("the state that was saved is that of a new scaler")
    for rank, each in found.items():
        if each.loaded != each.saved:
            lost = "that of a new scaler" if each.loaded == each.new else "another one"
            return Finding(
                status=Status.FAIL,
                message=f"rank {rank} saved {_state(each.saved)}, and a new scaler has "
                f"{_state(each.loaded)} after the load: {lost}",
                ranks=(rank,),
                numbers={"saved": each.saved[0], "loaded": each.loaded[0]},
                cause="not saved" if each.loaded == each.new else "saved wrong",
                compared=len(found),
            )
    return count_or_inconclusive(len(found), "states saved and loaded")


def _state(state: tuple[float, int | None]) -> str:
    return f"the scale {state[0]:g} and the growth tracker {state[1]}"


def _tells(evidence: Evidence, what: str) -> bool:
    steps = (s for trace in evidence.ranks for s in trace.steps if s.complete)
    return any(getattr(s, what) is not None for s in steps)
