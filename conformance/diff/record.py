"""One side of a diff, in its own interpreter: train and write a recording.

    python -m gradparity.conformance.diff.record REQUEST

Each scenario runs twice on the ranks; correct runs on one process in other orders of
reduction measure the effect of rounding (``judge.bounds``). Nothing is judged here.
"""

from __future__ import annotations

import math
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from ...fixtures import WorkloadError
from ...multiprocess import WorldError
from ..judge.bounds import SAFETY_FACTOR, ParityBounds, make_parity_bounds
from ..judge.compare import sizes
from ..judge.measured import gradient_of
from ..judge.parity import followed_schedule, mean_loss, moved
from ..rank.devices import Devices
from ..rank.observe import digest
from ..rank.scaler_spec import load_scaler
from ..rank.trace import RankTrace, StepTrace
from ..run.launcher import AloneError, Pool
from ..run.runner import Phases, Runner
from ..run.session import RunSettings
from ..space.catalogue import Selection
from ..space.scenario import Scenario
from ..status import EXIT_CODES, USAGE, UsageError, as_number, plain
from .recording import (
    Arrays,
    Part,
    Request,
    Run,
    Step,
    Tensor,
    add_array,
    write_arrays,
    write_recording,
)

__all__ = ["main", "record"]

Doubles = NDArray[np.float64]
Size = tuple[float, float]
Held = Mapping[int, tuple[NDArray[np.floating], NDArray[np.int64]]]
"""Rank -> values, and the place of each in the flat full tensor."""
_NOTHING_KNOWN = (math.inf, math.inf)
_STORED = 2.0**-24
"""Roundoff of fp32, in which parameters are stored before the first step."""


def main(argv: Sequence[str] | None = None) -> int:
    """Record one side.

    Args:
        argv: the file of a :class:`Request`; None takes the process's own.

    Returns:
        0 recorded, 2 bad usage, with one line on stderr, 3 the harness broke.
    """
    (path,) = sys.argv[1:] if argv is None else argv
    request = msgspec.json.decode(Path(path).read_bytes(), type=Request)
    try:
        record(request)
    except UsageError as error:
        print(plain(str(error)), file=sys.stderr)
        return USAGE
    except Exception:  # our own fault: a bug report needs the whole traceback
        traceback.print_exc()
        return EXIT_CODES["error"]
    return 0


def record(request: Request) -> None:
    """Run the request and write the recording into ``request.out``.

    Raises:
        UsageError: for unknown names, or a workload that breaks its protocol.
    """
    folder = os.getcwd()
    settings = RunSettings(
        scalers=request.scalers,
        selection=Selection.of(request),
        preset=request.preset,
        scenarios=request.scenarios,
    )
    runs = []
    with Pool(Devices(), request.timeout_s) as place:
        scenarios = settings.chosen(place)
        load_scaler(request.scaler, folder)
        place.check([phase.world_size for s in scenarios for phase in s.phases])
        runner = Runner(folder=folder, place=place)
        for number, scenario in enumerate(scenarios):
            print(f"{number + 1}/{len(scenarios)} {plain(scenario.id)}", flush=True)
            run, arrays = _recorded(runner, request.scaler, scenario)
            write_arrays(Path(request.out), number, arrays)
            runs.append(run)
    write_recording(Path(request.out), tuple(runs), str(torch.__version__))


def _recorded(runner: Runner, scaler: str, scenario: Scenario) -> tuple[Run, Arrays]:
    run = Run(
        scenario=scenario.id,
        pairs_with=_without_workload(scenario.id),
    )
    arrays: Arrays = {}
    try:
        phases = runner.traces(scaler, scenario)
        # twice: what differs between two runs of one side is no difference of the sides
        again = runner.traces(scaler, scenario)
        grouped = scenario.workload.one_rank
        bounds = runner.place.alone(_bounds, scenario, phases, in_group=grouped)
        writer = _Writer(scenario, phases, again, arrays, bounds)
        return writer.written(run), arrays
    except (WorkloadError, AloneError) as error:
        return msgspec.structs.replace(run, problem=plain(str(error))), {}
    except WorldError as failure:
        headline = plain(failure.root.headline)
        # an exception is the stack's behaviour, which may differ between the sides; a
        # rank that died proves nothing
        of_stack = isinstance(failure.root.exception, WorkloadError)
        name = "problem" if of_stack else "broken"
        return msgspec.structs.replace(run, **{name: headline}), {}
    except Exception as error:  # of this scenario only: the others go on
        traceback.print_exc()
        text = plain(f"{type(error).__name__}: {error}")[:400]
        return msgspec.structs.replace(run, broken=text), {}


def _without_workload(scenario: str) -> str:
    # two workloads are compared scenario by scenario, so their names must not count
    return re.sub(r"/?\bmodel=[^,/]*,?", "/", scenario).removesuffix("/")


def _bounds(scenario: Scenario, phases: Phases) -> ParityBounds | None:
    """Train the references of a run that came to its end, and compute its bounds."""
    whole = all(t.reached(scenario.steps - 1) for t in phases[-1])
    if not whole or scenario.parsed_recipe.training.random:
        return None
    return make_parity_bounds(scenario, followed_schedule(scenario, *phases))


class _Writer:
    """Makes the record of one scenario of its two runs."""

    def __init__(
        self,
        scenario: Scenario,
        phases: Phases,
        again: Phases,
        arrays: Arrays,
        bounds: ParityBounds | None,
    ) -> None:
        self.scenario = scenario
        self.phases = phases
        self.again = again
        self.arrays = arrays
        self.unsteady = ""
        self.bounds = bounds
        self.skipped = followed_schedule(scenario, *phases).skipped

    def written(self, run: Run) -> Run:
        """``run`` with everything that was observed."""
        steps = [
            self._step(number, phase, seen, twin)
            for number, (phase, seen, twin) in enumerate(self._steps())
        ]
        last = self.phases[-1]
        problem = next((t.problem for t in last if t.problem), None)
        text = next((f"rank {t.rank} hangs: {t.hung}" for t in last if t.hung), "")
        if problem is not None:
            text = f"step {problem.step}: {problem.call} raised {problem.error}"
        return msgspec.structs.replace(
            run,
            problem=plain(text),
            unsteady=self.unsteady,
            start=self._start(self.phases[0]),
            steps=tuple(steps),
        )

    def _steps(
        self,
    ) -> list[tuple[tuple[RankTrace, ...], list[StepTrace], list[StepTrace]]]:
        """(ranks, one step of each, the same of the second run), completed by all."""
        found = []
        for phase, twin in zip(self.phases, self.again, strict=False):
            # a run that stopped early has fewer steps
            done = min(t.completed for t in (*phase, *twin))
            for n in range(done):
                seen = [t.steps[n] for t in phase], [t.steps[n] for t in twin]
                found.append((phase, *seen))
        return found

    def _start(self, phase: Sequence[RankTrace]) -> dict[str, Tensor]:
        held: dict[str, dict[int, tuple[Any, NDArray[np.int64]]]] = {}
        for trace in phase:
            for name, values in trace.start.items():
                held.setdefault(name, {})[trace.rank] = (values, trace.index[name])
        return {name: self._started(parts) for name, parts in held.items()}

    def _started(self, parts: Held) -> Tensor:
        full = np.zeros(_elements(places for _, places in parts.values()))
        for values, places in parts.values():
            full[places] = values
        norm, largest = sizes(full)
        floor = SAFETY_FACTOR * _STORED
        return Tensor(
            parts=tuple(self._part(rank, *part) for rank, part in parts.items()),
            elements=len(full),
            size=(as_number(norm), as_number(largest)),
            bound=(as_number(floor * norm), as_number(floor * largest)),
        )

    def _numbers(self, values: Mapping[int, float], bound: float) -> Tensor:
        size, limit = abs(next(iter(values.values()))), as_number(bound)
        return Tensor(
            parts=tuple(
                self._part(rank, np.array([value]), np.zeros(1, np.int64))
                for rank, value in values.items()
            ),
            elements=1,
            size=(as_number(size), as_number(size)),
            bound=(limit, limit),
        )

    def _step(
        self,
        step: int,
        phase: Sequence[RankTrace],
        seen: list[StepTrace],
        twin: list[StepTrace],
    ) -> Step:
        bounds = self.bounds
        batch = self.scenario.workload.batch(step, self.scenario.seed)
        loss = mean_loss(seen)
        norms = {
            trace.rank: at.reported_norm
            for trace, at in zip(phase, seen, strict=True)
            if at.reported_norm is not None
        }
        names = dict.fromkeys(name for trace in phase for name in trace.index)
        gradients = {n: self._gradient(step, phase, seen, twin, n) for n in names}
        updates = {n: self._update(step, phase, seen, twin, n) for n in names}
        tensors: dict[str, dict[str, Tensor]] = {
            "gradient": {n: t for n, t in gradients.items() if t is not None},
            "update": {n: t for n, t in updates.items() if t is not None},
        }
        for kind, values in (
            ("loss", {} if loss is None else {0: loss}),
            ("norm", norms),
        ):
            bound = getattr(bounds, kind)[step][kind][0] if bounds else math.inf
            if values:
                tensors[kind] = {kind: self._numbers(values, bound)}
        return Step(
            batch="-".join(digest(tensor) for tensor in batch.tensors),
            scale=[as_number(at.scale_after) for at in seen],
            stepped=[at.parameters_changed for at in seen],
            tensors=tensors,
        )

    def _gradient(
        self,
        step: int,
        phase: Sequence[RankTrace],
        seen: list[StepTrace],
        twin: list[StepTrace],
        name: str,
    ) -> Tensor | None:
        here, there = (list(zip(phase, steps, strict=True)) for steps in (seen, twin))
        values, again = (
            {
                t.rank: (gradient_of(ranks, t, at, name), t.places(at, name))
                for t, at in ranks
                if name in at.gradients
            }
            for ranks in (here, there)
        )
        size = bound = _NOTHING_KNOWN
        if self.bounds is not None and name not in self.skipped[step]:
            true = self.bounds.truth.gradients[step].get(name)
            size = (0.0, 0.0) if true is None else sizes(true)
            bound = (0.0, 0.0) if true is None else self.bounds.gradient[step][name]
        what = f"the gradient of {name} at step {step}"
        return self._tensor(what, values, again, (size, bound), None)

    def _update(
        self,
        step: int,
        phase: Sequence[RankTrace],
        seen: list[StepTrace],
        twin: list[StepTrace],
        name: str,
    ) -> Tensor | None:
        values, again = (
            {
                t.rank: (moved(t, at, name), t.index[name])
                for t, at in zip(phase, steps, strict=True)
                if name in at.parameters
            }
            for steps in (seen, twin)
        )
        size, bound, weights = _NOTHING_KNOWN, _NOTHING_KNOWN, None
        if self.bounds is not None:
            size = sizes(self.bounds.truth.updates[step][name])
            bound = self.bounds.update[step][name]
            weights = self.bounds.weights[step][name]
        what = f"the update of {name} at step {step}"
        return self._tensor(what, values, again, (size, bound), weights)

    def _tensor(
        self,
        what: str,
        values: Held,
        again: Held,
        reference: tuple[Size, Size],
        weights: Doubles | None,
    ) -> Tensor | None:
        """The tensor, its bound widened by what the second run shows."""
        if not values:
            return None
        size, (norm, largest) = reference
        for rank, (first, places) in values.items():
            second = again[rank][0] if rank in again else np.full_like(first, np.nan)
            if first.tobytes() == second.tobytes():
                continue
            scaled = 1.0 if weights is None else weights[places]
            apart = sizes((first.astype(np.float64) - second) * scaled)
            if not (apart[0] <= norm and apart[1] <= largest):
                self.unsteady = self.unsteady or f"{what} on rank {rank}"
            norm = max(norm, SAFETY_FACTOR * apart[0])
            largest = max(largest, SAFETY_FACTOR * apart[1])
        counted = weights is not None and not (weights == 1.0).all()
        return Tensor(
            parts=tuple(self._part(rank, *held) for rank, held in values.items()),
            elements=_elements(places for _, places in values.values()),
            size=(as_number(size[0]), as_number(size[1])),
            bound=(as_number(norm), as_number(largest)),
            weights=add_array(self.arrays, weights.astype(np.float32))
            if weights is not None and counted
            else "",
        )

    def _part(
        self, rank: int, values: NDArray[np.floating], places: NDArray[np.int64]
    ) -> Part:
        return Part(
            rank, add_array(self.arrays, values), add_array(self.arrays, places)
        )


def _elements(places: Iterable[NDArray[np.int64]]) -> int:
    return max((int(p.max()) + 1 for p in places if p.size), default=0)


if __name__ == "__main__":
    sys.exit(main())
