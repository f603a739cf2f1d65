"""Checks (class ``Law``): id, sentence, reason and pure function of the evidence.

A check reads only :class:`Evidence` and never calls ``torch.distributed``, so it can be
tested on made-up traces.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict, replace

from ..rank.trace import Decision, RankTrace, StepTrace
from ..space.scenario import Scenario
from ..status import Finding, Status, Verdict, as_number, rank_list
from .measured import ORDER, Parity
from .reference import Reference

__all__ = [
    "ANY_SHARE",
    "LAWS",
    "MOST",
    "Evidence",
    "Finding",
    "Law",
    "Status",
    "apply_checks",
    "failed",
    "law",
    "rank_list",
]


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything observed in one run."""

    scenario: Scenario
    ranks: tuple[RankTrace, ...]
    """Trace of each rank; shorter than the scenario if the run stopped early."""
    control: tuple[RankTrace, ...] | None = None
    """Traces of the same scenario without a scaler, if a check needs them."""
    control_differs: str = ""
    """First bitwise difference between two runs without a scaler; else empty."""
    first_try: str = ""
    """Call that timed out in a first try, if this run is the second try; else empty."""
    parity: Parity | None = None
    """Comparison with the reference; None if the run stopped early."""
    uninterrupted: tuple[RankTrace, ...] | None = None
    """Traces of the same training without a resume, if the workload changes
    settings."""
    alone: Reference | None = None
    """The same training on one rank with whole batches and no resume, if the workload
    averages weights or has a schedule of its own."""
    alone_fails: str = ""
    """Reason why the workload cannot train on one rank; else empty."""
    scaler: bool = True
    """True if a scaler is checked; False if only the training setup is."""

    @property
    def unseen(self) -> int:
        """Number of planned rank-steps that were not completed."""
        due = self.scenario.steps - sum(1 for _ in self.steps())
        return max(due, 0) * len(self.ranks)

    def steps(self) -> Iterator[tuple[int, Sequence[StepTrace]]]:
        """Yield (step, traces of all ranks) for each step that every rank completed."""
        for number in range(min((t.completed for t in self.ranks), default=0)):
            seen = [t.steps[number] for t in self.ranks]
            yield seen[0].step, seen

    def decisions(self) -> Iterator[tuple[int, Sequence[Decision]]]:
        """Yield (step, decisions of all ranks) for each decision group and step.

        A decision group consists of optimizers that skip together. Only steps that
        every rank completed count.
        """
        for step, seen in self.steps():
            ranks = [
                self._decisions_due(*pair)
                for pair in zip(self.ranks, seen, strict=True)
            ]
            for each in zip(*ranks, strict=True):
                yield step, each

    def _decisions_due(self, trace: RankTrace, at: StepTrace) -> Iterator[Decision]:
        """Yield a rank's decisions, with None for parameters that rightly do not move.

        Then ``parameters_changed`` is None instead of False. There are four reasons:
        their gradients are zero, the learning rate is 0, the workload skipped the step
        itself, or the reference moves none of them.
        """
        for number, decision in enumerate(at.decisions):
            names = [n for owned in trace.owned[number : number + 1] for n in owned]
            used = [at.gradients[n] for n in names if n in at.gradients]
            # zero gradients move nothing; parity checks if they should be zero
            still = bool(used) and not any(gradient.any() for gradient in used)
            still |= at.own_skip
            if self.parity is not None:
                still |= (at.step, trace.rank, number) in self.parity.still
            # a warm-up begins at 0
            stepped = [at.settings[name] for name in names if name in at.settings]
            still |= {settings.get("lr") for settings in stepped} == {0.0}
            if still and decision.parameters_changed is False:
                decision = dataclasses.replace(decision, parameters_changed=None)
            yield decision


MOST = 0.5
"""Default of ``Law.least``. Checks compare every step on every rank, and a fault may be
anywhere. If less than half was compared, a fault is more likely where nothing was
compared. A check with another value gives the reason beside its constant."""
ANY_SHARE = 0.0
"""``Law.least`` of a check that passes after a single comparison, because all others
may be impossible in a correct run. Missing comparisons are still counted."""
STOPPED = "the run stopped before the others"
Check = Callable[[Evidence], Finding]


@dataclass(frozen=True, kw_only=True)
class Law:
    """One rule that every correct scaler, or every correct training setup, follows."""

    id: str
    """Stable id: ``chapter.name``."""
    text: str
    """The rule in one sentence."""
    reason: str
    """Reason why a training run needs the rule."""
    check: Check
    of_stack: bool = False
    """True if the check also applies to training without a scaler."""
    decides: bool = False
    """True if the check compares decisions that all ranks' optimizers make together."""
    least: float = MOST
    """Least fraction of the expected comparisons that a pass needs."""
    hidden: str | Callable[[Evidence], str] = STOPPED
    """Reason why comparisons may be missing, for the message if too few were made."""

    @property
    def chapter(self) -> str:
        """Part of the id before the dot."""
        return self.id.partition(".")[0]


LAWS: dict[str, Law] = {}
"""All checks by id, in the order of their chapters."""


def law(
    id: str,
    text: str,
    reason: str,
    *,
    of_stack: bool = False,
    decides: bool = False,
    least: float = MOST,
    hidden: str | Callable[[Evidence], str] = STOPPED,
) -> Callable[[Check], Check]:
    """Register the decorated function in :data:`LAWS`; see the fields of ``Law``."""

    def enter(check: Check) -> Check:
        assert id not in LAWS, f"two checks are called {id}"
        LAWS[id] = Law(
            id=id,
            text=text,
            reason=reason,
            check=check,
            of_stack=of_stack,
            decides=decides,
            least=least,
            hidden=hidden,
        )
        return check

    return enter


def apply_checks(evidence: Evidence) -> list[Verdict]:
    """Apply every check to the evidence."""
    return [_named(each.id, _finding(each, evidence)) for each in LAWS.values()]


def _named(law: str, finding: Finding) -> Verdict:
    numbers = {name: as_number(float(x)) for name, x in finding.numbers.items()}
    return Verdict(law=law, **asdict(finding) | {"numbers": numbers})


_REFERENCE = ("parity", "norm")
"""Chapters that compare with a reference; runs with random layers have no reference."""


def _finding(law: Law, evidence: Evidence) -> Finding:
    random = evidence.scenario.parsed_recipe.training.random
    if random and law.chapter in _REFERENCE:
        return skipped("random layers are on: every other recipe turns them off")
    if not (evidence.scaler or law.of_stack):
        return skipped("a check of scalers, and this run has no scaler")
    finding = law.check(evidence)
    doubt = ""
    if finding.status == Status.FAIL and law.chapter in _REFERENCE:
        doubt = _doubt_of(law, finding, evidence) or _unjoined(evidence)
    elif finding.status != Status.SKIPPED and law.decides:
        doubt = _unjoined(evidence)
    if doubt:
        message = f"{finding.message}; but {doubt}"
        return replace(finding, status=Status.INCONCLUSIVE, message=message)
    return _if_enough(law, finding, evidence)


def _if_enough(law: Law, finding: Finding, evidence: Evidence) -> Finding:
    """Return the finding; inconclusive instead of a pass if too little was compared."""
    n_compared, due = finding.compared, finding.compared + finding.not_compared
    if finding.status != Status.PASS or (n_compared and n_compared >= law.least * due):
        return finding
    needed = f", and a pass needs {law.least:.0%} of them" if n_compared else ""
    message = f"{n_compared} of {due} comparisons could be made{needed}: "
    message += law.hidden if isinstance(law.hidden, str) else law.hidden(evidence)
    if not due and law.hidden == STOPPED and not evidence.unseen:
        message = "this run had nothing to compare"
    return replace(finding, status=Status.INCONCLUSIVE, message=message)


def _doubt_of(law: Law, finding: Finding, evidence: Evidence) -> str:
    """Return why a correct run may differ where the check failed; else empty."""
    if narrow := narrowed(evidence):
        return narrow
    parity, step = evidence.parity, finding.step
    assert parity is not None and step is not None
    _, _, name = law.id.partition(".")
    doubt = parity.doubt(step, name if name in ORDER else "gradient", finding.parameter)
    return doubt.text if doubt is not None else ""


def of_buffer(name: str) -> str:
    """Return advice on what to do about a buffer that differs between ranks."""
    return (
        f"{name} is a buffer: let all ranks compute it from the data of all ranks. If "
        "each rank has its own, add to the workload: local_buffers = "
        f'("{name.rpartition(".")[2]}",)'
    )


def _unjoined(evidence: Evidence) -> str:
    """Return a reason if optimizers of the ranks cannot be matched; else an empty text.

    The matching says which optimizers skip a step together.
    """
    counts = evidence.ranks[0].unjoined if evidence.scaler else ()
    # without a bad gradient every optimizer must step
    if not counts or not any(bad_gradient(evidence, s) for _, s in evidence.steps()):
        return ""
    return (
        f"ranks step {', '.join(map(str, counts))} optimizers, and only their order "
        "says which of them decide together: on a rank that lacks one, hand the scaler "
        "None in its place, as in scaler.step(None)"
    )


def narrowed(evidence: Evidence) -> str:
    """Return why ranks compute fp32 less precisely than the references; else empty."""
    ranks = [trace.rank for trace in evidence.ranks if trace.narrows]
    if not (ranks and evidence.scenario.parsed_precision.is_full):
        return ""
    return (
        f"products of fp32 numbers round them first on {rank_list(ranks)}, as with "
        'TF32: call torch.set_float32_matmul_precision("highest") while it is checked, '
        "or choose a --precision in which nothing is fp32"
    )


def bad_gradient(evidence: Evidence, seen: Sequence[StepTrace | Decision]) -> str:
    """Describe the first non-finite gradient of a step; empty if all are finite."""
    for trace, rank in zip(seen, evidence.ranks, strict=True):
        if trace.non_finite:
            return f"{trace.non_finite[0]} is not finite on rank {rank.rank}"
    return ""


def failed(*, message: str, step: int | None = None, **facts: Any) -> Finding:
    """Return a finding that a check fails; its message begins with the step, if given.

    Args:
        message: sentence with the value that a rank got, and the expected one.
        step: step that shows it.
        facts: further fields of the finding.
    """
    begin = "" if step is None else f"step {step}: "
    return Finding(status=Status.FAIL, message=begin + message, step=step, **facts)


def skipped(message: str) -> Finding:
    """Return a finding that the check does not apply, with the reason."""
    return Finding(status=Status.SKIPPED, message=message)


def inconclusive(message: str) -> Finding:
    """Return a finding that nothing was compared, with the reason."""
    return Finding(status=Status.INCONCLUSIVE, message=message)


def say_tried_again(finding: Finding, evidence: Evidence) -> Finding:
    """Add to a finding about a time limit that this run is the second try."""
    if not evidence.first_try:
        return finding
    text = f"tried again alone: a first try ran out of time, {evidence.first_try}"
    return replace(finding, message=f"{finding.message} ({text})")


def count_or_inconclusive(compared: int, what: str, not_compared: int = 0) -> Finding:
    """Return a pass with its number of comparisons.

    :func:`apply_checks` makes the pass inconclusive if too few comparisons were made.

    Args:
        compared: number of comparisons that were made and agreed.
        what: description of the compared values, for the message.
        not_compared: number of expected comparisons that could not be made.
    """
    return Finding(
        status=Status.PASS,
        message=f"{compared} {what}",
        compared=compared,
        not_compared=not_compared,
    )
