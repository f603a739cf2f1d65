"""Meaning of a failed world: about the scaler, about the stack, or nothing."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch.utils.checkpoint import CheckpointError

from ...fixtures import CannotError, OfWorkload, WorkloadError, shortened
from ...multiprocess import RankOutcome, RankState, WorldError
from ..judge.one_rank import one_rank_references
from ..judge.reference import Schedule, reference_before
from ..judge.variants import PLAIN
from ..rank.fold import fold
from ..rank.scaler_spec import NO_SCALER
from ..rank.trace import RankTrace
from ..rank.worker import JudgedError, all_say_right, checked_collective
from ..space.scenario import Scenario
from .launcher import LOST, root_cause, waiting_place

__all__ = ["ran_out_of_time", "traces_of", "why_not_run"]

_CHECKS = re.compile(
    rf'/conformance/rank/worker\.py", line \d+ in '
    rf"({all_say_right.__name__}|{checked_collective.__name__})$",
    re.MULTILINE,
)
"""The frames in which a rank waits for the others, once its step is made."""


def traces_of(failure: WorldError, *, judged: bool) -> tuple[RankTrace, ...]:
    """Traces of a world that failed because of the judged code.

    [Note: How a rank ends]
    What a rank leaves, and what it proves:
    - it returns: its trace;
    - it raises JudgedError: the trace so far, and either the call of the scaler that
      raised, or a checked collective with a wrong result on some rank. All ranks raise
      then (``worker.all_say_right``), so that none is left in a collective;
    - it hangs, and the parent kills it: no trace. With a scaler that is a violation,
      after a second try, because a busy machine is slow, too; without one it is not;
    - it is killed or exits: no trace, and no verdict, since the machine may be short of
      memory. The same holds for any other exception: it is the judge's or the stack's.

    Args:
        failure: failure of a run.
        judged: true if there was a scaler; then a hang is the scaler's.

    Raises:
        WorldError: if the failure is neither the scaler's nor a stray collective.
    """
    states = {outcome.state for outcome in failure.outcomes}
    raised = isinstance(failure.root.exception, JudgedError)
    own = isinstance(failure.root.exception, WorkloadError)
    hangs = judged and RankState.HUNG in states
    if own or states & LOST or not (raised or hangs):
        raise failure
    hung = _hung(failure)
    return fold([_trace_of(o, hung=o.rank in hung) for o in failure.outcomes])


def _hung(failure: WorldError) -> set[int]:
    """Ranks that hang; other ranks that did not end only wait for these.

    A rank whose scaler returned waits in the judge's own check. The harness does not
    know that check: it may take this rank for the one that hangs, and one that is stuck
    in a collective of the scaler for its victim.
    """
    if failure.root.state is not RankState.HUNG:
        return set()
    killed = {RankState.HUNG, RankState.VICTIM}
    left = [o for o in failure.outcomes if o.state in killed and o.error_type is None]
    stuck = [o for o in left if not _CHECKS.search(o.stacks)]
    named = [o for o in stuck if o.state is RankState.HUNG]
    return {o.rank for o in named or stuck or left}


def _how(outcome: RankOutcome) -> str:
    """How a rank hangs: since when, and in which function."""
    # of a victim: "...; killed because rank 0 failed", but this one is the cause
    since = (outcome.message or "no answer").partition("; killed")[0]
    place = waiting_place(outcome)
    return f"{since}, in {place}" if place else since


def ran_out_of_time(traces: Sequence[RankTrace]) -> str:
    """The call that exceeded its time limit, in words, or the empty string."""
    if any(trace.problem is not None for trace in traces):
        return ""  # a rank raised: the others were late only because they waited for it
    for trace in traces:
        if trace.hung:
            return f"rank {trace.rank}: {trace.hung}"
    for trace in traces:
        for seen in trace.steps:
            if seen.checked_sum is not None and math.isnan(seen.checked_sum[0]):
                what = f"step {seen.step}: the checked all-reduce did not come back"
                return f"{what} on rank {trace.rank}"
    return ""


def _trace_of(outcome: RankOutcome, *, hung: bool) -> RankTrace:
    if isinstance(outcome.exception, JudgedError):
        trace = outcome.exception.trace
        if outcome.state is RankState.VICTIM:
            trace.problem = None  # what it raised after its peer had failed
        return trace
    if isinstance(outcome.value, RankTrace):
        return outcome.value
    empty = RankTrace(rank=outcome.rank, coordinate={}, index={}, shards={})
    if hung:
        empty.hung = _how(outcome)
    return empty


def why_not_run(
    failure: WorldError,
    spec: str,
    scenario: Scenario,
    alone: Callable[..., str],
) -> str:
    """Why a workload could not run the scenario, or the empty string.

    Meshes with an axis at size 1, frozen parameters, recomputation, a second layout and
    gradients that are synchronised later are the judge's choices. So an exception of
    ``parallelize`` there is no fault, and neither is one of ``train_step`` on
    parameters without gradients or on such a mesh, where a schedule written by hand may
    wait for a stage that does not exist, nor one of a pass that a module does not
    support in its own ``no_sync()``.

    Args:
        failure: failure of the world.
        spec: the judged scaler, or ``none``.
        scenario: scenario that the world was to train.
        alone: calls a function on the process of the references.
    """
    error, recipe = failure.root.exception, scenario.parsed_recipe
    frozen = recipe.training.frozen
    narrowed = scenario.parsed_topology.narrowed
    unasked = narrowed or recipe.resume or recipe.recompute
    text = shortened(str(error), 600)
    if isinstance(error, CannotError):
        return text
    own_step = spec == NO_SCALER and OfWorkload.LOOP not in scenario.workload.has
    if narrowed and own_step and failure.root.state is RankState.HUNG:
        return f"its train_step: {root_cause(failure)}"
    if not isinstance(error, WorkloadError):
        return ""
    laid_out = error.call == "parallelize" and (unasked or frozen)
    # a stack's own autograd (torch.func) may not support checkpointing; torch's error
    # is the finding of the recipe
    unknown = recipe.recompute and own_step and error.raised != CheckpointError.__name__
    tried = frozen or (narrowed and own_step) or unknown
    trained = error.call == "train_step" and tried and bool(error.raised)
    deferred = recipe.defer_sync and error.call in ("forward", "backward")
    is_tried = laid_out or trained or deferred
    if is_tried:
        return text
    return alone(why_not_alone, scenario, in_group=scenario.workload.one_rank)


def why_not_alone(scenario: Scenario) -> str:
    """Why one process cannot run a half precision either, or the empty string.

    The precision is the judge's choice, and torch has operations that refuse it.
    """
    if scenario.parsed_precision.is_full:
        return ""
    schedule = Schedule(skipped=(frozenset(),), scales=(1.0,))
    try:
        if scenario.workload.one_rank:
            one_rank_references(replace(scenario, steps=1), schedule)
            return ""
        reference_before(scenario, schedule, PLAIN, 1)
    except WorkloadError as error:
        text = shortened(str(error), 600)
        return f"one process cannot run in {scenario.precision} either: {text}"
    return ""
