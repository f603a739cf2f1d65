"""Write a violation as a standalone script for a bug report.

The script needs only torch, the tested scaler's package, and the module of a user's
workload. A script consists of ``template.py``, the workload (the user's class, or the
source of the built-in model and layout) and, for a scaler, ``scaled.py``.

A script compares the gradients of each step, and the weights after the step, with one
process in fp64, and the scaler with its documented rule. If there are differences, the
script prints one line for each, and its exit code is 1. Scripts do not make finer
checks: a scenario that fails only such a check gives exit code 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ...fixtures import (
    MODELS,
    OPTIMIZERS,
    PARAM_ORDERS,
    OfWorkload,
    dataset_of,
    loss,
    named,
    parse_faults,
    without_gradient_sync,
)
from ...fixtures.imports import importable
from ..files import write_whole
from ..rank.scaler_spec import NO_SCALER
from ..space.facts import facts_of
from ..space.recipes import CLIP_NORM, Recipe, Training
from ..space.scenario import Scenario
from ..status import UsageError
from . import pieces
from .bundle import Bundle, Code
from .scaled import Scaled
from .template import Run, main

__all__ = ["refuse_other_file", "standalone_script", "write_standalone"]


def standalone_script(scenario: Scenario, scaler_spec: str) -> str:
    """Return a Python script that shows a failure of a scaler with only torch.

    Args:
        scenario: scenario in which the scaler failed.
        scaler_spec: ``module:attribute`` of the scaler.

    Raises:
        UsageError: names the part of the scenario that scripts do not support.
    """
    refusal = _refusal(scenario, scaler_spec)
    if refusal:
        raise UsageError(f"no standalone script for {refusal}")
    own, bundle = OfWorkload.OF_USER in scenario.workload.has, Bundle()
    bundle.need(main.__module__, main.__name__)
    values: dict[str, Any] = {
        "RUN": _run(scenario),
        "WORKLOAD": _own(scenario.model) if own else _built_in(scenario),
    }
    if scaler_spec != NO_SCALER:
        values["SCALED"] = _scaled(scenario, scaler_spec)
    # Do this twice: an imported name must not be the name of a definition.
    for _ in range(2):
        lines = [f"{key} = {bundle.expression(each)}" for key, each in values.items()]
    packages = _packages(scaler_spec, scenario.model)
    text = _SCRIPT.format(
        tested="no scaler" if scaler_spec == NO_SCALER else scaler_spec,
        place=f"{scenario.topology}, {scenario.world_size} ranks",
        title=TITLE,
        id=scenario.id,
        packages=" and ".join(packages),
        trained=_OWN.format(scenario.model) if own else _BUILT_IN,
        definitions=bundle.text(),
        values="\n".join(lines),
        names=", ".join(values),
    )
    # A text that is no Python fails here, not for a reader.
    compile(text, "standalone", "exec")
    return text


_OWN = """\
The model, data, layout and optimizer come from {}. Run this script in the folder
that contains its package or module."""
_BUILT_IN = "Model and layout are the scenario's; digits are random."
_SCRIPT = '''\
"""{tested} on {place}: {title}.

Scenario: {id}
Needs {packages}. Exit code 1 and one line a violation, 0 without any.
{trained}
"""

from __future__ import annotations

{definitions}


{values}

if __name__ == "__main__":
    sys.exit(main({names}))
'''


TITLE = "a failure without a harness"
"""End of the first line of each script, by which an earlier script is recognised."""


def write_standalone(path: Path, scenario: Scenario, scaler_spec: str) -> None:
    """Write the script to ``path`` atomically.

    Raises:
        UsageError: see :func:`standalone_script` and :func:`refuse_other_file`.
    """
    refuse_other_file(path, scaler_spec, scenario.model)
    write_whole(path, standalone_script(scenario, scaler_spec))


def _packages(*specs: str) -> list[str]:
    """Return the packages that a script imports."""
    imported = [re.split("[.:]", spec)[0] for spec in specs if ":" in spec]
    return list(dict.fromkeys(["torch", *imported]))


def refuse_other_file(path: Path, *specs: str) -> None:
    """Raise if a script at ``path`` would replace another file, or hide a package.

    Args:
        path: file of the script.
        specs: ``module:attribute`` of what the script imports.

    Raises:
        UsageError: if the file is no script of an earlier run, such as the workload's
            own module, or if the script would import itself.
    """
    if path.stem in _packages(*specs):
        text = f"{path} would hide {path.stem}, which it imports: choose another name"
        raise UsageError(text)
    if path.is_file() and TITLE not in path.read_bytes()[:400].decode(errors="replace"):
        text = f"{path} exists, and is no script of gradparity: choose another name"
        raise UsageError(text)


def _refusal(scenario: Scenario, spec: str) -> str:
    """Return which part of a scenario scripts do not support; "" if they can do all."""
    recipe, precision = scenario.parsed_recipe, scenario.parsed_precision
    workload, facts = scenario.workload, facts_of(scenario.model)
    bare = spec == NO_SCALER
    needs = "needs gradparity's own loop: give its replay command"
    refused = {
        f"scaler {spec!r}": not (bare or re.fullmatch(r"[\w.]+:[\w.]+", spec)),
        f"precision {scenario.precision!r}, which converts the model": (
            precision.convert is not None
        ),
        "planted faults without a scaler": bare and scenario.faults != "none",
        f"recipe {scenario.recipe!r}, which {needs}": (
            not _is_simple(recipe) or (recipe.training.clip and bare)
        ),
        f"topology {scenario.topology!r}: a pipeline {needs}": (
            scenario.parsed_topology.pipelined
        ),
        f"{scenario.model}: it has random layers, which gradparity turns off, or its "
        "second forward of a batch gives other outputs than the first": facts.draws,
        f"{scenario.model}: its forward makes new tensors without a dtype, and the "
        "script trains in fp64, too: make them in the dtype of the inputs": (
            facts.widens
        ),
        f"{scenario.model}: a loss with several counts {needs}": facts.counts > 1,
        f'{scenario.model}: reference = "one rank" {needs}': workload.one_rank,
        f"{scenario.model}: its train_step {needs}, but with --scaler none, in fp32": (
            OfWorkload.LOOP not in workload.has and not (bare and precision.is_full)
        ),
    }
    return next((text for text, applies in refused.items() if applies), "")


def _is_simple(recipe: Recipe) -> bool:
    """Return True if the template's loop is that of the recipe."""
    plain = replace(
        recipe,
        text="",
        parts=1,
        defer_sync=False,
        unscale=False,
        primed=False,
        of_stacks=False,
    )
    return plain in (Recipe(text=""), Recipe(text="", training=Training(clip="norm")))


def _run(scenario: Scenario) -> Run:
    recipe, workload = scenario.parsed_recipe, scenario.workload
    precision, topology = scenario.parsed_precision, scenario.parsed_topology
    mesh = topology.mesh_shape(scenario.world_size)
    of_user, own_parts = OfWorkload.OF_USER in workload.has, workload.micro_batches
    takes_policy = topology.fully_shards or not of_user
    passes: Callable[..., None] = pieces.micro_batches
    if recipe.defer_sync:
        passes = partial(passes, unsynced=without_gradient_sync)
    if facts_of(workload.name).counted:
        passes = partial(passes, counted=True)
    options: dict[str, Any] = {
        "placed": pieces.placed if workload.weights or workload.gradients else None,
        "parts": pieces.halves if recipe.parts > 1 and not own_parts else None,
        "clip_norm": CLIP_NORM if recipe.training.clip else None,
        # On one rank gradparity trains the bare model.
        "parallel": False if of_user and topology.name == "single" else None,
        # Errors of correct runs in half precision stay below this limit.
        "limit": 0.1 if scenario.in_half else None,
    }
    return Run(
        mesh=mesh,
        data_axes=tuple(axis for axis in mesh if axis in topology.data_axes),
        steps=scenario.steps,
        passes=passes,
        seed=scenario.seed,
        policy=(precision.policy(),) * takes_policy,
        loss_factor=scenario.loss_factor,
        autocast=precision.autocast_dtype,
        order=PARAM_ORDERS[scenario.param_order],
        **{name: value for name, value in options.items() if value is not None},
    )


def _own(spec: str) -> Code:
    """Return the code that imports the user's workload and creates it."""
    module, _, name = spec.partition(":")
    workload = named("workload", spec, "mypackage.stack:Workload")
    code = f"{name}()" if isinstance(workload, type) else name
    return Code(importable(module), code, late=True)


def _built_in(scenario: Scenario) -> pieces.BuiltIn:
    return pieces.BuiltIn(
        model=MODELS[scenario.model].make,
        batch=pieces.BATCHES[dataset_of(scenario.model)],
        loss=loss,
        optimizer=OPTIMIZERS[scenario.optimizer],
        layout=scenario.parsed_topology.apply,
    )


def _scaled(scenario: Scenario, spec: str) -> partial[Any]:
    module, _, name = spec.partition(":")
    recipe = scenario.parsed_recipe
    settings = {
        "init_scale": scenario.init_scale,
        "growth_factor": scenario.growth_factor,
        "backoff_factor": scenario.backoff_factor,
        "growth_interval": scenario.growth_interval,
        "enabled": True,
    }
    clip = {"clip_norm": CLIP_NORM} if recipe.training.clip else {}
    kind: Any = Scaled  # its first argument is the name of a class
    return partial(
        kind,
        Code(module, name),
        settings,
        unscale=recipe.unscale,
        primed=recipe.primed,
        faults=parse_faults(scenario.faults),
        **clip,
    )
