"""Record a step: gradients, draws, reductions, and its effect."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...fixtures import Batch, OfWorkload, ResolvedFault, inject, local
from ..record.reading import states_of_generators
from .buffers import buffers_on_rank
from .engine import Engine
from .layout_checks import same_everywhere
from .observe import (
    ReductionLog,
    digest,
    gradient_places,
    non_finite,
    optimizer_digest,
    partial_ranks,
)
from .randomness import DrawLog
from .routing import ChoiceLog
from .trace import Event, Floats, Kind, RankTrace, StepTrace

__all__ = [
    "digests_of",
    "floats",
    "global_batch",
    "grad_scale_of",
    "local_gradients",
    "next_batch",
    "plant_and_read",
    "record_buffers",
    "record_effect",
    "record_gradient",
    "recording_draws",
    "recording_gradients",
    "recording_reductions",
]


@contextmanager
def recording_draws(engine: Engine, seen: StepTrace) -> Iterator[None]:
    """Record a step's random draws; repeat the router choices of the reference."""
    states = states_of_generators(torch.device("cpu"))
    random = engine.scenario.parsed_recipe.training.random
    # a reference on one rank must not draw; the log shows where it did
    logs = random or engine.variation is not None
    names = engine.module_names, engine.parameters
    # dropouts are off in all other recipes
    dropouts = engine.dropouts if random else {}
    log = DrawLog(engine.module, engine.recomputed, *names, dropouts) if logs else None
    choices = ChoiceLog(engine.choices[seen.step]) if engine.choices else None
    with log or nullcontext(), choices or nullcontext():
        yield
    if choices is not None:
        seen.unclear_choices = choices.unclear
    if log is not None:
        seen.draws, seen.drawn_outside = log.draws, log.outside
    # from the generator, because not every run has the log
    after = states_of_generators(torch.device("cpu"))
    seen.drew = not all(map(torch.equal, states, after))


@contextmanager
def recording_reductions(engine: Engine, seen: StepTrace) -> Iterator[None]:
    """Record the dtypes of gradient reductions, if the workload promises a dtype."""
    if engine.scenario.promised_dtype is None:
        yield
        return
    with ReductionLog() as log:
        yield
    seen.reductions = log.reductions


def plant_and_read(
    seen: StepTrace, faults: Iterable[ResolvedFault], gradients: Mapping[str, Tensor]
) -> None:
    """Write this step's faults into gradients, and record which gradients are bad.

    Args:
        seen: trace of the step, which is filled.
        faults: faults of the scenario.
        gradients: name -> gradient that a scaler is about to read.
    """
    planted = inject(faults, gradients, dist.get_rank(), seen.step)
    seen.faults += [text for text in planted if text not in seen.faults]
    bad = {n: non_finite(g, seen.scale_before) for n, g in gradients.items()}
    seen.raw = (seen.raw or {}) | bad


def next_batch(engine: Engine, step: int) -> Batch:
    """Zero the gradients and return the global batch of a step."""
    for optimizer in engine.optimizers:
        optimizer.zero_grad()
    return global_batch(engine, step)


def global_batch(engine: Engine, step: int) -> Batch:
    """Return the global batch of a step, on the engine's device."""
    workload = engine.scenario.workload
    batch = workload.batch(step, engine.scenario.seed)
    if OfWorkload.OF_USER in workload.has:
        tensors = {f"tensor {i}": t for i, t in enumerate(batch.tensors)}
        same_everywhere(workload, "batch", tensors)
    return batch.to(engine.device)


def local_gradients(engine: Engine) -> dict[str, Tensor]:
    """Return this rank's gradients by parameter name, without missing ones."""
    return {
        name: parameter.grad
        for name, parameter in engine.parameters.items()
        if parameter.grad is not None
    }


@contextmanager
def recording_gradients(engine: Engine, seen: StepTrace) -> Iterator[None]:
    """Copy the gradients whenever an optimizer is called in this context."""

    def watch(number: int, optimizer: torch.optim.Optimizer) -> None:
        scale, gradients = grad_scale_of(optimizer), local_gradients(engine)
        for name in engine.owned[number]:
            # once: an optimizer's class may change gradients and call its base class
            if name in gradients and name not in seen.gradients:
                record_gradient(engine, seen, name, gradients[name], scale)

    with ExitStack() as hooks:
        for number, optimizer in enumerate(engine.optimizers):
            hook = partial(lambda n, o, *_: watch(n, o), number)
            hooks.callback(optimizer.register_step_pre_hook(hook).remove)
        yield


def grad_scale_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the ``grad_scale`` by which a fused kernel divides; 1 without one."""
    grad_scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if grad_scale is None else float(local(grad_scale))


def record_gradient(
    engine: Engine, seen: StepTrace, name: str, gradient: Tensor, scale: float
) -> None:
    """Record a gradient's local elements, divided by ``scale``, and their positions.

    Raises:
        WorkloadError: if its layout does not tell which elements these are.
    """
    parameter, index = engine.parameters[name], engine.index[name]
    try:
        seen.places[name] = gradient_places(gradient, parameter, index)
    except ValueError as error:
        raise engine.scenario.workload.refuse("backward", f"{name}: {error}") from error
    seen.partial[name], parts = partial_ranks(gradient)
    seen.gradients[name] = floats(local(gradient) / (scale * parts))


def floats(tensor: Tensor) -> Floats:
    """Return a flat copy on the host: in fp64 if the tensor is fp64, else in fp32."""
    on_host = tensor.detach().reshape(-1).cpu()
    wide = on_host if on_host.dtype == torch.float64 else on_host.float()
    flat: Floats = wide.numpy().copy()
    return flat


def digests_of(engine: Engine) -> tuple[dict[str, str], list[str]]:
    """Return digests of the local parameters by name, and of the optimizers."""
    digests = {name: digest(part) for name, part in engine.local_tensors().items()}
    return digests, [optimizer_digest(optimizer) for optimizer in engine.optimizers]


def record_buffers(engine: Engine, seen: StepTrace | RankTrace) -> None:
    """Record digests and values of this rank's buffers."""
    for name, buffer in buffers_on_rank(engine).items():
        seen.buffer_digests[name] = digest(buffer)
        if buffer.dtype == engine.buffers[name].dtype:
            seen.buffers[name] = floats(buffer)


def record_effect(
    engine: Engine, seen: StepTrace, before: tuple[dict[str, str], Sequence[str]]
) -> None:
    """Record what has changed since ``before``, a result of :func:`digests_of`."""
    parts = engine.local_tensors()
    seen.digests = {name: digest(part) for name, part in parts.items()}
    seen.changed = frozenset(n for n, d in seen.digests.items() if d != before[0][n])
    seen.parameters = {name: floats(part) for name, part in parts.items()}
    record_buffers(engine, seen)
    for number, (optimizer, was) in enumerate(
        zip(engine.optimizers, before[1], strict=True)
    ):
        if optimizer_digest(optimizer) != was:
            seen.events.append(Event(kind=Kind.CHANGED, optimizer=number))
