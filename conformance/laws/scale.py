"""Scale: backoff and growth follow the documented rule exactly, and stay finite.

The rule (torch.amp documentation, ``torch._amp_update_scale_``): a bad step multiplies
the scale by the backoff factor and resets the tracker; a good step counts, and when
the count reaches the interval the scale is multiplied by the growth factor, unless the
product is not finite, and the count starts again. ``update(new_scale)`` sets the scale
and leaves the count. A scale that would fall below the smallest normal number may stop
anywhere above 0: the rule would make it 0, from which nothing recovers (B05b).
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from ..law import Evidence, Finding, Status, count_or_inconclusive, law, skipped
from ..recipes import MANUAL_STEP
from ..scenario import Scenario
from ..trace import StepTrace


def expected_update(
    scenario: Scenario, scale: float, growth: int, *, bad: bool
) -> tuple[float, int]:
    """(scale, tracker) after one ``update``, computed in fp32 as the scale is held."""
    if bad:
        return _times(scale, scenario.backoff_factor), 0
    if growth + 1 < scenario.growth_interval:
        return scale, growth + 1
    grown = _times(scale, scenario.growth_factor)
    return (grown if math.isfinite(grown) else scale), 0


def _as_the_rule_says(
    scenario: Scenario, seen: StepTrace, *, bad: bool
) -> tuple[tuple[float, int], bool]:
    """What the state should be after the step, and whether it is."""
    before, got = (
        (seen.scale_before, seen.growth_before),
        (seen.scale_after, seen.growth_after),
    )
    recipe = scenario.parsed_recipe
    if not recipe.enabled:
        return before, got == before
    if recipe.new_scale is not None and seen.step == MANUAL_STEP:
        want = (recipe.new_scale, before[1])
        return want, got == want
    want = expected_update(scenario, *before, bad=bad)
    if bad and want[0] < SMALLEST:  # a floor is one's own choice
        return want, got[0] <= before[0] and got[1] == 0
    return want, got == want


SMALLEST = float(np.finfo(np.float32).tiny)
"""The smallest normal number; below it a scale is rounded, and soon 0."""


def _times(scale: float, factor: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(scale) * np.float32(factor))


@law(
    "scale.rule",
    "Backoff, growth and the growth tracker follow the documented rule exactly.",
    "A scale that grows late, never, or on bad steps wastes steps or the range of "
    "fp16; resuming and comparing runs needs the exact sequence.",
)
def rule(evidence: Evidence) -> Finding:
    """Replay every update of every rank against the oracle."""
    compared = 0
    for _, seen in evidence.steps():
        bad = any(s.non_finite for s in seen)
        for s, trace in zip(seen, evidence.ranks, strict=True):
            want, kept = _as_the_rule_says(evidence.scenario, s, bad=bad)
            compared += 1
            if not kept:
                return _broken(trace.rank, s, want, bad)
    return count_or_inconclusive(compared, "updates equal to the rule")


def _broken(rank: int, seen: StepTrace, want: tuple[float, int], bad: bool) -> Finding:
    kind = "bad" if bad else "good"
    return Finding(
        status=Status.FAIL,
        message=f"step {seen.step}: after a {kind} step rank {rank} went from scale "
        f"{seen.scale_before:g}, tracker {seen.growth_before} to "
        f"{seen.scale_after:g}, {seen.growth_after}; the rule says "
        f"{want[0]:g}, {want[1]}",
        step=seen.step,
        ranks=(rank,),
        numbers={"got": seen.scale_after, "expected": want[0]},
    )


@law(
    "scale.positive",
    "The scale is never zero, infinite or nan.",
    "From such a scale no run recovers: gradients become nan or are lost (B05).",
)
def positive(evidence: Evidence) -> Finding:
    """Look at every scale that any rank showed."""
    compared = 0
    for step, seen in evidence.steps():
        for s, trace in zip(seen, evidence.ranks, strict=True):
            compared += 1
            if not (math.isfinite(s.scale_after) and s.scale_after > 0):
                return Finding(
                    status=Status.FAIL,
                    message=f"step {step}: rank {trace.rank} holds the scale "
                    f"{s.scale_after}",
                    step=step,
                    ranks=(trace.rank,),
                )
    return count_or_inconclusive(compared, "scales looked at")


@law(
    "scale.continuity",
    "The state after a step is the state before the next one, also through save and "
    "load.",
    "A resumed run that starts with another scale or tracker repeats its overflows or "
    "loses range; a scale that changes between steps unscales what it did not scale.",
)
def continuity(evidence: Evidence) -> Finding:
    """Compare the state at the end of each step with that at the next backward."""
    compared = 0
    for trace in evidence.ranks:
        # a rank of another world goes on from what the first rank there has saved
        saved = evidence.before.ranks[0].steps[-1:] if evidence.before else []
        steps = [*saved, *trace.steps[: trace.completed]]
        for before, after in itertools.pairwise(steps):
            left = (before.scale_after, before.growth_after)
            found = (after.scale_before, after.growth_before)
            compared += 1
            if found != left:
                return Finding(
                    status=Status.FAIL,
                    message=f"step {after.step}: rank {trace.rank} left step "
                    f"{before.step} with scale {left[0]:g}, tracker {left[1]}, and "
                    f"starts with {found[0]:g}, {found[1]}",
                    step=after.step,
                    ranks=(trace.rank,),
                    numbers={"got": found[0], "expected": left[0]},
                )
    if not compared and any(True for _ in evidence.steps()):
        return skipped("the run has one step")
    return count_or_inconclusive(compared, "pairs of steps")
