"""Liveness: a legal training step comes to its end on every rank."""

from __future__ import annotations

from ..law import (
    Evidence,
    Finding,
    Status,
    count_or_inconclusive,
    law,
    rank_list,
    say_tried_again,
)


@law(
    "liveness.completes",
    "Every call of a legal training step returns on every rank.",
    "A scaler that raises or hangs on a mesh cannot be used on it. If one rank stops, "
    "the others wait in a collective.",
    of_stack=True,
)
def completes(evidence: Evidence) -> Finding:
    """No rank may have stopped early."""
    return say_tried_again(_completes(evidence), evidence)


def _completes(evidence: Evidence) -> Finding:
    problems = [(t.problem, t.rank) for t in evidence.ranks if t.problem is not None]
    done = sum(t.completed for t in evidence.ranks)
    if not problems:
        return count_or_inconclusive(done, "rank-steps completed", evidence.unseen)
    first = min((p for p, _ in problems), key=lambda p: p.step)
    ranks = [
        rank for p, rank in problems if (p.step, p.call) == (first.step, first.call)
    ]
    when = "in the constructor" if first.step < 0 else f"step {first.step}"
    return Finding(
        status=Status.FAIL,
        message=f"{when}: {first.call} raised on {rank_list(ranks)}: {first.error}",
        step=max(first.step, 0),
        ranks=tuple(ranks),
        cause=f"{first.call} raised {first.error.partition(':')[0]}",
        compared=done,
    )
