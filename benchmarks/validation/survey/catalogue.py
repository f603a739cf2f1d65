"""Catalogue of the model types of transformers that ship a parallel plan.

It is read from the source of their configuration classes, without importing them.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gradparity.conformance.status import UsageError

__all__ = ["PLANS", "ModelType", "Plan", "chosen_types", "model_types"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to lay out a model."""

    text: str
    promise: str
    """Behaviour of gradients that the package documents."""
    rules: str
    """Attribute of a configuration class that holds the plan's rules."""
    mesh: Mapping[str, int]
    """Axis -> size, as in a workload's meshes."""
    sizes: Mapping[str, int]
    """Arguments of ``transformers.distributed.DistributedConfig``."""


PLANS: Mapping[str, Plan] = {
    "tp": Plan(
        text="tensor parallel over 2 ranks",
        promise=(
            "All ranks see all rows. The gradient of a parameter that a rule shards is "
            "that of its shard; all others are whole on every rank: a rule such as "
            "`replicated_with_grad_allreduce` is there to sum them."
        ),
        rules="base_model_tp_plan",
        mesh={"tp": 2},
        sizes={"tp_size": 2},
    ),
    "ep": Plan(
        text="experts over 2 ranks, which share the rows; tensor parallel beside them",
        promise=(
            "All ranks see all rows, and an expert lies whole on one of them. In "
            "training each token goes to it and comes back by all-to-all "
            '(`ep_implementation="auto"`). `EPImplementation` promises that gradients '
            "reach every rank that holds a token, routing weights included. So an "
            "expert's gradient is whole where the expert is, and all others, the "
            "router's too, are whole on every rank. A choice of experts that tips "
            "within the noise of its scores is made as in the reference."
        ),
        rules="base_model_ep_plan",
        mesh={"ep": 2},
        sizes={"tp_size": 2, "ep_size": 2},
    ),
    "fsdp+tp": Plan(
        text="FSDP2 over 2 ranks outside tensor parallel over 2",
        promise=(
            "Each half of the rows goes to one group of tensor parallel, and FSDP2 "
            "takes the mean over the groups: gradients are those of all rows on one "
            "process."
        ),
        rules="base_model_tp_plan",
        mesh={"dp": 2, "tp": 2},
        sizes={"fsdp_size": 2, "tp_size": 2},
    ),
}


@dataclass(frozen=True, kw_only=True)
class ModelType:
    """A model type whose configuration class ships a plan."""

    name: str
    """``model_type`` of the configuration class."""
    folder: str
    """Name of its folder in ``transformers.models``."""
    configuration: str
    """Module that defines the configuration class."""
    config: str
    """Name of the configuration class."""
    rules: frozenset[str]
    """Names of the attributes with rules that the class ships."""


@cache
def model_types() -> Mapping[str, ModelType]:
    """Return all model types, by name.

    Raises:
        UsageError: if transformers is not installed.
    """
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        text = "transformers is not installed: pip install 'transformers>=5.23'"
        raise UsageError(text)
    models = Path(spec.origin).parent / "models"
    found = [
        kind
        for path in sorted(models.glob("*/configuration_*.py"))
        for kind in _types_in(path)
    ]
    return {kind.name: kind for kind in found}


def chosen_types(plan: str, names: tuple[str, ...] = ()) -> list[ModelType]:
    """Return the model types that ship a plan.

    Args:
        plan: a key of :data:`PLANS`.
        names: model types or folders to choose; by default all.
    """
    return [
        kind
        for kind in model_types().values()
        if PLANS[plan].rules in kind.rules
        and (not names or {kind.name, kind.folder} & {*names})
    ]


def _types_in(path: Path) -> Iterator[ModelType]:
    """Yield the model types of one file: its classes with rules and a name."""
    source = path.read_text(encoding="utf-8")
    wanted = {plan.rules for plan in PLANS.values()}
    # most files ship no plan, and parsing is what takes time
    if not any(rules in source for rules in wanted):
        return
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        set_here = {
            target.id: each.value
            for each in node.body
            if isinstance(each, ast.Assign)
            for target in each.targets
            if isinstance(target, ast.Name)
        }
        name = set_here.get("model_type")
        rules = {
            each
            for each in wanted & set_here.keys()
            # a subclass without experts resets its parent's plan
            if getattr(set_here[each], "value", ...) is not None
        }
        if rules and isinstance(name, ast.Constant):
            yield ModelType(
                name=str(name.value),
                folder=path.parent.name,
                configuration=path.stem,
                config=node.name,
                rules=frozenset(rules),
            )
