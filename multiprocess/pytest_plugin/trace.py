"""A Chrome trace of one test: what torch's profiler saw on each rank, on one clock.

The profiler's times are of the Unix epoch, as are those of the flight records; all
ranks of a machine read the same clock. Each rank is a process of the trace, and its
collectives are a row of their own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..outcomes import RankOutcome
from ..rank.world import current_world

_COLLECTIVES = 1 << 30
"""Number of the row of collectives: no thread has it."""


def profiled(folder: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn`` on a rank; leave what torch's profiler saw in ``folder``."""
    from torch.profiler import ProfilerActivity, profile

    profiler = profile(activities=[ProfilerActivity.CPU])
    profiler.start()
    try:
        return fn(*args)
    finally:
        profiler.stop()
        file = Path(folder, f"rank-{current_world().rank}.json")
        # Renamed when complete: the rank may be killed while it writes.
        profiler.export_chrome_trace(f"{file}.part")
        os.replace(f"{file}.part", file)


def merge(folder: Path, outcomes: Sequence[RankOutcome], file: Path) -> None:
    """Write one trace of what the ranks left in ``folder``, and remove that.

    Args:
        folder: Of :func:`profiled`; a rank that was killed has left nothing.
        outcomes: Of the call.
        file: The trace.
    """
    events = [e for outcome in outcomes for e in _events_of(folder, outcome)]
    start = min((e["ts"] for e in events if "ts" in e), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] -= start
    events.sort(key=lambda event: event.get("ts", -1.0))
    partial = file.with_suffix(".part")
    partial.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    partial.replace(file)
    for left in folder.glob("rank-*.json*"):
        left.unlink()
    folder.rmdir()


def trace_file(folder: str, nodeid: str) -> Path:
    """Return the name of a test's trace."""
    name = re.sub(r"[^\w.-]+", "_", nodeid)[-120:]
    return Path(folder).absolute() / f"{name}.json"


def _events_of(folder: Path, outcome: RankOutcome) -> Iterator[dict[str, Any]]:
    rank = outcome.rank
    named = {"ph": "M", "pid": rank, "name": "process_name"}
    yield {**named, "args": {"name": f"rank {rank}: {outcome.state.value}"}}
    yield {
        "ph": "M",
        "pid": rank,
        "tid": _COLLECTIVES,
        "name": "thread_name",
        "args": {"name": "collectives"},
    }
    for call in outcome.collectives:
        event: dict[str, Any] = {"pid": rank, "tid": _COLLECTIVES, "cat": "collective"}
        event["name"] = f"{call.op} #{call.number}"
        event["ts"] = call.issued_ns / 1e3
        event["args"] = {"group": call.group, "tensors": call.tensors}
        event["args"]["where"] = call.where
        if call.ended_ns:
            yield {**event, "ph": "X", "dur": (call.ended_ns - call.issued_ns) / 1e3}
        else:
            yield {**event, "ph": "B"}  # it never ended
    try:
        found = json.loads((folder / f"rank-{rank}.json").read_text())
    except OSError:
        return
    # torch writes times since this base, in microseconds.
    base_us = found.get("baseTimeNanoseconds", 0) / 1e3
    for event in found["traceEvents"]:
        if event.get("ph") in ("X", "i", "s", "f", "B", "E") and "ts" in event:
            yield {**event, "pid": rank, "ts": event["ts"] + base_us}
