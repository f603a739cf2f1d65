"""The catalogue: which scenarios a run consists of.

``parity`` is the main job: on both data sets and every topology a clean fp32 run
(transparency, parity), a half-precision run that starts with a scale so large that
gradients overflow by themselves, and a run with planted inf and nan on single ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..fixtures import DATASETS, TOPOLOGIES, Topology
from .scenario import Scenario

__all__ = ["PRESETS", "Selection", "select"]

OVERFLOWING_SCALE = 2.0**26
"""Large enough that fp16 gradients of every model here overflow in the first steps."""

_SPLIT = {"digits": "up.weight", "text": "blocks.0.feed_forward.up.weight"}
_FULLY_SHARD = ("fsdp", "hsdp", "fsdp+tp")


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
        for name in selection.topologies or TOPOLOGIES:
            topology = TOPOLOGIES[name]
            if data in topology.models:
                yield from _three_runs(topology, data, selection)


def _three_runs(
    topology: Topology, data: str, selection: Selection
) -> Iterator[Scenario]:
    world = selection.world or topology.default_world
    half = "fp16-params" if topology.name in _FULLY_SHARD else "fp16-autocast"
    # where tensors are split, this one is: only the ranks that hold it see the fault
    struck, holder = _SPLIT[data], 0 if topology.name == "pp" else world - 1
    name, seed = topology.name, selection.seed
    yield Scenario(
        topology=name, world=world, precision="fp32", data=data, seed=seed, steps=6
    )
    yield Scenario(
        topology=name,
        world=world,
        precision=half,
        data=data,
        seed=seed,
        steps=14,
        init_scale=OVERFLOWING_SCALE,
        growth_interval=2,
    )
    yield Scenario(
        topology=name,
        world=world,
        precision="fp32",
        optimizer="adamw",
        faults=f"inf@r{holder}s1:{struck};nan@r0s3:last",
        data=data,
        seed=seed,
        steps=6,
    )


PRESETS = {"parity": _parity}
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
    return found
