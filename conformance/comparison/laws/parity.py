"""Parity: gradients, updates and losses are within their bounds of the fp64 truth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from ....fixtures import REFERENCE_LINE
from ..law import (
    STOPPED,
    Evidence,
    Finding,
    Status,
    failed,
    inconclusive,
    law,
    of_buffer,
    skipped,
)
from ..measured import Lack, Parity, ParityRow

REASON = (
    "A difference beyond its bound trains another model. Bounds come from the errors "
    "of correct runs (docs/parity.md)."
)
FEW = 0.1
"""Least fraction of update elements to compare. Rounding decides the direction of an
adaptive step if the gradient is below its bound. In bf16 this holds for most elements
of a tensor. With this fraction, a fault in 44 random elements is missed with a chance
below 1 % (0.9 ** 44 = 0.0097). A fault of the step alone affects a whole tensor, or a
rank's part of it. A fault of the gradient is found by parity.gradient, which leaves no
element out."""


def _parity(evidence: Evidence, kind: str) -> Finding:
    parity = evidence.parity
    if parity is None:
        return inconclusive("the run stopped before it could be compared")
    if parity.undecided:
        return inconclusive(parity.undecided)
    worst, first = parity.worst.get(kind), parity.first_bad.get(kind)
    if worst is None and kind == "gradient" and _all_bad(evidence):
        return skipped("every step had a bad gradient: none was used")
    if worst is None and {*parity.lacking.get(kind, ())} == {Lack.OVERFLOW}:
        return skipped(f"no {kind} was compared: {Lack.OVERFLOW.value}, every time")
    status, message = Status.PASS, "nothing was compared"
    if worst is not None:
        # a loss has no rank and no parameter to name
        where = f"{worst.parameter}, step {worst.step}, rank {worst.rank}"
        message = f"worst {kind} at {worst.ratio:.2g} of its bound "
        message += f"({where}, {worst.measure})"
        if missed := parity.not_compared[kind]:
            since, why = _most_lacking(parity, kind)
            message += f"; {missed} elements not compared, from step {since} on: "
            message += why.value
    finding = Finding(status=status, message=message)
    if first is not None:
        reference = "the same train_step" if parity.reference else "the fp64 truth"
        finding = _departed(first, reference)
        if any(first.parameter in trace.buffers for trace in evidence.ranks):
            ways = [of_buffer(first.parameter)] if len(evidence.ranks) > 1 else []
            if not parity.reference:
                ways.append(f"if train_step moves that buffer: {REFERENCE_LINE}")
            text = "; ".join([finding.message, *ways])
            finding = replace(finding, message=text)
    if kind == "loss" and parity.narrow_loss:
        text = f"{finding.message}; {parity.narrow_loss}"
        finding = replace(finding, message=text)
    schedule = parity.stack_schedule
    if first is not None:
        # the settings of a step act after its loss and gradient
        until = first.step - (kind in ("loss", "gradient"))
        other = parity.other_setting(until)
    else:  # updates are within their bounds, but a setting may differ
        other = schedule.differs[1] if schedule.differs and kind == "update" else ""
    if other:
        finding = replace(finding, message=f"{finding.message}; {other}")
    if kind == "update" and schedule.followed:
        text = f"the reference follows the stack's schedule of {schedule.followed}"
        finding = replace(finding, message=f"{finding.message}; {text}")
    own = [at.step for at in evidence.ranks[0].steps if at.own_skip]
    if kind == "update" and own and not parity.reference:
        text = f"the reference skips {_steps(own)}, as the stack decided on all ranks"
        finding = replace(finding, message=f"{finding.message}; {text}")
    if parity.reference:
        text = f"{finding.message} (reference: {parity.reference})"
        finding = replace(finding, message=text)
    return replace(
        finding,
        compared=parity.compared[kind],
        not_compared=parity.not_compared[kind],
    )


def _steps(numbers: Sequence[int]) -> str:
    return f"step{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _all_bad(evidence: Evidence) -> bool:
    """Return True if every step had a non-finite gradient."""
    return all(any(s.non_finite for s in seen) for _, seen in evidence.steps())


def _departed(row: ParityRow, reference: str) -> Finding:
    return failed(
        message=f"{_subject(row)} differs from {reference}" + row.by_how_much,
        step=row.step,
        # the mean over all ranks is compared, so no rank is named
        ranks=() if row.kind == "loss" else (row.rank,),
        parameter=row.parameter,
        numbers={"error": row.error, "bound": row.bound},
    )


def _subject(row: ParityRow) -> str:
    if row.kind == "loss":
        return "the loss"
    return f"the {row.kind} of {row.parameter} on rank {row.rank}"


_LESS_ROUNDING = "use a precision with less rounding (--precision fp32)"
_WAY_OUT = {
    Lack.UNSEEN: "it was not called, is not one of torch, or steps copies of the "
    "parameters. If optimizers use the parameters' own grad, write optimizers(stack) "
    "to name their parameters; else write gradients(stack) to return the gradients "
    "that they use",
    Lack.NOT_FINITE: "use a precision with a larger range, or a smaller learning rate",
    Lack.NOISE: "use more rows or a smaller learning rate, begin no layer with zeros, "
    f"or {_LESS_ROUNDING}",
    Lack.DIRECTION: _LESS_ROUNDING,
    Lack.COUNTS: "the model on one process does not accept the inputs of shard, or the "
    "loss has several counts (return the loss of the whole batch on all ranks)",
    Lack.OVERFLOW: "return the loss before it is scaled",
}
_OF_UPDATES = (
    "steps are below the rounding of the weights (use a larger learning rate), the "
    "optimizer is ill-conditioned, or a batch norm has few rows (use more rows)"
)


def _most_lacking(parity: Parity, kind: str) -> tuple[int, Lack]:
    """Return (step, reason): the main reason why elements could not be compared.

    The step is the first with this reason.
    """
    lacking = parity.lacking[kind].items()
    why, (_, since) = max(lacking, key=lambda each: each[1][0])
    return since, why


def _lacking(kind: str, otherwise: str = STOPPED) -> Callable[[Evidence], str]:
    """Return a function that gives the main reason why elements could not be compared.

    Args:
        kind: kind of the elements: ``gradient``, ``update`` or ``loss``.
        otherwise: reason to give if none was counted.
    """

    def why_not(evidence: Evidence) -> str:
        if evidence.parity is None or not evidence.parity.lacking.get(kind):
            return otherwise
        since, why = _most_lacking(evidence.parity, kind)
        of_update = kind == "update" and why is Lack.NOISE
        way_out = _OF_UPDATES if of_update else _WAY_OUT[why]
        return f"from step {since} on {why.value}: {way_out}"

    return why_not


@law(
    "parity.gradient",
    "Every unscaled gradient that the optimizer gets is as near to fp64 as in a "
    "correct single-process run of that precision.",
    REASON + " An update alone may not show it: Adam hides a wrong factor.",
    of_stack=True,
    hidden=_lacking("gradient", f"no gradient was due, or {STOPPED}"),
)
def gradient(evidence: Evidence) -> Finding:
    """Compare local gradients of every rank at every step that was not skipped."""
    finding, parity = _parity(evidence, "gradient"), evidence.parity
    if parity is None or not parity.unseen_gradients or finding.status != Status.PASS:
        return finding
    first, *others = parity.unseen_gradients
    more = f" and {len(others)} more parameters" if others else ""
    why, way_out = Lack.UNSEEN.value, _WAY_OUT[Lack.UNSEEN]
    text = f"{why} for {first}{more} in any step: {way_out}"
    return replace(finding, status=Status.INCONCLUSIVE, message=text)


@law(
    "parity.update",
    "Every parameter, and every buffer that training changes, moves as in a correct "
    "single-process run that skips the same steps.",
    REASON,
    of_stack=True,
    least=FEW,
    hidden=_lacking("update"),
)
def update(evidence: Evidence) -> Finding:
    """Compare local parameters minus their initial values, and buffers."""
    finding, parity = _parity(evidence, "update"), evidence.parity
    if parity is None or finding.status != Status.PASS:
        return finding
    constant = parity.other_constant
    # in half precision a setting may depend on the dtype of the parameter
    if constant is not None and evidence.scenario.parsed_precision.is_full:
        return failed(
            message=f"{constant.text}: use one value in both. The updates that were "
            "compared are within their bounds",
            step=constant.step,
            ranks=(constant.rank,),
            parameter=constant.parameter,
            cause="other settings",
            compared=finding.compared,
            not_compared=finding.not_compared,
        )
    if parity.moved_buffer is not None:
        name, step, rank = parity.moved_buffer
        text = f"rank {rank} moves the buffer {name}, and one process leaves it"
        if parity.reference:
            text = f"{text}. {of_buffer(name)}"
            counts = {"compared": finding.compared, "ranks": (rank,)}
            return failed(message=text, step=step, parameter=name, **counts)
        text = f"step {step}: {text}; if train_step moves it: {REFERENCE_LINE}"
        return replace(finding, status=Status.INCONCLUSIVE, message=text)
    if not parity.unseen_buffer:
        return finding
    text = (
        f"training on one process moves the buffer {parity.unseen_buffer}, and "
        "gradparity sees it whole on no rank. Let parallelize return its module, or "
        "keep that in an attribute, a list or a dict of the result. If ranks keep "
        "parts or different ones on purpose, add local_buffers = "
        f'("{parity.unseen_buffer}",) to the workload'
    )
    return replace(finding, status=Status.INCONCLUSIVE, message=text)


@law(
    "parity.loss",
    "The loss of every step is as near to fp64 as in a correct single-process run.",
    REASON,
    of_stack=True,
    hidden=_lacking("loss", "train_step returned no loss on any rank"),
)
def loss(evidence: Evidence) -> Finding:
    """Compare the mean of the ranks' losses."""
    return _parity(evidence, "loss")
