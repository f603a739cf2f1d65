"""Recipes: the order of calls in a training loop, as values.

:class:`Training` holds the settings that change the mathematics of a run; the reference
uses them. All other settings must not change the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...fixtures import CannotError, OfTopology, OfWorkload, ResolvedWorkload

__all__ = [
    "CLIP_NORM",
    "CLIP_VALUE",
    "CONTROL_RECIPES",
    "LR_DECAY",
    "MANUAL_STEP",
    "RECIPES",
    "Recipe",
    "Training",
    "frozen_names",
]

CLIP_VALUE = 2.0**-8
"""Limit of clipping by value: some gradients of every built-in model exceed it. For a
user's workload see ``clip_value_of``."""
CLIP_NORM = 2.0**-2
"""Limit of clipping by norm: first gradients of every built-in model exceed it. For a
user's workload see ``clip_norm_of``."""
LR_DECAY = 0.75
"""Factor of the learning rate at each step, if a scheduler runs."""
Z_LOSS = 2.0**-6
"""Weight of the second loss, the squared log-partition (z-loss, PaLM, 2022)."""


@dataclass(frozen=True)
class Training:
    """Settings of a recipe that change the mathematics."""

    clip: str = ""
    """Way to clip unscaled gradients: ``value`` or ``norm``; empty for no clipping."""
    frozen: bool = False
    """True to freeze the second half of the model; its gradients are None."""
    decay: bool = False
    """True to lower the learning rate at each step."""
    losses: int = 1
    """Number of losses; the second one is the z-loss."""
    random: bool = False
    """True to keep random layers on; then results are not compared with a reference."""

    def losses_of(self, first: Tensor, output: Any) -> list[Tensor]:
        """Return the 0-d losses of a micro-batch.

        Args:
            first: loss of the workload.
            output: output of the model; logits if there is a second loss.
        """
        if self.losses == 1:
            return [first]
        logits: Tensor = output
        wide = logits.to(first.dtype)
        return [first, Z_LOSS * wide.logsumexp(-1).square().mean()]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One training loop around the scaler."""

    text: str
    """Description in one sentence, for ``gradparity explain``."""
    training: Training = field(default_factory=Training)
    unscale: bool = False
    """True to call ``unscale_`` before ``step``."""
    clips_and_steps: bool = False
    """True if the scaler clips and steps in one call, ``clip_and_step``."""
    parts: int = 1
    """Number of backward passes in a step."""
    uneven: bool = False
    """True if the passes have unequal numbers of rows."""
    nearly_equal: bool = False
    """True if numbers of rows may differ by one."""
    defer_sync: bool = False
    """True to synchronise gradients in the last pass only."""
    optimizers: int = 1
    """Number of optimizers that step before one ``update``. The second one has the
    experts; without experts, the biases."""
    enabled: bool = True
    """Argument ``enabled`` of the scaler's constructor."""
    new_scale: float | None = None
    """Argument of ``update`` at the third step; None for no argument."""
    resume: bool = False
    """True if a new scaler and new optimizers load the saved states half-way."""
    resharded: bool = False
    """True if the scaler begins with a state that another world saved, see
    ``resharded_world``."""
    primed: bool = False
    """True if every rank calls ``scale`` once on zero before the first step."""
    compile: bool = False
    """True to compile the model (without code generation, which is not under test)."""
    recompute: bool = False
    """True if parts of the model drop their activations and are recomputed in
    backward."""
    of_stacks: bool = False
    """True for recipes that test the layout of a user's workload; built-in layouts do
    not need it."""

    def sizes(self, rows: int) -> list[int]:
        """Return the number of a rank's rows in each backward pass.

        Raises:
            CannotError: if this number of rows cannot be split.
        """
        first = (rows + 1) // 2
        last = max(1, rows // 6)
        least, more = divmod(rows, self.parts)
        sizes = [least + 1] * more + [least] * (self.parts - more)
        if self.uneven:
            sizes = [first, rows - first - last, last]
        # few rows may make unequal parts equal, so that the recipe would test nothing
        other = not self.nearly_equal and self.uneven == (len({*sizes}) == 1)
        if min(sizes) < 1 or other:
            kind = "unequal" if self.uneven else "equal"
            text = f"{rows} rows of a rank cannot be cut in {self.parts} {kind} parts"
            raise CannotError(text)
        return sizes

    @property
    def needs_of_topology(self) -> frozenset[OfTopology]:
        """Properties that the topology must have."""
        is_met_by_need = {
            OfTopology.CLIPPING: self.training.clip,
            OfTopology.COMPILATION: self.compile,
            OfTopology.PASSES: self.parts > 1 or self.training.losses > 1,
            OfTopology.NO_SYNC: self.defer_sync,
        }
        return frozenset(need for need, is_met in is_met_by_need.items() if is_met)

    @property
    def needs(self) -> frozenset[OfWorkload]:
        """Properties that the workload must have."""
        training = self.training
        of_norm = training.clip == "norm" and not self.clips_and_steps
        is_met_by_need = {
            OfWorkload.LOGITS: training.losses > 1,
            OfWorkload.COMPILED: self.compile,
            OfWorkload.OTHER_WORLDS: self.resharded,
            OfWorkload.OF_USER: self.of_stacks,
            # a train_step that clips by the norm may unscale as it likes
            OfWorkload.UNSCALES: self.unscale and not training.clip,
            OfWorkload.CLIPS_VALUES: training.clip == "value",
            OfWorkload.CLIPS_AND_STEPS: self.clips_and_steps,
            OfWorkload.SYNCS_LAST: self.defer_sync,
            OfWorkload.TWO_OPTIMIZERS: self.optimizers > 1,
            OfWorkload.SCHEDULES: training.decay,
            OfWorkload.CLIPS_NORMS: of_norm,
            OfWorkload.CHECKPOINTS: self.resume,
            # gradparity's own loop saves no generator
            OfWorkload.OWN_CHECKPOINTS: self.resume and training.random,
            OfWorkload.RANDOM_LAYERS: training.random,
            OfWorkload.RECOMPUTED: self.recompute,
            # rows that micro_batches cuts, even if gradients are not reduced in each
            # pass
            OfWorkload.ROWS: self.parts > 1 and not self.defer_sync,
            OfWorkload.TWO_KINDS: self.optimizers > 1,
        }
        return frozenset(need for need, is_met in is_met_by_need.items() if is_met)


RECIPES: dict[str, Recipe] = {
    "plain": Recipe(text="backward, step, update"),
    "unscale": Recipe(text="backward, explicit unscale_, step, update", unscale=True),
    "clip-value": Recipe(
        text="backward, unscale_, clip_grad_value_, step, update",
        training=Training(clip="value"),
        unscale=True,
    ),
    "clip-norm": Recipe(
        text="backward, unscale_, clipping by the global norm, step, update",
        training=Training(clip="norm"),
        unscale=True,
    ),
    "clip-and-step": Recipe(
        text="backward, clip_and_step of the scaler, where it has one, update",
        training=Training(clip="norm"),
        clips_and_steps=True,
    ),
    "accumulate": Recipe(
        text="two backward passes a step, synchronised in each", parts=2
    ),
    "accumulate-no-sync": Recipe(
        text="two backward passes a step, synchronised in the last",
        parts=2,
        defer_sync=True,
    ),
    "two-losses": Recipe(
        text="scale([loss, z-loss]), one backward", training=Training(losses=2)
    ),
    "two-optimizers": Recipe(
        text="step for weights and for biases (dense and experts), one update",
        optimizers=2,
    ),
    "two-optimizers-unscale": Recipe(
        text="unscale_ both, step both, one update", optimizers=2, unscale=True
    ),
    "scheduler": Recipe(
        text="a learning rate scheduler steps each step", training=Training(decay=True)
    ),
    "frozen": Recipe(
        text="the second half of the model does not train",
        training=Training(frozen=True),
    ),
    "manual-scale": Recipe(text="update(new_scale) at the third step", new_scale=64.0),
    "disabled": Recipe(text="a scaler constructed with enabled=False", enabled=False),
    "resume": Recipe(
        text="half-way, scaler and optimizers are loaded from saved states",
        resume=True,
    ),
    "resume-resharded": Recipe(
        text="the scaler begins with a state that one on another number of ranks saved",
        resharded=True,
    ),
    "primed": Recipe(
        text="every rank calls scale once before the first step: how users make "
        "pipelines run with scalers that know no stages",
        primed=True,
    ),
    "compiled": Recipe(text="torch.compile around the model", compile=True),
    "recompute": Recipe(
        text="activation checkpointing: blocks of the model run again in backward",
        recompute=True,
    ),
    "accumulate-uneven": Recipe(
        text="three backward passes a step, of unequal numbers of rows",
        parts=3,
        uneven=True,
        of_stacks=True,
    ),
    "accumulate-six": Recipe(
        text="six backward passes a step, of equal numbers of rows or nearly so",
        parts=6,
        nearly_equal=True,
        of_stacks=True,
    ),
    "random": Recipe(
        text="random layers are on, and what they draw is compared; in every other "
        "recipe they are off, and gradients are compared",
        training=Training(random=True),
        of_stacks=True,
    ),
    "random-recompute": Recipe(
        text="as random, with activation checkpointing: what runs again in backward "
        "draws the same numbers again",
        training=Training(random=True),
        recompute=True,
        of_stacks=True,
    ),
    "random-resume": Recipe(
        text="as random; half-way a new stack, with generators as a new process has "
        "them, goes on from the workload's own checkpoint",
        training=Training(random=True),
        resume=True,
        of_stacks=True,
    ),
}
"""Training recipes by name."""

CONTROL_RECIPES = tuple(
    name
    for name, recipe in RECIPES.items()
    if recipe.enabled
    and recipe.new_scale is None
    and not recipe.primed
    # without a scaler a recipe with unscale_ equals the recipe without it
    and (recipe.training.clip or not recipe.unscale)
    and not recipe.clips_and_steps
)
"""Recipes that are trained without a scaler. Recipes that would equal another one
without a scaler are left out."""

MANUAL_STEP = 2
"""Step (from 0) at which a recipe passes a scale to ``update``."""


def frozen_names(workload: ResolvedWorkload, names: Sequence[str]) -> set[str]:
    """Return the parameters to freeze: those of the second half of a model.

    Args:
        workload: workload to train; its ``frozen`` overrides the choice.
        names: names of all parameters, in the model's order.
    """
    if not workload.frozen:
        return {*names[(len(names) + 1) // 2 :]}
    return {n for n in names if n.startswith(workload.frozen)}
