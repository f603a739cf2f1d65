"""Runner: run a scaler in a scenario and check the result.

Three functions follow each other. ``_observe`` lets ``Runs`` train the scenario.
``_compare`` compares the traces with references and applies the checks. If parity
fails, ``localise`` finds the first module that differs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

import msgspec

from ...fixtures import OfWorkload, UndecidedError, WorkloadError
from ...multiprocess import RankState, WorldError
from ..comparison import laws as laws
from ..comparison.law import LAWS, Evidence, apply_checks
from ..comparison.laws.transparency import first_difference
from ..comparison.localise import first_bad_step, locate
from ..comparison.measured import Parity
from ..comparison.parity import demanded_schedule, measure_parity
from ..rank.devices import Devices
from ..rank.layout_checks import check_whole
from ..rank.scaler_spec import NO_SCALER
from ..rank.trace import RankTrace
from ..report.records import Location
from ..space.scenario import Scenario
from ..status import Status, Verdict, case_status
from .failures import ran_out_of_time, why_not_run
from .launcher import AloneError, Place, Pool, root_cause
from .runs import Runs, Traces, is_of_parallelize, without_scaler
from .waiting import Waiting

__all__ = ["Case", "Runner"]

_LOGGER = logging.getLogger(__name__)
BEHIND = 24
"""Largest number of traces (one for each rank) of cases that wait for their checks.
Waiting traces stay in memory. One case may wait, however many ranks it has."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One scaler in one scenario: its traces and verdicts."""

    scaler: str
    scenario: Scenario
    verdicts: tuple[Verdict, ...]
    evidence: Evidence | None
    """Evidence for the verdicts; None if the harness broke."""
    seconds: float
    problem: str = ""
    """Reason why the harness broke, with the rank; else empty. With a reason, no checks
    are applied."""
    error: Exception | None = None
    """Exception behind ``problem``."""
    skipped: bool = False
    """True if the workload cannot run this scenario."""
    location: Location | None = None
    """First module, loss or update that differs, if it was localised."""

    @property
    def kind(self) -> tuple[str, str, str]:
        """Scaler, topology and recipe; one failure of each kind is localised."""
        return self.scaler, self.scenario.topology, self.scenario.recipe

    @property
    def own_error(self) -> WorkloadError | None:
        """Exception of the user's workload behind ``problem``, or None."""
        error: BaseException | None = self.error
        if isinstance(error, WorldError):
            error = error.root.exception
        return error if isinstance(error, WorkloadError) else None

    @property
    def hangs(self) -> bool:
        """True if ranks ran out of time and the scaler is not at fault."""
        error = self.error
        return isinstance(error, WorldError) and error.root.state is RankState.HUNG

    @property
    def status(self) -> Status:
        """Worst verdict; inconclusive if all checks are skipped."""
        if self.problem:
            return Status.ERROR
        if self.skipped:
            return Status.SKIPPED
        return Status(case_status(v.status for v in self.verdicts))


@dataclass(kw_only=True)
class _Seen:
    """Traces of one case before its checks; fields as in :class:`Evidence`."""

    spec: str
    scenario: Scenario
    traces: Traces = ()
    first_try: str = ""
    control: Traces | None = None
    control_differs: str = ""
    uninterrupted: tuple[RankTrace, ...] | None = None
    seconds: float = 0.0
    problem: str = ""
    error: Exception | None = None
    case: Case | None = None
    """Finished case, if there is nothing to compare."""

    @property
    def complete(self) -> bool:
        """True if all ranks completed the last step."""
        last = self.scenario.steps - 1
        return all(trace.reached(last) for trace in self.traces)

    @property
    def may_lose_settings(self) -> bool:
        """True if the workload loaded its own checkpoint, and goes on by itself.

        Settings need not have changed before the load: a schedule may first change
        them afterwards.
        """
        recipe, workload = self.scenario.parsed_recipe, self.scenario.workload
        own = OfWorkload.LOOP not in workload.has
        return bool(recipe.resume) and own and self.complete

    @property
    def needs_one_rank(self) -> bool:
        """True if the workload may average weights, or change settings by itself.

        A plain reference has no averages, and takes the settings from the ranks, so it
        cannot check either. Settings that stand still on several ranks may change on
        one rank. So the plain recipe in fp32 is also trained on one rank, if the
        workload has a topology for that and no ``lr_schedule``. False if any step is
        skipped: one rank has no bad gradient and would not skip the step.
        """
        scenario, workload = self.scenario, self.scenario.workload
        random = scenario.parsed_recipe.training.random
        if not self.complete or random or OfWorkload.LOOP in workload.has:
            return False
        schedule = demanded_schedule(self.traces)
        if scenario.faults != "none" or any(schedule.skipped):
            return False
        moves = bool(schedule.settings)
        is_plain = scenario.recipe == "plain" and scenario.parsed_precision.is_full
        if is_plain and scenario.world_size > 1 and workload.lr_schedule is None:
            layouts = workload.topologies.values()
            moves |= any(t.narrowed and t.default_world_size == 1 for t in layouts)
        # a reference on one rank has the rank's settings
        return (moves and not workload.one_rank) or workload.ema is not None

    @contextmanager
    def broken(self, runs: Runs) -> Iterator[None]:
        """Turn an exception into this case's problem, so that the run continues."""
        try:
            yield
        # an error that shows only in the reference, or on all ranks together
        except (WorkloadError, AloneError) as error:
            self.problem, self.error = str(error), error
        except WorldError as failure:
            place, scenario = runs.place, self.scenario
            cannot = why_not_run(failure, self.spec, scenario, place.alone)
            own = is_of_parallelize(failure) and runs.never_laid_out(scenario)
            if cannot and not own:
                undecided = isinstance(failure.root.exception, UndecidedError)
                status = Status.INCONCLUSIVE if undecided else Status.SKIPPED
                not_run = _not_run(self.spec, self.scenario, cannot, status)
                self.case = replace(not_run, skipped=not undecided)
            self.problem, self.error = root_cause(failure), failure
        # an error of gradparity is reported, and the run continues
        except Exception as error:
            _LOGGER.exception("gradparity itself failed in %s", self.scenario.id)
            self.problem = f"gradparity itself failed: {type(error).__name__}: {error}"[
                :400
            ]
            self.error = error


class Runner:
    """Runs cases one after another; a context manager that ends its clusters."""

    def __init__(
        self,
        *,
        folder: str,
        timeout_s: float = 120.0,
        place: Place | None = None,
        localises: int = 0,
    ) -> None:
        """Use the ranks of a place, which is closed with the runner.

        Args:
            folder: import path of the tested scalers.
            timeout_s: time limit of one scenario, if ``place`` is None.
            place: where ranks come from; by default a pool on the CPU.
            localises: number of parity failures to localise, at most one for each
                scaler, topology and recipe.
        """
        self.localises = localises
        self._localised: set[tuple[str, str, str]] = set()
        self.place = place or Pool(Devices(), timeout_s)
        self.runs = Runs(self.place, folder)
        self._stacks: dict[Scenario, Case | None] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.place.__exit__()

    def run(self, spec: str, scenario: Scenario, *, parity: bool = True) -> Case:
        """Train one scenario with one scaler, and check the run.

        Args:
            spec: ``module:attribute`` of the scaler, or ``none``.
            scenario: scenario to train.
            parity: false to leave parity inconclusive, if only other checks matter: a
                scaler with other scales needs new references, which cost most of the
                time.
        """
        case = self._compare(self._observe(spec, scenario), parity)
        return self._localised_where_due(case)

    def run_all(
        self,
        pairs: Iterable[tuple[str, Scenario]],
        begin: Callable[[str, str], None],
        end: Callable[[Case], bool],
    ) -> None:
        """Run all pairs in order; checks of a case run while the next cases train.

        References train on a separate rank at the same time; otherwise one of two cores
        would be idle. Ranks take longer in some cases and references in others, so the
        thread that runs the checks may be some cases behind.

        Args:
            pairs: (``module:attribute`` of a scaler, scenario).
            begin: called with scaler and scenario id before the ranks start.
            end: called with each checked case, in order and in any thread; True ends
                the run.
        """
        pairs = [*pairs]
        with ThreadPoolExecutor(1, "comparison") as comparing:
            # Before the first references, for which a case would wait while ranks are
            # free. A case that asks again gets the error.
            for model in dict.fromkeys(scenario.model for _, scenario in pairs):
                comparing.submit(self.runs.facts, model)
            steps = self._compare, self._is_localised, self._localised_where_due
            waiting = Waiting(comparing, *steps, end)
            try:
                for spec, scenario in pairs:
                    begin(spec, scenario.id)
                    seen = self._observe(spec, scenario)
                    n_traces = len(seen.traces) or 1
                    waiting.add(seen, n_traces)
                    if waiting.catch_up(max(BEHIND, n_traces)):
                        return
                waiting.catch_up(0)
            except BaseException:  # also Ctrl-C
                # first check the cases whose ranks have ended
                waiting.end_all()
                raise

    def _observe(self, spec: str, scenario: Scenario) -> _Seen:
        """Train a scenario on ranks, and do the other runs that its checks need."""
        seen, start = _Seen(spec=spec, scenario=scenario), time.monotonic()
        if reason := self.place.not_runnable(scenario.most_ranks):
            seen.case = _not_run(spec, scenario, reason)
            return seen
        with seen.broken(self.runs):
            self.runs.facts(scenario.model)
            if (stack := self._stack_fault(spec, scenario)) is not None:
                seen.case = replace(stack, scaler=spec, scenario=scenario)
                return seen
            seen.traces = self.runs.run(spec, scenario)
            if late := ran_out_of_time(seen.traces):
                # A slow run proves nothing, because the machine may have been busy. The
                # failed world was ended, so the second try has new ranks.
                seen.traces, seen.first_try = self.runs.run(spec, scenario), late
            # bitwise checks need fp32, where scaling is exact, and a control run that
            # cannot skip
            compared = spec != NO_SCALER and scenario.faults == "none"
            if seen.complete and compared and scenario.parsed_precision.is_full:
                seen.control = self.runs.control(scenario)
                # A second control is made only after a difference, which may be the
                # control's.
                if first_difference(seen.control, seen.traces):
                    seen.control_differs = self.runs.control_differs(scenario)
            if seen.may_lose_settings:
                whole = replace(scenario, recipe="plain")
                seen.uninterrupted = self.runs.run(spec, whole)
        seen.seconds = time.monotonic() - start
        return seen

    def _compare(self, seen: _Seen, parity: bool = True) -> Case:
        """Compare the traces with the references and apply the checks."""
        if seen.case is not None:
            return seen.case
        start = time.monotonic()
        evidence: Evidence | None = None
        verdicts: list[Verdict] = []
        with seen.broken(self.runs):
            if not seen.problem:
                evidence = self._evidence(seen, parity)
                verdicts = apply_checks(evidence)
        return Case(
            scaler=seen.spec,
            scenario=seen.scenario,
            verdicts=tuple(verdicts),
            evidence=evidence,
            seconds=seen.seconds + time.monotonic() - start,
            problem=seen.problem,
            error=seen.error,
        )

    def localise(self, case: Case) -> Location | None:
        """Run a case again up to its first bad step, and find where it differs.

        Args:
            case: a complete case, failed or not.

        Returns:
            The location; None if the case was not compared with a reference.
        """
        evidence, scenario = case.evidence, case.scenario
        if evidence is None or evidence.parity is None:
            return None
        start = time.monotonic()
        step = first_bad_step(evidence.parity) or 0
        try:
            watched = self.runs.watched(case.scaler, scenario, step)
            evidence_there = evidence.ranks, evidence.parity, step, watched
            location = self.runs.beside_references(locate, scenario, *evidence_there)
        # no check depends on the location
        except Exception as error:
            _LOGGER.info("not localised: %s", scenario.id, exc_info=True)
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            location = Location(
                where="unknown", text=f"it could not be found out: {why}"
            )
        return msgspec.structs.replace(
            location, seconds=round(time.monotonic() - start, 3)
        )

    def _is_localised(self, case: Case) -> bool:
        broken = {v.law.partition(".")[0] for v in case.verdicts if v.status == "fail"}
        done = len(self._localised) >= self.localises or case.kind in self._localised
        return "parity" in broken and not done

    def _localised_where_due(self, case: Case) -> Case:
        if not self._is_localised(case):
            return case
        self._localised.add(case.kind)
        return replace(case, location=self.localise(case))

    def _evidence(self, seen: _Seen, measured: bool) -> Evidence:
        scenario, traces = seen.scenario, seen.traces
        random = scenario.parsed_recipe.training.random
        due = seen.complete and measured and not random
        parity = self.runs.beside_references(_on_one_process, scenario, traces, due)
        alone, alone_fails = (
            self.runs.plain_on_one_rank(scenario, traces)
            if seen.needs_one_rank
            else (None, "")
        )
        return Evidence(
            scenario=scenario,
            ranks=traces,
            control=seen.control,
            control_differs=seen.control_differs,
            first_try=seen.first_try,
            uninterrupted=seen.uninterrupted,
            alone=alone,
            alone_fails=alone_fails,
            parity=parity,
            scaler=seen.spec != NO_SCALER,
        )

    def _stack_fault(self, spec: str, scenario: Scenario) -> Case | None:
        """Return the case to report if the workload is wrong without a scaler, or None.

        A fault of the workload does not count against the scaler.
        """
        if spec == NO_SCALER or OfWorkload.OF_USER not in scenario.workload.has:
            return None
        alone = without_scaler(scenario)
        if alone not in self._stacks:
            self._stacks[alone] = _wrong_without_scaler(self.run(NO_SCALER, alone))
        return self._stacks[alone]


def _on_one_process(scenario: Scenario, traces: Traces, due: bool) -> Parity | None:
    """Compare a run with its references; return None if ``due`` is false.

    Raises:
        WorkloadError: if some element of the model is on no rank.
    """
    check_whole(scenario.workload, traces)
    return measure_parity(scenario, traces) if due else None


def _wrong_without_scaler(stack: Case) -> Case | None:
    """Return the case to report for every scaler if the workload is wrong, or None."""
    if stack.skipped and stack.scenario.parsed_topology.narrowed:
        return stack
    wrong = [v for v in stack.verdicts if v.status == Status.FAIL]
    if not wrong and not stack.problem:
        return None
    why = stack.problem or f"{wrong[0].law}: {wrong[0].message}"
    text = (
        f"the stack is wrong without any scaler (--scaler {NO_SCALER}, "
        f"{stack.scenario.id}): {why}"
    )
    if stack.problem:
        return replace(stack, problem=text)
    undecided = _every_law(Status.INCONCLUSIVE, text)
    return replace(stack, verdicts=undecided, evidence=None)


def _not_run(
    spec: str, scenario: Scenario, reason: str, status: Status = Status.SKIPPED
) -> Case:
    """Return a case that did not run: all its checks have the given status."""
    return Case(
        scaler=spec,
        scenario=scenario,
        verdicts=_every_law(status, reason),
        evidence=None,
        seconds=0.0,
    )


def _every_law(status: Status, message: str) -> tuple[Verdict, ...]:
    return tuple(Verdict(law=each, status=status, message=message) for each in LAWS)
