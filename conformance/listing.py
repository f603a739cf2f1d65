"""What ``gradparity list`` and ``gradparity explain`` say."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..fixtures import KINDS, OPTIMIZERS, PRECISIONS, TOPOLOGIES
from ..fixtures.peers import PEERS
from . import laws as laws
from .catalogue import Selection, select
from .law import LAWS
from .scenario import Scenario
from .schema import schema_text

__all__ = ["explain", "listing"]


def listing(what: str, preset: str, selection: Selection) -> Iterator[str]:
    """Lines of ``gradparity list what``.

    Raises:
        ValueError: if the selection names something unknown.
    """
    if what == "scenarios":
        yield from (scenario.id for scenario in select(preset, selection))
    else:
        yield from _TABLES[what]()


def _laws() -> Iterator[str]:
    return (f"{law.id:28} {law.text}" for law in LAWS.values())


def _topologies() -> Iterator[str]:
    for t in TOPOLOGIES.values():
        yield f"{t.name:10} {t.default_world} ranks; {t.text}"


def _precisions() -> Iterator[str]:
    return (f"{p.name:14} {p.text}" for p in PRECISIONS.values())


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
    "faults": _faults,
    "scalers": _scalers,
}


def explain(what: str) -> str:
    """A law or a scenario in words; ``report.jsonl`` as JSON Schema.

    Raises:
        ValueError: if ``what`` is none of them.
    """
    if what == "report.jsonl":
        return schema_text()
    if what in LAWS:
        law = LAWS[what]
        return f"{law.id}\n\n{law.text}\n\nWhy: {law.reason}"
    if "/" in what:
        return _explain_scenario(Scenario.parse(what))
    raise ValueError(
        f"{what!r} is neither a law ({', '.join(LAWS)}) nor a scenario id "
        "nor report.jsonl"
    )


def _explain_scenario(s: Scenario) -> str:
    shape = " x ".join(
        f"{axis} {size}" for axis, size in s.parsed_topology.mesh_shape(s.world).items()
    )
    return "\n".join(
        (
            s.id,
            "",
            f"topology:  {s.topology}: {s.parsed_topology.text}",
            f"mesh:      {shape}",
            f"precision: {s.parsed_precision.text}",
            f"model:     {s.data}, {s.steps} steps, seed {s.seed}",
            f"optimizer: {s.optimizer}, parameters in {s.order} order",
            f"recipe:    {s.parsed_recipe.text}",
            *(f"begins as: {leg.id}" for leg in s.legs[:-1]),
            f"scale:     {s.init_scale:g}, x {s.growth_factor:g} after "
            f"{s.growth_interval} good steps, x {s.backoff_factor:g} after a bad one",
            f"faults:    {s.faults}",
        )
    )
