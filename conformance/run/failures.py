"""Classify the failure of a world: caused by scaler, by workload, or neither."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch.utils.checkpoint import CheckpointError

from ...fixtures import CannotError, OfWorkload, WorkloadError, shortened
from ...multiprocess import RankOutcome, RankState, WorldError
from ..comparison.one_rank import one_rank_references
from ..comparison.reference import Schedule, reference_before
from ..comparison.variants import PLAIN
from ..rank.fold import fold
from ..rank.scaler_spec import NO_SCALER
from ..rank.trace import RankTrace
from ..rank.worker import StoppedError, all_say_right, checked_collective
from ..space.scenario import Scenario
from .launcher import LOST, root_cause, waiting_place

__all__ = ["ran_out_of_time", "traces_of", "why_not_run"]

_CHECKS = re.compile(
    rf'/conformance/rank/worker\.py", line \d+ in '
    rf"({all_say_right.__name__}|{checked_collective.__name__})$",
    re.MULTILINE,
)
"""Matches a stack whose function waits for the other ranks after a step."""


def traces_of(failure: WorldError, *, has_scaler: bool) -> tuple[RankTrace, ...]:
    """Return the traces of a world that failed because of the code under test.

    [Note: End of a rank]
    How a rank may end, and what follows:

    - it returns its trace;
    - a call of the scaler raises: the rank raises StoppedError with the trace so far;
    - a checked collective has a wrong result on some rank, for example because a
      stray collective paired with it. All ranks raise StoppedError with their traces
      (``worker.all_say_right``), so that none is left in a collective;
    - it hangs, and the parent kills it: no trace. With a scaler, a hang is a violation
      if it occurs again in a second try, because a busy machine may also be slow.
      Without a scaler it is no violation;
    - it is killed or exits: no trace and no verdict, since the machine may be short of
      memory. The same holds for any other exception, which comes from gradparity or
      from the workload.

    Args:
        failure: failure of a run.
        has_scaler: true if the run had a scaler; a hang is then a fault of the scaler.

    Raises:
        WorldError: if a rank was killed or exited, or if the root cause is neither a
            StoppedError nor, in a run with a scaler, a hang.
    """
    states = {outcome.state for outcome in failure.outcomes}
    raised = isinstance(failure.root.exception, StoppedError)
    own = isinstance(failure.root.exception, WorkloadError)
    hangs = has_scaler and RankState.HUNG in states
    if own or states & LOST or not (raised or hangs):
        raise failure
    hung = _hung(failure)
    return fold([_trace_of(o, hung=o.rank in hung) for o in failure.outcomes])


def _hung(failure: WorldError) -> set[int]:
    """Return the ranks that hang; other unfinished ranks only wait for these.

    A rank whose scaler returned waits in gradparity's own check, which the harness does
    not know. So the harness may name that rank as hanging, and call a rank that is
    stuck in a collective of the scaler its victim.
    """
    if failure.root.state is not RankState.HUNG:
        return set()
    killed = {RankState.HUNG, RankState.VICTIM}
    left = [o for o in failure.outcomes if o.state in killed and o.error_type is None]
    stuck = [o for o in left if not _CHECKS.search(o.stacks)]
    named = [o for o in stuck if o.state is RankState.HUNG]
    return {o.rank for o in named or stuck or left}


def _how(outcome: RankOutcome) -> str:
    """Describe how a rank hangs: since when, and in which function."""
    # without "; killed because rank 0 failed", since this failure is the cause
    since = (outcome.message or "no answer").partition("; killed")[0]
    place = waiting_place(outcome)
    return f"{since}, in {place}" if place else since


def ran_out_of_time(traces: Sequence[RankTrace]) -> str:
    """Describe the call that exceeded the time limit; "" if there is none.

    Returns "" also if a call of the scaler raised: the other ranks were late only
    because they waited for the rank that raised.
    """
    if any(trace.problem is not None for trace in traces):
        # other ranks were late only because they waited for the rank that raised
        return ""
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
    if isinstance(outcome.exception, StoppedError):
        trace = outcome.exception.trace
        if outcome.state is RankState.VICTIM:
            trace.problem = None  # the rank raised this after another rank had failed
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
    """Return why a workload cannot run a scenario; "" if the workload is at fault.

    The following are gradparity's choices and not the user's: mesh axes of size 1,
    frozen parameters, recomputation, a second layout, and deferred gradient
    synchronisation. So these exceptions are not a fault of the workload:

    - an exception of ``parallelize`` with such a choice;
    - an exception of ``train_step`` with frozen parameters or recomputation;
    - an exception of ``train_step`` on a mesh with an axis of size 1, where a
      hand-written schedule may wait for a stage that does not exist;
    - an exception of forward or backward with deferred synchronisation, since a module
      may not support them in its ``no_sync()``;
    - an exception that one process, too, raises in the scenario's half precision
      (:func:`why_not_alone`).

    Args:
        failure: failure of the world.
        spec: name of the tested scaler, or ``none``.
        scenario: scenario that the world was to train.
        alone: calls a function on the process that trains references.
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
    # a stack's own autograd (torch.func) may not support checkpointing; torch's own
    # error is a result of the recipe
    unknown = recipe.recompute and own_step and error.raised != CheckpointError.__name__
    tried = frozen or (narrowed and own_step) or unknown
    trained = error.call == "train_step" and tried and bool(error.raised)
    deferred = recipe.defer_sync and error.call in ("forward", "backward")
    is_tried = laid_out or trained or deferred
    if is_tried:
        return text
    return alone(why_not_alone, scenario, in_group=scenario.workload.one_rank)


def why_not_alone(scenario: Scenario) -> str:
    """Return why even one process cannot run the scenario's precision; "" if it can.

    The precision is gradparity's choice, and some torch operations reject it.
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
