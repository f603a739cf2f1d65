"""Scenario: one training run to be observed, as a frozen value with a printable id.

The id is the path ``topology/world/precision/optimizer/faults`` and, where a setting
departs from its default, a sixth part ``key=value,key=value``. Parsing an id gives the
scenario back; that is what ``gradparity replay`` does.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from ...fixtures import (
    LOSS,
    ORDERS,
    PLACES,
    PRECISIONS,
    Fault,
    Kit,
    Precision,
    Topology,
    dataset_of,
    kit_of,
    parse_faults,
)
from ..status import UsageError, as_usage
from .constraints import other_world, why_not
from .recipes import BARE_RECIPES, Recipe, recipes_of

__all__ = ["Scenario"]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What to train, on which mesh, in which precision, with which faults."""

    topology: str
    """A key of ``fixtures.TOPOLOGIES``."""
    world: int
    """Number of ranks."""
    precision: str
    """A key of ``fixtures.PRECISIONS``."""
    optimizer: str = "sgd"
    """A key of ``fixtures.OPTIMIZERS``."""
    faults: str = "none"
    """A fault plan, see ``fixtures.parse_faults``."""
    data: str = field(default="digits", metadata={"key": "data"})
    """A key of ``fixtures.MODELS``; its first word names the data set. Or a user's own
    workload as ``module:attribute``, whose topologies and optimizer then hold."""
    steps: int = field(default=8, metadata={"key": "steps"})
    """Training steps."""
    seed: int = field(default=0, metadata={"key": "seed"})
    """Seed of the initial weights and of the batches."""
    order: str = field(default="model", metadata={"key": "order"})
    """A key of ``fixtures.ORDERS``: how parameters reach the optimizer."""
    recipe: str = field(default="plain", metadata={"key": "recipe"})
    """A key of ``recipes.RECIPES``, or of ``OWN_RECIPES`` for a user's workload."""
    magnitude: float = field(default=1.0, metadata={"key": "magnitude"})
    """Factor of the loss: makes tiny or huge gradients; a power of two is exact."""
    init_scale: float = field(default=1024.0, metadata={"key": "scale"})
    """Initial scale; a power of two keeps fp32 scaling exact."""
    growth_factor: float = field(default=2.0, metadata={"key": "growth"})
    """Factor of growth."""
    backoff_factor: float = field(default=0.5, metadata={"key": "backoff"})
    """Factor of backoff."""
    growth_interval: int = field(default=3, metadata={"key": "interval"})
    """Good steps between two growths."""

    @as_usage(ValueError)
    def __post_init__(self) -> None:
        for name, table in self._tables().items():
            value = getattr(self, name)
            if value not in table:
                raise UsageError(
                    f"unknown {name} {value!r}: expected one of {', '.join(table)}"
                )
        _check_faults(parse_faults(self.faults), self)
        self.parsed_topology.mesh_shape(self.world)
        reason = self.not_runnable()
        if reason:
            raise UsageError(reason)
        if self.steps < 1:
            raise UsageError(f"a scenario takes at least 1 step, got {self.steps}")
        if self.parsed_recipe.elsewhere and self.steps < 2:
            raise UsageError(
                f"recipe {self.recipe!r} trains on two worlds: choose at least 2 steps"
            )
        assert self.legs  # the run before must be one, too

    @property
    def kit(self) -> Kit:
        """Model, batches, loss, topologies and optimizers."""
        return kit_of(self.data)

    @property
    def parsed_topology(self) -> Topology:
        """The topology itself."""
        return self.kit.topologies[self.topology]

    @property
    def parsed_precision(self) -> Precision:
        """The precision itself."""
        return PRECISIONS[self.precision]

    @property
    def parsed_recipe(self) -> Recipe:
        """The recipe itself."""
        return recipes_of(self.kit)[self.recipe]

    @property
    def id(self) -> str:
        """The printable id, from which :meth:`parse` builds the scenario again."""
        head = [
            self.topology,
            str(self.world),
            self.precision,
            self.optimizer,
            self.faults,
        ]
        changed = [
            f"{f.metadata['key']}={_plain(getattr(self, f.name))}"
            for f in dataclasses.fields(self)
            if "key" in f.metadata and getattr(self, f.name) != f.default
        ]
        return "/".join([*head, ",".join(changed)] if changed else head)

    @property
    def hash(self) -> str:
        """Short hash of every field, for file names and links."""
        values = repr(dataclasses.astuple(self)).encode()
        return hashlib.blake2b(values, digest_size=5).hexdigest()

    @classmethod
    def parse(cls, text: str) -> Scenario:
        """Build the scenario that has this id.

        Raises:
            UsageError: if ``text`` is no id; says what was got and what was expected.
        """
        parts = text.split("/")
        if len(parts) not in (5, 6) or not parts[1].isdigit():
            raise UsageError(
                f"{text!r} is no scenario id: expected topology/world/precision/"
                "optimizer/faults[/key=value,...], for example fsdp/2/fp32/sgd/none"
            )
        extra = _parse_settings(parts[5]) if len(parts) == 6 else {}
        return cls(
            topology=parts[0],
            world=int(parts[1]),
            precision=parts[2],
            optimizer=parts[3],
            faults=parts[4],
            **extra,
        )

    @property
    def dataset(self) -> str:
        """Key of ``fixtures.DATASETS``: what the model is trained on."""
        return dataset_of(self.data)

    @property
    def seam(self) -> int:
        """The step before which a recipe that resumes does so; 0 of a single one.

        Past the middle: after an odd count of steps scale and growth tracker both are
        other than a new scaler's.
        """
        return min((self.steps + 1) // 2, self.steps - 1)

    @property
    def legs(self) -> tuple[Scenario, ...]:
        """The runs it consists of, each on a world of its own; itself is the last."""
        if not self.parsed_recipe.elsewhere:
            return (self,)
        topology, world = other_world(self.topology, self.world)
        first = replace(
            self,
            topology=topology,
            world=world,
            recipe="plain",
            steps=self.seam,
            faults=_faults_before(parse_faults(self.faults), self.seam, world),
        )
        return first, self

    @property
    def trains_alone(self) -> bool:
        """Whether it means something without a scaler."""
        return self.faults == "none" and self.recipe in BARE_RECIPES

    def not_runnable(self) -> str:
        """Why the parts do not go together, or the empty string."""
        if not self.parsed_recipe.enabled and self.faults != "none":
            return "a disabled scaler has no answer to bad gradients: choose no faults"
        choices = {name: getattr(self, name) for name in self._tables()}
        return why_not(self.kit, {**choices, "data": self.data})

    def _tables(self) -> dict[str, Any]:
        return {
            "topology": self.kit.topologies,
            "precision": PRECISIONS,
            "optimizer": self.kit.optimizers,
            "order": ORDERS,
            "recipe": recipes_of(self.kit),
        }


def _faults_before(faults: tuple[Fault, ...], seam: int, world: int) -> str:
    """The faults of the first leg; its ranks are counted round where they are fewer."""
    due = [f for f in faults if f.step is None or f.step < seam]
    there = [replace(f, rank=f.rank and f.rank % world) for f in due]
    return ";".join(map(str, there)) or "none"


def _plain(value: object) -> str:
    is_whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if is_whole else str(value)  # type: ignore[call-overload]  # a whole float


def _parse_settings(text: str) -> dict[str, Any]:
    fields = {
        f.metadata["key"]: f
        for f in dataclasses.fields(Scenario)
        if "key" in f.metadata
    }
    settings: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        if key not in fields:
            raise UsageError(
                f"unknown setting {part!r}: expected key=value with key one of "
                f"{', '.join(fields)}"
            )
        kind: Any = type(fields[key].default)
        try:
            settings[fields[key].name] = kind(value)
        except ValueError:
            raise UsageError(f"setting {part!r} is no {kind.__name__}") from None
    return settings


def _check_faults(faults: tuple[Fault, ...], scenario: Scenario) -> None:
    for fault in faults:
        known = (*PLACES, LOSS)
        if fault.parameter not in known:
            known += _parameters(scenario.data)
        if fault.parameter not in known:
            raise UsageError(
                f"fault {fault} names no parameter of {scenario.data}: choose one of "
                f"{', '.join(known)}"
            )
        if fault.rank is not None and fault.rank >= scenario.world:
            raise UsageError(
                f"fault {fault} names rank {fault.rank}, but there are "
                f"{scenario.world} ranks: choose 0 to {scenario.world - 1}"
            )
        if fault.step is not None and fault.step >= scenario.steps:
            raise UsageError(
                f"fault {fault} names step {fault.step}, but there are "
                f"{scenario.steps} steps: choose 0 to {scenario.steps - 1}"
            )


@lru_cache
def _parameters(data: str) -> tuple[str, ...]:
    with torch.random.fork_rng(devices=[]):
        return tuple(name for name, _ in kit_of(data).model().named_parameters())
