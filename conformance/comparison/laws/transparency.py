"""Transparency: in fp32, scaling by a power of two does not change any bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from ...rank.methods import CLIPS
from ...rank.trace import RankTrace, StepTrace
from ..law import (
    Evidence,
    Finding,
    count_or_inconclusive,
    failed,
    inconclusive,
    law,
    skipped,
)


def _not_applicable(evidence: Evidence) -> str:
    scenario = evidence.scenario
    if not scenario.parsed_precision.is_full:
        return "only fp32 scaling is exact"
    factors = (
        scenario.init_scale,
        scenario.growth_factor,
        scenario.backoff_factor,
    )
    # frexp of a power of two is (0.5, exponent)
    if any(math.frexp(f)[0] != 0.5 for f in factors):
        return "a scale that is not a power of two rounds"
    steps = [at for trace in evidence.ranks for at in trace.steps]
    if any(not at.calls.isdisjoint(CLIPS) for at in steps):
        return "the scaler clips by a norm that it has rounded itself"
    if scenario.faults != "none":
        return "a run without a scaler does not handle bad gradients"
    return ""


NO_STEP = "the first step had a bad gradient, or the run without a scaler is missing"


def _pairs(evidence: Evidence) -> Iterator[tuple[int, StepTrace, StepTrace]]:
    """Yield (rank, step, same step without a scaler), up to the first bad gradient."""
    for number, (_, seen) in enumerate(evidence.steps()):
        # the control run skips no such step, so its weights differ afterwards
        if evidence.control is None or any(s.non_finite for s in seen):
            return
        for position, s in enumerate(seen):
            yield (
                evidence.ranks[position].rank,
                s,
                evidence.control[position].steps[number],
            )


def first_difference(once: Sequence[RankTrace], again: Sequence[RankTrace]) -> str:
    """Describe the first bitwise difference of two runs; "" if they are equal."""
    for trace, twin in zip(once, again, strict=True):
        for s, t in zip(trace.steps, twin.steps, strict=True):
            where = f"on rank {trace.rank} at step {s.step}"
            for name, values in s.gradients.items():
                theirs = t.gradients.get(name)
                if theirs is None or values.tobytes() != theirs.tobytes():
                    return f"the gradient of {name} {where}"
            for name, digest in s.digests.items():
                if digest != t.digests.get(name):
                    return f"{name} {where}"
    return ""


def _undecided(evidence: Evidence) -> Finding | None:
    """Return a finding with the reason why this file's checks cannot compare a run.

    Returns None if they can compare it.
    """
    reason = _not_applicable(evidence)
    if reason:
        return skipped(reason)
    if evidence.control_differs:
        return inconclusive(
            "the run without a scaler, made twice, differs from itself in "
            f"{evidence.control_differs}: nothing bitwise can be held against a scaler"
        )
    return None


def _differs(rank: int, step: int, name: str, what: str, compared: int) -> Finding:
    return failed(
        message=f"{what} on rank {rank} is not bitwise what the run "
        "without a scaler gives",
        step=step,
        ranks=(rank,),
        parameter=name,
        compared=compared,
    )


ONE_STEP = 0.0
"""Least fraction of all comparisons that must be made: one step is enough. Inexact
scaling changes bits in every step. The run without a scaler does not skip a bad step,
so later steps cannot be compared."""
SUBNORMAL = 2.0**-100
"""Limit of the results of the control run. A smaller result may contain subnormal
products, which are rounded. In a larger one a subnormal term (below 2^-126) is less
than an eighth of a unit in the last place."""


@law(
    "transparency.gradient",
    "In fp32 with power-of-two scales, every gradient that the optimizer gets is "
    "bitwise that of a run without the scaler.",
    "Bounds relative to a tensor can miss one wrong element or a flushed gradient of "
    "1e-7.",
    least=ONE_STEP,
    hidden=NO_STEP,
)
def gradient(evidence: Evidence) -> Finding:
    """Compare the gradients that the optimizer gets with those of the control run."""
    undecided = _undecided(evidence)
    if undecided is not None:
        return undecided
    compared = 0
    for rank, s, control in _pairs(evidence):
        for name, values in control.gradients.items():
            compared += 1
            got = s.gradients.get(name)
            if got is None:
                text = f"the missing gradient of {name}"
                return _differs(rank, s.step, name, text, compared)
            normal = (np.abs(values) >= SUBNORMAL) | (np.abs(got) >= SUBNORMAL)
            wrong = np.flatnonzero(normal & (got != values))
            if len(wrong):
                text = (
                    f"the gradient of {name} ({got[wrong[0]]:g} for "
                    f"{values[wrong[0]]:g}, {len(wrong)} of {len(values)} elements)"
                )
                return _differs(rank, s.step, name, text, compared)
    due = sum(len(s.gradients) for t in evidence.control or () for s in t.steps)
    return count_or_inconclusive(
        compared, "gradients bitwise equal to the control run", max(due - compared, 0)
    )


@law(
    "transparency.bitwise",
    "In fp32 with power-of-two scales, training with the scaler is bitwise equal to "
    "training without it on the same topology.",
    "Multiplying and dividing by a power of two is exact, so any difference is an "
    "error of the scaler.",
    least=ONE_STEP,
    hidden=NO_STEP,
)
def bitwise(evidence: Evidence) -> Finding:
    """Compare digests of all parameters after every step with the control run."""
    undecided = _undecided(evidence)
    if undecided is not None:
        return undecided
    compared = 0
    for rank, s, control in _pairs(evidence):
        for name, digest in s.digests.items():
            compared += name in control.digests
            if name in control.digests and digest != control.digests[name]:
                return _differs(rank, s.step, name, name, compared)
    due = sum(len(s.digests) for t in evidence.control or () for s in t.steps)
    return count_or_inconclusive(
        compared, "tensors bitwise equal to the control run", max(due - compared, 0)
    )
