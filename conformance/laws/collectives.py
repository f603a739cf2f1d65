"""Collectives: what a scaler sends does not depend on gradients; nothing strays."""

from __future__ import annotations

from ..law import (
    Evidence,
    Finding,
    Status,
    count_or_inconclusive,
    law,
    say_tried_again,
)


@law(
    "collectives.same-sequence",
    "All ranks issue the same sequence of collectives inside the scaler's calls.",
    "A sequence that depends on local gradients pairs with the user's next collective "
    "and gives wrong numbers, or hangs (B14).",
)
def same_sequence(evidence: Evidence) -> Finding:
    """Compare the logs of all ranks, call by call."""
    compared = 0
    for step, seen in evidence.steps():
        first = seen[0].collectives
        for s, trace in zip(seen, evidence.ranks, strict=True):
            compared += 1
            if s.collectives != first:
                return Finding(
                    status=Status.FAIL,
                    message=f"step {step}: rank {trace.rank} issued "
                    f"{_text(s.collectives)}, rank {evidence.ranks[0].rank} "
                    f"{_text(first)}",
                    step=step,
                    ranks=(trace.rank,),
                    compared=compared,
                )
    return count_or_inconclusive(compared, "sequences compared", evidence.unseen)


def _text(collectives: list[str]) -> str:
    return " + ".join(collectives) or "none"


@law(
    "collectives.no-crosstalk",
    "A collective issued after the step returns the right number on every rank.",
    "A stray collective of the scaler pairs with the user's and corrupts it silently.",
    of_stack=True,
)
def no_crosstalk(evidence: Evidence) -> Finding:
    """Look at the checked all-reduce that follows every step."""
    return say_tried_again(_no_crosstalk(evidence), evidence)


def _no_crosstalk(evidence: Evidence) -> Finding:
    compared, missed = 0, evidence.unseen
    for step, seen in evidence.steps():
        for s, trace in zip(seen, evidence.ranks, strict=True):
            if s.checked_sum is None:
                missed += 1
                continue
            got, want = s.checked_sum
            compared += 1
            if got != want:
                return Finding(
                    status=Status.FAIL,
                    message=f"step {step}: the checked all-reduce gave {got:g} on rank "
                    f"{trace.rank}, expected {want:g}",
                    step=step,
                    ranks=(trace.rank,),
                    numbers={"got": got, "expected": want},
                    compared=compared,
                )
    return count_or_inconclusive(compared, "checked collectives", missed)
