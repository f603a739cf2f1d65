"""Trainer: schedules, averages and counters follow whether the step was taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..law import (
    Evidence,
    Finding,
    Status,
    bad_gradient,
    count_or_inconclusive,
    law,
    skipped,
)


@dataclass(frozen=True, kw_only=True)
class _Beside:
    """A value that a rank's stack reports before and after a step."""

    step: int
    rank: int
    before: Any
    after: Any
    taken: bool
    """Whether the step was taken; else it was skipped."""
    why: str
    """Why it was skipped, in parentheses."""

    def fail(self, message: str, compared: int, cause: str = "") -> Finding:
        return Finding(
            status=Status.FAIL,
            message=f"step {self.step}: {message}",
            step=self.step,
            ranks=(self.rank,),
            cause=cause,
            compared=compared,
        )


def _beside(evidence: Evidence, what: str) -> Iterator[_Beside]:
    """Values of ``what`` around each step that was clearly taken or clearly skipped.

    A step that was taken or skipped against the rule, or by some optimizers only,
    belongs to the laws on skips and is left out here.
    """
    for step, seen in evidence.steps():
        bad = any(s.non_finite for s in seen)
        changed = {d.parameters_changed for s in seen for d in s.decisions} - {None}
        if changed != {not bad}:
            continue
        why = f"({bad_gradient(evidence, seen)})" if bad else ""
        for s, trace in zip(seen, evidence.ranks, strict=True):
            said = getattr(s, what)
            if said is not None:
                yield _Beside(
                    step=step,
                    rank=trace.rank,
                    before=said[0],
                    after=said[1],
                    taken=not bad,
                    why=why,
                )


def _lost(evidence: Evidence, what: str, subject: str) -> Finding | None:
    """What is not loaded again where the stack goes on from its own checkpoint."""
    scenario = evidence.scenario
    if not scenario.parsed_recipe.resume:
        return None
    for trace in evidence.ranks:
        at = {s.step: getattr(s, what) for s in trace.steps}
        saved, loaded = at.get(scenario.resume_step - 1), at.get(scenario.resume_step)
        if saved and loaded and saved[1] != loaded[0]:
            return Finding(
                status=Status.FAIL,
                message=f"step {scenario.resume_step}: {subject} on rank {trace.rank} "
                "is not the one that was saved, once the stack is loaded from its own "
                "checkpoint",
                step=scenario.resume_step,
                ranks=(trace.rank,),
                cause="lost in the checkpoint",
                compared=1,
            )
    return None


@law(
    "trainer.schedule",
    "The schedule of the learning rate moves on every step that is taken, and on no "
    "step that is skipped; a checkpoint of the stack holds it.",
    "A warm-up that counts skipped steps is shorter than planned, and fp16 runs skip "
    "most steps at their start. Step the scheduler only if the scaler says that the "
    "optimizer has stepped. A call of the optimizer is no proof: a fused optimizer is "
    "called on skipped steps, too.",
    of_stack=True,
)
def schedule(evidence: Evidence) -> Finding:
    """Compare the schedule's state before and after each step."""
    if lost := _lost(evidence, "schedule", "the schedule"):
        return lost
    compared = 0
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
    if not compared and evidence.scenario.workload.lr_schedule is None:
        return skipped("the workload has no lr_schedule")
    return count_or_inconclusive(compared, "moves of the schedule", evidence.unseen)


@law(
    "trainer.average",
    "The running average of the weights does not move on a step that is skipped, and "
    "is equal on ranks that hold the same weights; a checkpoint of the stack holds it.",
    "If a skipped step counts, the weights before it count twice, and the warm-up of "
    "the average is shorter than planned. Ranks that count differently drift apart: "
    "which model is evaluated then depends on the rank that saves it. An average that "
    "moves on one rank only is compared with none.",
    of_stack=True,
)
def average(evidence: Evidence) -> Finding:
    """Compare the average's bits over each skipped step, and over ranks."""
    if lost := _lost(evidence, "average", "the running average"):
        return lost
    compared, torn = _torn(evidence)
    if torn is not None:
        return torn
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
    if not seen and evidence.scenario.workload.ema is None:
        return skipped("the workload has no ema")
    if not compared and evidence.unseen == 0:
        return skipped("no step was skipped, and no two ranks move the same average")
    return count_or_inconclusive(
        compared, "averages untouched by a skip, or equal on two ranks", evidence.unseen
    )


def _torn(evidence: Evidence) -> tuple[int, Finding | None]:
    """Averages of equal weights that were equal and are not after a step.

    An average may be laid out otherwise than the weights, or be kept on one rank: only
    one of as many elements as the weight, which moves on both ranks, is compared.
    """
    compared = 0
    for step, seen in evidence.steps():
        known: dict[tuple[str, str, str, str], tuple[int, str]] = {}
        for s, trace in zip(seen, evidence.ranks, strict=True):
            before, after = s.average or ({}, {})
            for name, (elements, was) in before.items():
                if name not in after or name not in trace.shards:
                    continue
                moved = was != after[name][1]
                if not moved or elements != len(trace.index[name]):
                    continue
                key = (name, trace.shards[name], s.digests.get(name, ""), was)
                rank, now = known.setdefault(key, (trace.rank, after[name][1]))
                compared += rank != trace.rank
                if now != after[name][1]:
                    return compared, Finding(
                        status=Status.FAIL,
                        message=f"step {step}: the running average of {name} on rank "
                        f"{trace.rank} differs from that on rank {rank}, which has the "
                        "same weights and had the same average before",
                        step=step,
                        ranks=(trace.rank,),
                        parameter=name,
                        cause="differs on ranks",
                        compared=compared,
                    )
    return compared, None


@law(
    "trainer.skips",
    "On every rank a trainer's count of skipped steps grows by one on every step that "
    "is skipped, and on no other.",
    "Schedules, averages, checkpoints and alarms depend on this number. A trainer that "
    "infers a skip from a missing call or from a smaller scale is wrong with fused "
    "optimizers and wherever the scale is at its limit.",
    of_stack=True,
)
def skips(evidence: Evidence) -> Finding:
    """Compare the count before and after each step."""
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
    "On every rank a new scaler that is loaded from the stack's own checkpoint has the "
    "scale and the growth tracker of the saved one.",
    "A run that resumes with the initial scale overflows again, and skips steps until "
    "the scale is low enough.",
)
def checkpoint(evidence: Evidence) -> Finding:
    """Compare the scaler's state before the save with that after the load."""
    found = {t.rank: t.restored for t in evidence.ranks if t.restored is not None}
    if not found and evidence.scenario.workload.save_checkpoint is None:
        return skipped("the workload has no save_checkpoint and load_checkpoint")
    if found and all(each.saved == each.new for each in found.values()):
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
