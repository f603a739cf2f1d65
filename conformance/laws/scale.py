"""Scale: backoff and growth follow the documented rule exactly, and stay finite.

The rule (torch.amp documentation, ``torch._amp_update_scale_``): a bad step multiplies
the scale by the backoff factor and resets the tracker; a good step counts, and when
the count reaches the interval the scale is multiplied by the growth factor, unless the
product is not finite, and the count starts again.
"""

from __future__ import annotations

import math

import numpy as np

from ..law import Evidence, Finding, Status, count_or_inconclusive, law
from ..scenario import Scenario


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
    for step, seen in evidence.steps():
        bad = any(s.non_finite for s in seen)
        for s, trace in zip(seen, evidence.ranks, strict=True):
            before = (s.scale_before, s.growth_before)
            want = expected_update(evidence.scenario, *before, bad=bad)
            got = (s.scale_after, s.growth_after)
            compared += 1
            if got != want:
                return _broken(step, trace.rank, before, want, got, bad)
    return count_or_inconclusive(compared, "updates equal to the rule")


def _broken(
    step: int,
    rank: int,
    before: tuple[float, int],
    want: tuple[float, int],
    got: tuple[float, int],
    bad: bool,
) -> Finding:
    kind = "bad" if bad else "good"
    return Finding(
        status=Status.FAIL,
        message=f"step {step}: after a {kind} step rank {rank} went from scale "
        f"{before[0]:g}, tracker {before[1]} to {got[0]:g}, {got[1]}; the rule says "
        f"{want[0]:g}, {want[1]}",
        step=step,
        ranks=(rank,),
        numbers={"got": got[0], "expected": want[0]},
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
