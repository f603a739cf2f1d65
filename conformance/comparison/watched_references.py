"""Reference values and bounds of the tensors at module boundaries.

A plain reference runs the model on the rows of a single rank. A reference on one rank
runs the workload's own ``train_step`` on the rows of all ranks together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from ...fixtures import Batch, ResolvedWorkload
from ..rank.modules import (
    INPUT,
    INPUT_GRADIENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    Boundary,
    ModuleLog,
    Watched,
    watch_modules,
)
from ..space.scenario import Scenario
from .compare import Doubles, Pair, Spread, relative_floor, sizes
from .noise.sides import JumpLog, sides_of
from .noise.weights import jittered
from .one_rank import watched_on_one_rank
from .reference import Schedule, reference_before
from .reference_run import ReferenceRun
from .variants import PLAIN, TRUTH

__all__ = ["Expected", "OnOneProcess", "OnOneRank", "parts_of"]


@dataclass(frozen=True)
class Expected:
    """Reference value and bound of one tensor."""

    truth: Doubles
    bound: Pair
    """Largest permitted norm, and largest permitted element, of the error."""


def parts_of(workload: ResolvedWorkload, step: int, seed: int) -> list[Batch]:
    """Return the micro-batches of the whole batch of one step."""
    batch, own = workload.batch(step, seed), workload.micro_batches
    return [batch] if own is None else own(batch)


class OnOneProcess:
    """Plain references, trained up to one step: the truth and a noisy run."""

    def __init__(self, scenario: Scenario, schedule: Schedule, step: int) -> None:
        self.scenario = scenario
        self.truth = reference_before(scenario, schedule, TRUTH, step)
        self.plain = reference_before(scenario, schedule, PLAIN, step)
        self.whole = scenario.workload.batch(step, scenario.seed)
        self.n_parts = len(parts_of(scenario.workload, step, scenario.seed))
        self.of_whole = self.always_whole = False
        precision = scenario.parsed_precision
        self.roundoff = precision.roundoff
        self.scale = 1.0 if precision.is_full else schedule.scales[step]

    def run_on_whole(self, shares: Sequence[Sequence[Batch]]) -> bool:
        """Run later references on the whole batch, if each rank has one micro-batch.

        Args:
            shares: micro-batches of each rank.

        Returns:
            True if references now run on the whole batch.
        """
        self.always_whole = self.n_parts == 1 and all(len(s) == 1 for s in shares)
        return self.always_whole

    def expected(self, each: Watched) -> tuple[dict[Boundary, Expected], ModuleLog]:
        """Run a rank's batches; return the tensors with bounds, and the truth's log."""
        batches = [self._of_whole_rows(batch) for batch in each.batches]
        with JumpLog() as due:
            truth = self._watched(self.truth, batches)
        with JumpLog() as had:
            noisy = [self._watched(self.plain, batches)]
        # a second noisy run, in which rounded weights stand for another order of sums
        generator = torch.Generator().manual_seed(0)
        with jittered(self.plain.parameters.values(), self.roundoff, generator):
            noisy.append(self._watched(self.plain, batches))
        sides = []
        for side in sides_of([due.inputs], [had.inputs]):
            with JumpLog(side):
                sides.append(self._watched(self.plain, batches))
        return _bounded(truth, noisy, sides, self.roundoff), truth

    def _of_whole_rows(self, batch: Batch) -> Batch:
        """Return the batch to run for a rank's micro-batch: itself, or the whole batch.

        The whole batch is run in two cases: the micro-batch holds only parts of rows,
        or rows depend on each other, as in a batch norm over all ranks. The rank's
        tensors are then compared with parts of the reference's tensors.
        """
        shapes = [[t.shape[1:] for t in b.tensors] for b in (batch, self.whole)]
        self.of_whole = self.always_whole or shapes[0] != shapes[1]
        return self.whole if self.of_whole else batch

    def _watched(self, run: ReferenceRun, batches: Sequence[Batch]) -> ModuleLog:
        names = {module: name for name, module in run.model.named_modules()}
        scale = 1.0 if run.variant.double else self.scale
        run.weights_of_heads()  # runs a forward, so it must come before the watch
        with watch_modules([run.model], names) as log:
            for batch in batches:
                run.one_pass(batch, scale)
        run.model.zero_grad()
        for boundary, passed in log.passed.items() if scale != 1.0 else ():
            if boundary.kind in (INPUT_GRADIENT, OUTPUT_GRADIENT):
                log.passed[boundary] = replace(passed, values=passed.values / scale)
        return log


class OnOneRank:
    """Reference trained by ``train_step`` on one rank, with the rows of all ranks."""

    of_whole = True

    def __init__(self, scenario: Scenario, schedule: Schedule, step: int) -> None:
        self.truth, noisy, sides = watched_on_one_rank(scenario, schedule, step)
        roundoff = scenario.parsed_precision.roundoff
        self.bounded = _bounded(self.truth, noisy, sides, roundoff)

    def expected(self, each: Watched) -> tuple[dict[Boundary, Expected], ModuleLog]:
        """Return the true value and the bound of each tensor, and the log of the truth.

        If the rank calls modules more or less often than the reference does, it is
        unknown which calls correspond, and nothing is compared.
        """
        mine, due = ([len(rows) for rows in log.rows] for log in (each.log, self.truth))
        if mine == due:
            return self.bounded, self.truth
        each.log.unpaired = each.log.unpaired or (
            f"its outermost modules were called {mine} times, and {due} times on one "
            "rank"
        )
        return {}, self.truth


def _bounded(
    truth: ModuleLog,
    noisy: Sequence[ModuleLog],
    sides: Sequence[ModuleLog],
    roundoff: float,
) -> dict[Boundary, Expected]:
    """Return truth and bound of each tensor, derived as in :mod:`.bounds`."""
    values = {b: p.values.astype(np.float64) for b, p in truth.passed.items()}
    spreads: dict[Boundary, Spread] = {}
    for boundary, value in values.items():
        spread = Spread(noise=_largest_distance(noisy, boundary, value))
        if (plain := noisy[0].passed.get(boundary)) is not None:
            effect = _largest_distance(sides, boundary, plain.values)
            spread = replace(spread, effect=effect)
        spreads[boundary] = spread
    expected = {}
    # activations and gradients round differently, so each group has its own median
    # noise
    for kinds in ((INPUT, OUTPUT), (INPUT_GRADIENT, OUTPUT_GRADIENT)):
        group = {b: spreads[b] for b in values if b.kind in kinds}
        own = {b: sizes(values[b]) for b in group}
        floor = relative_floor(group, own, roundoff)
        for b, spread in group.items():
            least = floor[0] * own[b][0], floor[1] * own[b][1]
            expected[b] = Expected(values[b], spread.bound(least))
    return expected


def _largest_distance(
    logs: Sequence[ModuleLog], boundary: Boundary, value: NDArray[np.floating]
) -> Pair:
    """Return the largest distance of runs from a value; inf if a run has no value."""
    norms, largest_ones = [0.0], [0.0]
    for log in logs:
        passed = log.passed.get(boundary)
        if passed is None or passed.values.shape != value.shape:
            return np.inf, np.inf
        norm, largest = sizes(passed.values.astype(np.float64) - value)
        norms.append(norm)
        largest_ones.append(largest)
    return max(norms), max(largest_ones)
