"""Reference training: the same model and batches on one process, without a scaler.

References train on a separate rank (``Place.alone``), not in the process that runs the
checks.

A reference skips each step with a non-finite gradient on any rank, whatever the tested
scaler did. Variants take rows in another order and round differently (``noise/``).
Their distance from the fp64 run is the noise that a correct run may show, and
``bounds`` derives the bounds from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ...fixtures import Counts
from ..rank.routing import Choices, chooses_in_forward
from ..rank.trace import Constants
from ..space.scenario import Scenario
from .compare import Doubles
from .kept import Kept, bytes_of
from .noise.sides import BOTH, Inputs
from .reference_run import Idle, ReferenceRun, Setup, buffers_of_passes
from .settings import Settings
from .shards import Shards
from .variants import NOISY, TRUTH, Variant

__all__ = ["Reference", "Schedule", "reference_before", "train_reference"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Decisions of the sharded run that the reference follows."""

    skipped: tuple[frozenset[str], ...]
    """For each step: parameters that must not change, because a gradient is not
    finite."""
    scales: tuple[float, ...]
    """For each step: the loss scale; it has an effect in half precision only."""
    idle: tuple[Idle, ...] = ()
    """For each step: parameters without a gradient; only for a user's workload."""
    settings: tuple[Settings, ...] = ()
    """For each step: settings that the workload's own schedules changed. Empty if none
    change, so that runs with and without a schedule share references."""
    shards: Shards = ()
    """Shards in which optimizers with a rounded state hold the parameters, if known;
    see [Note: Rounded state] in bounds."""


@dataclass(frozen=True, eq=False)
class Reference:
    """One reference run: for each step, flat fp64 arrays by parameter name.

    A reference is equal only to itself, so results can be cached by their references.
    """

    losses: tuple[float, ...]
    gradients: tuple[dict[str, Doubles], ...]
    updates: tuple[dict[str, Doubles], ...]
    """For each step: parameter or buffer after the step, minus its initial value."""
    start: dict[str, Doubles]
    """Parameters and compared buffers before the first step."""
    initial: str = ""
    """Digest of the initial weights, before their dtype was changed."""
    norms: tuple[float, ...] = ()
    """For each step: norm of the whole unscaled gradient, before clipping."""
    loss_dtype: str = ""
    """Name in torch of the losses' dtype; empty if they are plain numbers."""
    counts: tuple[Counts, ...] = ()
    """For each step: total counts, if the loss is (sum, count)."""
    choices: tuple[dict[str, Choices], ...] = ()
    """For each step: choices of learned routers, by kind of call."""
    errors: tuple[dict[str, float], ...] = ()
    """For each step: largest error of the routers' scores."""
    settings: tuple[Settings, ...] = ()
    """For each step: settings with which the optimizers step."""
    constants: tuple[dict[str, Constants], ...] = ()
    """For each step: parameter -> settings that schedules leave as they are."""
    averages: tuple[dict[str, Doubles], ...] = ()
    """For each step: running average of the weights minus the initial ones, if the
    workload on one rank reports it."""
    drew: str = ""
    """Description of the first function that drew random numbers on one rank."""
    generators: tuple[str, ...] = ()
    """For each step on one rank: digest of torch's generator state after it."""
    inputs: tuple[Inputs, ...] = ()
    """For each step: sampled inputs of functions whose derivative jumps."""

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        n_bytes = bytes_of((*self.gradients, *self.updates, *self.averages, self.start))
        return n_bytes + sum(inputs.nbytes for step in self.inputs for inputs in step)


LEAST = len(NOISY) + 3 + len(BOTH)
"""Number of references that are cached whatever their size: those of one scenario."""


def train_reference(
    scenario: Scenario, schedule: Schedule, variant: Variant
) -> Reference:
    """Train one reference run on this process, with a cache.

    In fp32, scaling by a power of two is exact. So the scales have no effect there and
    are left out of the cache key.
    """
    half = _is_half(scenario, variant)
    scales = schedule.scales if half else (1.0,) * scenario.steps
    precision = scenario.precision if half else "fp32"
    idle = schedule.idle or (Idle(),) * scenario.steps
    settings = schedule.settings or ((),) * scenario.steps
    return _train(
        _key(scenario, schedule),
        precision,
        schedule.skipped,
        scales,
        idle,
        settings,
        variant,
    )


def reference_before(
    scenario: Scenario, schedule: Schedule, variant: Variant, step: int
) -> ReferenceRun:
    """Return a reference run that has made all steps before ``step``."""
    half = _is_half(scenario, variant)
    precision = scenario.precision if half else "fp32"
    run = ReferenceRun(_key(scenario, schedule), precision, variant)
    for number in range(step):
        scale = schedule.scales[number] if half else 1.0
        idle = schedule.idle[number] if schedule.idle else Idle()
        settings = schedule.settings[number] if schedule.settings else ()
        run.step(number, schedule.skipped[number], scale, idle, settings)
    return run


def _is_half(scenario: Scenario, variant: Variant) -> bool:
    return not (scenario.parsed_precision.is_full or variant.double)


def _key(scenario: Scenario, schedule: Schedule) -> Setup:
    return Setup(
        model=scenario.model,
        optimizer=scenario.optimizer,
        steps=scenario.steps,
        seed=scenario.seed,
        loss_factor=scenario.loss_factor,
        training=scenario.parsed_recipe.training,
        reduced_in=scenario.reduced_in,
        shards=schedule.shards,
    )


@partial(Kept, least=LEAST)
def _train(
    key: Setup,
    precision_name: str,
    skipped: tuple[frozenset[str], ...],
    scales: tuple[float, ...],
    idle: tuple[Idle, ...],
    settings: tuple[Settings, ...],
    variant: Variant,
) -> Reference:
    run = ReferenceRun(key, precision_name, variant)
    if run.buffers:
        lost = buffers_of_passes(key.model)
        run.buffers = {n: s for n, s in run.buffers.items() if n not in lost}
    if chooses_in_forward(key.model) and variant != TRUTH:
        ones = (1.0,) * key.steps
        # noisy runs choose as the truth does, since another expert is another model and
        # no noise
        truth = _train(key, "fp32", skipped, ones, idle, settings, TRUTH)
        run.replayed = truth.choices
    for step in range(key.steps):
        run.step(step, skipped[step], scales[step], idle[step], settings[step])
    return Reference(
        losses=tuple(run.losses),
        gradients=tuple(run.gradients),
        updates=tuple(run.updates),
        start=run.start,
        initial=run.initial,
        norms=tuple(run.norms),
        loss_dtype=run.loss_dtype,
        counts=tuple(run.counts),
        choices=tuple(run.choices),
        errors=tuple(run.errors),
        settings=tuple(run.settings),
        constants=tuple(run.constants),
        inputs=tuple(run.inputs),
    )
