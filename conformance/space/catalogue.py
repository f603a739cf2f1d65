"""The catalogue: the scenarios of each preset.

``parity`` is the main job. On both data sets and every topology it has three runs. The
first is a clean fp32 run (transparency, parity). The second is in half precision, with
an initial scale that makes gradients overflow. The third has planted inf and nan on
single ranks.

``layouts`` is for reviews: each topology with a few plain steps, once with whole
batches and once with two micro-batches.

``quick`` covers every choice (topology, precision, optimizer, parameter order, recipe,
faults, model) at least once, ``default`` every pair, ``full`` every triple. Each of
them also drives the scale to its limits. All presets make the same checks. Scenarios
that add the most new choices for their cost come first, so that a common fault shows
early.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from ...fixtures import (
    ADAPTIVE,
    DATASETS,
    KINDS,
    MODELS,
    OWN,
    PARAM_ORDERS,
    PRECISIONS,
    TOPOLOGIES,
    OfWorkload,
    Topology,
    WorkloadError,
    resolve_workload,
)
from ..status import UsageError, as_usage
from .constraints import PAIRS, why_not
from .covering import cover, most_new_first, subsets
from .facts import facts_of
from .recipes import CONTROL_RECIPES, RECIPES
from .scenario import Scenario
from .selection import MAIN_TOPOLOGIES, Selection, check_names
from .workload_checks import check_workload, counts_alike, steps_alike

__all__ = [
    "PRESETS",
    "Selection",
    "columns",
    "fits",
    "not_tried",
    "select",
    "split_parameter",
    "to_scenario",
]

OVERFLOWING_SCALE = 2.0**26
"""Scale at which fp16 gradients of any usual model overflow in the first steps."""
OVERFLOWS_OF_ITSELF: dict[bool, dict[str, Any]] = {
    # fp16 gradients of the built-in models are finite at 2^17 or 2^18
    False: {"init_scale": 2.0**21, "steps": 9, "growth_interval": 2},
    True: {"init_scale": OVERFLOWING_SCALE, "steps": 12, "growth_interval": 2},
}
"""Settings with which gradients overflow, become finite, and overflow again. Key: True
for a user's workload, False for built-in models."""

WHEN: dict[str, tuple[str, ...]] = {
    "never": (),
    "natural": (),
    "once": ("1",),
    "on growth": ("1", "3"),
    "alternating": ("0", "2", "4"),
    "always": ("*",),
}
"""Name of the times at which gradients are bad -> steps with planted faults. The scale
grows after 2 good steps."""
TARGETS = ("first", "middle[middle]", "last[last]", "split", "loss", "loss[last]")
"""Parameters of a fault; ``split`` is a parameter that is sharded if any is."""
RANKS = ("0", "last", "*")
LOSS_FACTORS = {"usual": 1.0, "tiny": 2.0**-30, "huge": 2.0**30}
"""Factors of the loss, for gradients of about 1e-2, 1e-11 and 1e7."""
NOTHING = "-"
"""Value of a column that does not apply to a row."""
LONG = 200
"""Number of steps in a long run: bad ones bring any scale to its floor, good ones to
2^110."""
LIMITS: dict[str, tuple[str, dict[str, float]]] = {
    # after one growth to 2^127 a second one would leave fp32; a planted fault, since
    # large gradients of a user's workload may overflow at this scale in every step
    "highest": ("once", {"init_scale": 2.0**126, "growth_interval": 1}),
    # the rule gives 2^-152 at the fourth step, which fp32 rounds to 0
    "lowest": ("always", {"init_scale": 2.0**-100, "backoff_factor": 2.0**-13}),
    # the smallest scale at which unscaled gradients are exact down to 2^-100
    "small": ("never", {"init_scale": 2.0**-24}),
    # reciprocals of 1000, 750 and 1125 are rounded, in half precision by a large amount
    "no power of two": (
        "once",
        {"init_scale": 1000.0, "growth_factor": 1.5, "backoff_factor": 0.75},
    ),
}
"""Name -> time at which gradients are bad, and settings that drive the scale to a
limit."""


def _parity(selection: Selection) -> Iterator[Scenario]:
    """Three runs of each layout: the main job."""
    for model in (
        [selection.workload] if selection.workload else selection.models or DATASETS
    ):
        for name in selection.main_topologies():
            topology = selection.resolved.topologies[name]
            if selection.workload or model in topology.models:
                yield from _three_runs(topology, model, selection)
    yield from _narrowed(selection)
    yield from _random_runs(selection)


def _random_runs(selection: Selection) -> Iterator[Scenario]:
    """Yield each layout of a workload with random layers on, if the model has any."""
    model = selection.workload
    if not model or not facts_of(model).draws:
        return
    for name in selection.main_topologies():
        topology = selection.resolved.topologies[name]
        yield Scenario(
            topology=name,
            world_size=selection.world_size or topology.default_world_size,
            precision="fp32",
            optimizer=OWN,
            model=model,
            recipe="random",
            seed=selection.seed,
            steps=4,
        )


def _three_runs(
    topology: Topology, model: str, selection: Selection
) -> Iterator[Scenario]:
    world_size = selection.world_size or topology.default_world_size
    optimizers = ("sgd", "adamw") if not selection.workload else (OWN, OWN)
    run = partial(
        Scenario,
        topology=topology.name,
        world_size=world_size,
        model=model,
        seed=selection.seed,
        steps=6,
    )
    yield run(precision="fp32", optimizer=optimizers[0])
    if selection.no_scaler:
        yield run(precision="bf16-autocast", optimizer=optimizers[1])
        return
    half = "fp16-params" if topology.fully_shards else "fp16-autocast"
    yield run(
        precision=half,
        optimizer=optimizers[0],
        **OVERFLOWS_OF_ITSELF[bool(selection.workload)],
    )
    # a parameter that the topology splits, so that only the ranks that hold it see the
    # fault
    target = split_parameter(model)
    holder = 0 if topology.pipelined else last_holder(topology, world_size, model)
    yield run(
        precision="fp32",
        optimizer=optimizers[1],
        faults=f"inf@r{holder}s1:{target};nan@r0s3:last",
    )


SIX_PASSES = "accumulate-six"
"""Recipe with the most passes; faults that need more passes are not found."""
MANY_STEPS = 20
"""Number of steps of a workload's longest run; later faults are not found."""
LAYOUT_STEPS = 3
"""Number of steps: the first, one that shows leftover gradients, and one more."""


def _layouts(selection: Selection) -> Iterator[Scenario]:
    """Plain steps of each layout, with whole batches and accumulated."""
    optimizers = selection.optimizers or (OWN if selection.workload else "sgd",)
    for name, model, precision, optimizer, recipe in itertools.product(
        selection.main_topologies(),
        [selection.workload] if selection.workload else selection.models or DATASETS,
        selection.precisions or ("fp32",),
        optimizers,
        ("plain", "accumulate"),
    ):
        row = _PLAINEST | {
            "topology": name,
            "model": model,
            "precision": precision,
            "optimizer": optimizer,
            "recipe": recipe,
            "when": "never",
        }
        if not why_not(resolve_workload(model), row):
            yield to_scenario(row, selection, steps=LAYOUT_STEPS)


def split_parameter(model: str) -> str:
    """Return a parameter that is sharded if any is; "first" for a workload."""
    return MODELS[model].sharded if model in MODELS else "first"


@cache
def last_holder(topology: Topology, world_size: int, model: str) -> int:
    """Return the last rank that holds elements of the split parameter.

    If the parameter has too few rows for all shards, the last shards are empty, and a
    fault planted there would have no effect. In a mesh with replicas the last copy
    counts.
    """
    if model not in MODELS or topology.tensors == "plain":
        return world_size - 1
    rows = MODELS[model].make().get_parameter(split_parameter(model)).shape[0]
    shape = topology.mesh_shape(world_size)
    shards = math.prod(n for axis, n in shape.items() if axis != "replicate")
    # torch.chunk makes shards of one size, then a smaller one, then empty ones
    size = math.ceil(rows / shards)
    return world_size - shards + math.ceil(rows / size) - 1


def columns(selection: Selection) -> dict[str, list[str]]:
    """Return column -> its values; a scenario has one value of each column."""
    resolved, own = selection.resolved, bool(selection.workload)
    plain = {"when": ["never"], "target": [NOTHING], "ranks": [NOTHING]}
    chosen = {
        "topology": selection.layouts(resolved.topologies),
        "model": selection.model_names,
        "recipe": [
            name
            for name, recipe in RECIPES.items()
            if (name in CONTROL_RECIPES or not selection.no_scaler)
            and (own or OfWorkload.OF_USER not in recipe.needs)
            and name != SIX_PASSES  # one run for each workload, see _longer
        ],
        "when": list(WHEN),
        "precision": list(selection.precisions or PRECISIONS),
        "optimizer": list(selection.optimizers or resolved.optimizers),
        "target": [NOTHING, *(t for t in TARGETS if not own or t != "split")],
        "ranks": [NOTHING, *RANKS],
        "kind": [NOTHING, *KINDS],
        # a user's learning rate is unknown, and with a small factor updates may be no
        # larger than rounding
        "loss_factor": ["usual"] if own else list(LOSS_FACTORS),
        "param_order": list(PARAM_ORDERS),
    }
    if not selection.no_scaler:
        return chosen
    # without a scaler fp16 fails by itself, so it is tried only on request
    if not selection.precisions:
        wide = [p.name for p in PRECISIONS.values() if not p.overflows]
        chosen["precision"] = wide
    return chosen | plain | {"kind": [NOTHING]}


def fits(row: Row, workload: str = "") -> bool:
    """Return True if the choices so far can become a scenario.

    Args:
        row: values of some columns.
        workload: the user's workload, in place of the built-in models.
    """
    return all(
        _go_together(pair, row[pair[0]], row[pair[1]], workload)
        for pair in _RULES
        if pair[0] in row and pair[1] in row
    )


@cache  # the search asks a hundred thousand times for a few hundred pairs
def _go_together(pair: tuple[str, str], a: str, b: str, workload: str) -> bool:
    sensible, resolved = (
        _SENSIBLE.get(pair),
        resolve_workload(workload or next(iter(MODELS))),
    )
    if why_not(resolved, {pair[0]: a, pair[1]: b}):
        return False
    return not sensible or sensible(a, b)


def _both_or_none(a: str, b: str) -> bool:
    return (a == NOTHING) == (b == NOTHING)


def _where_planted(when: str, value: str) -> bool:
    return (when in _PLANTED) == (value != NOTHING)


_PLANTED = tuple(when for when, steps in WHEN.items() if steps)
_SENSIBLE: dict[tuple[str, str], Callable[[str, str], bool]] = {
    ("precision", "when"): lambda p, w: w != "natural" or PRECISIONS[p].overflows,
    # a disabled scaler does not handle bad gradients
    ("recipe", "when"): lambda r, when: RECIPES[r].enabled or when == "never",
    # the columns of a planted fault apply only if one is planted
    ("when", "target"): _where_planted,
    ("when", "ranks"): _where_planted,
    ("when", "kind"): _where_planted,
    ("target", "ranks"): _both_or_none,
    ("target", "kind"): _both_or_none,
    ("ranks", "kind"): _both_or_none,
    ("topology", "ranks"): lambda t, r: t != "single" or r in (NOTHING, "0"),
    # in a user's workload no parameter is known to be split
    ("topology", "target"): lambda t, x: x != "split" or TOPOLOGIES[t].spreads,
    # a rank may hold nothing of the half of the model that trains
    ("recipe", "ranks"): lambda r, x: r != "frozen" or x in (NOTHING, "*"),
    # small gradients are lost in half precision, and make small steps in plain SGD
    ("loss_factor", "precision"): lambda m, p: m == "usual" or PRECISIONS[p].is_full,
    ("optimizer", "loss_factor"): lambda o, m: m == "usual" or o in ADAPTIVE,
}
_RULES = tuple(dict.fromkeys([*PAIRS, *_SENSIBLE]))


def to_scenario(row: Row, selection: Selection, **settings: Any) -> Scenario:
    """Return the scenario of a complete row."""
    topology, model = selection.resolved.topologies[row["topology"]], row["model"]
    world_size = selection.world_size or _world_size(topology, model)
    defaults: dict[str, Any] = {"steps": 5, "init_scale": 1024.0, "growth_interval": 2}
    if row["when"] == "natural":
        defaults = OVERFLOWS_OF_ITSELF[bool(selection.workload)]
    return Scenario(
        topology=topology.name,
        world_size=world_size,
        precision=row["precision"],
        optimizer=row["optimizer"],
        param_order=row["param_order"],
        recipe=row["recipe"],
        faults=_faults(row, topology, world_size),
        model=model,
        loss_factor=LOSS_FACTORS[row["loss_factor"]],
        **{"seed": selection.seed} | defaults | settings,
    )


def _world_size(topology: Topology, model: str) -> int:
    wanted = MODELS[model].world_size if model in MODELS else None
    if wanted is not None and topology.mesh_takes(wanted):
        return wanted
    return topology.default_world_size


def _faults(row: Row, topology: Topology, world_size: int) -> str:
    target, model = row["target"], row["model"]
    last = world_size - 1
    if target == "split":
        target, last = split_parameter(model), last_holder(topology, world_size, model)
    rank = str(last) if row["ranks"] == "last" else row["ranks"]
    steps = WHEN[row["when"]]
    plan = ";".join(f"{row['kind']}@r{rank}s{step}:{target}" for step in steps)
    return plan or "none"


Row = dict[str, str]
_PLACE = ("topology", "target", "ranks")
_OVERFLOW = ("topology", "precision", "when")


def _quick(selection: Selection) -> Iterable[Scenario]:
    """Every topology with every fault time, and each other choice once."""
    wanted = [("topology", "when"), *subsets(columns(selection), 1)]
    limits = _limits(selection, QUICK_LIMIT_TOPOLOGIES)
    own = [*_narrowed(selection), *_on_each_mesh(selection), *_random_runs(selection)]
    return _in_order(selection, [*_covering(selection, wanted), *limits, *own])


def _default(selection: Selection) -> Iterable[Scenario]:
    """All pairs of choices, and each place and time of a fault by topology.

    A place is a parameter and the ranks of a fault. Times are combined with precisions.
    """
    wanted = [_PLACE, _OVERFLOW, *subsets(columns(selection), 2)]
    chosen = [*_covering(selection, wanted), *_extremes(selection)]
    return [*_in_order(selection, chosen), *_longer(selection)]


def _full(selection: Selection) -> Iterable[Scenario]:
    """All combinations of three choices."""
    wanted = subsets(columns(selection), 3)
    chosen = [*_covering(selection, wanted), *_extremes(selection)]
    return [*_in_order(selection, chosen), *_longer(selection)]


def _covering(
    selection: Selection, wanted: Sequence[tuple[str, ...]]
) -> Iterator[Scenario]:
    rules = partial(fits, workload=selection.workload)
    for row in cover(columns(selection), rules, wanted):
        yield to_scenario(row, selection)


def _extremes(selection: Selection) -> Iterator[Scenario]:
    yield from _limits(selection, MAIN_TOPOLOGIES)
    yield from _long_runs(selection)
    yield from _narrowed(selection)


WITH_EVERY_MESH = ("accumulate", "accumulate-no-sync", "accumulate-uneven", "clip-norm")
"""Recipes with which each mesh of a workload runs. Most wrong gradients show in these,
and most code depends on the size of a mesh axis."""


def _narrowed(selection: Selection) -> Iterator[Scenario]:
    """Yield runs of each mesh of a workload with one axis at size 1."""
    for name in _narrowed_meshes(selection):
        for recipe in ("plain", *WITH_EVERY_MESH):
            yield from _plain_runs(selection, topology=name, recipe=recipe)


def _narrowed_meshes(selection: Selection) -> list[str]:
    return [
        name
        for name, topology in selection.resolved.topologies.items()
        if topology.narrowed
        and not selection.topologies
        and (selection.world_size is None or topology.mesh_takes(selection.world_size))
    ]


def _on_each_mesh(selection: Selection) -> Iterator[Scenario]:
    """Yield runs of ``WITH_EVERY_MESH`` on each declared mesh of several ranks.

    Each mesh also gets a run with half of the model frozen, a run with a resume, and a
    run in half precision: their faults may show on one mesh only. The resume is in
    fp32: bf16 rounding may hide the effect of a setting that a checkpoint loses.
    """
    if selection.workload:
        topologies = selection.resolved.topologies
        half = [p for p in columns(selection)["precision"] if not PRECISIONS[p].is_full]
        for name in selection.layouts(topologies):
            if not topologies[name].parallel:
                continue
            for recipe in (*WITH_EVERY_MESH, "frozen", "resume"):
                yield from _plain_runs(selection, topology=name, recipe=recipe)
            for precision in half[:1]:
                yield from _plain_runs(selection, topology=name, precision=precision)


def _longer(selection: Selection) -> Iterator[Scenario]:
    """Yield a run with six backward passes a step, and a run with more steps.

    Both runs use the largest mesh of a workload; a run that does not fit is left out.
    They come last, and not in the preset ``quick``: few faults need these long runs.
    """
    if not selection.workload:
        return
    declared = selection.resolved.topologies
    meshes = [t for t in selection.layouts(declared) if declared[t].parallel]
    for name in sorted(meshes, key=lambda t: -declared[t].default_world_size)[:1]:
        yield from _plain_runs(selection, topology=name, recipe=SIX_PASSES)
        for run in _plain_runs(selection, topology=name):
            yield replace(run, steps=MANY_STEPS)


def _plain_runs(selection: Selection, **choices: str) -> Iterator[Scenario]:
    """Yield the workload's plain run with these choices, if they fit together."""
    row = _PLAINEST | {"model": selection.workload, "optimizer": OWN, "when": "never"}
    if not why_not(selection.resolved, row | choices):
        yield to_scenario(row | choices, selection)


def not_tried(selection: Selection) -> list[str]:
    """Return lines that say what a workload's presets do not test, and why."""
    if not selection.workload:
        return []
    resolved, names = selection.resolved, columns(selection)
    narrowed = _narrowed_meshes(selection)
    recipes: dict[str, dict[str, None]] = {}
    for recipe in names["recipe"]:
        for topology in [*names["topology"], *narrowed]:
            text = why_not(
                resolved,
                {"topology": topology, "recipe": recipe, "model": selection.workload},
            )
            recipes.setdefault(text.partition(": ")[2], {})[recipe] = None
    lines = [f"{', '.join(of)}: {why}" for why, of in recipes.items() if why]
    if counts_alike(resolved):
        lines.append(
            "unequal counts: all rows of batch() count alike, so a loss that each rank "
            "divides by its own count passes"
        )
    if steps_alike(resolved):
        lines.append(
            "other rows in each step: batch() gives those of step 0 for step 1 too, "
            "so a trainer that mixes up steps passes"
        )
    if narrowed:
        text = f"only in fp32 with {', '.join(('plain', *WITH_EVERY_MESH))}"
        lines.append(f"{', '.join(narrowed)}: an axis of size 1 is tried {text}")
    return lines


def _limits(selection: Selection, usual: Sequence[str]) -> Iterator[Scenario]:
    """Yield runs that drive the scale to its limits, also with a fused optimizer."""
    for when, settings in LIMITS.values():
        for optimizer in ("sgd", "adamw-fused"):
            for row in _plainest(selection, usual, when, optimizer):
                yield to_scenario(row, selection, **settings)


def _long_runs(selection: Selection) -> Iterator[Scenario]:
    """Yield runs that reach any floor or ceiling of the scale with default factors."""
    for when, usual in _LONG_RUNS.items():
        for row in _plainest(selection, usual, when, "adamw"):
            yield to_scenario(row, selection, steps=LONG)


def _plainest(
    selection: Selection, usual: Sequence[str], when: str, optimizer: str
) -> Iterator[Row]:
    """Yield a plain row for each selected topology that is among the usual ones.

    The model is the topology's first. A workload is its own model, and all of its
    topologies are usual. Without a scaler there are no rows.
    """
    if selection.no_scaler:
        return
    own = selection.workload
    chosen = [*selection.resolved.topologies] if own else usual
    for name in selection.layouts(chosen):
        model = own or TOPOLOGIES[name].models[0]
        row = _PLAINEST | {"topology": name, "model": model, "when": when}
        row["optimizer"] = OWN if own else optimizer
        trained = own or selection.trains(model)
        if name in chosen and trained and not why_not(resolve_workload(model), row):
            yield row


QUICK_LIMIT_TOPOLOGIES = ("single", "fsdp", "tp")
"""Topologies with plain tensors, with DTensors of one mesh, and with both."""
_LONG_RUNS = {"always": MAIN_TOPOLOGIES, "never": ("single", "fsdp")}
"""Time at which gradients are bad -> topologies of the run."""
_PLAINEST = {
    "recipe": "plain",
    "precision": "fp32",
    "target": "first",
    "ranks": "0",
    "kind": "nan",
    "loss_factor": "usual",
    "param_order": "model",
}


def _in_order(selection: Selection, scenarios: Iterable[Scenario]) -> list[Scenario]:
    """Order by new choices per cost, so that common faults show early.

    Without a scaler fp32 comes first: a fault is then far above rounding, and the
    faulty module is clear.
    """
    chosen = most_new_first(list(dict.fromkeys(scenarios)), _words, _cost)
    return sorted(
        chosen, key=lambda s: selection.no_scaler and not s.parsed_precision.is_full
    )


def _words(scenario: Scenario) -> set[str]:
    """Return the words of a scenario's id: names, settings, parts of a fault."""
    return set(re.split("[/,;@:]", scenario.id))


def _cost(scenario: Scenario) -> float:
    """Estimate the relative run time on two cores, including references."""
    model = MODELS[scenario.model].cost if scenario.model in MODELS else 1
    compiles = 6 if scenario.parsed_recipe.compile else 1
    return sum(
        each.world_size * (each.steps + 5) * model * compiles
        for each in (scenario, scenario.saved_by)
        if each is not None
    )


PRESETS: dict[str, Callable[[Selection], Iterable[Scenario]]] = {
    "parity": _parity,
    "layouts": _layouts,
    "quick": _quick,
    "default": _default,
    "full": _full,
}
"""Preset -> function that returns the scenarios of a selection."""


def select(preset: str, selection: Selection) -> list[Scenario]:
    """Return the scenarios of a preset that match the selection.

    Raises:
        UsageError: for unknown names, a world size that no selected topology accepts, a
            workload that breaks its protocol, or an empty selection.
    """
    check_names("preset", [preset], PRESETS)
    # the constraints may depend on the workload's batches
    with as_usage(WorkloadError):
        if selection.workload:
            check_workload(selection.workload)
    scenarios = [s for s in PRESETS[preset](selection) if selection.keeps(s)]
    if not scenarios:
        text = f"the selection leaves no scenario of preset {preset!r}"
        raise UsageError(f"{text}: {_why_none(selection)}")
    return list(dict.fromkeys(scenarios))


def _why_none(selection: Selection) -> str:
    """Return why no scenario matches the selection."""
    resolved, choices = selection.resolved, columns(selection)
    if not choices["topology"]:
        all_ = resolved.topologies.values()
        takes = ", ".join(f"{each.name} {each.default_world_size}" for each in all_)
        return f"no topology is for {selection.world_size} ranks ({takes})"
    for pair in PAIRS:
        both = itertools.product(*(choices[column] for column in pair))
        reasons = [why_not(resolved, dict(zip(pair, two, strict=True))) for two in both]
        if all(reasons):
            return next(iter(reasons), f"no {' and '.join(pair)} are left")
    return "its options exclude each other"
