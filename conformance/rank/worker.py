"""What runs on a rank: one scenario with one scaler, observed at every step.

Steps of :func:`observe_rank`: build the engine; construct the judged scaler; then per
step: passes, faults, the raw gradients, the judged calls under observation,
their effect, and one checked collective.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
)
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...fixtures import (
    LOSS,
    Batch,
    ResolvedFault,
    WorkloadError,
    inject,
    inject_loss,
    is_workload,
    local,
    parse_faults,
    resolve_faults,
)
from ...multiprocess import current_world
from ..space.recipes import MANUAL_STEP
from ..space.scenario import Scenario
from .checked import all_say_right, checked_collective
from .devices import set_deterministic
from .engine import Engine, build_engine, shard_id
from .layout_checks import same_everywhere
from .local_parts import read_local_parts
from .observe import (
    NO_STATE,
    CallLog,
    ReductionLog,
    digest,
    gradient_places,
    non_finite,
    optimizer_digest,
    partial_ranks,
)
from .own_step import OptimizerCalls, WatchedScaler, as_number, parameters_of
from .probe import probe
from .randomness import DrawLog
from .reshard import optimizer_states, restore
from .routing import ChoiceLog, Choices
from .scaler_spec import growth_tracker, load_scaler
from .trace import Decision, Floats, Misuse, Problem, RankTrace, Saved, StepTrace

__all__ = ["JudgedError", "observe_rank"]

Around = Callable[[Engine, int], AbstractContextManager[None]]
"""(engine, step) -> a context in which the step is made."""


class JudgedError(Exception):
    """The run cannot go on because of the judged scaler; carries what was seen.

    Either a legal call raised (``trace.problem`` says which), or a stray collective has
    corrupted the one that is checked after each step.
    """

    def __init__(self, trace: RankTrace) -> None:
        super().__init__(trace)
        self.trace = trace

    def __str__(self) -> str:
        problem = self.trace.problem
        if problem is None:
            return f"rank {self.trace.rank}: the checked collective was corrupted"
        where = f"rank {self.trace.rank}, step {problem.step}, {problem.call}"
        return f"{where}: {problem.error}"


def observe_rank(
    scenario: Scenario,
    spec: str,
    folder: str,
    saved: Saved | None = None,
    keep: bool = False,
    choices: Sequence[Mapping[str, Choices]] = (),
    around: Around | None = None,
    last: int | None = None,
) -> RankTrace:
    """Train ``scenario`` on this rank and return what was seen.

    Args:
        scenario: what to train.
        spec: the judged scaler, or ``none`` to train without one.
        folder: import path of the judged scaler and of the workload.
        saved: the state of the first phase, to resume from.
        keep: keep the state after the last step, for :func:`restore`.
        choices: per step what learned routers are to choose.
        around: (engine, step) -> a context in which the step is made.
        last: the step to end with, and no wrong calls after it.

    Raises:
        JudgedError: if a call of the judged scaler raised; holds the trace so far.
    """
    world = current_world()
    set_deterministic(world.device)
    factory = load_scaler(spec, folder)
    shape = scenario.parsed_topology.mesh_shape(scenario.world_size)
    mesh = world.mesh(tuple(shape.values()), tuple(shape))
    engine = build_engine(scenario, mesh, torch.device(world.device))
    trace = RankTrace(
        rank=world.rank,
        coordinate={axis: mesh.get_local_rank(axis) for axis in shape},
        index=engine.index,
        shards={name: shard_id(index) for name, index in engine.index.items()},
        owned=engine.owned,
        start={name: _floats(part) for name, part in engine.local_tensors().items()},
    )
    trace.reduce_dtype = str(_promised(scenario) or "").removeprefix("torch.")
    engine.choices = choices
    judged = _Judged(engine, trace)
    own = _OwnStep(engine, judged) if engine.scenario.workload.train_step else None
    faults = _resolved_faults(engine, trace)
    if factory is not None:
        judged.construct(factory)
    steps = scenario.steps if last is None else last + 1
    for step in range(scenario.resume_step if saved else 0, steps):
        trace.steps.append(StepTrace(step=step))
        if scenario.parsed_recipe.resume and step == scenario.resume_step:
            judged.resume(saved)
        with nullcontext() if around is None else around(engine, step):
            _observe_step(engine, judged, trace, faults, own)
    trace.owned = engine.owned
    if own is not None:
        own.check_gradients(trace)
    if keep:
        trace.saved = judged.saved()
    trace.misuse = judged.misuse() if last is None else None
    return trace


def _promised(scenario: Scenario) -> torch.dtype | None:
    """In which dtype a workload promises to reduce gradients, if it does."""
    usual = scenario.workload.reduce_dtype
    handed = scenario.parsed_topology.fully_shards  # the policy, which then says so
    policy = scenario.parsed_precision.reduce_dtype if handed else None
    return usual and (policy or usual)


def _resolved_faults(engine: Engine, trace: RankTrace) -> tuple[ResolvedFault, ...]:
    """Exchange which elements each rank holds, and resolve the faults."""
    held = {n: s for n, s in trace.shards.items() if engine.trains(n)}
    holdings: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(holdings, held | {LOSS: engine.rows})
    engine.replicas = {
        name: sum(other.get(name) == shard for other in holdings)
        for name, shard in held.items()
    }
    return resolve_faults(parse_faults(engine.scenario.faults), holdings)


class _Judged:
    """The judged scaler behind its public protocol; every call is watched."""

    def __init__(self, engine: Engine, trace: RankTrace) -> None:
        self.engine = engine
        self.trace = trace
        self.recipe = engine.scenario.parsed_recipe
        self.scaler: Any = None
        self.factory: Any = None

    def construct(self, factory: Any) -> None:
        scenario = self.engine.scenario
        self.factory = factory
        with self.watch("constructor"):
            self.scaler = factory(
                device=self.engine.device.type,
                init_scale=scenario.init_scale,
                growth_factor=scenario.growth_factor,
                backoff_factor=scenario.backoff_factor,
                growth_interval=scenario.growth_interval,
                enabled=self.recipe.enabled,
            )
        if self.recipe.primed:
            self.scale([torch.zeros((), device=self.engine.device)])

    def saved(self) -> Saved:
        """The state of scaler and optimizers, as this rank knows it."""
        states = optimizer_states(self.engine)
        return Saved(scaler=self._saved_scaler(), optimizers=states)

    def resume(self, saved: Saved | None) -> None:
        """Go on from ``saved``, or with all made anew from what is here."""
        if saved is not None:
            restore(self.engine, saved)
            self._load_scaler(saved.scaler)
            return
        self.engine.remake_optimizers()
        if self.scaler is not None:
            state = self._saved_scaler()
            self.construct(self.factory)
            self._load_scaler(state)

    def _saved_scaler(self) -> bytes:
        file = io.BytesIO()
        if self.scaler is not None:
            with self.watch("state_dict"):
                torch.save(self.scaler.state_dict(), file)
        return file.getvalue()

    def _load_scaler(self, state: bytes) -> None:
        if self.scaler is not None:
            with self.watch("torch.load of its state_dict"):
                loaded = torch.load(io.BytesIO(state), weights_only=True)
            with self.watch("load_state_dict"):
                self.scaler.load_state_dict(loaded)

    @contextmanager
    def watch(self, call: str) -> Iterator[None]:
        try:
            yield
        except WorkloadError:  # of the optimizer or its gradients, not the scaler's
            raise
        except Exception as error:  # recorded as the verdict's evidence
            step = self.trace.steps[-1].step if self.trace.steps else -1
            text = str(error) or "(no message)"
            self.trace.problem = Problem(
                step=step, call=call, error=f"{type(error).__name__}: {text[:400]}"
            )
            raise JudgedError(self.trace) from error

    def scale(self, losses: list[Tensor]) -> list[Tensor]:
        if self.scaler is None:
            return losses
        with self.watch("scale"):
            # most callers have one loss and no list
            if len(losses) == 1:
                return [self.scaler.scale(losses[0])]
            scaled: list[Tensor] = self.scaler.scale(losses)
        return scaled

    def state(self) -> tuple[float, int | None]:
        """(scale, growth tracker) as the public protocol tells them."""
        if self.scaler is None:
            return 1.0, 0
        with self.watch("get_scale"):
            scale = float(self.scaler.get_scale())
        with self.watch("state_dict"):
            return scale, growth_tracker(self.scaler.state_dict())

    def step(self) -> None:
        optimizers = self.engine.optimizers
        if self.scaler is None:
            self.engine.clip()
            for optimizer in optimizers:
                optimizer.step()
            return
        for optimizer in optimizers * self.recipe.unscale:
            with self.watch("unscale_"):
                self.scaler.unscale_(optimizer)
        self.engine.clip()
        for optimizer in optimizers:
            with self.watch("step"):
                self.scaler.step(optimizer)

    def manual_scale(self, step: int) -> float | None:
        """What ``update`` is given in a step."""
        return self.recipe.new_scale if step == MANUAL_STEP else None

    def update(self, step: int) -> None:
        manual = self.manual_scale(step)
        if self.scaler is not None:
            with self.watch("update"):
                self.scaler.update(*[manual] * (manual is not None))

    def misuse(self) -> list[Misuse]:
        """Calls in a wrong order; they depend on no recipe, so on plain runs only."""
        scenario = self.engine.scenario
        if (
            self.scaler is None
            or scenario.recipe != "plain"
            or scenario.workload.train_step
        ):
            return []
        # gradients of a backward of their own: those of the last step carry its scale,
        # which only a rank that scaled a loss can know once update() has moved it
        last = self.engine.scenario.steps
        batch = _next_batch(self.engine, last)
        self.engine.forward_backward(batch, lambda losses, *_: self.scale(losses))
        return probe(self.scaler, self.engine.optimizers, self._digests, self.watch)

    def _digests(self) -> dict[str, str]:
        """What a refused call must leave as it is."""
        gradients = _local_gradients(self.engine).items()
        parameters, state = _effect(self.engine)
        return {
            "parameters": repr(parameters),
            "the optimizer's state": repr(state),
            "gradients": repr({name: digest(g) for name, g in gradients}),
            "the scale or the growth tracker": repr(self.state()),
        }


def _observe_step(
    engine: Engine,
    judged: _Judged,
    trace: RankTrace,
    faults: tuple[ResolvedFault, ...],
    own: _OwnStep | None,
) -> None:
    seen = trace.steps[-1]
    if own is None:
        _judges_step(engine, judged, seen, faults)
    else:
        own.run(seen, faults)
    for scheduler in engine.schedulers:
        scheduler.step()
    seen.checked_sum = checked_collective(trace.rank, seen.step, engine.device)
    seen.complete = True
    if not all_say_right(seen):
        raise JudgedError(trace)


def _judges_step(
    engine: Engine, judged: _Judged, seen: StepTrace, faults: tuple[ResolvedFault, ...]
) -> None:
    rank = dist.get_rank()

    def prepare(losses: list[Tensor], part: int, parts: int) -> list[Tensor]:
        bad, injected = inject_loss(faults, losses[0], (rank, seen.step), (part, parts))
        seen.faults += injected
        return judged.scale([bad, *losses[1:]])

    batch = _next_batch(engine, seen.step)  # what it draws is no layer's
    with _reductions(engine, seen), _watched_passes(engine, seen):
        seen.loss = engine.forward_backward(batch, prepare)
    seen.count = engine.count
    seen.scale_before, seen.growth_before = judged.state()
    gradients = _local_gradients(engine)
    seen.faults += inject(faults, gradients, rank, seen.step)
    seen.decisions = _undecided(engine, gradients, seen.scale_before)
    before = _effect(engine)
    log = CallLog()
    with _gradients_at_optimizers(engine, seen), log:
        judged.step()
    with log:
        judged.update(seen.step)
    seen.collectives = log.collectives
    seen.scale_after, seen.growth_after = judged.state()
    _record_effect(engine, seen, before, range(len(engine.optimizers)))


@contextmanager
def _watched_passes(engine: Engine, seen: StepTrace) -> Iterator[None]:
    """Note which random numbers a step's passes draw; choose as the reference did."""
    generator, log = torch.get_rng_state(), DrawLog()
    random = engine.scenario.parsed_recipe.training.random
    choices = ChoiceLog(engine.choices[seen.step]) if engine.choices else None
    with log if random else nullcontext(), choices or nullcontext():
        yield
    if choices is not None:
        seen.unclear_choices = choices.unclear
    seen.draws = log.draws
    seen.drew = not torch.equal(generator, torch.get_rng_state())


class _OwnStep:
    """Runs ``train_step`` and sees the same of it as of the judge's own loop."""

    def __init__(self, engine: Engine, judged: _Judged) -> None:
        self.engine = engine
        self.judged = judged
        self.workload = engine.scenario.workload
        self.calls = OptimizerCalls(self.workload, self._record_gradients)
        self.seen = StepTrace(step=-1)
        self.faults: tuple[ResolvedFault, ...] = ()
        self.non_finite: dict[str, bool] | None = None
        """Name -> whether its raw gradient is bad; None until a scaler reads them."""
        self.unknown = engine.owned[0]
        """Names whose optimizer was not seen yet, or steps copies of its own."""
        self.called: list[list[str]] = []
        self.scaled = self.parts = 0

    def run(self, seen: StepTrace, faults: tuple[ResolvedFault, ...]) -> None:
        engine, judged, workload = self.engine, self.judged, self.workload
        self.seen, self.faults, self.non_finite = seen, faults, None
        self.called.clear()
        self.scaled = 0
        micro_batches = engine.micro_batches(_global_batch(engine, seen.step))
        self.parts = len(micro_batches)
        seen.scale_before, seen.growth_before = judged.state()
        before, log = _effect(engine), CallLog()
        precision = engine.scenario.parsed_precision
        autocast = precision.autocast(engine.device.type)
        with self.calls.watching(), autocast, _watched_passes(engine, seen):
            # a cast weight that is kept has the graph of the backward before: what a
            # later micro-batch adds to it would be lost
            torch.set_autocast_cache_enabled(False)
            loss, norm = self._train(micro_batches, log)
        seen.collectives = log.collectives
        seen.loss = as_number(workload, "loss", loss)
        seen.reported_norm = as_number(workload, "norm", norm)
        seen.weight = engine.weight_of(micro_batches)
        seen.scale_after, seen.growth_after = judged.state()
        if workload.gradients is not None:
            self._keep_given_gradients()
        self._decide()
        owned = [self._enter(optimizer) for optimizer in engine.optimizers]
        deciding = [
            next(n for n, names in enumerate(engine.owned) if names is mine)
            for mine in owned
        ]
        _record_effect(engine, seen, before, deciding)
        changed = [d.parameters_changed for d in seen.decisions]
        if judged.scaler is None and not self.calls.seen and False in changed:
            text = "stepped never: no optimizer of torch was called and no weight has"
            raise workload.refuse("train_step", f"{text} changed in step {seen.step}")

    def check_gradients(self, trace: RankTrace) -> None:
        """See that the gradients of a whole run were not out of sight."""
        called = any(d.optimizer_called for s in trace.steps for d in s.decisions)
        hidden = self.workload.gradients is None and not any(
            seen.gradients for seen in trace.steps
        )
        if hidden and called and any(map(self.engine.trains, self.engine.index)):
            text = "an optimizer was called, and no parameter had a grad: write"
            raise self.workload.refuse("gradients", f"{text} gradients(stack)")

    def _train(self, micro_batches: list[Batch], log: CallLog) -> tuple[Any, Any]:
        assert self.workload.train_step is not None
        scaler = self.judged.scaler
        if scaler is not None:
            scaler = WatchedScaler(
                scaler,
                watch=partial(self._watch, log),
                inject=self._inject_loss,
                before=self._before_scaler_call,
                new_scale=self.judged.manual_scale(self.seen.step),
            )
        try:
            with _reductions(self.engine, self.seen):
                return self.workload.train_step(
                    self.engine.module, micro_batches, scaler
                )
        except WorkloadError as error:
            if isinstance(error.__cause__, JudgedError):  # of a call of the scaler
                raise error.__cause__ from None
            raise

    @contextmanager
    def _watch(self, log: CallLog, call: str) -> Iterator[None]:
        with self.judged.watch(call):
            if call in ("unscale_", "step", "update"):
                with log:
                    yield
            else:
                yield

    def _inject_loss(self, loss: Tensor) -> Tensor:
        where, at = (dist.get_rank(), self.seen.step), (self.scaled, self.parts)
        self.scaled += 1
        loss, injected = inject_loss(self.faults, loss, where, at)
        self.seen.faults += injected
        return loss

    def _before_scaler_call(self, optimizer: Any) -> None:
        """Inject faults and read the raw gradients, once a step."""
        self._enter(optimizer)
        if self.non_finite is None:
            engine, seen = self.engine, self.seen
            gradients = _local_gradients(engine)
            seen.faults += inject(self.faults, gradients, dist.get_rank(), seen.step)
            self.non_finite = {
                name: non_finite(gradient, seen.scale_before)
                for name, gradient in gradients.items()
            }

    def _enter(self, optimizer: Any) -> list[str]:
        """Names of an optimizer's parameters; a new one decides for itself."""
        engine, mine = self.engine, {id(p) for p in parameters_of(optimizer)}
        if isinstance(optimizer, torch.optim.Optimizer) and not any(
            optimizer is known for known in engine.optimizers
        ):
            engine.optimizers.append(optimizer)
        names = [n for n, p in engine.parameters.items() if id(p) in mine]
        if not names:
            return self.unknown
        for owned in engine.owned:
            if owned == names and owned is not self.unknown:
                return owned
        self.unknown[:] = [n for n in self.unknown if n not in names]
        engine.owned.append(names)
        return names

    def _record_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy what an optimizer uses, at the moment it is called."""
        engine, seen = self.engine, self.seen
        names = self._enter(optimizer)
        self.called.append(names)
        if self.workload.gradients is not None:
            return
        scale, gradients = _grad_scale(optimizer), _local_gradients(engine)
        for name in names:
            if name in gradients and name not in seen.gradients:
                _keep_gradient(engine, seen, name, gradients[name], scale)

    def _keep_given_gradients(self) -> None:
        engine, seen = self.engine, self.seen
        assert self.workload.gradients is not None
        given = self.workload.gradients(engine.module)
        for name, part in read_local_parts(
            self.workload, "gradients", given, engine.whole
        ).items():
            seen.places[name] = part.places
            seen.partial[name], parts = partial_ranks(part.tensor)
            seen.gradients[name] = _floats(local(part.tensor) / parts)

    def _decide(self) -> None:
        """What each optimizer did; parameters whose optimizer is not known go first."""
        seen, bad = self.seen, dict(self.non_finite or {})
        if not self.unknown and not seen.step:  # later their numbers are in use
            del self.engine.owned[0]
        for name, values in seen.gradients.items():
            if name not in bad:
                bad[name] = not np.isfinite(values).all()
        seen.decisions = [
            Decision(
                non_finite=[n for n in names if bad.get(n)],
                optimizer_called=any(names is called for called in self.called),
            )
            for names in self.engine.owned
        ]


@contextmanager
def _reductions(engine: Engine, seen: StepTrace) -> Iterator[None]:
    """Note in which dtypes gradients are reduced, where a dtype is promised."""
    if _promised(engine.scenario) is None:
        yield
        return
    with ReductionLog() as log:
        yield
    seen.reductions = log.reductions


def _undecided(
    engine: Engine, gradients: Mapping[str, Tensor], scale: float
) -> list[Decision]:
    """Per optimizer: which of its gradients are bad, before the scaler sees them."""
    return [
        Decision(
            non_finite=[
                n for n in names if n in gradients and non_finite(gradients[n], scale)
            ]
        )
        for names in engine.owned
    ]


def _next_batch(engine: Engine, step: int) -> Batch:
    """The global batch of a step, whose gradients replace those before."""
    for optimizer in engine.optimizers:
        optimizer.zero_grad()
    return _global_batch(engine, step)


def _global_batch(engine: Engine, step: int) -> Batch:
    workload = engine.scenario.workload
    batch = workload.batch(step, engine.scenario.seed)
    if is_workload(workload.name):
        tensors = {f"tensor {i}": t for i, t in enumerate(batch.tensors)}
        same_everywhere(workload, "batch", tensors)
    return batch.to(engine.device)


def _local_gradients(engine: Engine) -> dict[str, Tensor]:
    return {
        name: parameter.grad
        for name, parameter in engine.parameters.items()
        if parameter.grad is not None
    }


@contextmanager
def _gradients_at_optimizers(engine: Engine, seen: StepTrace) -> Iterator[None]:
    """Copy the gradients at the moment an optimizer is called."""

    def watch(number: int, optimizer: torch.optim.Optimizer) -> None:
        seen.decisions[number].optimizer_called = True
        scale, gradients = _grad_scale(optimizer), _local_gradients(engine)
        for name in engine.owned[number]:
            if name in gradients:
                _keep_gradient(engine, seen, name, gradients[name], scale)

    with ExitStack() as hooks:
        for number, optimizer in enumerate(engine.optimizers):
            hook = partial(lambda n, o, *_: watch(n, o), number)
            hooks.callback(optimizer.register_step_pre_hook(hook).remove)
        yield


def _grad_scale(optimizer: torch.optim.Optimizer) -> float:
    """What a fused optimizer, which is handed the scale, divides by in its kernel."""
    grad_scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if grad_scale is None else float(local(grad_scale))


def _keep_gradient(
    engine: Engine, seen: StepTrace, name: str, gradient: Tensor, scale: float
) -> None:
    parameter, index = engine.parameters[name], engine.index[name]
    try:
        seen.places[name] = gradient_places(gradient, parameter, index)
    except ValueError as error:
        raise engine.scenario.workload.refuse("backward", f"{name}: {error}") from error
    seen.partial[name], parts = partial_ranks(gradient)
    seen.gradients[name] = _floats(local(gradient) / (scale * parts))


def _floats(tensor: Tensor) -> Floats:
    flat: Floats = tensor.detach().float().reshape(-1).cpu().numpy().copy()
    return flat


def _effect(engine: Engine) -> tuple[dict[str, str], list[str]]:
    digests = {name: digest(part) for name, part in engine.local_tensors().items()}
    return digests, [optimizer_digest(optimizer) for optimizer in engine.optimizers]


def _record_effect(
    engine: Engine,
    seen: StepTrace,
    before: tuple[dict[str, str], list[str]],
    deciding: Sequence[int],
) -> None:
    """See what has changed; ``deciding`` tells the decision of each optimizer."""
    held = engine.local_tensors()
    seen.digests = {name: digest(part) for name, part in held.items()}
    for number, decision in enumerate(seen.decisions):
        moving = [name for name in engine.owned[number] if engine.trains(name)]
        if moving:
            changed = [seen.digests[name] != before[0][name] for name in moving]
            decision.parameters_changed = any(changed)
    states = [optimizer_digest(optimizer) for optimizer in engine.optimizers]
    # of one that was first seen in this step nothing was known before
    known = before[1] + [NO_STATE] * (len(states) - len(before[1]))
    for number, state, earlier in zip(deciding, states, known, strict=True):
        seen.decisions[number].state_changed |= state != earlier
    seen.parameters = {name: _floats(part) for name, part in held.items()}
