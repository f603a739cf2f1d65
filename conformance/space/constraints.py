"""Constraints: which pairs of choices can be trained together.

Two choices fit together if one has all that the other needs (``fixtures/needs.py``).
Constraints are pairs, so that a covering set can be built one choice at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...fixtures import (
    MODELS,
    OPTIMIZER_NEEDS,
    PRECISIONS,
    TOPOLOGIES,
    CannotError,
    OfModel,
    OfTopology,
    OfWorkload,
    ResolvedWorkload,
    first_lacking,
    resolve_workload,
)
from .facts import FOUND_OUT, facts_of
from .recipes import RECIPES

__all__ = ["PAIRS", "resharded_world", "why_not"]


def _topology_model(workload: ResolvedWorkload, topology: str, model: str) -> str:
    needs = workload.topologies[topology].needs
    lacking = first_lacking(OfModel, needs, resolve_workload(model).has)
    if lacking is None:
        return ""
    able = [m.name for m in MODELS.values() if needs <= m.has]
    return (
        f"topology {topology!r} cannot lay out the model {model!r}, which does not "
        f"have {lacking.value}: choose {' or '.join(able)}"
    )


def _why_not_on(
    workload: ResolvedWorkload, topology: str, chosen: str, needs: frozenset[OfTopology]
) -> str:
    lacking = first_lacking(OfTopology, needs, workload.topologies[topology].has)
    if lacking is None:
        return ""
    able = [t.name for t in workload.topologies.values() if needs <= t.has]
    others = f": choose {' or '.join(able)}" if able else ""
    return f"{chosen} with topology {topology!r}: {lacking.value}{others}"


def _topology_precision(
    workload: ResolvedWorkload, topology: str, precision: str
) -> str:
    needs = PRECISIONS[precision].needs
    return _why_not_on(workload, topology, f"precision {precision!r}", needs)


def _topology_optimizer(
    workload: ResolvedWorkload, topology: str, optimizer: str
) -> str:
    needs = OPTIMIZER_NEEDS.get(optimizer, frozenset())
    return _why_not_on(workload, topology, f"optimizer {optimizer!r}", needs)


def _topology_recipe(workload: ResolvedWorkload, topology: str, recipe: str) -> str:
    chosen = RECIPES[recipe]
    needs = chosen.needs_of_topology
    text = _why_not_on(workload, topology, f"recipe {recipe!r}", needs)
    # with shard, the number of rows is known only on a rank
    own = workload.shard or workload.micro_batches
    if text or chosen.parts == 1 or own or OfWorkload.OF_USER not in workload.has:
        return text
    layout = workload.topologies[topology]
    try:
        rows = facts_of(workload.name).rows
        chosen.sizes(rows // layout.shares(layout.default_world_size))
    except CannotError as error:
        return f"recipe {recipe!r}: {error}"
    return ""


def _recipe_model(_: ResolvedWorkload, recipe: str, model: str) -> str:
    needs, has = RECIPES[recipe].needs, resolve_workload(model).has
    why, lacking = "", first_lacking(OfWorkload, needs, has | FOUND_OUT)
    if lacking is not None:
        why = lacking.value
    elif not needs <= has:
        lacks = facts_of(model).lacks
        why = next((lacks[need] for need in lacks if need in needs - has), "")
    return f"recipe {recipe!r}: {why}" if why else ""


def resharded_world(topology: str, world_size: int) -> tuple[str, int]:
    """Return (topology, ranks) of a world that saves the state for this world.

    A recipe lets this world's scaler begin with that state. The layout is the same, on
    half as many ranks or on twice as many, up to 4. If neither fits, another layout is
    used, which supports all models and precisions of this one.
    """
    chosen = TOPOLOGIES[topology]
    for ranks in (world_size // 2, 2 * world_size):
        if (ranks * 2 == world_size or ranks <= 4) and chosen.mesh_takes(ranks):
            return topology, ranks
    if chosen.default_world_size == 1:
        return "ddp", 2
    return ("fsdp", 2) if chosen.fully_shards else ("single", 1)


PAIRS: Mapping[tuple[str, str], Callable[[ResolvedWorkload, str, str], str]] = {
    ("topology", "model"): _topology_model,
    ("topology", "precision"): _topology_precision,
    ("topology", "optimizer"): _topology_optimizer,
    ("recipe", "model"): _recipe_model,
    ("topology", "recipe"): _topology_recipe,
}
"""Two fields of a scenario -> function that returns why values of these fields exclude
each other; "" if they fit together."""


def why_not(workload: ResolvedWorkload, choices: Mapping[str, str]) -> str:
    """Return the first reason why choices exclude each other; "" if all fit together.

    Args:
        workload: workload whose topologies are used.
        choices: some fields of a scenario.
    """
    for (a, b), reason in PAIRS.items():
        if a in choices and b in choices:
            text = reason(workload, choices[a], choices[b])
            if text:
                return text
    return ""
