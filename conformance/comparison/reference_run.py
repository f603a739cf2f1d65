"""One reference run: model, optimizers, and what each step recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ...fixtures import (
    PRECISIONS,
    Batch,
    Counts,
    Precision,
    compared_parameters,
    local,
    resolve_workload,
)
from ..formulas import equal_but_for_rounding
from ..rank.buffers import saved_buffers
from ..rank.layout import digest_of_weights, initial_model
from ..rank.observe import dtype_name
from ..rank.routing import ChoiceLog, Choices, chooses_in_forward
from ..rank.trace import Constants, Setting
from ..space.facts import (
    clip_norm_of,
    clip_value_of,
    facts_of,
    new_tensors_in_fp64,
)
from ..space.recipes import LR_DECAY, Training
from ..space.workload_checks import ROUNDING
from .compare import Doubles
from .noise.rows import Rows
from .noise.sides import Inputs, JumpLog
from .settings import Planned, Settings, constants_by_name, settings_of
from .shards import InShards, Shards
from .variants import PLAIN, TRUTH, Variant

__all__ = [
    "Idle",
    "ReferenceRun",
    "Setup",
    "buffers_of_passes",
    "check_equal_start",
    "rows_apart",
]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Unused parameters, by the gradient that the ranks' optimizers got: zeros or None.

    Both are right, but weight decay and momentum act only if the gradient is zeros.
    """

    zeros: frozenset[str] = frozenset()
    """Parameters whose gradients were zeros on every rank."""
    absent: frozenset[str] = frozenset()
    """Parameters without a gradient on any rank."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Values of a scenario and of its layout on which a reference depends."""

    model: str
    optimizer: str
    steps: int
    seed: int
    loss_factor: float = 1.0
    training: Training = field(default_factory=Training)
    reduced_in: torch.dtype | None = None
    shards: Shards = ()


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Run the user's model and optimizer without ``torch.compile``.

    Only the runs on the ranks compile. References also run under dispatch modes, which
    do not work with compiled code.
    """
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _same_draws(step: int) -> Iterator[None]:
    """Make all references draw the same numbers in a step.

    A model may draw numbers that have no effect, for example to leave out layers with
    probability 0. If two runs drew different numbers, these would be taken for one
    input that differs between the runs, near a jump of a derivative.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(step)
        yield


class ReferenceRun:
    """A reference run in progress: model, optimizers and recorded values."""

    def __init__(self, key: Setup, precision: str, variant: Variant) -> None:
        self.key = key
        self.variant = variant
        self.precision: Precision = PRECISIONS[precision]
        dtype = torch.float64 if variant.double else torch.float32
        self.workload = resolve_workload(key.model)
        model = initial_model(key.model, key.seed, key.training)
        self.initial = digest_of_weights(model)
        if self.precision.convert is not None and not variant.double:
            model = self.precision.convert(model)
        names = [*compared_parameters(model)]
        # .to(dtype) would also cast complex buffers to real
        self.model = model.double() if dtype == torch.float64 else model.float()
        self.parameters = {n: self.model.get_parameter(n) for n in names}
        seen = dict(key.shards)
        even = max((each.shards for each in variant.noise), default=1)
        self.sharded = {
            name: InShards(parameter, seen.get(name, ()), even)
            for name, parameter in self.parameters.items()
            if parameter.requires_grad  # an optimizer may leave out frozen parameters
        }
        # one for each parameter, because the schedule distinguishes parameters
        self.optimizers = {
            name: self.workload.optimizers[key.optimizer]([(name, p) for p in of.parts])
            for name, of in self.sharded.items()
        }
        self.planned = Planned.of(self.workload, key.optimizer, self.parameters)
        saved = saved_buffers(self.workload, self.model)
        self.buffers = {name: buffer.shape for name, buffer in saved.items()}
        self.start = self._flat(self.parameters | self._buffers())
        self.losses: list[float] = []
        self.loss_dtype = ""
        self.gradients: list[dict[str, Doubles]] = []
        self.updates: list[dict[str, Doubles]] = []
        self.norms: list[float] = []
        self.counts: list[Counts] = []
        self.heads: dict[int, list[float]] = {}
        self.rows_apart: bool | None = None
        self.steps_made = dict.fromkeys(self.optimizers, 0)
        seed = max(each.seed for each in (Rows(), *variant.noise))
        self.generator = torch.Generator().manual_seed(seed)
        self.replayed: tuple[dict[str, Choices], ...] = ()
        """For each step: the choices that routers must make. If empty, routers make
        their own choices."""
        self.choices: list[dict[str, Choices]] = []
        self.errors: list[dict[str, float]] = []
        self.settings: list[Settings] = []
        self.constants: list[dict[str, Constants]] = []
        self.inputs: list[Inputs] = []

    @_uncompiled()
    def step(
        self,
        step: int,
        skipped: frozenset[str],
        scale: float,
        idle: Idle,
        settings: Settings = (),
    ) -> None:
        """Train one step and record the values that are compared."""
        batch, named = self._batch(step), self.parameters
        self._zero_grad()
        parts = self._parts(batch)
        log = ChoiceLog(self.replayed[step] if self.replayed else None)
        # backward may run a forward again
        chooses = chooses_in_forward(self.key.model)
        notes = JumpLog() if self.variant in (TRUTH, PLAIN) else None
        with ExitStack() as contexts:
            contexts.enter_context(_same_draws(step))
            contexts.enter_context(log if chooses else nullcontext())
            contexts.enter_context(self._new_tensors())
            for each in self.variant.noise:
                contexts.enter_context(each.passes(self, step))
            contexts.enter_context(notes or nullcontext())
            passes, weights = self._cast(lambda: self._passes(batch, parts, scale))
        self.inputs.append(notes.inputs if notes else ())
        self.choices.append(log.choices)
        moved = any(each.moves_scores for each in self.variant.noise)
        # noise of scores comes only from runs that do not move them
        self.errors.append({} if moved else log.errors)
        self._unscale(scale)
        self.norms.append(self._norm())
        self._clip()
        self.losses.append(
            sum(
                value.item() * weight
                for values, of_heads in zip(passes, weights, strict=True)
                for value, weight in zip(values, of_heads, strict=True)
            )
        )
        self._idle(named, idle)
        self.gradients.append(
            self._flat({n: p.grad for n, p in named.items() if p.grad is not None})
        )
        # after recording, so that this step's gradients are compared unchanged
        for each in self.variant.noise:
            each.gradients(self, step)
        if self.planned is not None:
            settings = self.planned.settings()
        for name, key, setting in settings:
            # a parameter that the recipe has frozen has no optimizer
            optimizer = self.optimizers.get(name)
            for group in optimizer.param_groups if optimizer is not None else ():
                if key in group:
                    group[key] = _in_the_form_of(group[key], setting)
        self.settings.append(settings_of(self.optimizers))
        self.constants.append(constants_by_name(self.optimizers))
        for name, optimizer in self.optimizers.items():
            if name not in skipped:
                with ExitStack() as contexts:
                    contexts.enter_context(self.workload.calling("optimizer"))
                    for each in self.variant.noise:
                        contexts.enter_context(each.optimizer(self, name))
                    contexts.enter_context(self.sharded[name].stepped())
                    optimizer.step()
                self.steps_made[name] += 1
            if self.key.training.decay:  # also after a skip, as in ExponentialLR
                for group in optimizer.param_groups:
                    group["lr"] *= LR_DECAY
        if self.planned is not None and not skipped.issuperset(self.optimizers):
            self.planned.advance()
        now = self._flat(named | self._buffers())
        self.updates.append({n: now[n] - self.start[n] for n in now})

    def _buffers(self) -> dict[str, Tensor]:
        """Return the buffers that are compared; a forward may have replaced some.

        A buffer that a forward removes or reshapes is a cache and is not compared.
        """
        now = dict(self.model.named_buffers())
        self.buffers = {
            name: shape
            for name, shape in self.buffers.items()
            if name in now and now[name].shape == shape
        }
        return {name: now[name] for name in self.buffers}

    def _passes(
        self, batch: Batch, parts: list[Batch], scale: float
    ) -> tuple[list[list[Tensor]], list[list[float]]]:
        """Run forward and backward of all parts; return losses and their weights."""
        passes = [self._objective(part) for part in parts]
        weights = self._weights(batch, parts, [counts for _, counts in passes])
        for (values, _), of_heads in zip(passes, weights, strict=True):
            with self.workload.calling("backward"):
                _weighted(values, [scale * weight for weight in of_heads]).backward()
            self._round_gradients()
        return [values for values, _ in passes], weights

    def _cast(self, passes: Callable[[], T]) -> T:
        """Run the passes on copies of the parameters in the compute dtype.

        The parameters stay in fp32, as in ``fully_shard``. Backward also uses the
        copies, because activation checkpointing runs the forward again there.
        """
        dtype = self.precision.parameter_dtype
        if dtype is None:
            return passes()
        narrow = {f"model.{n}": p.to(dtype) for n, p in self.parameters.items()}
        result: T = functional_call(_Calls(self.model), narrow, (passes,))
        return result

    def _new_tensors(self) -> AbstractContextManager[Any]:
        wide = self.variant.double
        return new_tensors_in_fp64(self.key.model) if wide else nullcontext()

    def _round_gradients(self) -> None:
        """Round accumulated gradients, if the workload reduces in a narrower dtype."""
        dtype = self.key.reduced_in
        if dtype is None or self.variant.double:
            return
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.to(dtype))

    def _idle(self, named: dict[str, nn.Parameter], idle: Idle) -> None:
        for name in idle.zeros | idle.absent:
            gradient = named[name].grad
            if not named[name].requires_grad:
                # with zeros, weight decay and momentum would move the parameter
                continue
            if gradient is None or not gradient.any():
                zeros = torch.zeros_like(named[name])
                named[name].grad = zeros if name in idle.zeros else None

    def _norm(self) -> float:
        every = self.parameters.values()
        gradients = [p.grad.reshape(-1) for p in every if p.grad is not None]
        # In the dtype of the run, over all elements at once. For 10**6 elements,
        # torch's norm in fp32 has an error of 1e-5, and a right stack may have the same
        # error.
        return float(torch.cat(gradients).norm()) if gradients else 0.0

    def _clip(self) -> None:
        parameters = [p for p in self.parameters.values() if p.grad is not None]
        if self.key.training.clip == "value":
            torch.nn.utils.clip_grad_value_(parameters, clip_value_of(self.workload))
        limit = clip_norm_of(self.workload, self.key.training)
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(parameters, limit)

    def _batch(self, step: int) -> Batch:
        return self._wide(self.workload.batch(step, self.key.seed))

    def _wide(self, batch: Batch) -> Batch:
        if not self.variant.double:
            return batch
        return batch.map(lambda t: t.double() if t.is_floating_point() else t)

    @_uncompiled()
    def one_pass(self, part: Batch, factor: float) -> None:
        """Run forward and backward of a given micro-batch, without a step."""
        weights = self.weights_of_heads()

        def passes() -> None:
            values, _ = self._objective(self._wide(part))
            _weighted(values, [factor * weight for weight in weights]).backward()

        with self._new_tensors():
            self._cast(passes)

    def weights_of_heads(self) -> list[float]:
        """Return the weights with which a micro-batch's losses add up in the next step.

        The weights are right up to a common factor. A loss with several counts has one
        weight for each; a forward of the whole batch gives them. Any other loss has the
        weight 1.
        """
        if facts_of(self.key.model).counts < 2:
            return [1.0]
        step = len(self.updates)
        if step not in self.heads:
            needed = facts_of(self.key.model).differentiates
            with self._new_tensors(), torch.set_grad_enabled(needed):
                parts = self._parts(self._batch(step))
                counts = self._cast(lambda: [self._objective(p)[1] for p in parts])
            totals = [*map(sum, zip(*counts, strict=True))]
            self.heads[step] = [totals[0] / total for total in totals]
        return self.heads[step]

    def gradients_of(self, parts: Iterable[Batch]) -> dict[str, Doubles]:
        """Return the gradient of some micro-batches together, up to a factor."""
        self._zero_grad()
        counted = facts_of(self.key.model).counted
        for part in parts:
            # a loss with a count is a sum over elements, and any other a mean
            self.one_pass(part, 1.0 if counted else part.elements)
        named = self.parameters.items()
        gradients = self._flat({n: p.grad for n, p in named if p.grad is not None})
        self._zero_grad()
        return gradients

    def _parts(self, batch: Batch) -> list[Batch]:
        """Return the micro-batches of one step."""
        own = self.workload.micro_batches
        parts = [batch] if own is None else own(batch)
        for each in self.variant.noise:
            parts = each.rows(parts, self)
        return parts

    def rows_may_be_cut(self) -> bool:
        """Return True if gradients are sums over rows."""
        if self.rows_apart is None:
            self.rows_apart = rows_apart(self.key.model)
        return self.rows_apart

    def _weights(
        self, batch: Batch, parts: list[Batch], counts: list[Counts]
    ) -> list[list[float]]:
        """Return the weights of each part's losses in the loss of the step."""
        totals = tuple(map(sum, zip(*counts, strict=True)))
        self.counts.append(totals)
        if not totals:
            return [[part.elements / batch.elements] for part in parts]
        if not all(totals):
            text = f"the counts of the batch add up to 0 at step {len(self.counts) - 1}"
            raise self.workload.refuse("loss", text)
        return [[1.0 / total for total in totals]] * len(parts)

    def _objective(self, part: Batch) -> tuple[list[Tensor], Counts]:
        with self.precision.autocast("cpu"):
            with self.workload.calling("forward"):
                output = self._forward(part.inputs)
            values, counts = self.workload.objective(output, part.targets)
            self.loss_dtype = dtype_name(values[0].dtype)
            if not counts:
                losses = self.key.training.losses_of(values[0], output)
                values = [torch.stack(losses).sum()]
        return [value * self.key.loss_factor for value in values], counts

    def _forward(self, inputs: Any) -> Any:
        dtype = self.precision.parameter_dtype
        if dtype is None:
            return self.model(inputs)
        batch = Batch(inputs=inputs, targets=())
        narrowed = batch.map(lambda t: t.to(dtype) if t.is_floating_point() else t)
        return self.model(narrowed.inputs)

    def _zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def _unscale(self, scale: float) -> None:
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad /= scale

    def _flat(
        self, tensors: dict[str, Tensor] | dict[str, nn.Parameter]
    ) -> dict[str, Doubles]:
        return {
            n: local(t.detach()).to(torch.float64, copy=True).reshape(-1).numpy()
            for n, t in tensors.items()
        }


def _weighted(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    first, *rest = (v * w for v, w in zip(values, weights, strict=True))
    return sum(rest, first)


def _in_the_form_of(held: Any, value: Setting) -> Any:
    """Convert a setting to the type of the param group's entry: number or tensor."""
    # a new tensor, because the workload may give all optimizers the same one
    return torch.full_like(held, value) if isinstance(held, Tensor) else value  # type: ignore[arg-type]  # no tensor of betas


class _Calls(nn.Module):
    """Wraps a model in a module whose forward calls a given function."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[[], T]) -> T:
        """Call the function."""
        return call()


def check_equal_start(model: str, what: str, one: str, others: Iterable[str]) -> None:
    """Check that references, or a reference and ranks, began with the same weights.

    Otherwise the distance between two models would count as noise, and the bound
    derived from it would let every gradient pass.

    Args:
        model: model that the runs train.
        what: description of the compared runs, for the message.
        one: digest of the first run's weights.
        others: digests of the other runs' weights.

    Raises:
        WorkloadError: if the digests differ.
    """
    if {one} != {one, *others}:
        raise resolve_workload(model).refuse(
            "model",
            f"gave {what} different weights after the same torch.manual_seed: what "
            "does not begin equal cannot be compared",
        )


@lru_cache
def rows_apart(model: str) -> bool:
    """Return True if rows may be reversed and cut, since gradients are sums of rows.

    Rows of a workload's own micro-batches may depend on each other: several sequences
    may be packed in one. Gradients are not sums of rows if a layer uses all rows at
    once, such as batch statistics. Then training on parts is a different training even
    in fp64, and its distance from the truth would wrongly count as noise.

    Args:
        model: a key of ``fixtures.MODELS``, or a user's workload.
    """
    losses, gradients, starts = [], [], []
    workload = resolve_workload(model)
    if workload.rounds_to is not None and workload.micro_batches is None:
        # by this declaration rows are coupled only by scales, which is noise
        return True
    for variant in (TRUTH, CUT):
        try:
            # with rows_apart, since the run would call this function without it
            run = _first_step(model, variant, rows_apart=True)
        # the model or the loss refuses such parts, so rows must not be cut
        except (ValueError, RuntimeError, IndexError):
            return False
        losses.append(run.losses[0])
        gradients.append(run.gradients[0])
        starts.append(run.initial)
    check_equal_start(model, "two references", starts[0], starts)
    if workload.micro_batches is not None and not (
        abs(losses[0] - losses[1]) <= ROUNDING * abs(losses[0])
    ):
        return False
    return equal_but_for_rounding(*gradients)


CUT = Variant(double=True, noise=(Rows(parts=4, reverse=True),))
"""The run in fp64 with reversed and cut rows."""


@lru_cache
def buffers_of_passes(model: str) -> frozenset[str]:
    """Return buffers that depend on how rows are cut into passes, and on their order.

    Each rank has its own passes. Returns the empty set if no reference cuts the batch.
    """
    apart = rows_apart(model)
    if not apart and resolve_workload(model).micro_batches is None:
        return frozenset()
    whole, cut = (_first_step(model, v, rows_apart=apart) for v in (TRUTH, CUT))
    return frozenset(
        name
        for name in whole.buffers.keys() & cut.buffers
        if not equal_but_for_rounding(
            {name: whole.updates[0][name]}, {name: cut.updates[0][name]}
        )
    )


def _first_step(model: str, variant: Variant, *, rows_apart: bool) -> ReferenceRun:
    """Train one step; ``rows_apart`` says if rows of a micro-batch may be cut."""
    optimizer = next(iter(resolve_workload(model).optimizers))
    key = Setup(model=model, optimizer=optimizer, steps=1, seed=0)
    run = ReferenceRun(key, "fp32", variant)
    run.rows_apart = rows_apart
    run.step(0, frozenset(), 1.0, Idle())
    return run
