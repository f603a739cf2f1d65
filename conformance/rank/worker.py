"""Train one scenario with one scaler on a rank, observed at every step.

:func:`observe_rank` builds the engine and constructs the tested scaler. For each step
it runs forward and backward, plants faults, and records the gradients. Then it calls
the scaler, records the effect, and makes one collective whose result is checked.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...fixtures import (
    LOSS,
    OfWorkload,
    ResolvedFault,
    inject_loss,
    parse_faults,
    resolve_faults,
)
from ...multiprocess import current_world
from ..space.facts import WorkloadFacts, remember
from ..space.scenario import Scenario
from .devices import narrows_products, set_deterministic
from .engine import Engine
from .events import groups_of
from .layout import build_engine, shard_id
from .observe import CallLog
from .own_step import OwnStep, clip_norm_handed
from .recording import (
    digests_of,
    floats,
    local_gradients,
    next_batch,
    plant_and_read,
    record_buffers,
    record_effect,
    recording_draws,
    recording_gradients,
    recording_reductions,
)
from .routing import Choices
from .same_skips import SameSkips
from .scaler_spec import load_scaler
from .scaler_under_test import ScalerUnderTest, StoppedError
from .trace import Event, Group, Kind, RankTrace, Saved, StepTrace
from .variation import Alone

__all__ = ["StoppedError", "all_say_right", "checked_collective", "observe_rank"]

Around = Callable[[Engine, int], AbstractContextManager[None]]
"""(engine, step) -> context in which the step runs."""
ASK_EVERY_S = 0.05
"""Interval in seconds at which a rank that waits for the checked collective asks if
another rank has reported a wrong sum."""
RIGHT, WRONG = "right", "wrong"
"""Reports of a rank about its checked sum."""
UNLIMITED = timedelta(hours=24)
"""Time limit longer than any deadline of the parent process, which detects a hanging
rank."""


def observe_rank(
    scenario: Scenario,
    spec: str,
    folder: str,
    saved: Saved | None = None,
    keep: bool = False,
    choices: Sequence[Mapping[str, Choices]] = (),
    around: Around | None = None,
    last: int | None = None,
    facts: WorkloadFacts | None = None,
    alone: Alone | None = None,
    files: str | None = None,
) -> RankTrace:
    """Train ``scenario`` on this rank and return its trace.

    Args:
        scenario: scenario to train.
        spec: name of the tested scaler, or ``none``.
        folder: import path of the scaler and of the workload.
        saved: state of a scaler on another world, with which this one begins.
        keep: true to keep the state of the scaler after the last step.
        choices: for each step, the choices of learned routers.
        around: (engine, step) -> context in which the step runs.
        last: last step; then no wrong calls are made after it. None for all steps.
        facts: facts of the workload; None to find them here.
        alone: makes the run a reference, on a mesh of the same axes at size 1.
        files: folder for checkpoints; None for the system's temporary folder.

    Raises:
        StoppedError: if a call of the tested scaler raised; holds the trace so far.
    """
    world = current_world()
    set_deterministic(world.device)
    if facts is not None:
        remember(scenario.model, facts)
    # Reset, so that a warm rank compiles as a new process would. Graphs of earlier runs
    # count against Dynamo's limit, and code beyond it runs uncompiled.
    torch.compiler.reset()
    factory = load_scaler(spec, folder)
    shape = scenario.parsed_topology.mesh_shape(scenario.world_size)
    variation = None if alone is None else alone.variation
    if variation is not None:
        scenario, shape = variation.scenario(scenario), dict.fromkeys(shape, 1)
    mesh = world.mesh(tuple(shape.values()), tuple(shape))
    # around the layout, too, since a stack may read clip_norm in parallelize
    with clip_norm_handed(scenario):
        device = torch.device(world.device)
        engine = build_engine(scenario, mesh, device, variation)
        trace = RankTrace(
            rank=world.rank,
            coordinate={axis: mesh.get_local_rank(axis) for axis in shape},
            index=engine.index,
            shards={name: shard_id(index) for name, index in engine.index.items()},
            sizes={name: whole.numel() for name, whole in engine.whole.items()},
            trains=frozenset(filter(engine.trains, engine.index)),
            initial=engine.initial,
            dropouts=engine.dropouts,
            start={name: floats(part) for name, part in engine.local_tensors().items()},
        )
        trace.reduce_dtype = str(scenario.promised_dtype or "").removeprefix("torch.")
        record_buffers(engine, trace)
        engine.choices = choices
        tested = ScalerUnderTest(engine, trace)
        own = (
            None
            if OfWorkload.LOOP in scenario.workload.has
            else OwnStep(engine, tested, files)
        )
        faults = _resolved_faults(engine, trace)
        if factory is not None:
            tested.construct(factory)
            if saved is not None:
                tested.load(saved)
                trace.loaded_state = saved.state
        if alone is not None and alone.scaled:
            tested.scaler = SameSkips(
                alone,
                scenario,
                lambda o: {n for group in groups_of(engine, o) for n in group.names},
            )
        steps = scenario.steps if last is None else last + 1
        for step in range(steps):
            trace.steps.append(StepTrace(step=step))
            if scenario.parsed_recipe.resume and step == scenario.resume_step:
                if own is None:
                    tested.resume()
                else:
                    own.resume(trace)
            with nullcontext() if around is None else around(engine, step):
                _observe_step(engine, tested, trace, faults, own)
        engine.check_recomputed()
        if own is not None:
            own.check_stepped()
            own.check_gradients(trace)
            if last is None:
                trace.restored = own.restored()
        trace.narrows = narrows_products(device)
        if keep:
            trace.saved = tested.saved()
        trace.misuse = tested.misuse() if last is None else None
        return trace


def _resolved_faults(engine: Engine, trace: RankTrace) -> tuple[ResolvedFault, ...]:
    """Exchange which elements each rank holds, and resolve the faults."""
    shard_by_name = {n: s for n, s in trace.shards.items() if engine.trains(n)}
    holdings: list[Any] = [None] * dist.get_world_size()
    # ranks with the same rows share a loss, so a fault of the loss hits all of them
    dist.all_gather_object(holdings, shard_by_name | {LOSS: engine.rows})
    engine.replicas = {
        name: sum(other.get(name) == shard for other in holdings)
        for name, shard in shard_by_name.items()
    }
    return resolve_faults(parse_faults(engine.scenario.faults), holdings)


def _observe_step(
    engine: Engine,
    tested: ScalerUnderTest,
    trace: RankTrace,
    faults: tuple[ResolvedFault, ...],
    own: OwnStep | None,
) -> None:
    seen = trace.steps[-1]
    if own is None:
        _run_step(engine, tested, seen, faults)
    else:
        own.run(seen, faults)
    # also after a skipped step, as in most loops and in the reference
    for scheduler in engine.schedulers:
        scheduler.step()
    seen.checked_sum = checked_collective(trace.rank, seen.step, engine.device)
    # complete even if the check below ends the run, so that checks may use this step
    seen.complete = True
    if not all_say_right(seen):
        raise StoppedError(trace)


def _run_step(
    engine: Engine,
    tested: ScalerUnderTest,
    seen: StepTrace,
    faults: tuple[ResolvedFault, ...],
) -> None:
    rank = dist.get_rank()

    def prepare(losses: list[Tensor], part: int, parts: int) -> list[Tensor]:
        bad, injected = inject_loss(faults, losses[0], (rank, seen.step), (part, parts))
        seen.faults += injected
        return tested.scale([bad, *losses[1:]])

    batch = next_batch(engine, seen.step)  # no layer draws the numbers of the batch
    with recording_reductions(engine, seen), recording_draws(engine, seen):
        seen.loss = engine.forward_backward(batch, prepare)
    seen.counts, seen.loss_dtype = engine.counts, engine.loss_dtype
    seen.scale_before, seen.growth_before = tested.state()
    # Plant faults before anything reads the gradients. The scaler and the rule, which
    # needs raw gradients, then see the same.
    plant_and_read(seen, faults, local_gradients(engine))
    group_by_name = {
        name: group
        for optimizer in engine.optimizers
        for group in groups_of(engine, optimizer)
        for name in group.names
    }
    for number, names in enumerate(engine.owned):
        groups = tuple(
            replace(group_by_name.get(name, Group()), names=(name,)) for name in names
        )
        seen.events += [
            Event(kind=Kind.HANDED, optimizer=number, groups=groups),
            Event(kind=Kind.RETURNED, optimizer=number),
        ]
    before = digests_of(engine)
    log = CallLog()
    with recording_gradients(engine, seen), log:
        tested.step()
    with log:
        tested.update(seen.step)
    seen.collectives = log.collectives
    seen.scale_after, seen.growth_after = tested.state()
    record_effect(engine, seen, before)


def checked_collective(
    rank: int, step: int, device: torch.device
) -> tuple[float, float]:
    """Return the result of an all-reduce and the expected sum.

    A stray collective would pair with this one and change the result. A rank waits for
    late peers up to the time limit of the run. The result is nan if the all-reduce
    failed, or if another rank got a wrong sum: then this rank may have no partner.
    """
    ranks = dist.get_world_size()
    value = torch.tensor([_summand(rank, step)], device=device)
    want = sum(_summand(each, step) for each in range(ranks))
    work = dist.all_reduce(value, async_op=True)
    assert work is not None  # None only for ranks outside of the group
    pause: Callable[[float], object] = time.sleep
    # a future of NCCL is complete as soon as the call is enqueued
    if device.type == "cpu":
        # the sum wakes this rank; with sleep, every step would begin late on all ranks
        summed = threading.Event()
        work.get_future().add_done_callback(lambda _: summed.set())
        pause = summed.wait
    pause_s = ASK_EVERY_S / 1024
    while not work.is_completed():
        if pause_s > ASK_EVERY_S and _one_says_wrong(step):
            return math.nan, want
        pause(min(pause_s, ASK_EVERY_S))
        pause_s *= 2
    try:
        work.wait()
    except RuntimeError:
        return math.nan, want
    return value.item(), want


def _summand(rank: int, step: int) -> float:
    """Return a rank's summand in the checked sum; it depends on rank and step.

    The sum is in fp32, like most stray collectives. With up to 9,548 ranks, the sum
    stays below 2^24, up to which fp32 holds whole numbers exactly.
    """
    return (1.0 + rank % 7) * (1.0 + step % 251)


def _one_says_wrong(step: int) -> bool:
    """Return True if a rank reported a wrong checked sum for this step."""
    world = current_world()
    keys = [f"checked/{step}/{rank}" for rank in range(world.world_size)]
    answered = [key for key in keys if world.store.check([key])]
    return any(world.store.get(key).decode() == WRONG for key in answered)


def all_say_right(seen: StepTrace) -> bool:
    """Return True if the checked sum is right on every rank.

    Ranks exchange this through the store, because the process group may be broken. So
    no rank continues alone and hangs. See [Note: End of a rank] in
    ``run/failures.py``.
    """
    assert seen.checked_sum is not None
    world = current_world()
    right = seen.checked_sum[0] == seen.checked_sum[1]
    world.store.set(f"checked/{seen.step}/{world.rank}", RIGHT if right else WRONG)
    keys = [f"checked/{seen.step}/{rank}" for rank in range(world.world_size)]
    world.store.wait(keys, UNLIMITED)
    return all(answer.decode() == RIGHT for answer in world.store.multi_get(keys))
