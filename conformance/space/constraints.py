"""Constraints: which choices torch itself can train together, pair by pair.

Pairs, so that a covering set can be built one choice at a time. Each gives the reason
why two choices do not go together, or the empty string.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

from ...fixtures import (
    MULTI_TENSOR,
    PRECISIONS,
    TOPOLOGIES,
    CannotError,
    Kit,
    is_workload,
    kit_of,
    split_names,
)
from .random_layers import draws_in_forward
from .recipes import OWN_RECIPES, RECIPES

__all__ = ["PAIRS", "other_world", "why_not"]

Reason = Callable[[str, str], str]


def _topology_data(topology: str, data: str) -> str:
    models = TOPOLOGIES[topology].models
    if data in models:
        return ""
    return (
        f"topology {topology!r} cannot lay out the model {data!r}: it takes "
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


_UNIFORM = ("single", "ddp", "fsdp1", "fsdp", "hsdp", "pp", "pp+fsdp")
"""Where all parameters of a rank are plain, or DTensors of one mesh."""


_PLAIN = ("single", "ddp", "fsdp1", "pp")
"""Where all parameters are plain tensors."""


def _topology_optimizer(topology: str, optimizer: str) -> str:
    if optimizer == "sgd-fused" and topology not in _PLAIN:
        return f"torch's fused SGD takes no DTensor: choose one of {', '.join(_PLAIN)}"
    if optimizer not in MULTI_TENSOR or topology in _UNIFORM:
        return ""
    return (
        f"torch's {optimizer} refuses the mixed tensors or meshes of topology "
        f"{topology!r}: choose one of {', '.join(_UNIFORM)}"
    )


def _topology_recipe(topology: str, recipe: str) -> str:
    if topology == "tp+sp" and recipe in ("clip-value", "clip-norm"):
        return "sequence-parallel norms have partial gradients, which cannot be clipped"
    if recipe == "compiled" and topology not in _COMPILED:
        return f"only {', '.join(_COMPILED)} are compiled here"
    return RECIPES[recipe].refuses(TOPOLOGIES[topology])


_COMPILED = ("single", "ddp", "fsdp", "tp")


def _recipe_data(recipe: str, data: str) -> str:
    if recipe == "compiled" and data != "digits":
        return "compiling the larger models takes minutes: choose data digits"
    return ""


def other_world(topology: str, world: int) -> tuple[str, int]:
    """Where a training begins that goes on on ``world`` ranks of ``topology``.

    The same layout on half or on twice as many ranks, up to 4; else another layout
    that takes all models and precisions of this one.
    """
    chosen = TOPOLOGIES[topology]
    for ranks in (world // 2, 2 * world):
        if (ranks * 2 == world or ranks <= 4) and chosen.mesh_takes(ranks):
            return topology, ranks
    if topology == "single":
        return "ddp", 2
    return ("fsdp", 2) if chosen.fully_shards else ("single", 1)


PAIRS: Mapping[tuple[str, str], Reason] = {
    ("topology", "data"): _topology_data,
    ("topology", "precision"): _topology_precision,
    ("topology", "optimizer"): _topology_optimizer,
    ("topology", "recipe"): _topology_recipe,
    ("recipe", "data"): _recipe_data,
}
"""(field, field) of a scenario -> why two values do not go together."""


_OTHERS_MODEL = {
    "two-losses": "it takes the output of the model to be logits",
    "compiled": "compiling somebody else's model may take minutes",
    "resume-elsewhere": "another world would have to lay the workload out, too",
}
"""Recipes that know the models or layouts of fixtures, and why."""
_OWN_STEP = (
    *("plain", "accumulate", "accumulate-uneven"),
    *("manual-scale", "disabled", "primed", "random"),
)
"""Recipes in which ``train_step`` makes all calls itself."""


def _own_precision(kit: Kit, topology: str, precision: str) -> str:
    chosen = kit.topologies[topology]
    if not PRECISIONS[precision].needs_fully_shard or chosen.fully_shards:
        return ""
    return (
        f"precision {precision!r} needs a MixedPrecisionPolicy, and {topology!r} of "
        f"workload {kit.name} takes none: write parallelize(model, mesh, policy)"
    )


def _own_recipe(kit: Kit, topology: str, recipe: str) -> str:
    reason = _own_reason(kit, topology, recipe)
    return f"recipe {recipe!r}: {reason}" if reason else ""


def _own_reason(kit: Kit, topology: str, recipe: str) -> str:
    chosen = OWN_RECIPES[recipe]
    if recipe in _OTHERS_MODEL:
        return f"not for workloads of one's own: {_OTHERS_MODEL[recipe]}"
    if kit.train_step is not None and recipe not in _OWN_STEP:
        return "it needs the judge's own loop, and the workload has a train_step"
    if chosen.training.random and not draws_in_forward(kit.name):
        return f"it needs random layers, and {kit.name} has none"
    if chosen.parts > 1 and kit.micro_batches is not None and not chosen.defer_sync:
        return "it cuts rows, and the workload has micro_batches, in every recipe"
    if chosen.parts > 1 and kit.micro_batches is None and kit.shard is None:
        try:
            chosen.sizes(_rows(kit.name) // kit.topologies[topology].shares)
        except CannotError as error:
            return str(error)
    if chosen.optimizers == 1:
        return ""
    if not all(split_names(name for name, _ in kit.model().named_parameters())):
        return (
            "it parts experts from the rest, else biases from weights: the model has "
            "not both"
        )
    return ""


@cache
def _rows(workload: str) -> int:
    return kit_of(workload).batch(0, 0).rows


_OWN_PAIRS: Mapping[tuple[str, str], Callable[[Kit, str, str], str]] = {
    ("topology", "precision"): _own_precision,
    ("topology", "recipe"): _own_recipe,
}
"""As :data:`PAIRS`, for a workload of the user's own."""


def why_not(kit: Kit, choices: Mapping[str, str]) -> str:
    """The first reason why ``choices`` do not go together, or the empty string.

    Args:
        kit: what is trained.
        choices: some fields of a scenario.
    """
    own = is_workload(kit.name)
    pairs = [*(_OWN_PAIRS if own else PAIRS)]
    for a, b in pairs:
        if a not in choices or b not in choices:
            continue
        at = choices[a], choices[b]
        text = _OWN_PAIRS[a, b](kit, *at) if own else PAIRS[a, b](*at)
        if text:
            return text
    return ""
