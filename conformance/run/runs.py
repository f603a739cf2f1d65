"""Train scenarios on ranks, and cache what several cases share.

Facts of a workload, and the last runs without a scaler, are computed once and cached.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ...fixtures import CannotError, WorkloadError, resolve_workload
from ...multiprocess import WorldError
from ..comparison.bounds import expected_choices
from ..comparison.laws.transparency import first_difference
from ..comparison.one_rank import first_norm_on_one_rank, plain_on_one_rank
from ..comparison.parity import followed_schedule
from ..comparison.reference import Reference, Schedule
from ..comparison.reference_run import Idle
from ..rank.fold import fold
from ..rank.modules import Watched
from ..rank.routing import Choices, chooses_in_forward
from ..rank.scaler_spec import NO_SCALER
from ..rank.trace import RankTrace, Saved
from ..rank.watched_step import observe_modules
from ..rank.worker import observe_rank
from ..space.facts import WorkloadFacts, exceeded_by, facts_of, remember
from ..space.scenario import Scenario
from .failures import traces_of
from .launcher import AloneError, Place

__all__ = ["Runs", "Traces", "is_of_parallelize", "without_scaler"]

T = TypeVar("T")
CONTROLS = 4
"""Number of cached runs without a scaler. The scalers of a scenario run one after
another, and few scenarios share a control run (3 of 224 in all presets)."""
TRIES = 3
"""Largest number of runs with router choices of a reference. The first reference skips
no step, and each later one skips the steps that the run before it skipped. If the skips
still change after the last run, the last run is compared."""
Traces = tuple[RankTrace, ...]
"""Traces of all ranks."""


@dataclass(kw_only=True)
class _Control:
    """A run without a scaler."""

    traces: Traces
    differs: str | None = None
    """First bitwise difference from a second run without a scaler. Empty if there is
    none; None if no second run was made yet."""


class Runs:
    """Trains scenarios on the ranks of a place."""

    def __init__(self, place: Place, folder: str) -> None:
        """Use the ranks of ``place``.

        Args:
            place: where ranks come from.
            folder: import path of the scalers.
        """
        self.place = place
        self._folder = folder
        self._controls: dict[Scenario, _Control] = {}
        self._facts: dict[str, tuple[WorkloadFacts, bool]] = {}
        self._never_laid_out: dict[tuple[str, str], bool] = {}
        self._hangs_alone: dict[tuple[str, str], str] = {}
        """(model, topology) -> why the workload did not end on one rank."""

    def run(self, spec: str, scenario: Scenario) -> Traces:
        """Train, or use the cached run without a scaler; return the traces.

        The traces of a failed run end at its failure.
        """
        if spec != NO_SCALER:
            return self.traces(spec, scenario)
        try:
            # without a scaler the checked run is the control, and trains once
            return self.control(scenario)
        except WorldError as failure:
            return traces_of(failure, has_scaler=False)

    def traces(self, spec: str, scenario: Scenario) -> Traces:
        """Train without the cache; return the traces, which may end at a failure.

        Args:
            spec: ``module:attribute`` of the scaler, or ``none``.
            scenario: scenario to train.

        Raises:
            WorldError: if the scaler did not cause the failure.
        """
        try:
            return self._followed(spec, scenario)
        except WorldError as failure:
            return traces_of(failure, has_scaler=spec != NO_SCALER)

    def control(self, scenario: Scenario) -> Traces:
        """Return the traces of the scenario without a scaler."""
        return self._control(scenario).traces

    def _control(self, scenario: Scenario) -> _Control:
        key = without_scaler(scenario)
        if key not in self._controls:
            control = _Control(traces=self._followed(NO_SCALER, key))
            while len(self._controls) >= CONTROLS:
                self._controls.pop(next(iter(self._controls)))
            self._controls[key] = control
        return self._controls[key]

    def control_differs(self, scenario: Scenario) -> str:
        """Describe the first bitwise difference of two runs without a scaler; else "".

        A difference shows that a kernel is nondeterministic, and not that the scaler
        has a fault.
        """
        control = self._control(scenario)
        if control.differs is None:
            again = self._followed(NO_SCALER, without_scaler(scenario))
            control.differs = first_difference(control.traces, again)
        return control.differs

    def _followed(self, spec: str, scenario: Scenario) -> Traces:
        """Train with the choices that routers make in the reference; return the traces.

        The reference trains first, as if no step were skipped. If the run then skips
        steps, it runs again with the choices of a reference that skips the same steps.
        """
        # with random layers scores are random, so no choice is made again
        random = scenario.parsed_recipe.training.random
        own = random or scenario.workload.one_rank
        if own or not self.facts(scenario.model)[1]:
            return self._trained(spec, scenario)
        scale = 1.0 if spec == NO_SCALER else scenario.init_scale
        steps = scenario.steps
        schedule = Schedule(
            skipped=(frozenset(),) * steps,
            scales=(scale,) * steps,
            idle=(Idle(),) * steps,
        )
        for _ in range(TRIES):
            choices = self.place.alone(expected_choices, scenario, schedule)
            traces = self._trained(spec, scenario, choices)
            followed = followed_schedule(scenario, traces)
            if replace(followed, scales=schedule.scales) == schedule:
                break
            # with other choices a step may be skipped, so compare again
            schedule = followed
        return traces

    def _trained(
        self,
        spec: str,
        scenario: Scenario,
        choices: tuple[dict[str, Choices], ...] = (),
    ) -> Traces:
        """Train a scenario; return the traces of all ranks."""
        results = self.place.ranks(scenario.world_size).run(
            observe_rank,
            scenario,
            spec,
            self._folder,
            self._saved(spec, scenario),
            choices=choices,
            facts=self.facts(scenario.model)[0],
            files=self._files(scenario),
        )
        return fold(results)

    def _saved(self, spec: str, scenario: Scenario) -> Saved | None:
        """Return the saved state with which the scaler begins, or None.

        The state is made by training another world.
        """
        other = scenario.saved_by
        if other is None or spec == NO_SCALER:
            return None
        traces = self.place.ranks(other.world_size).run(
            observe_rank,
            other,
            spec,
            self._folder,
            keep=True,
            facts=self.facts(other.model)[0],
        )
        return traces[0].saved

    def watched(self, spec: str, scenario: Scenario, step: int) -> list[Watched]:
        """Return for each rank the record of its modules in one step."""
        return self.place.ranks(scenario.world_size).run(
            observe_modules,
            scenario,
            spec,
            self._folder,
            self._saved(spec, scenario),
            step,
            self.facts(scenario.model)[0],
            self._files(scenario),
        )

    def facts(self, model: str) -> tuple[WorkloadFacts, bool]:
        """Return the facts of a workload, and True if its routers choose in forward.

        Computed once, on the process that trains references.
        """
        if model not in self._facts:
            facts, chooses = self.place.alone(_find_out, model)
            workload = resolve_workload(model)
            if workload.one_rank and workload.clip_norm is not None:
                norm = self.place.alone(first_norm_on_one_rank, model, in_group=True)
                if 0.0 < norm < math.inf:
                    facts = replace(facts, exceeded=exceeded_by(norm))
            self._facts[model] = facts, chooses
            remember(model, facts)
        return self._facts[model]

    def never_laid_out(self, scenario: Scenario) -> bool:
        """Return True if ``parallelize`` also raises without gradparity's choices.

        Then the workload is at fault. If only a recipe or a narrowed mesh makes
        ``parallelize`` raise, the scenario is skipped.
        """
        topology = scenario.parsed_topology
        if topology.narrowed:  # a narrowed form of a mesh that the workload declares
            layouts = scenario.workload.topologies.values()
            topology = next(t for t in layouts if t.parallel and not t.narrowed)
        key = scenario.model, topology.name
        if key not in self._never_laid_out:
            size = topology.default_world_size
            place = f"{topology.name}/{size}/fp32/{scenario.optimizer}/none"
            plain = Scenario.parse(f"{place}/model={scenario.model},steps=1")
            self._never_laid_out[key] = False
            if not self.place.not_runnable(size):
                try:
                    self._trained(NO_SCALER, plain)
                except WorldError as failure:
                    self._never_laid_out[key] = is_of_parallelize(failure)
        return self._never_laid_out[key]

    def beside_references(
        self, compare: Callable[..., T], scenario: Scenario, *args: Any
    ) -> T:
        """Call ``compare`` on the process that trains the scenario's references."""
        one_rank, facts = scenario.workload.one_rank, self.facts(scenario.model)[0]
        result: T = self.place.alone(
            _with_facts, facts, compare, scenario, *args, in_group=one_rank
        )
        return result

    def plain_on_one_rank(
        self, scenario: Scenario, traces: Traces
    ) -> tuple[Reference | None, str]:
        """Train on one rank without accumulation, with the scales of the ranks.

        Returns:
            The run and "", or None and the reason why the workload cannot train there.
        """
        key = scenario.model, scenario.topology
        if key in self._hangs_alone:
            return None, self._hangs_alone[key]
        facts = self.facts(scenario.model)[0]
        schedule = followed_schedule(scenario, traces)
        arguments = _with_facts, facts, plain_on_one_rank, scenario, schedule
        try:
            return self.place.alone(*arguments, in_group=True, trainings=1), ""
        except AloneError as error:  # a hand-written schedule may wait for a stage
            self._hangs_alone[key] = str(error)
            return None, str(error)
        except (WorkloadError, CannotError) as error:
            return None, str(error)

    def _files(self, scenario: Scenario) -> str | None:
        # a killed process leaves its folder, so make none if nothing is saved
        saves = scenario.workload.save_checkpoint is not None
        return self.place.files if saves else None


def is_of_parallelize(failure: WorldError) -> bool:
    """Return True if the workload's ``parallelize`` raised."""
    error = failure.root.exception
    return isinstance(error, WorkloadError) and error.call == "parallelize"


def without_scaler(scenario: Scenario) -> Scenario:
    """Return the scenario with neutral scaler settings, for a shared control run."""
    return replace(scenario, init_scale=1.0, growth_interval=1, faults="none")


def _with_facts(
    facts: WorkloadFacts, compare: Callable[..., T], scenario: Scenario, *args: Any
) -> T:
    """Call ``compare`` with the facts that the ranks have."""
    remember(scenario.model, facts)
    return compare(scenario, *args)


def _find_out(model: str) -> tuple[WorkloadFacts, bool]:
    return facts_of(model), chooses_in_forward(model)
