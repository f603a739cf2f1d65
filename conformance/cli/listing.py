"""Output of ``gradparity list`` and ``gradparity explain``.

Torch is imported only for scenarios and for the meshes of a workload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..chosen import Chosen
from .tables import law_texts, names_of, rows_of

__all__ = ["explain", "listing"]


def listing(what: str, chosen: Chosen) -> Iterator[str]:
    """Yield the lines of ``gradparity list what``.

    Args:
        what: kind of names, such as ``scenarios``.
        chosen: options that restrict the list.

    Raises:
        UsageError: if the selection names something unknown.
    """
    if what == "scenarios" or (what == "topologies" and chosen.workload):
        yield from _made(what, chosen)
    else:
        yield from _TABLES[what]()


def _made(what: str, chosen: Chosen) -> Iterator[str]:
    from ..space.catalogue import Selection, select

    selection = Selection.of(chosen)
    if what == "scenarios":
        yield from (scenario.id for scenario in select(chosen.preset, selection))
    else:
        for t in selection.resolved.topologies.values():
            yield _topology(t.name, t.default_world_size, t.text)


def _topologies() -> Iterator[str]:
    for name, row in rows_of("topology").items():
        yield _topology(name, row["default_world_size"], row["text"])


def _topology(name: str, ranks: object, text: object) -> str:
    return f"{name:10} {ranks} ranks; {text}"


def _with_text(what: str, width: int) -> Callable[[], Iterator[str]]:
    """Return a function that yields one line for each entry of a table: name and text.

    Args:
        what: key of the table in ``TABLES``.
        width: width to which names are padded.
    """
    return lambda: (f"{n:{width}} {row['text']}" for n, row in rows_of(what).items())


def _laws() -> Iterator[str]:
    return (f"{law.id:28} {law.text}" for law in law_texts())


def _models() -> Iterator[str]:
    for name, row in rows_of("model").items():
        yield f"{name:15} trained on {row['dataset']}"


def _faults() -> Iterator[str]:
    kinds = ", ".join(names_of("fault"))
    yield f"KIND@rRANKsSTEP:PARAMETER, joined by ';'; KIND is {kinds};"
    yield "RANK and STEP may be *, PARAMETER first or last; ! spares the replicas"


def _scalers() -> Iterator[str]:
    yield "gradparity.scaler:GradScaler"
    yield "gradparity.scaler:ShardedGradScaler"
    yield from (str(row["spec"]) for row in rows_of("scaler").values())


_TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "laws": _laws,
    "topologies": _topologies,
    "precisions": _with_text("precision", 14),
    "optimizers": lambda: iter(names_of("optimizer")),
    "models": _models,
    "recipes": _with_text("recipe", 18),
    "presets": _with_text("preset", 8),
    "faults": _faults,
    "scalers": _scalers,
}


def explain(what: str) -> str:
    """Return the description of a check, a group of checks or a scenario.

    Raises:
        UsageError: if ``what`` is none of these. Unknown names of checks were already
            rejected by ``values.check_values``.
    """
    # Look for checks first: only the id of a scenario has a slash.
    laws = [law for law in law_texts() if what in (law.id, law.id.partition(".")[0])]
    if laws:
        return "\n\n".join(f"{x.id}\n\n{x.text}\n\nWhy: {x.reason}" for x in laws)
    return _explain_scenario(what)


def _explain_scenario(text: str) -> str:
    from ..space.scenario import Scenario

    s = Scenario.parse(text)
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
            *([f"loads:     what {s.saved_by.id} saved"] if s.saved_by else []),
            f"scale:     {s.init_scale:g}, x {s.growth_factor:g} after "
            f"{s.growth_interval} good steps, x {s.backoff_factor:g} after a bad one",
            f"faults:    {s.faults}",
        )
    )
