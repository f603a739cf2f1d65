"""Standalone: a violation as a short script for a bug report, without a harness.

The script needs torch and the judged scaler's package alone, and the workload's module
where that is the user's own. It builds a model of the same kind (or that model) with
the same layout, precision, recipe and faults, and judges agreement, skips, the scale
rule, the unscaled gradients and stray collectives by itself. Finer laws (parity against
the reference) are beyond it: exit code 0 then says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from ...fixtures import LOSS, PLACES, Fault, is_workload, parse_faults
from ..rank.local_parts import WRAPPERS
from ..rank.scaler_spec import NO_SCALER
from ..space.random_layers import draws_in_forward
from ..space.scenario import Scenario
from ..status import UsageError, write_whole
from .own_workload import own_values
from .parts import (
    BATCHES,
    LAYERS,
    LIKENESS,
    OPTIMIZERS,
    PARAM_ORDERS,
    PARTS,
    calls,
    imports,
    layout,
    passes,
    schedule,
)
from .phases import chosen, lines

__all__ = ["standalone_script", "write_standalone"]


def standalone_script(scenario: Scenario, scaler_spec: str) -> str:
    """A Python script that shows a failure of a scaler with torch alone.

    Args:
        scenario: in which the scaler failed.
        scaler_spec: ``module:attribute`` of the scaler.

    Raises:
        UsageError: if the scenario holds something that scripts are not made for; says
            which part.
    """
    own = is_workload(scenario.model)
    if not own:
        _refuse(scenario)
    elif draws_in_forward(scenario.model):
        raise UsageError("no standalone script for a workload with random layers")
    named = [s for s in (scaler_spec, scenario.model) if is_workload(s)]
    packages = dict.fromkeys(re.split("[.:]", name)[0] for name in named)
    text = _template().render(
        **_scaler(scaler_spec),
        **_settings(scenario),
        **(own_values if own else _values)(scenario),
        own=own,
        enabled=scenario.parsed_recipe.enabled and scaler_spec != NO_SCALER,
        needs=[package for package in packages if package != "torch"],
    )
    compile(text, "standalone", "exec")
    return text


def _scaler(spec: str) -> dict[str, object]:
    """Where the scaler comes from; ``none`` is a class that the script has itself."""
    if spec == NO_SCALER:
        return {"scaler": "no scaler", "module": "", "root": "NoScaler", "rest": ""}
    if not re.fullmatch(r"[\w.]+:[\w.]+", spec):
        raise UsageError(f"no standalone script for scaler {spec!r}")
    module, _, attribute = spec.partition(":")
    root, dot, rest = attribute.partition(".")
    return {"scaler": spec, "module": module, "root": root, "rest": dot + rest}


def _settings(scenario: Scenario) -> dict[str, object]:
    """Numbers, faults, mesh and recipe."""
    recipe, phases = scenario.parsed_recipe, scenario.phases
    return dict(
        id=scenario.id,
        place=", then ".join(
            f"{phase.topology}, {phase.world_size} ranks" for phase in phases
        ),
        world_sizes=[phase.world_size for phase in phases],
        steps=scenario.steps,
        seed=scenario.seed,
        growth=scenario.growth_factor,
        backoff=scenario.backoff_factor,
        interval=scenario.growth_interval,
        init_scale=scenario.init_scale,
        loss_factor=scenario.loss_factor,
        primed=recipe.primed,
        manual=recipe.new_scale,
        faults=[
            [_fault(f, phase) for f in parse_faults(phase.faults)] for phase in phases
        ],
        wrappers=WRAPPERS,
        mesh_shape=chosen(scenario, lambda phase: tuple(_mesh(phase).values())),
        mesh_axes=chosen(scenario, lambda phase: tuple(_mesh(phase))),
        order=PARAM_ORDERS[scenario.param_order],
        two=recipe.optimizers == 2,
        resharded=recipe.resharded,
        resumes=recipe.resume and not recipe.resharded,
        resume_step=scenario.resume_step,
    )


def _values(scenario: Scenario) -> dict[str, object]:
    """What stands for the model, data, layout and optimizer of the fixtures."""
    recipe, phases = scenario.parsed_recipe, scenario.phases
    return dict(
        model="standalone_model.py.j2",
        trained="The model is of the same kind as the scenario's; the data are random.",
        imports=dict.fromkeys(line for phase in phases for line in imports(phase)),
        recomputes=recipe.recompute,
        layers=_layers(scenario.model),
        experts=scenario.model == "digits-experts",
        tied=scenario.model == "text-tied",
        frozen=recipe.training.frozen,
        compiled=recipe.compile,
        averages=any(phase.topology in ("fsdp+plain", "ep") for phase in phases),
        layout=lines(scenario, layout),
        optimizer=f"torch.optim.{OPTIMIZERS[scenario.optimizer]}",
        groups=scenario.optimizer == "adamw-groups",
        numbered=recipe.resharded,
        parity=False,
        schedule=lines(scenario, schedule),
        rows=chosen(scenario, _rows),
        batch=BATCHES[scenario.dataset],
        passes=lines(scenario, passes),
        calls=calls(scenario),
    )


def write_standalone(path: Path, scenario: Scenario, scaler_spec: str) -> None:
    """Write the script to ``path``, whole or not at all.

    Raises:
        UsageError: as :func:`standalone_script`.
    """
    write_whole(path, standalone_script(scenario, scaler_spec))


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("gradparity.conformance.script"),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("standalone.py.j2")


def _refuse(scenario: Scenario) -> None:
    known: Sequence[tuple[str, Mapping[str, object] | Sequence[str]]] = (
        ("model", LAYERS),
        ("topology", PARTS),
        ("optimizer", OPTIMIZERS),
        ("param_order", PARAM_ORDERS),
    )
    for name, table in known:
        value = getattr(scenario, name)
        if value not in table:
            raise UsageError(
                f"no standalone script for {name} {value!r}: it is made for "
                f"{', '.join(table)}"
            )


def _fault(fault: Fault, scenario: Scenario) -> tuple[object, ...]:
    name = fault.parameter
    if name not in (*PLACES, LOSS) and not is_workload(scenario.model):
        *_, layer, kind = ("", *name.split("."))
        layer = LIKENESS.get(layer, layer)
        if layer not in LAYERS[scenario.model] or kind not in ("weight", "bias"):
            raise UsageError(f"no standalone script for the fault {fault}")
        name = f"{layer}.{kind}"
    return fault.kind, fault.rank, fault.step, name, fault.place, fault.alone


def _layers(data: str) -> str:
    lines = [f'        "{name}": {layer},' for name, layer in LAYERS[data].items()]
    return "\n".join(["{", *lines, "    }"])


def _mesh(scenario: Scenario) -> dict[str, int]:
    return scenario.parsed_topology.mesh_shape(scenario.world_size)


def _rows(scenario: Scenario) -> str:
    """A number that tells which rows a rank sees."""
    axes = [a for a in _mesh(scenario) if a in scenario.parsed_topology.data_axes]
    ranks = [
        f'{10**i} * mesh.get_local_rank("{axis}")' for i, axis in enumerate(axes, 1)
    ]
    return " + ".join([str(scenario.seed), *ranks])
