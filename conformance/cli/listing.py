"""The output of ``gradparity list`` and ``gradparity explain``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...fixtures import KINDS, MODELS, OPTIMIZERS, PRECISIONS, TOPOLOGIES, dataset_of
from ...fixtures.peers import PEERS
from ..judge import laws as laws
from ..judge.law import LAWS
from ..space.catalogue import PRESETS, Selection, select
from ..space.recipes import RECIPES
from ..space.scenario import Scenario

__all__ = ["explain", "listing"]


def listing(what: str, preset: str, selection: Selection) -> Iterator[str]:
    """Lines of ``gradparity list what``.

    Raises:
        UsageError: if the selection names something unknown.
    """
    if what == "scenarios":
        yield from (scenario.id for scenario in select(preset, selection))
    else:
        yield from _TABLES[what]()


def _laws() -> Iterator[str]:
    return (f"{law.id:28} {law.text}" for law in LAWS.values())


def _topologies() -> Iterator[str]:
    for t in TOPOLOGIES.values():
        yield f"{t.name:10} {t.default_world_size} ranks; {t.text}"


def _precisions() -> Iterator[str]:
    return (f"{p.name:14} {p.text}" for p in PRECISIONS.values())


def _models() -> Iterator[str]:
    for name in MODELS:
        yield f"{name:15} trained on {dataset_of(name)}"


def _recipes() -> Iterator[str]:
    return (f"{name:18} {recipe.text}" for name, recipe in RECIPES.items())


def _faults() -> Iterator[str]:
    yield f"KIND@rRANKsSTEP:PARAMETER, joined by ';'; KIND is {', '.join(KINDS)};"
    yield "RANK and STEP may be *, PARAMETER first or last; ! spares the replicas"


def _scalers() -> Iterator[str]:
    yield "gradparity.scaler:GradScaler"
    yield "gradparity.scaler:ShardedGradScaler"
    yield from (peer.spec for peer in PEERS.values())


_TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "laws": _laws,
    "topologies": _topologies,
    "precisions": _precisions,
    "optimizers": lambda: iter(OPTIMIZERS),
    "models": _models,
    "recipes": _recipes,
    "presets": lambda: iter(PRESETS),
    "faults": _faults,
    "scalers": _scalers,
}


def explain(what: str) -> str:
    """A law, a chapter of laws or a scenario in words.

    Raises:
        UsageError: if ``what`` is none of them: names of laws are checked before
            (``values.check_values``).
    """
    # laws before scenarios: only an id has a slash
    laws = [law for law in LAWS.values() if what in (law.id, law.chapter)]
    if laws:
        return "\n\n".join(f"{x.id}\n\n{x.text}\n\nWhy: {x.reason}" for x in laws)
    return _explain_scenario(Scenario.parse(what))


def _explain_scenario(s: Scenario) -> str:
    shape = " x ".join(
        f"{axis} {size}"
        for axis, size in s.parsed_topology.mesh_shape(s.world_size).items()
    )
    return "\n".join(
        (
            s.id,
            "",
            f"topology:  {s.topology}: {s.parsed_topology.text}",
            f"mesh:      {shape}",
            f"precision: {s.parsed_precision.text}",
            f"model:     {s.model}, {s.steps} steps, seed {s.seed}",
            f"optimizer: {s.optimizer}, parameters in {s.param_order} order",
            f"recipe:    {s.parsed_recipe.text}",
            *(f"begins as: {phase.id}" for phase in s.phases[:-1]),
            f"scale:     {s.init_scale:g}, x {s.growth_factor:g} after "
            f"{s.growth_interval} good steps, x {s.backoff_factor:g} after a bad one",
            f"faults:    {s.faults}",
        )
    )
