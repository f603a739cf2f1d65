"""Liveness: a legal training step ends on every rank."""

from __future__ import annotations

from msgspec.structs import replace

from ..law import (
    Evidence,
    Finding,
    Status,
    count_or_inconclusive,
    failed,
    law,
    rank_list,
    say_tried_again,
)


@law(
    "liveness.completes",
    "Every call of a legal training step returns on every rank.",
    "If one rank raises or hangs, the others wait in a collective.",
    of_stack=True,
)
def completes(evidence: Evidence) -> Finding:
    """Check that no rank stopped early."""
    finding, other = _completes(evidence), evidence.scenario.saved_by
    if other is not None and len(evidence.ranks) != evidence.scenario.world_size:
        text = f"{finding.message} ({other.topology}/{other.world_size}, which saves "
        finding = replace(finding, message=f"{text}the state to load)")
    return say_tried_again(finding, evidence)


def _completes(evidence: Evidence) -> Finding:
    problems = [(t.problem, t.rank) for t in evidence.ranks if t.problem is not None]
    done = sum(t.completed for t in evidence.ranks)
    if not problems and any(t.hung for t in evidence.ranks):
        return _hang(evidence, done)
    if not problems:
        return count_or_inconclusive(done, "rank-steps completed", evidence.unseen)
    # a rank that raised explains a rank that hung waiting for it
    first = min((p for p, _ in problems), key=lambda p: p.step)
    ranks = [
        rank for p, rank in problems if (p.step, p.call) == (first.step, first.call)
    ]
    when = "before step 0" if first.step < 0 else f"step {first.step}"
    return Finding(
        status=Status.FAIL,
        message=f"{when}: {first.call} raised on {rank_list(ranks)}: {first.error}",
        step=max(first.step, 0),
        ranks=tuple(ranks),
        cause=f"{first.call} raised {first.error.partition(':')[0]}",
        compared=done,
    )


def _hang(evidence: Evidence, done: int) -> Finding:
    hung = [t.rank for t in evidence.ranks if t.hung]
    how = next(t.hung for t in evidence.ranks if t.hung)
    last = evidence.scenario.steps - 1
    waiting = [t.rank for t in evidence.ranks if not t.hung and not t.reached(last)]
    verbs = ("hangs" if len(hung) == 1 else "hang", "it" if len(hung) == 1 else "them")
    text = f"{rank_list(hung)} {verbs[0]}: {how}"
    if waiting:
        only = "waits" if len(waiting) == 1 else "wait"
        text += f"; {rank_list(waiting)} only {only} for {verbs[1]}"
    return failed(
        message=text,
        ranks=tuple(hung),
        # no step is given, because the trace of a hung rank is lost with its process
        cause="a rank hangs",
        compared=done,
    )
