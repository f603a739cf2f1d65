"""Parity: gradients, updates and loss are within their bounds of the fp64 truth."""

from __future__ import annotations

from msgspec.structs import replace

from ..law import (
    ENOUGH,
    Evidence,
    Finding,
    Status,
    inconclusive,
    law,
    rank_list,
    skipped,
)
from ..parity import Parity, ParityRow

REASON = (
    "A scaler that unscales wrongly, late or twice trains another model. The bound is "
    "derived from the error of correct runs (docs/parity.md)."
)


def _parity(evidence: Evidence, kind: str) -> Finding:
    parity = evidence.parity
    if parity is None:
        return inconclusive("the run stopped before it could be compared")
    worst = parity.worst.get(kind)
    if worst is None and kind == "gradient" and _all_bad(evidence):
        return skipped("every step had a bad gradient: none was used")
    compared, missed = parity.compared[kind], parity.not_compared[kind]
    due, first = compared + missed, parity.first_bad.get(kind)
    differs = parity.stack_schedule.differs
    drew = [t.rank for t in evidence.ranks if any(s.drew for s in t.steps)]
    # a departure that may come from the reference, and not from the run, is
    # inconclusive, so these reasons come before the violation
    if first is not None and drew:
        found = inconclusive(
            f"{_departed(first).message}; but {rank_list(drew)} drew random numbers in "
            "the passes, though every dropout that the judge knows of was off: set the "
            "probability to 0 where it is kept out of the modules' attributes"
        )
    elif first is not None and parity.cuts_rows:
        found = inconclusive(
            f"{_departed(first).message}; but gradients are no sums over rows here: "
            "where the batch is cut the reference departs from itself, in fp64, too. A "
            "layer that looks at all rows at once does that. Write shard or "
            "micro_batches if parts are to give what the whole does"
        )
    elif first is not None and _stepped_unclear(parity, first):
        found = inconclusive(
            f"{_departed(first).message}; but the stack moves "
            f"{parity.stack_schedule.unclear} for copies of the parameters, with other "
            "values in other groups, and nothing says which parameter has which: let "
            "weights(stack) give the tensors that the optimizer steps"
        )
    elif first is not None and (name := _late(evidence, first)):
        found = inconclusive(
            f"{_departed(first).message}; but train_step runs a forward after an "
            f"optimizer has moved weights, and steps {name} after it, while the "
            "reference takes all gradients at the weights before the step: such "
            "training (a GAN in turns, LBFGS) cannot be compared. Judge it with all "
            "passes before the first optimizer steps"
        )
    elif first is not None and _unclear(evidence, first.step):
        found = inconclusive(
            f"{_departed(first).message}; but up to there a learned router chose by "
            "scores that are those of two rows of the reference, which choose "
            "differently: take another seed, or more rows that are unlike"
        )
    elif first is not None:
        found = _departed(first)
        if differs is not None and differs[0] <= first.step:
            found = replace(found, message=f"{found.message}; {differs[1]}")
    elif not due and kind in _NONE_DUE:
        found = inconclusive(f"no {kind} could be compared: {_NONE_DUE[kind]}")
    elif worst is None or compared < ENOUGH * due:
        found = inconclusive(
            f"{compared} of {due} comparisons of the {kind} could be made: elsewhere "
            "the references are not finite, or the optimizer was not called"
            + (_BLIND if kind == "update" else "")
            + (_HIDDEN if kind == "gradient" and _reads_grad(evidence) else "")
        )
    else:
        found = Finding(
            status=Status.PASS,
            message=f"worst {kind} at {worst.ratio:.2g} of its bound ({_where(worst)})",
        )
        if kind == "update" and differs is not None:  # too little to show
            found = replace(found, message=f"{found.message}; {differs[1]}")
    followed = parity.stack_schedule.followed
    if kind == "update" and followed and found.status != Status.INCONCLUSIVE:
        text = f"the reference follows the stack's schedule of {followed}"
        found = replace(found, message=f"{found.message}; {text}")
    return replace(found, compared=compared, not_compared=missed)


_NONE_DUE = {
    "update": "no element has a gradient above the bound of its error, so rounding may "
    "decide the direction of every step. Take a precision with less rounding, or more "
    "rows for each statistic: batch norm over few rows makes small errors large",
    "loss": "train_step returned none on any rank",
}
"""Why there may be no comparison that was due."""
_BLIND = (
    ", or correct runs differ by as much as the update itself (the optimizer is "
    "ill-conditioned on this model, its steps are below the rounding of the weights, "
    "or rounding decides their direction: then judge this precision with more rows, "
    "or fp32 alone)"
)
_HIDDEN = (
    ", or torch has no such optimizer class, or the optimizer steps copies of the "
    "parameters with other gradients: let gradients(stack) give what it used"
)


def _reads_grad(evidence: Evidence) -> bool:
    """Whether the gradients of a stack's own step are those of its parameters."""
    workload = evidence.scenario.workload
    return workload.train_step is not None and workload.gradients is None


def _all_bad(evidence: Evidence) -> bool:
    """Whether no step had only finite gradients."""
    return all(any(s.non_finite for s in seen) for _, seen in evidence.steps())


def _stepped_unclear(parity: Parity, first: ParityRow) -> bool:
    """Whether steps with settings that have no parameter may explain a departure.

    Not where some gradient departs before any weight was stepped with it.
    """
    gradient = parity.first_bad.get("gradient")
    before_any_step = first.step == 0 and first.kind != "update"
    departs_before = gradient is not None and gradient.step == 0
    unclear = bool(parity.stack_schedule.unclear)
    return unclear and not (before_any_step or departs_before)


def _late(evidence: Evidence, first: ParityRow) -> str:
    """A parameter whose gradient is due at other weights, which a departure may show.

    Empty where another gradient departs no later: that is not the cause then.
    """
    parity = evidence.parity
    assert parity is not None
    late = [(s.step, n) for t in evidence.ranks for s in t.steps for n in s.late]
    if not late:
        return ""
    begin = min(step for step, _ in late)
    names = {name for step, name in late if step == begin}
    rows = [*parity.departed.get("gradient", ()), *parity.departed.get("update", ())]
    before = first.step < begin
    others = any(r.step <= begin and r.parameter not in names for r in rows)
    return "" if before or others else min(names)


def _unclear(evidence: Evidence, last: int) -> bool:
    """Whether a router's choice up to a step may belong to another row."""
    steps = [s for t in evidence.ranks for s in t.steps if s.step <= last]
    return any(s.unclear_choices for s in steps)


def _departed(row: ParityRow) -> Finding:
    return Finding(
        status=Status.FAIL,
        message=f"step {row.step}: {_subject(row)} departs from the fp64 truth: "
        f"relative {row.measure} of the error {row.error:.3g}, bound {row.bound:.3g}",
        step=row.step,
        # the loss that is compared is the mean of all ranks
        ranks=() if row.kind == "loss" else (row.rank,),
        parameter=row.parameter,
        numbers={"error": row.error, "bound": row.bound},
    )


def _subject(row: ParityRow) -> str:
    if row.kind == "loss":
        return "the loss"
    return f"the {row.kind} of {row.parameter} on rank {row.rank}"


def _where(row: ParityRow) -> str:
    return f"{row.parameter}, step {row.step}, rank {row.rank}, {row.measure}"


@law(
    "parity.gradient",
    "Every unscaled gradient that the optimizer sees is as near to fp64 as a correct "
    "single-process run of that precision.",
    REASON + " Gradients are compared because Adam hides a wrong factor.",
    of_stack=True,
)
def gradient(evidence: Evidence) -> Finding:
    """Local gradients of every rank at every step that was not skipped."""
    return _parity(evidence, "gradient")


@law(
    "parity.update",
    "Every parameter has changed by as much, and as exactly, as in a correct "
    "single-process run that skips the same steps.",
    REASON,
    of_stack=True,
)
def update(evidence: Evidence) -> Finding:
    """Local parameters minus their initial values."""
    return _parity(evidence, "update")


@law(
    "parity.loss",
    "The loss of every step is as near to fp64 as in a correct single-process run.",
    REASON,
    of_stack=True,
)
def loss(evidence: Evidence) -> Finding:
    """Mean of the ranks' losses."""
    return _parity(evidence, "loss")
