"""Scale: backoff and growth follow the documented rule exactly, and stay finite.

The rule is that of ``torch.amp`` (``torch._amp_update_scale_``). A bad step multiplies
the scale by the backoff factor and resets the growth tracker. A good step increases the
tracker. When the tracker reaches the interval, the scale is multiplied by the growth
factor, unless the product is not finite, and the tracker restarts.
``update(new_scale)`` sets the scale and leaves the tracker. A scale that would fall
below the smallest normal number may stop anywhere above 0. The rule would make it 0,
from which it cannot recover. If ``state_dict`` has no tracker, the tracker is counted
from the scales.
"""

from __future__ import annotations

import math

import numpy as np
from msgspec.structs import replace

from ...rank.trace import StepTrace
from ...space.recipes import MANUAL_STEP
from ...space.scenario import Scenario
from ..law import Evidence, Finding, count_or_inconclusive, failed, law, skipped


def expected_update(
    scenario: Scenario, scale: float, growth: int, *, bad: bool
) -> tuple[float, int]:
    """Return (scale, tracker) after one ``update``, in fp32 like the scale itself."""
    if bad:
        return _times(scale, scenario.backoff_factor), 0
    if growth + 1 < scenario.growth_interval:
        return scale, growth + 1
    grown = _times(scale, scenario.growth_factor)
    return (grown if math.isfinite(grown) else scale), 0


def _permitted(
    scenario: Scenario, seen: StepTrace, growth: int | None, *, bad: bool
) -> list[tuple[float, int | None]]:
    """Return the (scale, tracker) states that the rule permits after a step.

    If the tracker is known, there is one such state.

    Args:
        scenario: scenario that the ranks trained.
        seen: trace of the step.
        growth: tracker before the step; None if it is unknown.
        bad: true if a gradient on any rank was non-finite.
    """
    if not scenario.parsed_recipe.enabled:
        return [(seen.scale_before, growth)]
    if (chosen := _chosen(scenario, seen.step)) is not None:
        return [(chosen, growth)]
    # if the tracker is unknown, this step may or may not complete the interval
    trackers = (0, scenario.growth_interval - 1) if growth is None else (growth,)
    return [expected_update(scenario, seen.scale_before, g, bad=bad) for g in trackers]


def _chosen(scenario: Scenario, step: int) -> float | None:
    return scenario.parsed_recipe.new_scale if step == MANUAL_STEP else None


def _is_kept(
    seen: StepTrace, permitted: list[tuple[float, int | None]], *, bad: bool
) -> bool:
    scale, growth = seen.scale_after, seen.growth_after
    if bad and permitted[0][0] < SMALLEST:  # a scaler may define a floor
        return scale <= seen.scale_before and growth in (None, 0)
    return any(
        scale == want and growth in (None, tracker) for want, tracker in permitted
    )


SMALLEST = float(np.finfo(np.float32).tiny)
"""Smallest normal number; a smaller scale loses digits, and backoff soon makes it 0."""


def _times(scale: float, factor: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(scale) * np.float32(factor))


@law(
    "scale.rule",
    "Backoff, growth and the growth tracker follow the documented rule exactly.",
    "A scale that grows late, never, or on bad steps wastes steps or the range of "
    "fp16. Resuming a run needs the exact sequence.",
)
def rule(evidence: Evidence) -> Finding:
    """Check that every update of the scale on every rank follows the rule."""
    scenario, compared = evidence.scenario, 0
    # Counted here if state_dict has no tracker. A load may have lost the count, which
    # is then unknown until the scale changes.
    counts = {t.rank: 0 if t.loaded_state is None else None for t in evidence.ranks}
    for step, seen in evidence.steps():
        bad = any(s.non_finite for s in seen)
        for s, trace in zip(seen, evidence.ranks, strict=True):
            if scenario.parsed_recipe.resume and step == scenario.resume_step:
                counts[trace.rank] = None
            is_counted = s.growth_before is not None
            growth = s.growth_before if is_counted else counts[trace.rank]
            permitted = _permitted(scenario, s, growth, bad=bad)
            compared += 1
            if not _is_kept(s, permitted, bad=bad):
                finding = _broken(scenario, trace.rank, s, permitted[0], bad=bad)
                return replace(finding, compared=compared)
            # growth and backoff both reset the count, so a new scale makes it known
            # again
            is_counted = growth is not None or s.scale_after != s.scale_before
            counts[trace.rank] = permitted[-1][1] if is_counted else None
    return count_or_inconclusive(compared, "updates equal to the rule", evidence.unseen)


def _broken(
    scenario: Scenario,
    rank: int,
    seen: StepTrace,
    want: tuple[float, int | None],
    *,
    bad: bool,
) -> Finding:
    event = "a bad step" if bad else "a good step"
    if (chosen := _chosen(scenario, seen.step)) is not None:
        event = f"update({chosen:g})"
    return failed(
        message=f"after {event} rank {rank} went from scale "
        f"{seen.scale_before:g}, tracker {_text(seen.growth_before)} to "
        f"{seen.scale_after:g}, {_text(seen.growth_after)}; the rule says "
        f"{want[0]:g}, {_text(want[1])}",
        step=seen.step,
        ranks=(rank,),
        numbers={"got": seen.scale_after, "expected": want[0]},
    )


def _text(tracker: int | None) -> str:
    return "unknown" if tracker is None else str(tracker)


@law(
    "scale.positive",
    "The scale is never zero, infinite or nan.",
    "A run cannot recover: gradients become nan or zero.",
)
def positive(evidence: Evidence) -> Finding:
    """Check that the scale on every rank is finite and above 0 after every step."""
    compared = 0
    for step, seen in evidence.steps():
        for s, trace in zip(seen, evidence.ranks, strict=True):
            compared += 1
            if not (math.isfinite(s.scale_after) and s.scale_after > 0):
                return failed(
                    message=f"rank {trace.rank} holds the scale "
                    f"{s.scale_after}, expected a positive, finite one",
                    step=step,
                    ranks=(trace.rank,),
                    compared=compared,
                )
    return count_or_inconclusive(compared, "scales looked at", evidence.unseen)


@law(
    "scale.continuity",
    "The state after a step is the state before the next one, also through save and "
    "load.",
    "A resume with another scale or tracker repeats its overflows or loses range. If "
    "the scale changes between backward and step, the division does not undo the "
    "multiplication.",
)
def continuity(evidence: Evidence) -> Finding:
    """Compare the scaler's state after a step with that at the next backward."""
    compared = 0
    for trace in evidence.ranks:
        steps = trace.steps[: trace.completed]
        left_by_step = [(s.scale_after, s.growth_after) for s in steps[:-1]]
        if trace.loaded_state is None:  # nothing was left before the first step
            steps = steps[1:]
        else:
            left_by_step = [trace.loaded_state, *left_by_step]
        for left, after in zip(left_by_step, steps, strict=True):
            start = (after.scale_before, after.growth_before)
            compared += 1
            if start != left:
                whence = f"left step {after.step - 1} with"
                if not after.step:
                    whence = "loaded, from another number of ranks,"
                return failed(
                    message=f"rank {trace.rank} {whence} scale "
                    f"{left[0]:g}, tracker {_text(left[1])}, "
                    f"and starts with {start[0]:g}, {_text(start[1])}",
                    step=after.step,
                    ranks=(trace.rank,),
                    numbers={"got": start[0], "expected": left[0]},
                    compared=compared,
                )
    if not compared and any(True for _ in evidence.steps()):
        return skipped("the run has one step")
    return count_or_inconclusive(compared, "pairs of steps")
