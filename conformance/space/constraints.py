"""Constraints: which choices torch itself can train together, pair by pair.

Constraints are pairs, so that a covering set can be built one choice at a time. Each
function returns the reason why two choices exclude each other, or the empty string.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from ...fixtures import (
    MODELS,
    MULTI_TENSOR,
    PRECISIONS,
    TOPOLOGIES,
    CannotError,
    ResolvedWorkload,
    is_workload,
    resolve_workload,
    split_names,
)
from .random_layers import draws_in_forward
from .recipes import RECIPES, WORKLOAD_RECIPES
from .recomputation import why_not_recomputed

__all__ = ["PAIRS", "resharded_world", "why_not"]

Reason = Callable[[str, str], str]


def _topology_model(topology: str, model: str) -> str:
    models = TOPOLOGIES[topology].models
    if model in models:
        return ""
    return (
        f"topology {topology!r} cannot lay out the model {model!r}: it takes "
        f"{', '.join(models)}"
    )


def _topology_precision(topology: str, precision: str) -> str:
    if not PRECISIONS[precision].needs_fully_shard or TOPOLOGIES[topology].fully_shards:
        return ""
    able = [name for name, t in TOPOLOGIES.items() if t.fully_shards]
    return (
        f"precision {precision!r} needs fully_shard, which topology {topology!r} does "
        f"not use: choose {' or '.join(able)}"
    )


def _topology_optimizer(topology: str, optimizer: str) -> str:
    tensors = TOPOLOGIES[topology].tensors
    if optimizer == "sgd-fused" and tensors != "plain":
        able = [t.name for t in TOPOLOGIES.values() if t.tensors == "plain"]
        return f"torch's fused SGD takes no DTensor: choose one of {', '.join(able)}"
    if optimizer not in MULTI_TENSOR or tensors != "mixed":
        return ""
    able = [t.name for t in TOPOLOGIES.values() if t.tensors != "mixed"]
    return (
        f"torch's {optimizer} refuses the mixed tensors or meshes of topology "
        f"{topology!r}: choose one of {', '.join(able)}"
    )


def _topology_recipe(topology: str, recipe: str) -> str:
    chosen = TOPOLOGIES[topology]
    if RECIPES[recipe].training.clip and not chosen.clips:
        return "sequence-parallel norms have partial gradients, which cannot be clipped"
    if RECIPES[recipe].compile and not chosen.compiles:
        able = [t.name for t in TOPOLOGIES.values() if t.compiles]
        return f"only {', '.join(able)} are compiled here"
    return RECIPES[recipe].refuses(chosen)


def _recipe_model(recipe: str, model: str) -> str:
    if not RECIPES[recipe].compile or MODELS[model].compiles:
        return ""
    able = [m.name for m in MODELS.values() if m.compiles]
    return f"compiling the larger models takes minutes: choose {' or '.join(able)}"


def resharded_world(topology: str, world_size: int) -> tuple[str, int]:
    """The first world of a training that resumes on ``world_size`` of ``topology``.

    The same layout on half or on twice as many ranks, up to 4; else another layout that
    supports all models and precisions of this one.
    """
    chosen = TOPOLOGIES[topology]
    for ranks in (world_size // 2, 2 * world_size):
        if (ranks * 2 == world_size or ranks <= 4) and chosen.mesh_takes(ranks):
            return topology, ranks
    if chosen.default_world_size == 1:
        return "ddp", 2
    return ("fsdp", 2) if chosen.fully_shards else ("single", 1)


PAIRS: Mapping[tuple[str, str], Reason] = {
    ("topology", "model"): _topology_model,
    ("topology", "precision"): _topology_precision,
    ("topology", "optimizer"): _topology_optimizer,
    ("topology", "recipe"): _topology_recipe,
    ("recipe", "model"): _recipe_model,
}
"""(field, field) of a scenario -> why two values exclude each other."""


_NEEDS_FIXTURES = {
    "two-losses": "it takes the output of the model to be logits",
    "compiled": "compiling a user's model may take minutes",
    "resume-resharded": "another world would have to lay the workload out, too",
}
"""Recipes that need the models or layouts of fixtures, and why."""
_OPTIMIZERS = "train_step steps the optimizers that parallelize has made"
_TRAIN_STEP_DECIDES = {
    "unscale": "train_step decides whether it calls unscale_",
    "clip-value": "train_step clips by the norm alone (clip_norm)",
    "clip-and-step": "train_step decides how it clips (clip_norm)",
    "accumulate-no-sync": "train_step decides in which backward it reduces gradients",
    "two-optimizers": _OPTIMIZERS,
    "two-optimizers-unscale": _OPTIMIZERS,
    "scheduler": "train_step sets the schedule; the reference follows it",
}
"""Recipes that only ``train_step`` could follow, and why the judge cannot."""
_TRAIN_STEP_NEEDS = {
    "clip-norm": ("clip_norm", "clip_norm, to which its train_step clips"),
    "resume": ("save_checkpoint", "save_checkpoint and load_checkpoint"),
}
"""Recipe -> the attribute that it needs in a workload with ``train_step``."""


def _workload_precision(
    workload: ResolvedWorkload, topology: str, precision: str
) -> str:
    chosen = workload.topologies[topology]
    if not PRECISIONS[precision].needs_fully_shard or chosen.fully_shards:
        return ""
    return (
        f"precision {precision!r} needs a MixedPrecisionPolicy, and {topology!r} of "
        f"workload {workload.name} takes none: write parallelize(model, mesh, policy)"
    )


def _workload_recipe(workload: ResolvedWorkload, topology: str, recipe: str) -> str:
    reason = _workload_reason(workload, topology, recipe)
    return f"recipe {recipe!r}: {reason}" if reason else ""


def _workload_reason(workload: ResolvedWorkload, topology: str, recipe: str) -> str:
    chosen = WORKLOAD_RECIPES[recipe]
    if recipe in _NEEDS_FIXTURES:
        return f"not for your own workloads: {_NEEDS_FIXTURES[recipe]}"
    if workload.train_step is not None:
        if recipe in _TRAIN_STEP_DECIDES:
            return _TRAIN_STEP_DECIDES[recipe]
        # every workload has a model, so other recipes need nothing
        attribute, what = _TRAIN_STEP_NEEDS.get(recipe, ("model", ""))
        if getattr(workload, attribute) is None:
            return f"the workload has no {what}"
    if chosen.training.random and not draws_in_forward(workload.name):
        return f"it needs random layers, and {workload.name} has none"
    if chosen.recompute and (why := why_not_recomputed(workload.name)):
        return why
    if (
        chosen.parts > 1
        and workload.micro_batches is not None
        and not chosen.defer_sync
    ):
        return "it cuts rows, and the workload has micro_batches, in every recipe"
    # with shard, only a rank knows how many rows it has
    if chosen.parts > 1 and workload.micro_batches is None and workload.shard is None:
        try:
            layout = workload.topologies[topology]
            shares = layout.shares(layout.default_world_size)
            chosen.sizes(_rows(workload.name) // shares)
        except CannotError as error:
            return str(error)
    if chosen.optimizers == 1:
        return ""
    trains = {n: p.requires_grad for n, p in workload.model().named_parameters()}
    # an optimizer may be given nothing but frozen parameters, and then takes none
    if not all(any(trains[n] for n in part) for part in split_names(trains)):
        return (
            "it parts experts from the rest, else biases from weights: the model has "
            "not both, or trains not both"
        )
    return ""


@cache
def _rows(spec: str) -> int:
    return resolve_workload(spec).batch(0, 0).rows


_WORKLOAD_PAIRS: Mapping[
    tuple[str, str], Callable[[ResolvedWorkload, str, str], str]
] = {
    ("topology", "precision"): _workload_precision,
    ("topology", "recipe"): _workload_recipe,
}
"""Like :data:`PAIRS`, for a user's workload."""


def why_not(workload: ResolvedWorkload, choices: Mapping[str, str]) -> str:
    """The first reason why ``choices`` exclude each other, or the empty string.

    Args:
        workload: what is trained.
        choices: some fields of a scenario.
    """
    own = is_workload(workload.name)
    # the fixtures' rules do not know the topologies of a user's workload
    pairs = [*(_WORKLOAD_PAIRS if own else PAIRS)]
    for a, b in pairs:
        if a not in choices or b not in choices:
            continue
        at = choices[a], choices[b]
        text = _WORKLOAD_PAIRS[a, b](workload, *at) if own else PAIRS[a, b](*at)
        if text:
            return text
    return ""
