"""Scenario: one training run to be observed, as a frozen value with a printable id.

The id is the path ``topology/world/precision/optimizer/faults`` and, where a setting
departs from its default, a sixth part ``key=value,key=value``. Parsing an id gives the
scenario back; that is what ``gradparity replay`` does.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import Any

from ..fixtures import (
    DATASETS,
    MODELS,
    OPTIMIZERS,
    ORDERS,
    PRECISIONS,
    TOPOLOGIES,
    Fault,
    Precision,
    Topology,
    parse_faults,
)

__all__ = ["RECIPES", "Scenario"]

RECIPES = {
    "plain": "backward, step, update",
    "unscale": "backward, explicit unscale_, step, update",
    "clip-value": "backward, unscale_, clip_grad_value_, step, update",
    "accumulate": "two backward passes a step, synchronised in each",
}
"""Training recipes by name."""


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
    """A key of ``fixtures.DATASETS``; names the model, too."""
    steps: int = field(default=8, metadata={"key": "steps"})
    """Training steps."""
    seed: int = field(default=0, metadata={"key": "seed"})
    """Seed of the initial weights and of the batches."""
    order: str = field(default="model", metadata={"key": "order"})
    """A key of ``fixtures.ORDERS``: how parameters reach the optimizer."""
    recipe: str = field(default="plain", metadata={"key": "recipe"})
    """A key of :data:`RECIPES`."""
    init_scale: float = field(default=1024.0, metadata={"key": "scale"})
    """Initial scale; a power of two keeps fp32 scaling exact."""
    growth_factor: float = field(default=2.0, metadata={"key": "growth"})
    """Factor of growth."""
    backoff_factor: float = field(default=0.5, metadata={"key": "backoff"})
    """Factor of backoff."""
    growth_interval: int = field(default=3, metadata={"key": "interval"})
    """Good steps between two growths."""

    def __post_init__(self) -> None:
        for name, table in _TABLES.items():
            value = getattr(self, name)
            if value not in table:
                raise ValueError(
                    f"unknown {name} {value!r}: expected one of {', '.join(table)}"
                )
        _check_faults(parse_faults(self.faults), self)
        self.parsed_topology.mesh_shape(self.world)
        reason = self.not_runnable()
        if reason:
            raise ValueError(reason)
        if self.steps < 1:
            raise ValueError(f"a scenario takes at least 1 step, got {self.steps}")

    @property
    def parsed_topology(self) -> Topology:
        """The topology itself."""
        return TOPOLOGIES[self.topology]

    @property
    def parsed_precision(self) -> Precision:
        """The precision itself."""
        return PRECISIONS[self.precision]

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
            ValueError: if ``text`` is no id; says what was got and what was expected.
        """
        parts = text.split("/")
        if len(parts) not in (5, 6) or not parts[1].isdigit():
            raise ValueError(
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
        return self.data.split("-")[0]

    @property
    def clip_value(self) -> float | None:
        """Largest absolute gradient element, or None where nothing is clipped."""
        return CLIP_VALUE if self.recipe == "clip-value" else None

    def not_runnable(self) -> str:
        """Why the parts do not go together, or the empty string."""
        topology, precision = self.parsed_topology, self.parsed_precision
        if self.dataset not in topology.models:
            return (
                f"topology {self.topology!r} cannot lay out the model for "
                f"{self.data!r}: it takes {', '.join(topology.models)}"
            )
        if precision.needs_fully_shard and topology.name not in _FULLY_SHARD:
            return (
                f"precision {self.precision!r} needs fully_shard, which topology "
                f"{self.topology!r} does not use: choose {' or '.join(_FULLY_SHARD)}"
            )
        if self.data == "text-tied" and topology.name not in _TIEABLE:
            return f"tied weights cannot be laid out by topology {self.topology!r}"
        if self.recipe == "accumulate" and topology.name.startswith("pp"):
            return "a pipeline accumulates inside its schedule: choose another recipe"
        return ""


CLIP_VALUE = 2.0**-8
"""Bound of ``clip_grad_value_``: some gradients of every model here exceed it."""
_FULLY_SHARD = ("fsdp", "hsdp", "fsdp+tp", "hsdp+tp", "pp+fsdp")
_TIEABLE = ("single", "ddp", "fsdp", "hsdp", "tp")
_TABLES: dict[str, Any] = {
    "topology": TOPOLOGIES,
    "precision": PRECISIONS,
    "optimizer": OPTIMIZERS,
    "data": MODELS,
    "order": ORDERS,
    "recipe": RECIPES,
}
assert set(DATASETS) <= set(MODELS)


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
            raise ValueError(
                f"unknown setting {part!r}: expected key=value with key one of "
                f"{', '.join(fields)}"
            )
        kind: Any = type(fields[key].default)
        try:
            settings[fields[key].name] = kind(value)
        except ValueError:
            raise ValueError(f"setting {part!r} is no {kind.__name__}") from None
    return settings


def _check_faults(faults: tuple[Fault, ...], scenario: Scenario) -> None:
    for fault in faults:
        if fault.rank is not None and fault.rank >= scenario.world:
            raise ValueError(
                f"fault {fault} names rank {fault.rank}, but there are "
                f"{scenario.world} ranks: choose 0 to {scenario.world - 1}"
            )
        if fault.step is not None and fault.step >= scenario.steps:
            raise ValueError(
                f"fault {fault} names step {fault.step}, but there are "
                f"{scenario.steps} steps: choose 0 to {scenario.steps - 1}"
            )
