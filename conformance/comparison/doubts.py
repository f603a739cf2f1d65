"""Doubts: reasons why a correct run may differ from the reference.

One rule in :mod:`.law` makes a difference under a doubt inconclusive, in every check
that compares with the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...fixtures import REFERENCE_LINE
from ..space.scenario import Scenario
from ..status import rank_list
from .measured import Doubt, Seen
from .reference_run import rows_apart

__all__ = ["doubts_of"]


def doubts_of(
    scenario: Scenario, steps: Sequence[Seen], unclear: str, *, draws_idly: bool = False
) -> list[Doubt]:
    """Return the doubts about the reference of one run.

    Args:
        scenario: scenario that the ranks trained.
        steps: for each step, the traces of all ranks.
        unclear: description of optimizer settings that changed for unknown parameters,
            because the optimizer steps copies.
        draws_idly: true if the reference on one rank draws random numbers that have no
            effect on its gradients.
    """
    if scenario.workload.one_rank:
        if draws_idly:
            return []
        text = ", and the reference, on one rank, did not: draw them in batch()"
        return [*_drawn(steps, text)]
    text = (
        ", though every dropout that gradparity knows of was off: set the probability "
        "to 0 where it is kept out of the modules' attributes"
    )
    # a workload cannot declare both
    line = REFERENCE_LINE + " in place of scheduler" * bool(scenario.workload.scheduler)
    doubts = [*_drawn(steps, text), *_chose(steps), *_stepped_late(steps, line)]
    if _cuts_rows(scenario) and not rows_apart(scenario.model):
        text = (
            "gradients are not sums over rows: cutting the batch changes them even in "
            "fp64, as where a layer uses all rows at once. Write shard or "
            "micro_batches so that parts give the result of the whole. If train_step "
            "gathers what it needs from other ranks: "
            f"{line}"
        )
        doubts.append(Doubt(since_step=0, text=text))
    if unclear:
        text = (
            f"the stack changes {unclear} of optimizers that step copies of the "
            "parameters. Groups have different values, and nothing shows which "
            "parameter is in which: let optimizers(stack) give the param group of "
            "each name"
        )
        # settings change nothing before the first step of an optimizer
        doubts.append(Doubt(since_step=0, since="update", text=text))
    return doubts


def _drawn(steps: Sequence[Seen], way_out: str) -> Iterator[Doubt]:
    for seen in steps:
        ranks = [trace.rank for trace, at in seen if at.drew]
        if ranks:
            text = f"{rank_list(ranks)} drew random numbers in the passes{way_out}"
            yield Doubt(since_step=seen[0][1].step, text=text)
            return


def _chose(steps: Sequence[Seen]) -> Iterator[Doubt]:
    for seen in steps:
        if any(at.unclear_choices for _, at in seen):
            text = (
                "a learned router gives two rows of the reference scores that are "
                "equal up to rounding, and other choices, so a rank's choice has no "
                "known partner: take another seed, or rows that differ more"
            )
            yield Doubt(since_step=seen[0][1].step, text=text)
            return


def _stepped_late(steps: Sequence[Seen], line: str) -> Iterator[Doubt]:
    for seen in steps:
        names = frozenset(name for _, at in seen for name in at.late)
        if names:
            text = (
                "train_step moves weights, runs a forward, and then steps "
                f"{min(names)} (a GAN in turns, LBFGS); the reference takes all "
                "gradients before any weight moves: "
                f"{line}"
            )
            yield Doubt(since_step=seen[0][1].step, parameters=names, text=text)
            return


def _cuts_rows(scenario: Scenario) -> bool:
    """Return True if gradparity, and not the workload, divides a batch by rows."""
    workload, topology = scenario.workload, scenario.parsed_topology
    if workload.shard is not None or workload.micro_batches is not None:
        return False
    shares = topology.shares(scenario.world_size)
    return shares > 1 or topology.pipelined or scenario.parts > 1
