"""A script on a workload of the user's own: it needs torch and the user's module.

Model, batches, loss, layout and optimizer are the workload's, so the script can also
compare the first gradients with those of one process.
"""

from __future__ import annotations

from ...fixtures import parse_faults
from ..space.scenario import Scenario
from ..status import UsageError
from .parts import calls, import_policy, passes, policy

__all__ = ["own_values"]


def own_values(scenario: Scenario) -> dict[str, object]:
    """What the template takes from a workload that is the user's own.

    Raises:
        UsageError: for what only gradparity's own loop does.
    """
    _refuse(scenario)
    module, _, attribute = scenario.model.partition(":")
    root, dot, rest = attribute.partition(".")
    takes_policy = scenario.parsed_topology.fully_shards
    index, parts = _share(scenario)
    return {
        "model": "standalone_own.py.j2",
        "trained": f"Model, data, layout and optimizer are those of {scenario.model}.",
        "workload": f"workload{dot}{rest}",
        "home": module,
        "imports": [
            *([import_policy()] if takes_policy else []),
            'sys.path.insert(0, "")  # modules are looked for where this is run',
            f"from {module} import {root} as workload",
        ],
        "layout": _layout(scenario, takes_policy),
        "experts": False,
        "optimizer": "workload.optimizer([*params.items()])",
        "numbered": True,
        "parity": _has_parity(scenario),
        "rows": index,
        "batch": f'rows(workload.batch(step, SEED), held["loss"], {parts})',
        "passes": passes(scenario),
        "calls": calls(scenario),
        "schedule": [],
    }


def _refuse(scenario: Scenario) -> None:
    workload, recipe = scenario.workload, scenario.parsed_recipe
    own = ("train_step", "weights", "gradients", "shard", "micro_batches")
    needs = [name for name in own if getattr(workload, name) is not None]
    needs += ["a loss that is (sum, count)"] if workload.counted else []
    frozen = recipe.training.frozen
    if recipe.uneven or recipe.defer_sync or frozen or recipe.recompute:
        needs.append(f"recipe {scenario.recipe!r}")
    if needs:
        raise UsageError(
            f"no standalone script for {scenario.model}: {', '.join(needs)} needs "
            "gradparity's own loop; give its replay command instead"
        )


def _layout(scenario: Scenario, takes_policy: bool) -> list[str]:
    if not scenario.parsed_topology.parallel:
        return []
    if takes_policy:
        call = "model = workload.parallelize(model, mesh, policy)"
        return [policy(scenario), call]
    return ["model = workload.parallelize(model, mesh)"]


def _share(scenario: Scenario) -> tuple[str, int]:
    """Which part of the rows a rank sees, as an expression, and of how many."""
    index, parts = "0", 1
    for axis, size in scenario.parsed_topology.mesh_shape(scenario.world_size).items():
        if axis in scenario.parsed_topology.data_axes:
            index = f'({index}) * {size} + mesh.get_local_rank("{axis}")'
            parts *= size
    return index, parts


def _has_parity(scenario: Scenario) -> bool:
    """In fp32, where gradients of the first step are not spoilt on purpose."""
    spoilt = any(not fault.step for fault in parse_faults(scenario.faults))
    return scenario.parsed_precision.is_full and not spoilt
