"""Collectives: their sequence does not depend on gradients; none is left pending."""

from __future__ import annotations

import math

from ...rank.trace import Collective
from ..law import (
    Evidence,
    Finding,
    count_or_inconclusive,
    failed,
    law,
    say_tried_again,
    skipped,
)


@law(
    "collectives.same-sequence",
    "Inside the scaler's calls, any two ranks issue the same sequence of collectives "
    "on the groups they share.",
    "Otherwise a collective of the scaler pairs with one of yours and gives wrong "
    "numbers, or hangs.",
)
def same_sequence(evidence: Evidence) -> Finding:
    """Compare the sequences of collectives of all pairs of ranks, call by call."""
    if len(evidence.ranks) == 1:
        return skipped("there is only one rank")
    compared, issued = 0, False
    for step, seen in evidence.steps():
        issued |= any(s.collectives for s in seen)
        pairs = [*zip(seen, evidence.ranks, strict=True)]
        for place, (s, trace) in enumerate(pairs):
            compared += 1
            for other, peer in pairs[:place]:
                # compare only collectives that include both ranks; others may differ
                mine = [c for c in s.collectives if peer.rank in c.ranks]
                theirs = [c for c in other.collectives if trace.rank in c.ranks]
                if mine != theirs:
                    return failed(
                        message=f"rank {trace.rank} issued {_text(mine)}, "
                        f"rank {peer.rank} {_text(theirs)}",
                        step=step,
                        ranks=(trace.rank,),
                        compared=compared,
                    )
    if compared and not issued:
        return skipped("no rank issued a collective inside the scaler's calls")
    return count_or_inconclusive(compared, "sequences compared", evidence.unseen)


def _text(collectives: list[Collective]) -> str:
    return " + ".join(map(str, collectives)) or "none"


@law(
    "collectives.no-crosstalk",
    "A collective issued after the step returns the right number on every rank.",
    "A stray collective of the scaler silently corrupts your next one.",
    of_stack=True,
)
def no_crosstalk(evidence: Evidence) -> Finding:
    """Check the result of the all-reduce that gradparity adds after every step."""
    if len(evidence.ranks) == 1:
        return skipped("there is only one rank")
    return say_tried_again(_no_crosstalk(evidence), evidence)


def _gave(got: float) -> str:
    """Describe the result of a collective; a wait that timed out is recorded as nan."""
    return "did not come back in time" if math.isnan(got) else f"gave {got:g}"


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
                return failed(
                    message=f"the checked all-reduce {_gave(got)} on rank "
                    f"{trace.rank}, expected {want:g}",
                    step=step,
                    ranks=(trace.rank,),
                    numbers={"got": got, "expected": want},
                    compared=compared,
                )
    return count_or_inconclusive(compared, "checked collectives", missed)
