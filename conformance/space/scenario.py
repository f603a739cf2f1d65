"""Scenario: one training run as a frozen value with a printable id.

The id is the path ``topology/world/precision/optimizer/faults``. If settings differ
from their defaults, a sixth part lists them: ``key=value,key=value``. The id can be
parsed to the scenario, as ``gradparity replay`` does.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch

from ...fixtures import (
    LOSS,
    PARAM_ORDERS,
    PLACES,
    PRECISIONS,
    Fault,
    OfWorkload,
    Precision,
    ResolvedWorkload,
    Topology,
    compared_parameters,
    dataset_of,
    parse_faults,
    resolve_workload,
)
from ..status import UsageError, as_usage, id_parts, unknown
from .constraints import resharded_world, why_not
from .recipes import CONTROL_RECIPES, RECIPES, Recipe

__all__ = ["Scenario"]


_LIMITS = {
    "loss_factor": (0.0, math.inf),
    # scalers keep the scale in fp32
    "init_scale": (0.0, torch.finfo(torch.float32).max),
    "growth_factor": (1.0, math.inf),
    "backoff_factor": (0.0, 1.0),
    "growth_interval": (0, math.inf),
}
"""Field -> limits of its value; scalers rightly reject other settings."""
_MOST = {
    "world_size": (1024, "each rank is a process, and one process compares them"),
    "steps": (1000, "all steps are held in memory, and rounding adds up in long runs"),
    "seed": (2**32, "workloads seed generators of 64 bits with multiples of it"),
    "growth_interval": (2**31 - 1, "scalers count good steps in 32 bits"),
}
"""Field -> its largest value, and the reason."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One training run: topology, world size, precision, optimizer, faults."""

    topology: str
    """A key of ``fixtures.TOPOLOGIES``."""
    world_size: int
    """Number of ranks."""
    precision: str
    """A key of ``fixtures.PRECISIONS``."""
    optimizer: str = "sgd"
    """A key of ``fixtures.OPTIMIZERS``."""
    faults: str = "none"
    """A fault plan, see ``fixtures.parse_faults``."""
    model: str = field(default="digits", metadata={"key": "model"})
    """A key of ``fixtures.MODELS``, whose first word names the data set. Or a user's
    workload as ``module:attribute``, with its own topologies and optimizers."""
    steps: int = field(default=8, metadata={"key": "steps"})
    """Number of training steps."""
    seed: int = field(default=0, metadata={"key": "seed"})
    """Seed of the initial weights and of the batches."""
    param_order: str = field(default="model", metadata={"key": "param-order"})
    """A key of ``fixtures.PARAM_ORDERS``: order of the parameters in the optimizer."""
    recipe: str = field(default="plain", metadata={"key": "recipe"})
    """A key of ``RECIPES``."""
    loss_factor: float = field(default=1.0, metadata={"key": "loss-factor"})
    """Factor of the loss, for tiny or huge gradients; a power of two is exact."""
    init_scale: float = field(default=1024.0, metadata={"key": "scale"})
    """Initial scale; a power of two keeps fp32 scaling exact."""
    growth_factor: float = field(default=2.0, metadata={"key": "growth"})
    """Factor of the scale at growth."""
    backoff_factor: float = field(default=0.5, metadata={"key": "backoff"})
    """Factor of the scale at backoff."""
    growth_interval: int = field(default=3, metadata={"key": "interval"})
    """Number of good steps between two growths."""

    @as_usage(ValueError)
    def __post_init__(self) -> None:
        for name, table in self._tables().items():
            value = getattr(self, name)
            if value not in table:
                raise UsageError(unknown(name, value, table))
        for name, (largest, why) in _MOST.items():
            if abs(value := getattr(self, name)) > largest:
                got = value if abs(value) < 10**20 else "more than 20 digits"
                raise UsageError(f"{name} is at most {largest}, got {got}: {why}")
        _check_faults(parse_faults(self.faults), self)
        self.parsed_topology.mesh_shape(self.world_size)
        reason = self.not_runnable()
        if reason:
            raise UsageError(reason)
        if self.steps < 1:
            raise UsageError(f"a scenario takes at least 1 step, got {self.steps}")
        if self.seed < 0:  # numpy refuses negative seeds, on each rank
            raise UsageError(f"seed is 0 or more, got {self.seed}")
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            if not least < value < most:  # written so that nan is refused
                raise UsageError(
                    f"{name} must be above {least:g} and below {most:g}, got {value:g}"
                )
        assert self.most_ranks  # raises if ``saved_by`` is no valid scenario

    @property
    def workload(self) -> ResolvedWorkload:
        """Workload of the model: batches, loss, topologies and optimizers."""
        return resolve_workload(self.model)

    @property
    def parsed_topology(self) -> Topology:
        """Topology that the field ``topology`` names."""
        return self.workload.topologies[self.topology]

    @property
    def parsed_precision(self) -> Precision:
        """Precision that the field ``precision`` names."""
        return PRECISIONS[self.precision]

    @property
    def parsed_recipe(self) -> Recipe:
        """Recipe that the field ``recipe`` names."""
        return RECIPES[self.recipe]

    @property
    def promised_dtype(self) -> torch.dtype | None:
        """Dtype in which the workload promises to reduce gradients, or None."""
        usual = self.workload.reduce_dtype
        # fully_shard gets the policy of the precision, which has its own reduce_dtype
        takes_policy = self.parsed_topology.fully_shards
        policy = self.parsed_precision.reduce_dtype if takes_policy else None
        return usual and (policy or usual)

    @property
    def reduced_in(self) -> torch.dtype | None:
        """Half precision in which the workload promises to reduce, or None."""
        promised = self.promised_dtype
        return promised if promised in (torch.bfloat16, torch.float16) else None

    @property
    def in_half(self) -> bool:
        """True if anything is computed or reduced in less than fp32."""
        return not self.parsed_precision.is_full or self.reduced_in is not None

    @property
    def id(self) -> str:
        """Printable id, which `parse` converts to the scenario."""
        head = [
            self.topology,
            str(self.world_size),
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
        """Return the scenario that has this id.

        Raises:
            UsageError: if ``text`` is not an id; shows it with the expected form.
        """
        parts = id_parts(text)
        extra = _parse_settings(parts[5]) if len(parts) == 6 else {}
        with as_usage(ValueError):  # int() raises for too many digits
            world_size = int(parts[1])
        return cls(
            topology=parts[0],
            world_size=world_size,
            precision=parts[2],
            optimizer=parts[3],
            faults=parts[4],
            **extra,
        )

    @property
    def dataset(self) -> str:
        """Key of ``fixtures.DATASETS`` with the training data of the model."""
        return dataset_of(self.model)

    @property
    def resume_step(self) -> int:
        """Step before which a recipe resumes; 0 if there is a single step.

        The middle, rounded up: after 3 of 5 steps both the scale and the growth tracker
        differ from a new scaler's.
        """
        return min((self.steps + 1) // 2, self.steps - 1)

    @property
    def needs_two_passes(self) -> bool:
        """True if a ``train_step`` gets two micro-batches, though the recipe has one.

        Three kinds of recipes need two. Clipping must act on the sum of their
        gradients. Random layers must draw new numbers in each. Recomputation must use
        the inputs of each. With ``shard`` ranks may have different numbers of rows, so
        nothing is cut.
        """
        recipe, workload = self.parsed_recipe, self.workload
        training = recipe.training
        if not (training.clip == "norm" or training.random or recipe.recompute):
            return False
        loops = OfWorkload.LOOP in workload.has
        return not loops and recipe.parts == 1 and workload.shard is None

    @property
    def parts(self) -> int:
        """Largest number of micro-batches into which gradparity cuts a rank's rows."""
        return 2 if self.needs_two_passes else self.parsed_recipe.parts

    def sizes(self, rows: int) -> list[int]:
        """Return the number of a rank's rows in each micro-batch that gradparity cuts.

        Raises:
            CannotError: if the recipe cannot split this number of rows.
        """
        if self.needs_two_passes and rows % 2 == 0:
            return [rows // 2] * 2
        recipe = self.parsed_recipe
        return [rows] if recipe.parts == 1 else recipe.sizes(rows)

    @property
    def saved_by(self) -> Scenario | None:
        """Scenario on another world that saves the state with which this one begins.

        None if this scenario begins with no saved state.
        """
        if not self.parsed_recipe.resharded:
            return None
        topology, world_size = resharded_world(self.topology, self.world_size)
        return replace(
            self,
            topology=topology,
            world_size=world_size,
            recipe="plain",
            steps=max(self.resume_step, 1),
            faults="none",
        )

    @property
    def most_ranks(self) -> int:
        """Number of ranks of the largest world that the scenario needs."""
        return max(s.world_size for s in (self, self.saved_by) if s is not None)

    @property
    def trains_alone(self) -> bool:
        """True if the scenario can train without a scaler."""
        return self.faults == "none" and self.recipe in CONTROL_RECIPES

    def not_runnable(self) -> str:
        """Return why the choices exclude each other; "" if all fit together."""
        if not self.parsed_recipe.enabled and self.faults != "none":
            return "a disabled scaler does not handle bad gradients: choose no faults"
        choices = {name: getattr(self, name) for name in self._tables()}
        return why_not(self.workload, {**choices, "model": self.model})

    def _tables(self) -> dict[str, Any]:
        return {
            "topology": self.workload.topologies,
            "precision": PRECISIONS,
            "optimizer": self.workload.optimizers,
            "param_order": PARAM_ORDERS,
            "recipe": RECIPES,
        }


def _plain(value: object) -> str:
    # write 1024.0 as 1024, so that equal scenarios have equal ids
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
        if fields[key].name in settings:
            raise UsageError(f"{text!r:.200} gives {key} twice")
        kind: Any = type(fields[key].default)
        try:
            settings[fields[key].name] = kind(value)
        except ValueError:
            raise UsageError(
                f"setting {part!r:.60} is not of type {kind.__name__}"
            ) from None
    return settings


def _check_faults(faults: tuple[Fault, ...], scenario: Scenario) -> None:
    for fault in faults:
        names = (*PLACES, LOSS)
        # make the model only if a fault names a parameter
        if fault.parameter not in names:
            names += _parameters(scenario.model)
        if fault.parameter not in names:
            raise UsageError(
                f"fault {fault} names no parameter of {scenario.model}: choose one of "
                f"{', '.join(names)}"
            )
        if fault.rank is not None and fault.rank >= scenario.world_size:
            raise UsageError(
                f"fault {fault} names rank {fault.rank}, but there are "
                f"{scenario.world_size} ranks: choose 0 to {scenario.world_size - 1}"
            )
        if fault.step is not None and fault.step >= scenario.steps:
            raise UsageError(
                f"fault {fault} names step {fault.step}, but there are "
                f"{scenario.steps} steps: choose 0 to {scenario.steps - 1}"
            )


@lru_cache
def _parameters(model: str) -> tuple[str, ...]:
    # a model draws its weights from the global generator, which other code also uses
    with torch.random.fork_rng(devices=[]):
        return (*compared_parameters(resolve_workload(model).model()),)
