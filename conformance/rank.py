"""What runs on a rank: one scenario with one scaler, observed at every step.

Steps of :func:`observe_rank`: build the engine; construct the judged scaler; then per
step: passes, faults, look at the raw gradients, the judged calls under observation,
look at the effect, and one checked collective.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..fixtures import (
    LOSS,
    Strike,
    WorkloadError,
    aim,
    inject,
    inject_loss,
    is_workload,
    local,
    parse_faults,
)
from ..multiprocess import current_world
from .checked import all_say_right, checked_collective
from .devices import settle
from .engine import Engine, Prepare, build_engine, shard_id
from .handover import optimizer_states, restore
from .observe import (
    CallLog,
    digest,
    gradient_places,
    non_finite,
    optimizer_digest,
    partial_ranks,
)
from .probe import probe
from .recipes import MANUAL_STEP
from .scenario import Scenario
from .spec import growth_tracker, load_scaler
from .trace import Decision, Floats, Misuse, Problem, RankTrace, Saved, StepTrace
from .workload import same_everywhere

__all__ = ["JudgedError", "observe_rank"]


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
) -> RankTrace:
    """Train ``scenario`` on this rank and return what was seen.

    Args:
        scenario: what to train.
        spec: the judged scaler, or ``none`` to train without one.
        folder: import path of the judged scaler and of the workload.
        saved: what another world came to at the seam, to go on from there.
        keep: hand over the state after the last step.

    Raises:
        JudgedError: if a call of the judged scaler raised; holds the trace so far.
    """
    world = current_world()
    settle(world.device)
    factory = load_scaler(spec, folder)
    shape = scenario.parsed_topology.mesh_shape(scenario.world)
    mesh = world.mesh(tuple(shape.values()), tuple(shape))
    engine = build_engine(scenario, mesh, torch.device(world.device))
    trace = RankTrace(
        rank=world.rank,
        coordinate={axis: mesh.get_local_rank(axis) for axis in shape},
        index=engine.index,
        shards={name: shard_id(index) for name, index in engine.index.items()},
        owned=engine.owned,
        start={name: _floats(local(p)) for name, p in engine.parameters.items()},
    )
    judged = _Judged(engine, trace)
    strikes = _aim(engine, trace)
    if factory is not None:
        judged.construct(factory)
    for step in range(scenario.seam if saved else 0, scenario.steps):
        trace.steps.append(StepTrace(step=step))
        if scenario.parsed_recipe.resume and step == scenario.seam:
            judged.resume(saved)
        _observe_step(engine, judged, trace, strikes)
    if keep:
        trace.saved = judged.saved()
    trace.misuse = judged.misuse()
    return trace


def _aim(engine: Engine, trace: RankTrace) -> tuple[Strike, ...]:
    """Tell all ranks which elements each holds, and find the faults' targets."""
    held = {n: s for n, s in trace.shards.items() if engine.trains(n)}
    holdings: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(holdings, held | {LOSS: engine.rows})
    engine.replicas = {
        name: sum(other.get(name) == shard for other in holdings)
        for name, shard in held.items()
    }
    return aim(parse_faults(engine.scenario.faults), holdings)


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

    def update(self, step: int) -> None:
        manual = self.recipe.new_scale if step == MANUAL_STEP else None
        if self.scaler is not None:
            with self.watch("update"):
                self.scaler.update(*[manual] * (manual is not None))

    def misuse(self) -> list[Misuse]:
        """Calls in a wrong order; they depend on no recipe, so on plain runs only."""
        if self.scaler is None or self.engine.scenario.recipe != "plain":
            return []
        # gradients of a backward of their own: those of the last step carry its scale,
        # which only a rank that scaled a loss can know once update() has moved it
        last = self.engine.scenario.steps
        _backward(self.engine, last, lambda losses, *_: self.scale(losses))
        return probe(self.scaler, self.engine.optimizers, self._look, self.watch)

    def _look(self) -> dict[str, str]:
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
    engine: Engine, judged: _Judged, trace: RankTrace, strikes: tuple[Strike, ...]
) -> None:
    seen = trace.steps[-1]

    def prepare(losses: list[Tensor], part: int, parts: int) -> list[Tensor]:
        where = (trace.rank, seen.step)
        bad, struck = inject_loss(strikes, losses[0], where, (part, parts))
        seen.faults += struck
        return judged.scale([bad, *losses[1:]])

    seen.loss = _backward(engine, seen.step, prepare)
    seen.scale_before, seen.growth_before = judged.state()
    gradients = _local_gradients(engine)
    seen.faults += inject(strikes, gradients, trace.rank, seen.step)
    seen.decisions = _undecided(engine, gradients, seen.scale_before)
    before = _effect(engine)
    log = CallLog()
    with _gradients_at_optimizers(engine, seen), log:
        judged.step()
    with log:
        judged.update(seen.step)
    seen.collectives = log.collectives
    seen.scale_after, seen.growth_after = judged.state()
    _look_at_effect(engine, seen, before)
    for scheduler in engine.schedulers:
        scheduler.step()
    seen.checked_sum = checked_collective(trace.rank, seen.step, engine.device)
    seen.complete = True
    if not all_say_right(seen):
        raise JudgedError(trace)


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


def _backward(engine: Engine, step: int, prepare: Prepare) -> float | None:
    """Loss of one step on this rank; its gradients replace those before."""
    for optimizer in engine.optimizers:
        optimizer.zero_grad()
    kit = engine.scenario.kit
    batch = kit.batch(step, engine.scenario.seed)
    if is_workload(kit.name):
        tensors = {f"tensor {i}": t for i, t in enumerate(batch.tensors)}
        same_everywhere(kit, "batch", tensors)
    return engine.forward_backward(batch.to(engine.device), prepare)


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
        # a fused optimizer is handed the scale and divides by it in its kernel
        divisor = getattr(optimizer, "grad_scale", None)
        scale = 1.0 if divisor is None else float(local(divisor))
        gradients = _local_gradients(engine)
        for name in engine.owned[number]:
            if name in gradients:
                _keep_gradient(engine, seen, name, gradients[name], scale)

    with ExitStack() as hooks:
        for number, optimizer in enumerate(engine.optimizers):
            hook = partial(lambda n, o, *_: watch(n, o), number)
            hooks.callback(optimizer.register_step_pre_hook(hook).remove)
        yield


def _keep_gradient(
    engine: Engine, seen: StepTrace, name: str, gradient: Tensor, scale: float
) -> None:
    parameter, index = engine.parameters[name], engine.index[name]
    try:
        seen.places[name] = gradient_places(gradient, parameter, index)
    except ValueError as error:
        raise engine.scenario.kit.refuse("backward", f"{name}: {error}") from error
    seen.partial[name], parts = partial_ranks(gradient)
    seen.gradients[name] = _floats(local(gradient) / (scale * parts))


def _floats(tensor: Tensor) -> Floats:
    flat: Floats = tensor.detach().float().reshape(-1).cpu().numpy().copy()
    return flat


def _effect(engine: Engine) -> tuple[dict[str, str], list[str]]:
    digests = {name: digest(p) for name, p in engine.parameters.items()}
    return digests, [optimizer_digest(optimizer) for optimizer in engine.optimizers]


def _look_at_effect(
    engine: Engine, seen: StepTrace, before: tuple[dict[str, str], list[str]]
) -> None:
    seen.digests, states = _effect(engine)
    for number, decision in enumerate(seen.decisions):
        moving = [name for name in engine.owned[number] if engine.trains(name)]
        if moving:
            changed = [seen.digests[name] != before[0][name] for name in moving]
            decision.parameters_changed = any(changed)
        decision.state_changed = states[number] != before[1][number]
    seen.parameters = {
        name: _floats(local(parameter)) for name, parameter in engine.parameters.items()
    }
