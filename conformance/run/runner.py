"""Runner: scenarios x scalers on warm clusters -> judged cases.

Worlds are kept by size, the last runs without a scaler by scenario, references by their
schedule; each is made once and shared by all scalers of a scenario.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from ...fixtures import OfWorkload, UndecidedError, WorkloadError
from ...multiprocess import RankState, WorldError
from ..judge import laws as laws
from ..judge.bounds import expected_choices
from ..judge.law import LAWS, Evidence, judge
from ..judge.laws.transparency import first_difference
from ..judge.localise import first_bad_step, locate
from ..judge.measured import Parity
from ..judge.parity import demanded_schedule, followed_schedule, measure_parity
from ..judge.reference import Idle, Schedule
from ..rank.devices import Devices
from ..rank.fold import fold
from ..rank.layout_checks import check_whole
from ..rank.modules import Watched
from ..rank.reshard import gathered
from ..rank.routing import Choices, chooses_in_forward
from ..rank.scaler_spec import NO_SCALER
from ..rank.trace import RankTrace, Saved
from ..rank.watched_step import observe_modules
from ..rank.worker import observe_rank
from ..report.records import Location
from ..space.facts import WorkloadFacts, facts_of, remember
from ..space.scenario import Scenario
from ..status import Status, Verdict, case_status
from .failures import ran_out_of_time, traces_of, why_not_run
from .launcher import AloneError, Place, Pool, root_cause
from .waiting import Waiting

__all__ = ["Case", "Phases", "Runner"]

T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)
BEHIND = 24
"""Number of traces, one a rank, of cases whose ranks have ended and that wait to be
judged: they are in memory until then. One case may wait, however many ranks it has."""
CONTROLS = 4
"""Number of runs without a scaler that are kept: the scalers of a scenario run one
after another, and few scenarios share a control (3 of 224 in all presets)."""
TRIES = 3
"""How often a run is made until the reference's choices fit it: with the choices of no
skips, of its skips, and once more where these choices change the skips. Skips that move
still are compared as they are."""
Phases = tuple[tuple[RankTrace, ...], ...]
"""One trace a rank, for each world that a run was on."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One scaler in one scenario: its traces and verdicts."""

    scaler: str
    scenario: Scenario
    verdicts: tuple[Verdict, ...]
    evidence: Evidence | None
    """None where the harness broke."""
    seconds: float
    problem: str = ""
    """Why the harness broke, naming the rank; else empty. No law is judged then."""
    error: Exception | None = None
    """The exception behind ``problem``."""
    skipped: bool = False
    """True if the workload cannot run this scenario."""
    location: Location | None = None
    """Where parity begins to fail, if it was localised."""

    @property
    def kind(self) -> tuple[str, str, str]:
        """Scaler, topology and recipe: one failure of each kind is localised."""
        return self.scaler, self.scenario.topology, self.scenario.recipe

    @property
    def own_error(self) -> WorkloadError | None:
        """The error of the user's workload behind ``problem``, if it is one."""
        error: BaseException | None = self.error
        if isinstance(error, WorldError):
            error = error.root.exception
        return error if isinstance(error, WorkloadError) else None

    @property
    def hangs(self) -> bool:
        """True if ranks ran out of time, and no scaler is accused of it."""
        error = self.error
        return isinstance(error, WorldError) and error.root.state is RankState.HUNG

    @property
    def status(self) -> Status:
        """The worst verdict; skipped laws do not count, and alone prove nothing."""
        if self.problem:
            return Status.ERROR
        if self.skipped:
            return Status.SKIPPED
        return Status(case_status(v.status for v in self.verdicts))


@dataclass(kw_only=True)
class _Seen:
    """The traces of one case, before it is judged; :class:`Evidence` has the words."""

    spec: str
    scenario: Scenario
    phases: Phases = ()
    first_try: str = ""
    control: Phases | None = None
    control_differs: str = ""
    uninterrupted: tuple[RankTrace, ...] | None = None
    plain: tuple[RankTrace, ...] | None = None
    seconds: float = 0.0
    problem: str = ""
    error: Exception | None = None
    case: Case | None = None
    """The finished case, if there is nothing to judge."""

    @property
    def complete(self) -> bool:
        """True if all ranks completed the last step."""
        last = self.scenario.steps - 1
        return all(trace.reached(last) for trace in self.phases[-1])

    @property
    def may_lose_settings(self) -> bool:
        """True if a stack that moves settings has loaded its own checkpoint."""
        recipe, workload = self.scenario.parsed_recipe, self.scenario.workload
        if not recipe.resume or recipe.resharded or OfWorkload.LOOP in workload.has:
            return False
        return self.complete and bool(demanded_schedule(*self.phases).settings)

    @property
    def averages_otherwise(self) -> bool:
        """True if rows are cut, or a checkpoint loaded, and an average moves."""
        scenario, recipe = self.scenario, self.scenario.parsed_recipe
        if scenario.workload.ema is None or recipe.resharded or recipe.training.random:
            return False
        planned = scenario.faults != "none" or not scenario.parsed_precision.is_full
        return self.complete and not planned and (recipe.parts > 1 or recipe.resume)

    @contextmanager
    def broken(
        self, place: Place, always: Callable[[Scenario], bool]
    ) -> Iterator[None]:
        """Turn an exception into this case's problem, so that the run continues.

        Args:
            place: place of the ranks.
            always: true if ``parallelize`` raises in every scenario.
        """
        try:
            yield
        # a fault that shows only in the reference, or on all ranks together
        except (WorkloadError, AloneError) as error:
            self.problem, self.error = str(error), error
        except WorldError as failure:
            cannot = why_not_run(failure, self.spec, self.scenario, place.alone)
            if cannot and not (_of_parallelize(failure) and always(self.scenario)):
                undecided = isinstance(failure.root.exception, UndecidedError)
                status = Status.INCONCLUSIVE if undecided else Status.SKIPPED
                not_run = _not_run(self.spec, self.scenario, cannot, status)
                self.case = replace(not_run, skipped=not undecided)
            self.problem, self.error = root_cause(failure), failure
        # a fault of the judge: reported, and the run continues
        except Exception as error:
            _LOGGER.exception("gradparity itself failed in %s", self.scenario.id)
            self.problem = f"gradparity itself failed: {type(error).__name__}: {error}"[
                :400
            ]
            self.error = error


@dataclass(kw_only=True)
class _Control:
    """A run without a scaler."""

    phases: Phases
    differs: str | None = None
    """Where a second such run differs bitwise; empty: nowhere; None: not yet made."""


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
        """Take ranks from a place, which is closed with the runner.

        Args:
            folder: import path of the judged scalers.
            timeout_s: limit of one scenario, where ``place`` has none.
            place: where ranks come from; by default a pool on the CPU.
            localises: number of parity failures to localise, at most one for each
                scaler, topology and recipe.
        """
        self.folder = folder
        self.localises = localises
        self._localised: set[tuple[str, str, str]] = set()
        self.place = place or Pool(Devices(), timeout_s)
        self._controls: dict[Scenario, _Control] = {}
        self._stacks: dict[Scenario, Case | None] = {}
        self._known: dict[str, tuple[WorkloadFacts, bool]] = {}
        self._laid_out: dict[tuple[str, str], bool] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.place.__exit__(kind, error, trace)

    def run(self, spec: str, scenario: Scenario, *, parity: bool = True) -> Case:
        """Judge the scaler named ``spec`` in ``scenario``.

        Args:
            spec: ``module:attribute``.
            scenario: scenario to train.
            parity: False leaves parity inconclusive, if only other laws matter: a
                scaler with other scales needs new references, which cost most of the
                time.
        """
        case = self._judge(self._observe(spec, scenario), parity)
        return self._localised_where_due(case)

    def traces(self, spec: str, scenario: Scenario) -> Phases:
        """Traces of a new run, not judged, up to the phase that failed.

        Args:
            spec: ``module:attribute``, or ``none``.
            scenario: scenario to train.

        Raises:
            WorldError: if the failure is not the scaler's.
        """
        seen: list[tuple[RankTrace, ...]] = []
        try:
            seen.extend(self._followed(spec, scenario))
        except WorldError as failure:
            seen.append(traces_of(failure, judged=spec != NO_SCALER))
        return tuple(seen)

    def run_all(
        self,
        pairs: Iterable[tuple[str, Scenario]],
        begin: Callable[[str, str], None],
        end: Callable[[Case], bool],
    ) -> None:
        """Judge all ``pairs`` in order; cases are judged while the next ones train.

        References train on a separate rank: one after the other they would
        leave half of two cores idle. Ranks take longer in some cases and references in
        others, so the thread that judges may be some cases behind.

        Args:
            pairs: (``module:attribute``, what to train).
            begin: called with spec and scenario id before its ranks start.
            end: called with each judged case, in order and in any thread; True ends the
                run.
        """
        pairs = [*pairs]
        with ThreadPoolExecutor(1, "judge") as judge:
            # before the first references: a case would wait for them with free ranks;
            # an error is that of the case that asks again
            for model in dict.fromkeys(scenario.model for _, scenario in pairs):
                judge.submit(self._found_out, model)
            steps = self._judge, self._is_localised, self._localised_where_due
            waiting = Waiting(judge, *steps, end)
            try:
                for spec, scenario in pairs:
                    begin(spec, scenario.id)
                    seen = self._observe(spec, scenario)
                    traces = sum(map(len, seen.phases)) or 1
                    waiting.add(seen, traces)
                    if waiting.catch_up(max(BEHIND, traces)):
                        return
                waiting.catch_up(0)
            except BaseException:  # Ctrl-C, too
                # the cases whose ranks have ended are judged before it goes on
                waiting.end_all()
                raise

    def _observe(self, spec: str, scenario: Scenario) -> _Seen:
        """Run the ranks, and the control a second time if they differ from it."""
        seen, start = _Seen(spec=spec, scenario=scenario), time.monotonic()
        ranks = max(phase.world_size for phase in scenario.phases)
        if reason := self.place.not_runnable(ranks):
            seen.case = _not_run(spec, scenario, reason)
            return seen
        with seen.broken(self.place, self._never_laid_out):
            self._found_out(scenario.model)
            if (stack := self._stack_fault(spec, scenario)) is not None:
                seen.case = replace(stack, scaler=spec, scenario=scenario)
                return seen
            seen.phases = self._run_ranks(spec, scenario)
            if late := ran_out_of_time(seen.phases[-1]):
                # Time alone proves nothing: the machine may have been busy. The world
                # that failed was ended, so the second try has ranks of its own.
                seen.phases, seen.first_try = self._run_ranks(spec, scenario), late
            # bitwise laws need fp32, where scaling is exact, and a run whose control
            # cannot skip
            compared = spec != NO_SCALER and scenario.faults == "none"
            if seen.complete and compared and scenario.parsed_precision.is_full:
                seen.control = self._control_of(scenario).phases
                # A second control is needed only after a difference: it may be the
                # control's.
                if first_difference(seen.control, seen.phases):
                    seen.control_differs = self._compare_controls(scenario)
            if seen.may_lose_settings or seen.averages_otherwise:
                whole = replace(scenario, recipe="plain")
                traces = self._run_ranks(spec, whole)[-1]
                seen.uninterrupted = traces if seen.may_lose_settings else None
                seen.plain = traces if seen.averages_otherwise else None
        seen.seconds = time.monotonic() - start
        return seen

    def _judge(self, seen: _Seen, parity: bool = True) -> Case:
        """Compare the traces with the references and apply the laws."""
        if seen.case is not None:
            return seen.case
        start = time.monotonic()
        evidence: Evidence | None = None
        verdicts: list[Verdict] = []
        with seen.broken(self.place, self._never_laid_out):
            if not seen.problem:
                evidence = self._evidence(seen, parity)
                verdicts = judge(evidence)
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
        """Run a case again up to its first bad step, and find where it departs.

        Args:
            case: a complete one, failed or not.

        Returns:
            None where the case has no parity to go by.
        """
        evidence, scenario = case.evidence, case.scenario
        if evidence is None or evidence.parity is None:
            return None
        start = time.monotonic()
        step = first_bad_step(evidence.parity) or 0
        before = [evidence.before.ranks] if evidence.before else []
        phases = [*before, evidence.ranks]
        try:
            watched = self._watched(case.scaler, scenario, step)
            evidence_there = phases, evidence.parity, step, watched
            location = self._with_references(locate, scenario, *evidence_there)
        # the verdict does not depend on localisation
        except Exception as error:
            _LOGGER.info("not localised: %s", scenario.id, exc_info=True)
            why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            location = Location(
                where="unknown", text=f"it could not be found out: {why}"
            )
        return msgspec.structs.replace(
            location, seconds=round(time.monotonic() - start, 3)
        )

    def _with_references(
        self, compare: Callable[..., T], scenario: Scenario, *args: Any
    ) -> T:
        """Call ``compare`` on the process that trains the scenario's references."""
        one_rank = scenario.workload.one_rank
        return self.place.alone(compare, scenario, *args, in_group=one_rank)

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
        scenario, phases = seen.scenario, seen.phases
        random = scenario.parsed_recipe.training.random
        due = seen.complete and measured and not random
        parity = self._with_references(_on_one_process, scenario, phases, due)
        evidence: Evidence | None = None
        for number, traces in enumerate(phases):
            evidence = Evidence(
                scenario=scenario,
                ranks=traces,
                control=None if seen.control is None else seen.control[number],
                control_differs=seen.control_differs,
                first_try=seen.first_try,
                uninterrupted=seen.uninterrupted,
                plain=seen.plain,
                parity=parity,
                scaler=seen.spec != NO_SCALER,
                before=evidence,
            )
        assert evidence is not None
        return evidence

    def _stack_fault(self, spec: str, scenario: Scenario) -> Case | None:
        """The case to report if a user's workload is wrong without any scaler.

        A scaler is not accused of faults that its stack has without it.
        """
        if spec == NO_SCALER or OfWorkload.JUDGED not in scenario.workload.has:
            return None
        alone = _without_scaler(scenario)
        if alone not in self._stacks:
            self._stacks[alone] = _unjudged(self.run(NO_SCALER, alone))
        return self._stacks[alone]

    def _never_laid_out(self, scenario: Scenario) -> bool:
        """True if ``parallelize`` also raises without any choice of the judge.

        Else a recipe would count as skipped for an error of every scenario.
        """
        topology = scenario.parsed_topology
        if topology.narrowed:  # of a mesh that the workload has declared
            layouts = scenario.workload.topologies.values()
            topology = next(t for t in layouts if t.parallel and not t.narrowed)
        key = scenario.model, topology.name
        if key not in self._laid_out:
            size = topology.default_world_size
            place = f"{topology.name}/{size}/fp32/{scenario.optimizer}/none"
            plain = Scenario.parse(f"{place}/model={scenario.model},steps=1")
            self._laid_out[key] = True
            if not self.place.not_runnable(size):
                try:
                    list(self._phases(NO_SCALER, plain))
                except WorldError as failure:
                    self._laid_out[key] = not _of_parallelize(failure)
        return not self._laid_out[key]

    def _control_of(self, scenario: Scenario) -> _Control:
        key = _without_scaler(scenario)
        if key not in self._controls:
            control = _Control(phases=tuple(self._followed(NO_SCALER, key)))
            while len(self._controls) >= CONTROLS:
                self._controls.pop(next(iter(self._controls)))
            self._controls[key] = control
        return self._controls[key]

    def _compare_controls(self, scenario: Scenario) -> str:
        """Where two runs without a scaler differ bitwise; else empty.

        Without this check a nondeterministic kernel would accuse the scaler.
        """
        control = self._control_of(scenario)
        if control.differs is None:
            again = tuple(self._followed(NO_SCALER, _without_scaler(scenario)))
            control.differs = first_difference(control.phases, again)
        return control.differs

    def _run_ranks(self, spec: str, scenario: Scenario) -> Phases:
        """The traces of each phase, up to the first that failed."""
        if spec != NO_SCALER:
            return self.traces(spec, scenario)
        try:
            # without a scaler the judged run is the control: it trains once
            return self._control_of(scenario).phases
        except WorldError as failure:
            return (traces_of(failure, judged=False),)

    def _followed(
        self, spec: str, scenario: Scenario
    ) -> Iterable[tuple[RankTrace, ...]]:
        """The phases; learned routers make the reference's choices in them.

        The reference trains first, as if no step were skipped. If the run then skips
        steps, it runs again with the choices of a reference that skips the same steps.
        """
        # with random layers on, scores are random, too: no choice to make again
        random = scenario.parsed_recipe.training.random
        if random or scenario.workload.one_rank:
            return self._phases(spec, scenario)
        if not self._found_out(scenario.model)[1]:
            return self._phases(spec, scenario)
        scale = 1.0 if spec == NO_SCALER else scenario.init_scale
        steps = scenario.steps
        schedule = Schedule(
            skipped=(frozenset(),) * steps,
            scales=(scale,) * steps,
            idle=(Idle(),) * steps,
        )
        for _ in range(TRIES):
            choices = self.place.alone(expected_choices, scenario, schedule)
            phases = tuple(self._phases(spec, scenario, choices))
            followed = followed_schedule(scenario, *phases)
            if replace(followed, scales=schedule.scales) == schedule:
                break
            # with other choices it may skip other steps, so it is compared again
            schedule = followed
        return phases

    def _found_out(self, model: str) -> tuple[WorkloadFacts, bool]:
        """The facts of a workload, and whether its routers choose in forward.

        Found once, on the process of the references.
        """
        if model not in self._known:
            self._known[model] = self.place.alone(_find_out, model)
            remember(model, self._known[model][0])
        return self._known[model]

    def _phases(
        self,
        spec: str,
        scenario: Scenario,
        choices: tuple[dict[str, Choices], ...] = (),
    ) -> Iterator[tuple[RankTrace, ...]]:
        saved: Saved | None = None
        for phase in scenario.phases:
            more = phase != scenario
            results = self.place.ranks(phase.world_size).run(
                observe_rank,
                phase,
                spec,
                self.folder,
                saved,
                more,
                choices,
                facts=self._found_out(phase.model)[0],
                files=self._files(phase),
            )
            saved = gathered(results) if more else None
            yield fold(results)

    def _files(self, scenario: Scenario) -> str | None:
        # a killed process leaves its folder: none is made where nothing is saved
        saves = scenario.workload.save_checkpoint is not None
        return self.place.files if saves else None

    def _watched(self, spec: str, scenario: Scenario, step: int) -> list[Watched]:
        """The watched ``step`` of each rank of the world that trained it."""
        saved: Saved | None = None
        facts, _ = self._found_out(scenario.model)
        for phase in scenario.phases:
            ranks, arguments = (
                self.place.ranks(phase.world_size),
                (phase, spec, self.folder, saved),
            )
            if step < phase.steps:
                files = self._files(phase)
                return ranks.run(observe_modules, *arguments, step, facts, files)
            saved = gathered(ranks.run(observe_rank, *arguments, True, facts=facts))
        raise AssertionError(f"no phase makes step {step}")


def _of_parallelize(failure: WorldError) -> bool:
    error = failure.root.exception
    return isinstance(error, WorkloadError) and error.call == "parallelize"


def _find_out(model: str) -> tuple[WorkloadFacts, bool]:
    return facts_of(model), chooses_in_forward(model)


def _on_one_process(scenario: Scenario, phases: Phases, due: bool) -> Parity | None:
    """Compare a run with its references, if it is due.

    Raises:
        WorkloadError: if no rank holds some element of the model.
    """
    check_whole(scenario.workload, phases[-1])
    return measure_parity(scenario, *phases) if due else None


def _without_scaler(scenario: Scenario) -> Scenario:
    """The scenario without scaler settings: all scalers share its control run."""
    return replace(scenario, init_scale=1.0, growth_interval=1, faults="none")


def _unjudged(stack: Case) -> Case | None:
    """The case that every scaler gets if the stack itself is wrong, else None."""
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
    """Nothing was compared: every law has this status, and the case is no pass."""
    return Case(
        scaler=spec,
        scenario=scenario,
        verdicts=_every_law(status, reason),
        evidence=None,
        seconds=0.0,
    )


def _every_law(status: Status, message: str) -> tuple[Verdict, ...]:
    return tuple(Verdict(law=each, status=status, message=message) for each in LAWS)
