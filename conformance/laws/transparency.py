"""Transparency: in fp32, scaling by a power of two changes no bit of the training."""

from __future__ import annotations

import math

from ..law import Evidence, Finding, Status, count_or_inconclusive, law, skipped


def _not_applicable(evidence: Evidence) -> str:
    scenario = evidence.scenario
    if scenario.precision != "fp32":
        return "only fp32 scaling is exact"
    factors = (
        scenario.init_scale,
        scenario.growth_factor,
        scenario.backoff_factor,
    )
    if any(math.frexp(f)[0] != 0.5 for f in factors):
        return "a scale that is no power of two rounds"
    if scenario.faults != "none":
        return "a run without a scaler has no answer to bad gradients"
    return ""


@law(
    "transparency.bitwise",
    "In fp32 with power-of-two scales, training with the scaler is bitwise equal to "
    "training without it on the same topology.",
    "Multiplying and dividing by a power of two is exact; any difference is an error "
    "of the scaler, and the tolerance for it is zero.",
)
def bitwise(evidence: Evidence) -> Finding:
    """Compare digests of all parameters after every step with the bare run."""
    reason = _not_applicable(evidence)
    if reason:
        return skipped(reason)
    compared = 0
    for step, seen in evidence.steps():
        for position, s in enumerate(seen):
            bare = evidence.bare[position].steps[step].digests if evidence.bare else {}
            for name, digest in s.digests.items():
                compared += name in bare
                if name in bare and digest != bare[name]:
                    rank = evidence.ranks[position].rank
                    return Finding(
                        status=Status.FAIL,
                        message=f"step {step}: {name} on rank {rank} is not bitwise "
                        "what the run without a scaler gives",
                        step=step,
                        ranks=(rank,),
                        parameter=name,
                    )
    return count_or_inconclusive(compared, "tensors bitwise equal to the bare run")
