"""Train a rank up to one step and record its modules in that step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

from ...fixtures import Batch
from ..space.facts import WorkloadFacts
from ..space.scenario import Scenario
from .engine import Engine
from .modules import ModuleLog, Watched, is_whole, modules_in, names_of, watch_modules
from .observe import CallLog
from .trace import Saved
from .worker import observe_rank

__all__ = ["observe_modules", "watched_step"]


def observe_modules(
    scenario: Scenario,
    spec: str,
    folder: str,
    saved: Saved | None,
    step: int,
    facts: WorkloadFacts,
    files: str | None = None,
) -> Watched:
    """Train on this rank up to ``step``, and record the modules in that step.

    Args:
        scenario: scenario to train.
        spec: name of the tested scaler, or ``none``.
        folder: import path of the scaler and of the workload.
        saved: state of a scaler on another world, with which this one begins.
        step: last step, which is recorded.
        facts: facts of the workload.
        files: folder for checkpoints.
    """
    watched: list[Watched] = []

    def around(engine: Engine, at: int) -> AbstractContextManager[None]:
        return watched_step(engine, at, watched) if at == step else nullcontext()

    trace = observe_rank(
        scenario,
        spec,
        folder,
        saved,
        around=around,
        last=step,
        facts=facts,
        files=files,
    )
    return replace(watched[0], rank=trace.rank, coordinate=trace.coordinate)


@contextmanager
def watched_step(engine: Engine, step: int, found: list[Watched]) -> Iterator[None]:
    """Record the modules in a step.

    Args:
        engine: engine that trains.
        step: number of the step.
        found: list to which the record is appended, without rank and coordinate.
    """
    workload = engine.scenario.workload
    model = workload.model()
    names = {
        module: name
        for root in modules_in(engine.module)
        for module, name in names_of(
            root, engine.module_names, engine.parameters
        ).items()
        # a part of the model, such as a pipeline stage, has other inputs and outputs
        if is_whole(module, name, model)
    }
    # a loss may be a module
    roots = [
        root
        for root in modules_in(engine.module)
        if any(module in names for module in root.modules())
    ]
    with CallLog() as calls, watch_modules(roots, names, calls) as log:
        yield
    batches = _micro_batches(engine, step)
    if not workload.one_rank:  # with one rank as the reference, each call has a partner
        batches = _as_called(batches, log)
    found.append(
        Watched(
            rank=-1,
            coordinate={},
            index=engine.index,
            rows=engine.rows,
            log=log,
            batches=batches,
        )
    )


def _micro_batches(engine: Engine, step: int) -> list[Batch]:
    """Return the micro-batches of this rank in ``step``, in order."""
    scenario = engine.scenario
    batch = scenario.workload.batch(step, scenario.seed)
    # the schedule of a pipeline cuts the whole share itself
    if engine.schedule is not None:
        return [engine.share(batch)]
    return engine.micro_batches(batch)


def _as_called(batches: Sequence[Batch], log: ModuleLog) -> list[Batch]:
    """Cut the batches into the rows of each call of the model.

    A pipeline schedule cuts its input, and its first call only infers shapes. If there
    are more calls than batches, and their rows do not fit, calls and rows cannot be
    matched. The log then has the reason in ``unpaired``.
    """
    called = next(iter(log.rows), [])
    row_counts = [batch.tensors[0].shape[0] for batch in batches]
    due = sum(row_counts)
    if not any(sum(called[n:]) == due for n in range(len(called))):
        if len(called) > len(batches):
            log.without_calls(len(called))
            log.unpaired = f"it was called with {sum(called)} rows in {len(called)} "
            log.unpaired += f"calls, and was given {due} rows in {len(batches)}"
        return list(batches)
    extra = next(n for n in range(len(called)) if sum(called[n:]) == due)
    # the first calls of a pipeline infer shapes, and belong to no micro-batch
    log.without_calls(extra)
    rows = called[extra:]
    if rows == row_counts:
        return list(batches)
    cut: list[Batch] = []
    left = list(batches)
    for count in rows:
        cut.append(left[0].map(lambda t, count=count: t[:count]))  # type: ignore[misc]
        left[0] = left[0].map(lambda t, count=count: t[count:])  # type: ignore[misc]
        if not left[0].tensors[0].shape[0]:
            left.pop(0)
    return cut
