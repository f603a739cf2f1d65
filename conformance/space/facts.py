"""Facts about a workload, found by running it once on one process.

:func:`probe` calls the model on the first batch, with and without the changes that
gradparity may make to it. A run probes each workload once, on the process that trains
references (``run/launcher.py``, [Note: One process]). Other processes get the facts by
:func:`remember`. Facts that only references need are found where references train.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ...fixtures import (
    Batch,
    Counts,
    OfWorkload,
    ResolvedWorkload,
    WorkloadError,
    compared_parameters,
    resolve_workload,
    split_names,
)
from ..formulas import FP32_INSIDE
from .random_layers import equal_outputs, generators_of, turn_off_random_layers
from .recipes import CLIP_NORM, CLIP_VALUE, Training
from .recomputation import recompute_in_backward

__all__ = [
    "FOUND_OUT",
    "NewTensorsInFp64",
    "WorkloadFacts",
    "clip_norm_of",
    "clip_value_of",
    "clips_by_norm",
    "exceeded_by",
    "facts_of",
    "new_tensors_in_fp64",
    "objective_of",
    "probe",
    "remember",
    "seeded_model",
    "wide",
    "writes",
]

FOUND_OUT = frozenset(
    {OfWorkload.RANDOM_LAYERS, OfWorkload.RECOMPUTED, OfWorkload.TWO_KINDS}
)
"""Properties of a workload that are found by a probe and not declared."""


@dataclass(frozen=True, kw_only=True)
class WorkloadFacts:
    """Facts about a workload's model, loss and first batch.

    If the model cannot be called, the facts are those of a plain model;
    ``check_workload`` reports the error.
    """

    lacks: Mapping[OfWorkload, str]
    """Reason why the workload lacks a property, for each missing one of
    :data:`FOUND_OUT`."""
    rows: int
    """Number of rows of the global batch."""
    counts: int
    """Number of counts of the loss: 0 for a mean, 1 for each pair (sum, count)."""
    widens: bool
    """True if the model creates or keeps tensors that must be fp64 in an fp64 run."""
    differentiates: bool
    """True if forward or loss need autograd. Examples: forces as gradients of the
    inputs, an inner optimization step."""
    exceeded: float
    """Clipping norm: a power of two, at most half the norm of the first gradient, so
    that the rounding of sums does not change it. With a reference on one rank the
    gradient is that of ``train_step``."""
    middle: float
    """Limit for clipping by value: a power of two that the largest element reaches in
    at least half of the parameters' first gradients."""

    @property
    def counted(self) -> bool:
        """True if the loss is (sum, count), or several such pairs."""
        return self.counts > 0

    @property
    def draws(self) -> bool:
        """True if the model draws random numbers in training."""
        return OfWorkload.RANDOM_LAYERS not in self.lacks


_KNOWN: dict[str, WorkloadFacts] = {}


def facts_of(name: str) -> WorkloadFacts:
    """Return the facts of a scenario's model; compute them if none are stored."""
    if name not in _KNOWN:
        _KNOWN[name] = probe(resolve_workload(name))
    return _KNOWN[name]


def remember(name: str, facts: WorkloadFacts) -> None:
    """Store facts that another process has computed."""
    _KNOWN[name] = facts


def probe(workload: ResolvedWorkload) -> WorkloadFacts:
    """Find the facts of a workload; torch's random generator is not changed."""
    with torch.random.fork_rng(devices=[]):
        draws, counts = _first_calls(workload)
        exceeded, middle = _limits(workload)
        reasons = {
            OfWorkload.RANDOM_LAYERS: ""
            if draws
            else f"{workload.name} has no random layers",
            OfWorkload.RECOMPUTED: _why_not_recomputed(workload),
            OfWorkload.TWO_KINDS: _why_not_parted(workload),
        }
        return WorkloadFacts(
            lacks={need: why for need, why in reasons.items() if why},
            rows=workload.batch(0, 0).rows,
            counts=counts,
            widens=_widens(workload),
            differentiates=_differentiates(workload),
            exceeded=exceeded,
            middle=middle,
        )


def seeded_model(workload: ResolvedWorkload) -> Any:
    """Return ``model()`` after seed 0, with its random layers off."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = workload.model()
    turn_off_random_layers(model)
    return model


def wide(batch: Batch) -> Batch:
    """Return a copy of a batch with floating tensors in fp64."""
    return batch.map(lambda t: t.double() if t.is_floating_point() else t)


def objective_of(
    workload: ResolvedWorkload, model: nn.Module, parts: Iterable[Batch]
) -> tuple[Tensor, Counts]:
    """Return the loss of micro-batches together, and its counts.

    Means are weighted by the number of target elements. A sum whose count is 0 is not
    divided.
    """
    objectives, parts = [], [*parts]
    for part in parts:
        try:
            with workload.calling("forward"):
                output = model(part.inputs)
        except WorkloadError as error:
            if isinstance(part.inputs, Tensor) or error.raised != TypeError.__name__:
                raise
            raise workload.refuse(
                "forward",
                f"{error.text}; the model is called with the inputs of batch() as its "
                f"one argument, here a {type(part.inputs).__name__}: let forward "
                "unpack it",
            ) from error
        objectives.append(workload.objective(output, part.targets))
    counts = tuple(map(sum, zip(*(counts for _, counts in objectives), strict=True)))
    if counts:
        heads = zip(*(sums for sums, _ in objectives), counts, strict=True)
        means = [torch.stack(sums).sum() / (count or 1.0) for *sums, count in heads]
        return torch.stack(means).sum(), counts
    weights = [part.elements for part in parts]
    values = [v * w for ((v,), _), w in zip(objectives, weights, strict=True)]
    return torch.stack(values).sum() / sum(weights), ()


def clips_by_norm(workload: ResolvedWorkload, training: Training) -> bool:
    """Return True if gradients are clipped by their norm."""
    return training.clip == "norm" or (
        not training.clip and workload.clip_norm is not None
    )


def clip_norm_of(workload: ResolvedWorkload, training: Training) -> float | None:
    """Return the norm to which the recipe or ``train_step`` clips gradients, or None.

    A recipe lowers its norm if the gradients of a ``train_step`` are small. Otherwise
    nothing would be clipped, and a wrong norm would not show.
    """
    if training.clip != "norm":
        return None if training.clip else workload.clip_norm
    if OfWorkload.LOOP in workload.has:
        return CLIP_NORM
    return min(CLIP_NORM, facts_of(workload.name).exceeded)


def clip_value_of(workload: ResolvedWorkload) -> float:
    """Return the largest absolute gradient element that clipping by value leaves.

    For a user's workload the limit is near the largest elements of most gradients. A
    limit below the noise of a gradient would leave only signs, which rounding decides.
    """
    if OfWorkload.OF_USER not in workload.has:
        return CLIP_VALUE
    return facts_of(workload.name).middle


def new_tensors_in_fp64(name: str) -> AbstractContextManager[Any]:
    """Return a context for the passes of a workload's model in fp64.

    A forward may create a state of zeros in fp32, or mix fp32 class weights with fp64
    parameters, and most layers then raise. For such a model, the context creates these
    tensors in fp64.
    """
    return NewTensorsInFp64() if facts_of(name).widens else nullcontext()


class NewTensorsInFp64(TorchFunctionMode):
    """Creates tensors without an explicit dtype in fp64 instead of fp32.

    ``torch.set_default_dtype`` would affect all threads. A call that rejects fp32
    beside fp64 is repeated with all of its tensors in fp64.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run ``func``, and widen its result or its arguments."""
        kwargs = kwargs or {}
        try:
            result = func(*args, **kwargs)
        except RuntimeError:
            arguments = Batch(inputs=args, targets=kwargs)
            mixed = {torch.float32, torch.float64} <= {
                t.dtype for t in arguments.tensors
            }
            # such a function would write into the copy
            if not mixed or writes(func, kwargs):
                raise
            args, kwargs = arguments.map(_widened).pair
            result = func(*args, **kwargs)
        if func not in _CREATE or kwargs.get("dtype") is not None:
            return result
        return _widened(result)


def _widened(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype == torch.float32 else tensor


def writes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return True if a call writes into a tensor argument."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name.startswith(("__i", "__setitem__"))
    return name.endswith("_") or kwargs.get("out") is not None


_CREATE = {
    *(torch.zeros, torch.ones, torch.full, torch.empty, torch.eye, torch.tensor),
    *(torch.arange, torch.linspace, torch.logspace),
}

# - The single questions. Each makes its own model, since a pass may leave a state in it


def _first_calls(workload: ResolvedWorkload) -> tuple[bool, int]:
    """Return (True if a forward draws random numbers, number of counts of the loss)."""
    draws, counts = False, 0
    with suppress(WorkloadError):
        model, again = _seeded(workload), _seeded(workload)
        batch, before = workload.batch(0, 0), _states(model)
        with workload.calling("forward"):
            first = model(batch.inputs)
            after = _states(model)
            draws = len(before) < len(after) or not all(map(torch.equal, before, after))
            # A global generator shows in the outputs alone. A second forward of one
            # model may differ without draws: the first one may have moved a buffer.
            draws = draws or not equal_outputs(first, again(batch.inputs))
        counts = len(workload.objective(first, batch.targets)[1])
    return draws, counts


def _seeded(workload: ResolvedWorkload) -> nn.Module:
    torch.manual_seed(0)
    return workload.model()


def _states(model: nn.Module) -> list[Tensor]:
    """Return the states of torch's generator and of the generators of modules."""
    own = (g for module in model.modules() for g in generators_of(module))
    return [torch.get_rng_state(), *(generator.get_state() for generator in own)]


def _widens(workload: ResolvedWorkload) -> bool:
    batch = wide(workload.batch(0, 0))
    torch.manual_seed(0)
    model = workload.model().double()
    for widened in (False, True):
        with suppress(WorkloadError):
            with NewTensorsInFp64() if widened else nullcontext():
                objective_of(workload, model, [batch])
            return widened
    return False


def _differentiates(workload: ResolvedWorkload) -> bool:
    torch.manual_seed(0)
    with torch.no_grad():
        try:
            objective_of(workload, workload.model(), [workload.batch(0, 0)])
        except WorkloadError:
            return True
    return False


def _limits(workload: ResolvedWorkload) -> tuple[float, float]:
    """Return limits for clipping by norm and by value that gradients exceed."""
    batch, own = workload.batch(0, 0), workload.micro_batches
    model, norm, middle = seeded_model(workload), 0.0, 0.0
    with suppress(WorkloadError):
        value, _ = objective_of(workload, model, [batch] if own is None else own(batch))
        with workload.calling("backward"):
            value.backward()
        grads = [p.grad.to_dense() for p in model.parameters() if p.grad is not None]
        norm = float(nn.utils.get_total_norm(grads))
        largest = [float(g.abs().amax()) for g in grads if g.numel()]
        middle = median_low([size for size in largest if size > 0] or [0.0])
    if not 0.0 < norm < math.inf:
        return CLIP_NORM, CLIP_VALUE
    return exceeded_by(norm), 2.0 ** math.floor(math.log2(middle))


def exceeded_by(norm: float) -> float:
    """Return a clipping norm that a gradient of this norm exceeds; see ``exceeded``."""
    return 2.0 ** math.floor(math.log2(norm)) / 2


def _why_not_parted(workload: ResolvedWorkload) -> str:
    torch.manual_seed(0)
    trains = {
        n: p.requires_grad for n, p in compared_parameters(workload.model()).items()
    }
    # an optimizer that gets only frozen parameters need not exist
    if all(any(trains[n] for n in part) for part in split_names(trains)):
        return ""
    return OfWorkload.TWO_KINDS.value


def _why_not_recomputed(workload: ResolvedWorkload) -> str:
    """Return why the model cannot be recomputed in backward; "" if it can.

    Tested on one process, so that an error on ranks comes from the layout. Returns ""
    also if the model cannot be called: ``check_workload`` reports that.
    """
    calls = 0

    def call(*_: Any) -> None:
        nonlocal calls
        calls += 1

    try:
        part, model = _first_pass(workload)
        value = objective_of(workload, model, [part])[0]
        hook = register_module_forward_pre_hook(call)
        try:
            plain = _gradients(workload, model, value)
        finally:
            hook.remove()
    except WorkloadError:
        return ""
    if calls:
        return "its model recomputes by itself, in every recipe"
    part, model = _first_pass(workload)
    counted = recompute_in_backward(model)
    try:
        gradients = _gradients(
            workload, model, objective_of(workload, model, [part])[0]
        )
    except WorkloadError as error:
        return f"on one process the model cannot run again in backward: {error}"
    if not counted.again:
        return "its model calls no module of its own that has parameters"
    sizes = (float(g.abs().max()) for g in plain.values() if g.numel())
    largest = max(sizes, default=0.0)
    for parameter, gradient in plain.items():
        again = gradients.get(parameter)
        off = gradient if again is None else gradient - again
        if not bool((off.abs() <= FP32_INSIDE * largest).all()):
            return (
                f"on one process the gradient of {parameter} is another one where "
                "forward runs again: it depends on more than its inputs"
            )
    return ""


def _first_pass(workload: ResolvedWorkload) -> tuple[Batch, nn.Module]:
    batch, own = workload.batch(0, 0), workload.micro_batches
    return (batch if own is None else own(batch)[0]), seeded_model(workload)


def _gradients(
    workload: ResolvedWorkload, model: nn.Module, value: Tensor
) -> dict[str, Tensor]:
    with workload.calling("backward"):
        value.backward()
    named = model.named_parameters()
    return {name: p.grad.to_dense() for name, p in named if p.grad is not None}
