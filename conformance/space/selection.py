"""The user's selection among the scenarios of the catalogue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from ...fixtures import (
    MODELS,
    PRECISIONS,
    ResolvedWorkload,
    resolve_workload,
)
from ..chosen import Chosen
from ..status import UsageError, as_usage, unknown
from .scenario import Scenario

__all__ = ["MAIN_TOPOLOGIES", "Selection", "check_names"]

MAIN_TOPOLOGIES = ("single", "ddp", "fsdp", "hsdp", "tp", "tp+sp", "fsdp+tp", "pp")
"""Topologies of the main job; the others are larger ones or variations."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """The user's selection of scenarios; an empty field selects everything."""

    topologies: Sequence[str] = ()
    models: Sequence[str] = ()
    precisions: Sequence[str] = ()
    optimizers: Sequence[str] = ()
    world_size: int | None = None
    """Number of ranks; None for each topology's own number."""
    seed: int = 0
    workload: str = ""
    """The user's workload, ``module:attribute``, in place of the built-in models."""
    no_scaler: bool = False
    """True to train without a scaler; only scenarios that need none are selected."""

    @as_usage(ValueError)
    def __post_init__(self) -> None:
        if self.workload and self.models:
            raise UsageError("a workload has its own model: give no --model beside it")
        if self.workload and ":" not in self.workload:
            raise UsageError(
                f"workload {self.workload!r} is not module:attribute, such as "
                "mypackage.stack:Workload"
            )
        check_names("topology", self.topologies, self.resolved.topologies)
        check_names("model", self.models, MODELS)
        check_names("precision", self.precisions, PRECISIONS)
        check_names("optimizer", self.optimizers, self.resolved.optimizers)

    @classmethod
    def of(cls, chosen: Chosen) -> Self:
        """Return the selection that command-line options make."""
        return cls(
            topologies=chosen.topologies,
            models=chosen.models,
            precisions=chosen.precisions,
            optimizers=chosen.optimizers,
            world_size=chosen.world_size,
            seed=chosen.seed,
            workload=chosen.workload,
            no_scaler=chosen.scalers == ("none",),
        )

    @property
    def resolved(self) -> ResolvedWorkload:
        """The selected workload, or else the first built-in model."""
        return resolve_workload(self.workload or next(iter(MODELS)))

    @property
    def model_names(self) -> list[str]:
        """Values of ``model`` in the selected scenarios."""
        if self.workload:
            return [self.workload]
        return [m for m in MODELS if self.trains(m)]

    def main_topologies(self) -> list[str]:
        """Return the selected topologies of the main job."""
        return self.layouts(
            self.resolved.topologies if self.workload else MAIN_TOPOLOGIES
        )

    def layouts(self, usual: Iterable[str]) -> list[str]:
        """Return the selected topologies, or the ``usual`` ones that fit the world.

        Meshes with an axis reduced to size 1 are not included.
        """
        if self.topologies:
            return list(self.topologies)
        layouts = self.resolved.topologies
        # narrowed meshes have runs of their own, see ``catalogue._narrowed``
        usual = [name for name in usual if not layouts[name].narrowed]
        if self.world_size is None:
            return usual
        return [name for name in usual if layouts[name].mesh_takes(self.world_size)]

    def trains(self, model: str) -> bool:
        """Return True if the selection includes this model."""
        return not self.models or model in self.models

    def keeps(self, scenario: Scenario) -> bool:
        """Return True if a scenario matches the selection."""
        wanted = (
            (self.precisions, scenario.precision),
            (self.optimizers, scenario.optimizer),
        )
        return all(not names or value in names for names, value in wanted)


def check_names(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise if a name is unknown.

    Raises:
        UsageError: names the value and the known names.
    """
    for name in names:
        if name not in known:
            raise UsageError(unknown(what, name, known))
