"""Train a rank up to one step and record its modules in that step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
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
    inferring = _inferring_calls(called, row_counts)
    if inferring is None:
        if len(called) > len(batches):
            log.without_calls(range(len(called)))
            log.unpaired = f"it was called with {sum(called)} rows in {len(called)} "
            log.unpaired += f"calls, and was given {sum(row_counts)} rows in "
            log.unpaired += f"{len(batches)}"
        return list(batches)
    log.without_calls(inferring)
    rows = [count for n, count in enumerate(called) if n not in inferring]
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


def _inferring_calls(
    called: Sequence[int], row_counts: Sequence[int]
) -> Collection[int] | None:
    """Return the numbers of the calls that only infer shapes; None if rows do not fit.

    Each schedule of a pipeline infers shapes once, at its first call. A workload makes
    a schedule for each batch, for each size of a batch, or only one. Number and rows of
    the calls tell which, because the other calls have the rows of the batches.

    Args:
        called: number of rows in each call.
        row_counts: number of rows of each batch.
    """
    n = len(row_counts)
    of_each_size = [
        int(count not in row_counts[:k]) for k, count in enumerate(row_counts)
    ]
    at_the_start = [[count, *[0] * (n - 1)] for count in range(len(called))]
    for extra in ([1] * n, of_each_size, *at_the_start):
        numbers = _extra_calls(called, row_counts, extra)
        if numbers is not None:
            return numbers
    return None


def _extra_calls(
    called: Sequence[int], row_counts: Sequence[int], extra: Sequence[int]
) -> list[int] | None:
    """Return the numbers of the extra calls; None if the other calls do not fit.

    They fit if the rows of consecutive calls add up to each batch.

    Args:
        called: number of rows in each call.
        row_counts: number of rows of each batch.
        extra: number of extra calls before each batch.
    """
    numbers: list[int] = []
    at = 0
    for due, count in zip(row_counts, extra, strict=True):
        numbers += range(at, at + count)
        at += count
        rows = 0
        while rows < due and at < len(called):
            rows += called[at]
            at += 1
        if rows != due:
            return None
    return numbers if at == len(called) else None
