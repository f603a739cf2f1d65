"""The catalogue: which scenarios a run consists of.

``parity`` is the main job: on both data sets and every topology a clean fp32 run
(transparency, parity), a half-precision run that starts with a scale so large that
gradients overflow by themselves, and a run with planted inf and nan on single ranks.

``quick`` covers every pair of choices (topology, precision, optimizer, order, recipe,
faults, data) at least once, ``full`` every triple; the laws are the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ..fixtures import DATASETS, OPTIMIZERS, ORDERS, PRECISIONS, TOPOLOGIES, Topology
from .covering import cover
from .scenario import RECIPES, Scenario

__all__ = ["PRESETS", "Selection", "goes_together", "select"]

OVERFLOWING_SCALE = 2.0**26
"""Large enough that fp16 gradients of every model here overflow in the first steps."""

MAIN_TOPOLOGIES = ("single", "ddp", "fsdp", "hsdp", "tp", "tp+sp", "fsdp+tp", "pp")
"""Topologies of the main job; the others are larger or variations."""

FAULTS = {
    "none": "none",
    "one rank": "inf@r{last}s1:{split}",
    "rank 0, last": "nan@r0s2:last",
    "every rank": "-inf@r*s1:first",
    "burst": "nan@r0s*:{split}",
    "natural": "none",
}
"""Kinds of fault plans; ``last`` is the last rank, ``split`` a sharded parameter."""

SPLIT = {"digits": "up.weight", "text": "blocks.0.feed_forward.up.weight"}
_FULLY_SHARD = ("fsdp", "hsdp", "fsdp+tp", "hsdp+tp", "pp+fsdp")
# torch's own foreach and fused optimizers refuse plain tensors beside DTensors, and
# DTensors of several meshes: there nothing can be said of a scaler
_UNIFORM = ("single", "ddp", "fsdp", "hsdp", "pp", "pp+fsdp")
_MULTI_TENSOR = ("adamw-foreach", "adamw-fused")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What the user asked for; an empty field means everything."""

    topologies: Sequence[str] = ()
    data: Sequence[str] = ()
    precisions: Sequence[str] = ()
    optimizers: Sequence[str] = ()
    world: int | None = None
    """World size instead of each topology's own."""
    seed: int = 0

    def __post_init__(self) -> None:
        _check("topology", self.topologies, TOPOLOGIES)
        _check("data", self.data, DATASETS)
        _check("precision", self.precisions, PRECISIONS)
        _check("optimizer", self.optimizers, OPTIMIZERS)

    def keeps(self, scenario: Scenario) -> bool:
        """Whether ``scenario`` was asked for."""
        wanted = (
            (self.precisions, scenario.precision),
            (self.optimizers, scenario.optimizer),
        )
        return all(not names or value in names for names, value in wanted)


def _check(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(
                f"unknown {what} {name!r}: expected one of {', '.join(known)}"
            )


def _parity(selection: Selection) -> Iterator[Scenario]:
    for data in selection.data or DATASETS:
        for name in selection.topologies or MAIN_TOPOLOGIES:
            topology = TOPOLOGIES[name]
            if data in topology.models:
                yield from _three_runs(topology, data, selection)


def _three_runs(
    topology: Topology, data: str, selection: Selection
) -> Iterator[Scenario]:
    world = selection.world or topology.default_world
    half = "fp16-params" if topology.name in _FULLY_SHARD else "fp16-autocast"
    # where tensors are split, this one is: only the ranks that hold it see the fault
    struck, holder = SPLIT[data], 0 if "pp" in topology.name else world - 1
    run = partial(
        Scenario, topology=topology.name, world=world, data=data, seed=selection.seed
    )
    yield run(precision="fp32", steps=6)
    yield run(precision=half, steps=14, init_scale=OVERFLOWING_SCALE, growth_interval=2)
    yield run(
        precision="fp32",
        optimizer="adamw",
        faults=f"inf@r{holder}s1:{struck};nan@r0s3:last",
        steps=6,
    )


def _covering(selection: Selection, strength: int) -> Iterator[Scenario]:
    choices = [
        list(selection.topologies or TOPOLOGIES),
        list(selection.precisions or PRECISIONS),
        list(selection.optimizers or OPTIMIZERS),
        list(ORDERS),
        list(RECIPES),
        list(FAULTS),
        list(selection.data or DATASETS),
    ]
    for row in cover(choices, goes_together, strength):
        yield _scenario(row, selection)


def _scenario(row: Sequence[str], selection: Selection) -> Scenario:
    topology, precision, optimizer, order, recipe, faults, data = row
    world = selection.world or TOPOLOGIES[topology].default_world
    natural = faults == "natural"
    return Scenario(
        topology=topology,
        world=world,
        precision=precision,
        optimizer=optimizer,
        order=order,
        recipe=recipe,
        faults=FAULTS[faults].format(last=world - 1, split=SPLIT[data]),
        data=data,
        seed=selection.seed,
        steps=12 if natural else 5,
        init_scale=OVERFLOWING_SCALE if natural else 1024.0,
        growth_interval=2,
    )


def goes_together(row: Sequence[str]) -> bool:
    """Whether a row of choices makes a scenario that torch itself can train."""
    topology, precision, optimizer, _, recipe, faults, data = row
    return (
        (precision != "fp16-params" or topology in _FULLY_SHARD)
        and (optimizer not in _MULTI_TENSOR or topology in _UNIFORM)
        and (recipe != "accumulate" or not topology.startswith("pp"))
        # only fp16 overflows by itself
        and (faults != "natural" or precision.startswith("fp16"))
        # sequence-parallel norms have partial gradients, which clamp_ refuses
        and (recipe != "clip-value" or topology != "tp+sp")
        and data in TOPOLOGIES[topology].models
    )


PRESETS: dict[str, Callable[[Selection], Iterator[Scenario]]] = {
    "parity": _parity,
    "quick": partial(_covering, strength=2),
    "full": partial(_covering, strength=3),
}
"""Preset name -> scenarios of a selection."""


def select(preset: str, selection: Selection) -> list[Scenario]:
    """The scenarios of a preset that the selection keeps.

    Raises:
        ValueError: for unknown names, a world size that no chosen topology can take,
            or a selection that leaves nothing.
    """
    _check("preset", [preset], PRESETS)
    found = [s for s in PRESETS[preset](selection) if selection.keeps(s)]
    if not found:
        raise ValueError(f"the selection leaves no scenario of preset {preset!r}")
    return list(dict.fromkeys(found))
