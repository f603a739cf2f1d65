"""What runs on a rank: one scenario with one scaler, observed at every step.

Steps of :func:`observe_rank`: build the engine; construct the judged scaler; then per
step: passes, faults, look at the raw gradients, the judged calls under observation,
look at the effect, and one checked collective.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..fixtures import DATASETS, Strike, aim, inject, local, parse_faults
from ..multiprocess import current_world
from .devices import settle
from .engine import Engine, build_engine, shard_id
from .observe import CallLog, digest, non_finite, optimizer_digest, partial_axes
from .probe import probe
from .scenario import Scenario
from .trace import Floats, Misuse, Problem, RankTrace, StepTrace

__all__ = ["JudgedError", "load_scaler", "observe_rank"]


CHECK_TIMEOUT = timedelta(seconds=10)
"""How long the checked collective may take before it counts as lost."""


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


def load_scaler(spec: str, folder: str) -> Any:
    """The class or factory that ``module:attribute`` names.

    Args:
        spec: for example ``torch.amp:GradScaler``.
        folder: put first on the import path, so that a user's own module is found.

    Raises:
        ValueError: if ``spec`` has another form or names nothing callable.
    """
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute:
        raise ValueError(
            f"scaler {spec!r} is no module:attribute, such as torch.amp:GradScaler"
        )
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything: their fault, told
        raise ValueError(
            f"scaler {spec!r}: cannot import: {type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(
                f"scaler {spec!r}: {found.__name__!r} has no attribute {part!r}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"scaler {spec!r} is not callable: {found!r}")
    return found


def observe_rank(scenario: Scenario, spec: str | None, folder: str) -> RankTrace:
    """Train ``scenario`` on this rank and return what was seen.

    Args:
        scenario: what to train.
        spec: the judged scaler, or None to train without one.
        folder: import path of the judged scaler.

    Raises:
        JudgedError: if a call of the judged scaler raised; holds the trace so far.
    """
    world = current_world()
    settle(world.device)
    shape = scenario.parsed_topology.mesh_shape(scenario.world)
    mesh = world.mesh(tuple(shape.values()), tuple(shape))
    engine = build_engine(scenario, mesh, torch.device(world.device))
    trace = RankTrace(
        rank=world.rank,
        coordinate={axis: mesh.get_local_rank(axis) for axis in shape},
        index=engine.index,
        shards={name: shard_id(index) for name, index in engine.index.items()},
        start={name: _floats(local(p)) for name, p in engine.parameters.items()},
    )
    judged = _Judged(engine, trace)
    strikes = _aim(scenario, trace)
    if spec is not None:
        judged.construct(load_scaler(spec, folder))
    for step in range(scenario.steps):
        trace.steps.append(StepTrace(step=step))
        _observe_step(engine, judged, trace, strikes)
    trace.misuse = judged.misuse()
    return trace


def _aim(scenario: Scenario, trace: RankTrace) -> tuple[Strike, ...]:
    """Tell all ranks which elements each holds, and find the faults' targets."""
    faults = parse_faults(scenario.faults)
    if not faults:
        return ()
    held = {n: s for n, s in trace.shards.items() if len(trace.index[n])}
    holdings: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(holdings, held)
    return aim(faults, holdings)


class _Judged:
    """The judged scaler behind its public protocol; every call is watched."""

    def __init__(self, engine: Engine, trace: RankTrace) -> None:
        self.engine = engine
        self.trace = trace
        self.scaler: Any = None

    def construct(self, factory: Any) -> None:
        scenario = self.engine.scenario
        with self.watch("constructor"):
            self.scaler = factory(
                device=self.engine.device.type,
                init_scale=scenario.init_scale,
                growth_factor=scenario.growth_factor,
                backoff_factor=scenario.backoff_factor,
                growth_interval=scenario.growth_interval,
                enabled=True,
            )

    @contextmanager
    def watch(self, call: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # recorded as the verdict's evidence
            step = self.trace.steps[-1].step if self.trace.steps else -1
            text = str(error) or "(no message)"
            self.trace.problem = Problem(
                step=step, call=call, error=f"{type(error).__name__}: {text[:400]}"
            )
            raise JudgedError(self.trace) from error

    def scale(self, loss: Tensor) -> Tensor:
        if self.scaler is None:
            return loss
        with self.watch("scale"):
            scaled: Tensor = self.scaler.scale(loss)
        return scaled

    def state(self) -> tuple[float, int]:
        """(scale, growth tracker) as the public protocol tells them."""
        if self.scaler is None:
            return 1.0, 0
        with self.watch("get_scale"):
            scale = float(self.scaler.get_scale())
        with self.watch("state_dict"):
            return scale, int(self.scaler.state_dict().get("_growth_tracker", 0))

    def step(self) -> None:
        optimizer = self.engine.optimizer
        if self.scaler is None:
            self.engine.clip()
            optimizer.step()
            return
        if self.engine.scenario.recipe in ("unscale", "clip-value"):
            with self.watch("unscale_"):
                self.scaler.unscale_(optimizer)
        self.engine.clip()
        with self.watch("step"):
            self.scaler.step(optimizer)

    def update(self) -> None:
        if self.scaler is not None:
            with self.watch("update"):
                self.scaler.update()

    def misuse(self) -> list[Misuse]:
        """Calls in a wrong order; they depend on no recipe, so on plain runs only."""
        if self.scaler is None or self.engine.scenario.recipe != "plain":
            return []
        return probe(self.scaler, [self.engine.optimizer], self._look, self.watch)

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
    engine.optimizer.zero_grad()
    batch = DATASETS[engine.scenario.dataset].batch(seen.step, engine.scenario.seed)
    batch = batch.to(engine.device)
    seen.loss = engine.forward_backward(batch, judged.scale)
    seen.scale_before, seen.growth_before = judged.state()
    gradients = _local_gradients(engine)
    seen.faults = inject(strikes, gradients, trace.rank, seen.step)
    scale = seen.scale_before
    seen.non_finite = [n for n, g in gradients.items() if non_finite(g, scale)]
    before = _effect(engine)
    log = CallLog()
    with _gradients_at_optimizer(engine, seen), log:
        judged.step()
    seen.host_syncs = log.host_syncs
    with log:
        judged.update()
    seen.collectives = log.collectives
    seen.scale_after, seen.growth_after = judged.state()
    _look_at_effect(engine, seen, before)
    seen.checked_sum = _checked_collective(trace.rank, seen.step, engine.device)
    seen.complete = True
    if not _all_say_right(seen):
        raise JudgedError(trace)


def _local_gradients(engine: Engine) -> dict[str, Tensor]:
    return {
        name: parameter.grad
        for name, parameter in engine.parameters.items()
        if parameter.grad is not None
    }


@contextmanager
def _gradients_at_optimizer(engine: Engine, seen: StepTrace) -> Iterator[None]:
    """Copy the gradients at the moment the optimizer is called."""

    def look(optimizer: torch.optim.Optimizer, *_: object) -> None:
        seen.optimizer_called = True
        # a fused optimizer is handed the scale and divides by it in its kernel
        divisor = getattr(optimizer, "grad_scale", None)
        scale = 1.0 if divisor is None else float(local(divisor))
        seen.gradients = {
            name: _floats(local(gradient) / scale)
            for name, gradient in _local_gradients(engine).items()
        }
        seen.partial = {
            name: axes
            for name, gradient in _local_gradients(engine).items()
            if (axes := partial_axes(gradient))
        }

    handle = engine.optimizer.register_step_pre_hook(look)
    try:
        yield
    finally:
        handle.remove()


def _floats(tensor: Tensor) -> Floats:
    flat: Floats = tensor.detach().float().reshape(-1).cpu().numpy().copy()
    return flat


def _effect(engine: Engine) -> tuple[dict[str, str], str]:
    digests = {name: digest(p) for name, p in engine.parameters.items()}
    return digests, optimizer_digest(engine.optimizer)


def _look_at_effect(
    engine: Engine, seen: StepTrace, before: tuple[dict[str, str], str]
) -> None:
    seen.digests, state = _effect(engine)
    owned = [name for name, index in engine.index.items() if len(index)]
    if owned:
        seen.parameters_changed = any(seen.digests[n] != before[0][n] for n in owned)
    seen.state_changed = state != before[1]
    seen.parameters = {
        name: _floats(local(parameter)) for name, parameter in engine.parameters.items()
    }


def _checked_collective(
    rank: int, step: int, device: torch.device
) -> tuple[float, float]:
    """An all-reduce whose sum is known; stray collectives would pair with it."""
    ranks = dist.get_world_size()
    value = torch.tensor([(rank + 1.0) * (step + 1.0)], device=device)
    want = (step + 1.0) * ranks * (ranks + 1) / 2
    work = dist.all_reduce(value, async_op=True)
    try:
        assert work is not None  # None only for ranks outside of the group
        work.wait(CHECK_TIMEOUT)
    except RuntimeError:  # lost: recorded as nan, which no expectation equals
        return math.nan, want
    return value.item(), want


def _all_say_right(seen: StepTrace) -> bool:
    """Whether the checked sum is right on every rank.

    Told through the store and not through the process group, which may be the very
    thing that is broken; so no rank goes on alone and hangs.
    """
    assert seen.checked_sum is not None
    world = current_world()
    right = seen.checked_sum[0] == seen.checked_sum[1]
    world.store.set(f"checked/{seen.step}/{world.rank}", "right" if right else "wrong")
    keys = [f"checked/{seen.step}/{rank}" for rank in range(world.size)]
    world.store.wait(keys, 2 * CHECK_TIMEOUT)
    answers = [world.store.get(key) for key in keys]
    return all(answer == b"right" for answer in answers)
