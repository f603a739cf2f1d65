"""Build the model of a scenario on this rank, with its optimizers.

A model is laid out twice. The first time every parameter is filled with the numbers of
its own elements. The values that each rank then holds map its local elements to the
full tensor, for any placements. This layout is dropped, and the model is laid out again
with its true values, which are compared through the map. So gradparity needs no
knowledge of sharding internals and writes nothing into a laid-out model. Ranks with
equal maps hold replicas.

A workload with a method ``weights`` describes the local parts itself (``local_parts``),
and is laid out once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...fixtures import (
    CannotError,
    OfWorkload,
    ResolvedWorkload,
    WorkloadError,
    compared_parameters,
    local,
    loss,
    order_parameters,
    resolve_workload,
    split_names,
)
from ..space.random_layers import probabilities, turn_off_random_layers
from ..space.recipes import Training, frozen_names
from ..space.recomputation import Recomputed, recompute_in_backward
from ..space.scenario import Scenario
from .buffers import saved_buffers, saved_names
from .engine import MICRO_BATCHES, Engine
from .layout_checks import check_layout, same_everywhere
from .local_parts import (
    OTHERWISE,
    LocalPart,
    check_values,
    full_name,
    parameters_of,
    read_local_parts,
)
from .modules import module_names, modules_in
from .observe import digest
from .variation import Reduction, Variation

if TYPE_CHECKING:  # a slow import
    from torch.distributed.pipelining import ScheduleGPipe

__all__ = [
    "build_engine",
    "digest_of_weights",
    "initial_model",
    "remake_optimizers",
    "replace_stack",
    "shard_id",
]

Places = Mapping[str, NDArray[np.int64]]
"""Name -> position of each local element in the flat full tensor."""
_last_read: dict[Hashable, Places] = {}
"""At most one entry: the layout that this process read last, with the positions. All
scalers and recipes of a layout run one after another. A failed rank ends its whole
world, so either all ranks of a world have read the layout or none has."""
AGAIN = "this was its second call: with weights(stack) a model is laid out once"


def initial_model(spec: str, seed: int, training: Training) -> nn.Module:
    """Return the full model with its initial weights, the same on every rank.

    Args:
        spec: a key of ``fixtures.MODELS``, or a user's workload.
        seed: seed of the weights.
        training: says which parameters are trained.
    """
    # the caller's generator continues as if no model had been made
    with torch.random.fork_rng(devices=[]):
        # torch.manual_seed is slow without a device: it formats the stack of calls for
        # one
        anywhere = torch.accelerator.is_available()
        seeded = torch if anywhere else torch.default_generator
        seeded.manual_seed(seed)
        model = resolve_workload(spec).model()
    if training.frozen:
        names = [*compared_parameters(model)]
        for name in frozen_names(resolve_workload(spec), names):
            model.get_parameter(name).requires_grad_(False)
    if not training.random:
        turn_off_random_layers(model)
    return model


def digest_of_weights(model: nn.Module) -> str:
    """Return a digest of all compared parameters, for references and ranks."""
    bits = [f"{name} {digest(p)}" for name, p in compared_parameters(model).items()]
    return hashlib.blake2b("\n".join(bits).encode(), digest_size=8).hexdigest()


def build_engine(
    scenario: Scenario,
    mesh: DeviceMesh,
    device: torch.device,
    variation: Variation | None = None,
    places: Places | None = None,
) -> Engine:
    """Lay out the scenario's model over ``mesh`` and create its optimizers.

    Args:
        scenario: scenario to train.
        mesh: mesh of all ranks.
        device: device of this rank.
        variation: difference from the plain run, for a reference on one rank.
        places: map of an earlier layout; None to read it from a layout.
    """
    workload, training = scenario.workload, scenario.parsed_recipe.training
    weights_of = workload.weights if scenario.parsed_topology.parallel else None
    model = initial_model(scenario.model, scenario.seed, training).to(device)
    if OfWorkload.OF_USER in workload.has:
        same_everywhere(workload, "model", compared_parameters(model))
    initial = digest_of_weights(model)
    if weights_of is None and places is None:
        key = _layout_of(scenario, mesh, device)
        if key not in _last_read:
            read = _read_places(scenario, model, mesh, variation)
            _last_read.clear()
            _last_read[key] = read
            # a new model, since the first layout has changed the first one
            model = initial_model(scenario.model, scenario.seed, training).to(device)
        places = _last_read[key]
    if variation is not None:
        model = variation.change_weights(model, scenario.parsed_precision.roundoff)
    # clones, because training changes the parameters
    values = {n: p.detach().clone() for n, p in compared_parameters(model).items()}
    dropouts = probabilities(model)  # parallelize may replace them
    saved = saved_buffers(workload, model).items()
    buffers = {name: buffer.detach().clone() for name, buffer in saved}
    names_of_buffers = saved_names(model)
    names = module_names(model)
    trained = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
    try:
        module, recomputed = _laid_out(scenario, model, mesh, variation)
    except WorkloadError as error:
        if places is None:
            raise
        text = f"{error.text}; {AGAIN}"
        raise WorkloadError.of(workload.name, error.call, text, error.raised) from error
    if weights_of is not None:
        parts = read_local_parts(workload, "weights", weights_of(module), values)
        _check_trainable(scenario, module, parts)
        if not parts:
            _refuse_hidden(workload, module, values)
    else:
        assert places is not None
        parameters_found = parameters_of(module, values)
        if parameters_found.keys() != places.keys():
            raise workload.refuse("parallelize", OTHERWISE)
        parts = {
            name: LocalPart(parameters_found[name], places[name])
            for name in parameters_found
        }
    check_values(workload, parts, values)
    parameters: dict[str, nn.Parameter]
    parameters = {n: part.tensor for n, part in parts.items()}  # type: ignore[misc]  # checked where it matters
    if scenario.parsed_recipe.compile:
        # the eager backend, because generating code takes minutes and is not under test
        module.compile(backend="aot_eager")
    if training.frozen:
        _check_frozen(parameters, trained)
    own_step = OfWorkload.LOOP not in workload.has
    engine = Engine(
        scenario=scenario,
        module=module,
        mesh=mesh,
        parameters=parameters,
        whole=values,
        initial=initial,
        dropouts=dropouts,
        buffers=buffers,
        saved_names=names_of_buffers,
        module_names=names,
        trained=trained,
        index={name: part.places for name, part in parts.items()},
        optimizers=[] if own_step else _make_optimizers(scenario, parameters),
        owned=[] if own_step else _split(scenario, parameters),
        device=device,
        recomputed=recomputed,
        variation=variation,
    )
    if variation is not None and variation.seed and scenario.reduced_in:
        reduced = [p for p in parameters.values() if p.requires_grad and p.is_leaf]
        engine.reduction = Reduction(reduced, scenario.reduced_in, variation.seed)
    if scenario.parsed_topology.pipelined:
        engine.schedule = _pipeline(engine)
    return engine


def remake_optimizers(engine: Engine) -> None:
    """Replace the optimizers by new ones that load the old ones' states."""
    optimizers = _make_optimizers(engine.scenario, engine.parameters)
    for new, saved in zip(optimizers, engine.optimizers, strict=True):
        new.load_state_dict(saved.state_dict())
    engine.take_optimizers(optimizers)


def replace_stack(engine: Engine) -> None:
    """Lay out the initial model again, and replace the current one."""
    places = None if engine.gives_weights else engine.index
    new = build_engine(
        engine.scenario, engine.mesh, engine.device, engine.variation, places
    )
    same = new.index.keys() == engine.index.keys() and all(
        np.array_equal(places, engine.index[n]) for n, places in new.index.items()
    )
    # the trace has one index for all steps, so layouts must be equal
    if not same:
        raise engine.scenario.workload.refuse("parallelize", OTHERWISE)
    engine.module, engine.parameters = new.module, new.parameters
    engine.take_optimizers(new.optimizers)


def _laid_out(
    scenario: Scenario, model: nn.Module, mesh: DeviceMesh, variation: Variation | None
) -> tuple[Any, Recomputed | None]:
    """Lay out a model by the topology; also return its recomputed parts."""
    precision, recipe = scenario.parsed_precision, scenario.parsed_recipe
    if precision.convert is not None:
        model = precision.convert(model)
    # before the layout, so that its wrappers and hooks enclose the replaced forward
    recomputes = recipe.recompute and variation is None
    recomputed = recompute_in_backward(model) if recomputes else None
    with nullcontext() if variation is None else variation.new_tensors():
        module = scenario.parsed_topology.apply(model, mesh, precision.policy())  # type: ignore[arg-type]  # MODELS hold nothing else
    if not recipe.training.random:  # parallelize may have replaced them
        turn_off_random_layers(module)
    if recomputed is not None:
        _recompute_anew(module, recomputed)
    return module, recomputed


def _layout_of(scenario: Scenario, mesh: DeviceMesh, device: torch.device) -> Hashable:
    """Return a key of everything on which a layout depends.

    Recipes with equal keys share a layout.
    """
    recipe = scenario.parsed_recipe
    return (
        scenario.model,
        scenario.seed,
        recipe.training.frozen,
        recipe.training.random,
        recipe.recompute,
        scenario.precision,
        scenario.topology,
        tuple(mesh.shape),
        device,
    )


def _read_places(
    scenario: Scenario,
    model: nn.Module,
    mesh: DeviceMesh,
    variation: Variation | None,
) -> Places:
    """Read from a layout of element numbers which elements this rank holds."""
    device = next(model.parameters()).device
    drawn = [] if device.type == "cpu" else [device]
    # fork the generator, so that the tested layout draws the same without this one
    with torch.random.fork_rng(drawn, device_type=device.type):
        if variation is not None:
            model = variation.change_weights(model, scenario.parsed_precision.roundoff)
        # tensors without values, because a layout may change what it gets
        whole = {
            n: p.detach().to("meta") for n, p in compared_parameters(model).items()
        }
        tied = _tied(model)
        _fill_with_element_numbers(model)
        module, _ = _laid_out(scenario, model, mesh, variation)
    check_layout(scenario.workload, module, whole, tied)
    parameters = parameters_of(module, whole)
    flat = {name: local(p.detach()).reshape(-1) for name, p in parameters.items()}
    return {name: part.to(torch.int64).cpu().numpy() for name, part in flat.items()}


def _check_trainable(
    scenario: Scenario, module: Any, parts: Mapping[str, LocalPart]
) -> None:
    """Check that gradparity's loop can call the module and step its weights."""
    workload = scenario.workload
    if OfWorkload.LOOP not in workload.has:
        return
    if not callable(module):
        text = f"returned {type(module).__name__}, which cannot be called: write a"
        raise workload.refuse("parallelize", f"{text} train_step that trains it")
    for name, part in parts.items():
        if not isinstance(part.tensor, nn.Parameter):
            text = (
                f"returned {name}, which is not an nn.Parameter: without a train_step"
            )
            raise workload.refuse(
                "weights", f"{text} gradparity trains what it returns"
            )


def _refuse_hidden(
    workload: ResolvedWorkload, stack: Any, whole: Mapping[str, Tensor]
) -> None:
    """Raise if ``weights`` returns nothing on a rank that has whole parameters."""
    for root in modules_in(stack):
        for name, parameter in parameters_of(root, whole).items():
            if name in whole and parameter.shape == whole[name].shape:
                text = f"returned nothing, and this rank has {name}: return the weights"
                raise workload.refuse("weights", f"{text} of each rank")


def _recompute_anew(stack: Any, recomputed: Recomputed) -> None:
    """Recompute the modules that replaced all recomputed parts in a layout, if any.

    Such modules are found by the names of the parts.
    """
    names, parts = {*recomputed.parts}, {*recomputed.parts.values()}
    named_modules = [
        (full_name(name, names), module)
        for root in modules_in(stack)
        for name, module in root.named_modules()
    ]
    # if no part survived the layout, the replaced forwards are gone, too
    if parts.isdisjoint(module for _, module in named_modules):
        for name, module in named_modules:
            if name in names:
                recomputed.add(name, module)


def _check_frozen(parameters: Mapping[str, Tensor], trained: frozenset[str]) -> None:
    """Check that the parameters that the recipe froze stay frozen.

    Raises:
        CannotError: if a layout replaces parameters, and the new ones are trained. The
            recipe is then skipped, because it was not the user's choice.
    """
    freed = [n for n, p in parameters.items() if p.requires_grad and n not in trained]
    if freed:
        text = f"frozen parameters train again once parallelize is done: {freed[0]}"
        raise CannotError(text)


def _tied(model: nn.Module) -> dict[str, str]:
    """Return second name -> first name of each tied parameter."""
    first = {parameter: name for name, parameter in model.named_parameters()}
    names = model.named_parameters(remove_duplicate=False)
    return {name: first[p] for name, p in names if name != first[p]}


def _make_optimizers(
    scenario: Scenario, parameters: dict[str, nn.Parameter]
) -> list[torch.optim.Optimizer]:
    make = scenario.workload.optimizers[scenario.optimizer]
    return [
        make(
            order_parameters(scenario.param_order, [(n, parameters[n]) for n in names])
        )
        for names in _split(scenario, parameters)
    ]


def _split(scenario: Scenario, names: Iterable[str]) -> list[list[str]]:
    """Return the names of parameters for each optimizer."""
    if scenario.parsed_recipe.optimizers == 1:
        return [list(names)]
    return [*split_names(names)]


def shard_id(index: NDArray[np.int64]) -> str:
    """Return a digest of an index map; equal on replicas."""
    # a digest, since ranks exchange it
    return hashlib.blake2b(index.tobytes(), digest_size=6).hexdigest()


def _fill_with_element_numbers(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in compared_parameters(model).values():
            # fp32 holds integers exactly up to 2**24; these models are far smaller
            assert parameter.numel() < 2**24
            numbers = torch.arange(parameter.numel(), dtype=parameter.dtype)
            parameter.copy_(numbers.view_as(parameter))


def _pipeline(engine: Engine) -> ScheduleGPipe:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    mesh = engine.mesh
    stage = PipelineStage(
        engine.module,
        mesh.get_local_rank("pp"),
        mesh["pp"].size(),
        engine.device,
        group=mesh.get_group("pp"),
    )
    return ScheduleGPipe(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss)
