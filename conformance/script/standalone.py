"""Standalone: a violation as a short script for a bug report, without a harness.

The script needs torch and the judged scaler's package alone, and the workload's module
where that is the user's own. It consists of functions of ``runtime`` and of the data of
a scenario: a model of the same kind (or that model) with the same layout, precision,
recipe and faults. It checks agreement, skips, the scale rule, the unscaled gradients
and stray collectives by itself, or, without a scaler, the gradients and the updates of
a workload. It does not check finer laws and prints that with exit code 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...fixtures import (
    LOSS,
    OPTIMIZERS,
    PARAM_ORDERS,
    PLACES,
    Fault,
    is_workload,
    named,
    parse_faults,
    split_names,
    without_gradient_sync,
)
from ..files import write_whole
from ..rank.scaler_spec import NO_SCALER
from ..space.random_layers import draws_in_forward
from ..space.recipes import LR_DECAY, Recipe
from ..space.scenario import Scenario
from ..space.workload_checks import needs_wide_tensors
from ..status import UsageError
from .bundle import Bundle, Code
from .runtime import models, passes, scaler, stack
from .runtime.ranks import Phase, Stack
from .runtime.resharding import Resharded

__all__ = ["standalone_script", "write_standalone"]


def standalone_script(scenario: Scenario, scaler_spec: str) -> str:
    """A Python script that shows a failure of a scaler with torch alone.

    Args:
        scenario: in which the scaler failed.
        scaler_spec: ``module:attribute`` of the scaler.

    Raises:
        UsageError: names the part of the scenario that scripts do not support.
    """
    refusal = _refusal(scenario, scaler_spec)
    if refusal:
        raise UsageError(f"no standalone script for {refusal}")
    trained = _stack(scenario)
    program: Callable[[Any, Any], int] = stack.main
    if not _of_the_stack(scenario, scaler_spec):
        trained, program = _scaled(scenario, scaler_spec, trained), scaler.main
    phases = tuple(map(_phase, scenario.phases, (0, scenario.resume_step)))
    settings = {"stack": [trained], "phase": phases}
    bundle = Bundle(program.__module__, program.__name__, settings)
    data = [bundle.expression(value) for value in (trained, phases)]
    own = is_workload(scenario.model)
    made = f"workload = {bundle.expression(_own(scenario.model))}\n" if own else ""
    specs = [s for s in (scaler_spec, scenario.model) if is_workload(s)]
    packages = dict.fromkeys(["torch", *(re.split("[.:]", s)[0] for s in specs)])
    places = [f"{p.topology}, {p.world_size} ranks" for p in scenario.phases]
    text = _SCRIPT.format(
        judged="no scaler" if scaler_spec == NO_SCALER else scaler_spec,
        place=", then ".join(places),
        id=scenario.id,
        packages=" and ".join(packages),
        trained=_OWN.format(scenario.model) if own else _OF_ITS_KIND,
        definitions=bundle.text(),
        made=made,
        stack=data[0],
        phases=data[1],
    )
    # a text that is no Python fails here and not at the reader
    compile(text, "standalone", "exec")
    return text


_OWN = "Model, data, layout and optimizer are those of {}."
_OF_ITS_KIND = "The model is of the same kind as the scenario's; the data are random."
_SCRIPT = '''\
"""{judged} on {place}: a failure without a harness.

Scenario: {id}
Needs {packages}. Exit code 1 and one line a violation, 0 without any.
{trained}
"""

from __future__ import annotations

{definitions}


{made}STACK = {stack}
PHASES = {phases}

if __name__ == "__main__":
    sys.exit(main(STACK, PHASES))
'''


def write_standalone(path: Path, scenario: Scenario, scaler_spec: str) -> None:
    """Write the script to ``path``, whole or not at all.

    Raises:
        UsageError: as :func:`standalone_script`.
    """
    write_whole(path, standalone_script(scenario, scaler_spec))


_OF_A_STEP = ("train_step", "weights", "gradients")
"""Methods of workloads that only the program without a scaler calls."""


def _refusal(scenario: Scenario, spec: str) -> str:
    """The part that scripts do not support, or the empty string."""
    if spec != NO_SCALER and not re.fullmatch(r"[\w.]+:[\w.]+", spec):
        return f"scaler {spec!r}"
    if scenario.parsed_precision.convert is not None:
        return f"precision {scenario.precision!r}, which converts the model"
    if scenario.parsed_recipe.clips_and_steps:
        return f"recipe {scenario.recipe!r}, which not all scalers have"
    if is_workload(scenario.model):
        return _refusal_of_own(scenario, spec)
    for name, table in (("model", models.MODELS), ("topology", models.LAYOUTS)):
        value = getattr(scenario, name)
        if value not in table:
            return f"{name} {value!r}: it is made for {', '.join(table)}"
    known = {LOSS, *PLACES, *_names(models.MODELS[scenario.model])}
    for fault in map(_fault, parse_faults(scenario.faults)):
        if fault.parameter not in known:
            return f"the fault {fault}"
    return ""


def _refusal_of_own(scenario: Scenario, spec: str) -> str:
    if draws_in_forward(scenario.model):
        return "a workload with random layers"
    if needs_wide_tensors(scenario.model):
        return (
            f"{scenario.model}: its forward makes new tensors without a dtype, and the "
            "script trains in fp64, too: make them in the dtype of the inputs"
        )
    recipe = scenario.parsed_recipe
    if recipe.training.frozen or recipe.recompute:
        return (
            f"{scenario.model}: recipe {scenario.recipe!r} needs gradparity's own loop"
        )
    methods = [n for n in _OF_A_STEP if getattr(scenario.workload, n) is not None]
    if methods and not _of_the_stack(scenario, spec):
        return (
            f"{scenario.model}: {', '.join(methods)} needs gradparity's own loop, but "
            "with --scaler none, in fp32 and without faults; give its replay command"
        )
    return ""


def _of_the_stack(scenario: Scenario, spec: str) -> bool:
    """Whether the script tests the stack alone, in a loop of plain steps."""
    recipe = scenario.parsed_recipe
    # equal to the plain recipe but for its passes, which a train_step is given
    passes_alone = replace(recipe, text="", parts=1, uneven=False, defer_sync=False)
    return (
        is_workload(scenario.model)
        and spec == NO_SCALER
        and scenario.faults == "none"
        and scenario.parsed_precision.is_full
        and passes_alone == Recipe(text="")
    )


def _stack(scenario: Scenario) -> Stack:
    """The stack and its passes."""
    recipe, workload = scenario.parsed_recipe, scenario.workload
    trained: Any
    if is_workload(scenario.model):
        trained = Code("", "workload")
        frozen = []
    else:
        trained = models.Kind(
            model=models.MODELS[scenario.model],
            batch=models.BATCHES[scenario.dataset],
            loss=models.cross_entropy,
            optimizer=OPTIMIZERS[scenario.optimizer],
        )
        # the second half, as ``frozen_names`` chooses it in the scenario's model
        frozen = [n for n in _names(trained.model) if n.startswith(("down.", "head."))]
    parallel = scenario.parsed_topology.parallel
    of_layouts = ("train_step", "shard", "weights", "gradients") if parallel else ()
    methods = {
        name: Code("", f"workload.{name}")
        for name in (*of_layouts, "micro_batches")
        if getattr(workload, name) is not None
    }
    cut = None if workload.micro_batches else _CUTS[recipe.parts]
    return Stack(
        **methods,
        workload=trained,
        clip_norm=workload.clip_norm,
        seed=scenario.seed,
        loss_factor=scenario.loss_factor,
        own=is_workload(scenario.model),
        context=nullcontext
        if scenario.parsed_precision.autocast_dtype is None
        else partial(torch.autocast, "cpu", scenario.parsed_precision.autocast_dtype),
        counted=workload.counted,
        cut=cut,
        unsynced=without_gradient_sync if recipe.defer_sync else None,
        frozen=tuple(frozen) if recipe.training.frozen else (),
        recomputed=recipe.recompute,
        compiled=recipe.compile,
    )


def _own(spec: str) -> Code:
    """The user's workload."""
    module, _, name = spec.partition(":")
    found = named("workload", spec, "mypackage.stack:Workload")
    return Code(module, f"{name}()" if isinstance(found, type) else name, late=True)


_CUTS = {1: None, 2: passes.halves, 3: passes.three_unequal}
"""Micro-batches of a recipe -> the function that cuts the rows."""


def _passes(scenario: Scenario) -> Callable[..., None] | None:
    recipe, workload = scenario.parsed_recipe, scenario.workload
    if workload.train_step is not None:
        return None
    if scenario.parsed_topology.pipelined:
        return passes.pipeline
    if recipe.training.losses == 2:
        return passes.two_losses
    cut = workload.shard or workload.micro_batches or workload.counted
    return passes.micro_batches if cut or recipe.parts > 1 else passes.one_pass


def _names(make: Callable[[], nn.Module]) -> list[str]:
    """The parameters of a model."""
    with torch.random.fork_rng(devices=[]):
        return [name for name, _ in make().named_parameters()]


def _scaled(scenario: Scenario, spec: str, trained: Stack) -> scaler.ScaledStack:
    """The stack with a scaler, and the calls of the scaler."""
    recipe, first = scenario.parsed_recipe, parse_faults(scenario.faults)
    module, _, name = spec.partition(":")
    judged: Any = scaler.NoScaler if spec == NO_SCALER else Code(module, name)
    return scaler.ScaledStack(
        **vars(trained),
        scaler=judged,
        init_scale=scenario.init_scale,
        growth=scenario.growth_factor,
        backoff=scenario.backoff_factor,
        interval=scenario.growth_interval,
        enabled=recipe.enabled and spec != NO_SCALER,
        primed=recipe.primed,
        manual=recipe.new_scale,
        resume_step=scenario.resume_step if recipe.resume else 0,
        resumes=recipe.resume and not recipe.resharded,
        reshard=Resharded if recipe.resharded else None,
        unscale=recipe.unscale,
        clip=_CLIPPING[recipe.training.clip],
        split=split_names if recipe.optimizers == 2 else None,
        order=PARAM_ORDERS[scenario.param_order],
        decay=LR_DECAY if recipe.training.decay else 0.0,
        # the gradients of step 0 are compared: no fault may be due there
        parity=is_workload(scenario.model)
        and scenario.parsed_precision.is_full
        and all(fault.step for fault in first),
    )


_CLIPPING = {"": None, "value": scaler.clip_value, "norm": scaler.clip_norm}


def _phase(scenario: Scenario, begin: int) -> Phase:
    """One run on one world."""
    topology, faults = scenario.parsed_topology, parse_faults(scenario.faults)
    mesh = topology.mesh_shape(scenario.world_size)
    layout: Any
    if is_workload(scenario.model):
        layout = Code("", "workload.parallelize") if topology.parallel else None
    else:
        layout = models.LAYOUTS[scenario.topology]
        if layout is models.fsdp_tp and scenario.dataset == "text":
            layout = models.fsdp_tp_sp
        faults = tuple(map(_fault, faults))
    return Phase(
        mesh=mesh,
        data_axes=tuple(axis for axis in mesh if axis in topology.data_axes),
        steps=range(begin, scenario.steps),
        passes=_passes(scenario),
        parallelize=layout,
        further=(scenario.parsed_precision.policy(),) * topology.fully_shards,
        faults=faults,
    )


def _fault(fault: Fault) -> Fault:
    """The fault at a parameter of the script's model."""
    if fault.parameter in (LOSS, *PLACES):
        return fault
    *_, layer, kind = ("", *fault.parameter.split("."))
    name = f"{models.LIKENESS.get(layer, layer)}.{kind}"
    return replace(fault, parameter=name)
