"""Misuse: a call in a wrong order raises an error and changes nothing."""

from __future__ import annotations

from ..law import (
    Evidence,
    Finding,
    count_or_inconclusive,
    failed,
    inconclusive,
    law,
    skipped,
)


@law(
    "misuse.refused",
    "A call in a wrong order raises and changes nothing: a second unscale_ or step, "
    "unscale_ after step, step with a closure, update before any step.",
    "A call that is silently accepted divides gradients twice, moves parameters "
    "twice, or changes the scale without a step.",
)
def refused(evidence: Evidence) -> Finding:
    """Check that each call that was wrong on purpose raised and changed nothing."""
    compared = 0
    for trace in evidence.ranks:
        for seen in trace.misuse or ():
            compared += 1
            changes = ", ".join(seen.changed)
            accepted = "was accepted and has to raise"
            done = f"raised {seen.error}" if seen.error else accepted
            if not seen.error or seen.changed:
                return failed(
                    message=f"on rank {trace.rank} {seen.call} {done}"
                    f"{changes and f', and it changed {changes}'}",
                    ranks=(trace.rank,),
                    compared=compared,
                )
    if compared:
        return count_or_inconclusive(compared, "calls in a wrong order refused")
    if all(t.misuse is not None for t in evidence.ranks):
        return skipped("wrong calls are made after plain runs only")
    return inconclusive("the run stopped before any wrong call was made")
