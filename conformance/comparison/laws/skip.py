"""Skip: a bad gradient on any rank stops all ranks; a skipped step changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....fixtures import (
    LOSS,
    PLACES,
    REFERENCE_LINE,
    Fault,
    OfWorkload,
    parse_faults,
)
from ...rank.trace import Decision
from ..law import (
    Evidence,
    Finding,
    Status,
    bad_gradient,
    count_or_inconclusive,
    failed,
    law,
    rank_list,
    skipped,
)


def _is_bad(seen: Sequence[Decision]) -> bool:
    return any(s.non_finite for s in seen)


@law(
    "skip.all-ranks-skip",
    "A non-finite gradient on any rank stops every rank from stepping.",
    "A rank that steps applies a gradient without another rank's part, or writes inf "
    "and nan into the weights.",
    decides=True,
)
def all_ranks_skip(evidence: Evidence) -> Finding:
    """Check that no rank's parameters change at a bad step."""
    return _still_at_bad_steps(
        evidence, lambda s: s.parameters_changed, "{ranks} stepped"
    )


@law(
    "skip.all-ranks-step",
    "When the gradients on all ranks are finite, every rank steps.",
    "A needless skip wastes the batch. If one rank alone skips, weights drift apart.",
    of_stack=True,
    decides=True,
)
def all_ranks_step(evidence: Evidence) -> Finding:
    """Check that a good step changes parameters on every rank that trains any."""
    compared, good = 0, False
    for step, seen in evidence.decisions():
        if _is_bad(seen):
            continue
        good = True
        # None: nothing was to move, so a skip would not show
        compared += sum(s.parameters_changed is not None for s in seen)
        still = _ranks(evidence, seen, lambda s: s.parameters_changed is False)
        if still:
            part = _part(seen)
            own = len(still) == len(seen) and not part and _steps_itself(evidence)
            return failed(
                message=f"{rank_list(still)} did not step {part}"
                f"{_reason(evidence, step)}{OWN_SKIP if own else ''}",
                step=step,
                ranks=tuple(still),
                compared=compared,
            )
    if not good and any(True for _ in evidence.steps()):
        return skipped("every step of this run had a bad gradient")
    if not compared and not evidence.unseen and good:
        text = "no step was to move a parameter: the gradients are 0, or the rate is"
        return skipped(text)
    return count_or_inconclusive(
        compared, "rank-steps with finite gradients", evidence.unseen
    )


def _reason(evidence: Evidence, step: int) -> str:
    # A scaler or a train_step that does not call its optimizer shows no gradients.
    calls = not evidence.scaler and OfWorkload.LOOP in evidence.scenario.workload.has
    steps = dict(evidence.steps())[step]
    if calls and not any(at.gradients for at in steps):
        return "because no parameter has a gradient"
    return "although all gradients are finite"


def _part(seen: Sequence[Decision]) -> str:
    """Name the parameters of a decision group that did not move on some ranks.

    Returns "" if one of these ranks trains no other group: there all parameters stayed,
    and names would add nothing.
    """
    still = [d for d in seen if d.parameters_changed is False]
    if not all(d.others for d in still):
        return ""
    names = [*dict.fromkeys(name for d in still for name in d.names)]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}, "


NAMED = 3
"""Largest number of parameters that a message names."""
OWN_SKIP = (
    ". If train_step skips such steps on purpose, count them in skipped_steps(stack), "
    f"which all ranks must agree on, or, to check the decision itself: {REFERENCE_LINE}"
)


def _steps_itself(evidence: Evidence) -> bool:
    workload = evidence.scenario.workload
    return workload.train_step is not None and workload.skipped_steps is None


@law(
    "skip.no-side-effects",
    "A skipped step leaves parameters, optimizer state and counters bitwise equal.",
    "Adam's bias correction depends on the step counter, which must not count skipped "
    "steps.",
    decides=True,
)
def no_side_effects(evidence: Evidence) -> Finding:
    """Check that no optimizer state changes at a bad step."""
    return _still_at_bad_steps(
        evidence, lambda s: s.state_changed, "the optimizer state changed on {ranks}"
    )


def _still_at_bad_steps(
    evidence: Evidence, moved: Callable[[Decision], bool | None], words: str
) -> Finding:
    """Return a finding on the first bad step at which a value changed on a rank."""
    compared, bad = 0, False
    for step, seen in evidence.decisions():
        if not _is_bad(seen):
            continue
        bad = True
        # None: nothing was to move, so a step would not show
        compared += sum(moved(s) is not None for s in seen)
        ranks = _ranks(evidence, seen, lambda s: moved(s) is True)
        if ranks:
            return failed(
                message=f"{words.format(ranks=rank_list(ranks))} although "
                f"{bad_gradient(evidence, seen)}",
                step=step,
                ranks=tuple(ranks),
                parameter=next(s.non_finite[0] for s in seen if s.non_finite),
                compared=compared,
            )
    # checked last: a violation counts even if another planted fault was injected
    # nowhere
    missed = _not_struck(evidence)
    if missed:
        step, fault = missed[0]
        return Finding(
            status=Status.INCONCLUSIVE,
            message=f"{fault} was due at step {step} and was not injected: "
            f"{_why_not(evidence, fault)}",
            step=step,
            compared=compared,
            not_compared=len(missed) * len(evidence.ranks),
        )
    if not bad and any(True for _ in evidence.steps()):
        return skipped("no gradient was bad in this run")
    return count_or_inconclusive(compared, "rank-steps with a bad gradient somewhere")


def _not_struck(evidence: Evidence) -> list[tuple[int, Fault]]:
    """Return (step, fault) of planted faults that no rank wrote into a gradient."""
    return [
        (step, fault)
        for step, seen in evidence.steps()
        for fault in parse_faults(evidence.scenario.faults)
        if fault.step in (None, step)
        and not any(text.startswith(f"{fault}=") for s in seen for text in s.faults)
    ]


def _why_not(evidence: Evidence, fault: Fault) -> str:
    name = fault.parameter
    ranks = [t for t in evidence.ranks if fault.rank in (None, t.rank)]
    where = "any rank" if fault.rank is None else f"rank {fault.rank}"
    if name == LOSS:
        return f"no loss was on {where}"
    if name in PLACES:
        return f"the {name} parameter had no gradient on {where}"
    if any(len(t.index.get(name, ())) for t in ranks):
        return f"{name} had no gradient on {where}"
    return f"no element of {name} is on {where}"


def _ranks(
    evidence: Evidence, seen: Sequence[Decision], which: Callable[[Decision], bool]
) -> list[int]:
    pairs = zip(seen, evidence.ranks, strict=True)
    return [t.rank for s, t in pairs if which(s)]
