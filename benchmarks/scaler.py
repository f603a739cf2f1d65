"""Times the scaler against torch's in the same run, and writes what it found.

    python benchmarks/scaler.py [--quick] [--json FILE]

1. Two gloo ranks, one thread each, gradients as DTensor Shard(0) fp32: check, unscale
   and clip, and unscale alone, beside a bare read and the bare kernel on local tensors.
2. One process, plain tensors: a whole step.
3. Collectives and host synchronisations, counted.

Both sides of a ratio alternate within one run, so that noise meets them alike. Ranks
start each repeat at one moment of the clock, and the slower one is what training waits
for; each figure is the median over the repeats. What is timed is what a training loop
calls between backward and the optimizer's arithmetic; the optimizer itself is replaced
by nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradparity.benchmarks.situations import Idle
from gradparity.benchmarks.together import start_together
from gradparity.multiprocess import Cluster, recorder
from gradparity.scaler import GradScaler

Measured = dict[str, float]  # what was timed -> seconds
Repeats = dict[str, list[float]]  # the same of each repeat

SCALE = 1024.0
SIZES = {
    "500 of 64x64": (500, (64, 64)),
    "2000 of 16": (2000, (16,)),
    "1000 of 256x256": (1000, (256, 256)),
}
REPEATS = {"500 of 64x64": 201, "2000 of 16": 101, "1000 of 256x256": 61}


def _optimizer(params: list[Any], fused: bool) -> Any:
    optimizer = Idle(params, lr=0.0)
    optimizer._step_supports_amp_scaling = fused
    return optimizer


def _scaler(make: Any) -> Any:
    scaler = make(device="cpu", init_scale=SCALE, growth_interval=2**20)
    scaler.scale(torch.ones(()))
    return scaler


def _alternate(work: dict[str, Callable[[], float]], repeats: int) -> Repeats:
    for run in work.values():  # once to warm up
        run()
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, run in work.items():
            times[name].append(run())
    return times


def _medians(ranks: Sequence[Repeats]) -> Measured:
    return {
        name: statistics.median(map(max, zip(*(r[name] for r in ranks), strict=True)))
        for name in ranks[0]
    }


def _timed(act: Callable[[], Any], clean: Callable[[], Any]) -> Callable[[], float]:
    def run() -> float:
        if dist.is_initialized():
            start_together()
        start = time.perf_counter()
        act()
        seconds = time.perf_counter() - start
        clean()
        return seconds

    return run


def sharded(count: int, shape: tuple[int, ...], repeats: int) -> Repeats:
    """Time one size; runs on every rank.

    Args:
        count: number of gradients.
        shape: local shape of each.
        repeats: timings of each kind.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    recorder.uninstall()  # training has none
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def placed() -> Any:
        local = torch.randn(shape) * SCALE
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    params: list[Any] = [torch.nn.Parameter(placed()) for _ in range(count)]
    for p in params:
        p.grad = placed()
    locals_: list[Any] = [p.grad.to_local() for p in params]
    theirs, ours = _scaler(torch.amp.GradScaler), _scaler(GradScaler)
    plain, fused = _optimizer(params, False), _optimizer(params, True)
    zero, inv = torch.zeros(()), torch.tensor(1.0)
    message = torch.zeros(25, dtype=torch.float64)

    def read() -> None:
        torch._foreach_norm(locals_)

    def kernel() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(locals_, zero, inv)

    def then_agree(act: Callable[[], None]) -> Callable[[], None]:
        def both() -> None:
            act()
            dist.all_reduce(message)

        return both

    def torch_clip(optimizer: Any) -> None:
        theirs.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        theirs.step(optimizer)

    def our_clip(optimizer: Any) -> None:
        ours.clip_grad_norm_(optimizer, 1.0)
        ours.step(optimizer)

    def then_step(scaler: Any) -> Callable[[], None]:
        def both() -> None:
            scaler.unscale_(plain)
            scaler.step(plain)

        return both

    def refill(scaler: Any) -> Callable[[], None]:
        def clean() -> None:
            scaler._per_optimizer_states.clear()
            torch._foreach_mul_(locals_, 0.0)  # nothing shrinks to a denormal
            torch._foreach_add_(locals_, SCALE)

        return clean

    work = {
        "torch clip, fused": (lambda: torch_clip(fused), refill(theirs)),
        "our clip, fused": (lambda: our_clip(fused), refill(ours)),
        "torch clip": (lambda: torch_clip(plain), refill(theirs)),
        "our clip": (lambda: our_clip(plain), refill(ours)),
        "torch unscale_": (lambda: theirs.unscale_(plain), refill(theirs)),
        "our unscale_": (lambda: ours.unscale_(plain), refill(ours)),
        "torch unscale_ and step": (then_step(theirs), refill(theirs)),
        "our unscale_ and step": (then_step(ours), refill(ours)),
        "bare read": (read, refill(ours)),
        "bare read, then a collective": (then_agree(read), refill(ours)),
        "bare kernel": (kernel, refill(ours)),
        "bare kernel, then a collective": (then_agree(kernel), refill(ours)),
    }
    return _alternate({k: _timed(*v) for k, v in work.items()}, repeats)


def alone(count: int, shape: tuple[int, ...], fused: bool, repeats: int) -> Measured:
    """Time a whole step and update in one process with plain tensors."""
    torch.set_num_threads(1)
    params: list[Any] = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(count)]
    for p in params:
        p.grad = torch.full(shape, SCALE)
    optimizer = _optimizer(params, fused)

    def step(scaler: Any) -> Callable[[], float]:
        def act() -> None:
            for _ in range(inner):
                scaler.step(optimizer)
                scaler.update()

        def clean() -> None:
            for p in params:
                p.grad.fill_(SCALE)

        return _timed(act, clean)

    inner = max(1, 500 // count)
    makes = {"torch step": torch.amp.GradScaler, "our step": GradScaler}
    work = {name: step(_scaler(make)) for name, make in makes.items()}
    return _medians([_alternate(work, repeats)])


def counts(fused: bool, clip: bool) -> tuple[int, int]:
    """Count collectives and host synchronisations of a later step, on every rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.profiler import ProfilerActivity, profile

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    local = torch.ones(4)
    p = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    scaler, optimizer = _scaler(GradScaler), _optimizer([p], fused)
    collectives = syncs = 0
    for _ in range(2):
        p.grad = DTensor.from_local(local * SCALE, mesh, [Shard(0)], run_check=False)
        with (
            CommDebugMode() as mode,
            profile(activities=[ProfilerActivity.CPU]) as seen,
        ):
            if clip:
                scaler.clip_grad_norm_(optimizer, 1.0)
            scaler.step(optimizer)
            scaler.update()
        collectives = mode.get_total_counts()
        events = {event.key: event.count for event in seen.key_averages()}
        syncs = events.get("aten::_local_scalar_dense", 0)
    return collectives, syncs


def measure(quick: bool) -> dict[str, Any]:
    """Run everything; returns the report's ``rows``, ``seconds`` and ``counts``."""
    seconds: dict[str, Measured] = {}
    with Cluster(2) as cluster:
        for name, (count, shape) in SIZES.items():
            repeats = 3 if quick else REPEATS[name]
            per_rank = cluster.run(sharded, count, shape, repeats, timeout_s=300)
            seconds[name] = _medians(per_rank)
        counted = {
            _name(fused, clip): cluster.run(counts, fused, clip)[0]
            for fused in (True, False)
            for clip in (True, False)
        }
    for count, shape in ((1, (16,)), (500, (64, 64)), (2000, (16,)), (100, (256, 256))):
        for fused in (False, True):
            name = f"alone, {count} of {shape}{', fused' if fused else ''}"
            seconds[name] = alone(count, shape, fused, 5 if quick else 31)
    return {"rows": _rows(seconds), "seconds": seconds, "counts": counted}


def _limit(row: dict[str, Any]) -> str:
    return f"(limit {row['limit']:g})" if "limit" in row else ""


def _name(fused: bool, clip: bool) -> str:
    return f"{'fused' if fused else 'not fused'}{', clip' if clip else ''}"


def _rows(seconds: dict[str, Measured]) -> list[dict[str, Any]]:
    faster = [
        ("500 of 64x64", "clip, fused", 4.0),
        ("2000 of 16", "clip, fused", 6.0),
        ("1000 of 256x256", "clip, fused", 3.0),
        ("1000 of 256x256", "clip", 1.7),
        ("500 of 64x64", "unscale_", 2.0),
        # unscale_ does not wait for the other ranks, step does
        ("500 of 64x64", "unscale_ and step", 1.0),
        ("1000 of 256x256", "unscale_ and step", 1.0),
    ]
    rows = []
    for size, work, goal in faster:
        times = seconds[size]
        torchs, ours = f"torch {work}", f"our {work}"
        row = _row(
            f"{work}, {size}",
            "times faster than torch",
            times,
            torchs,
            ours,
            goal,
            more=True,
        )
        # What any scaler must do: touch each gradient once, and agree.
        bare = "bare read" if "fused" in work else "bare kernel"
        row["limit"] = round(times[torchs] / times[f"{bare}, then a collective"], 2)
        rows.append(row)
    large = seconds["1000 of 256x256"]
    for work, bare, goal in (
        ("clip, fused", "bare read", 1.3),
        ("unscale_", "bare kernel", 1.1),
    ):
        row = _row(
            f"{work}, 1000 of 256x256",
            f"times the {bare}",
            large,
            f"our {work}",
            bare,
            goal,
            more=False,
        )
        row["limit"] = round(large[f"{bare}, then a collective"] / large[bare], 2)
        rows.append(row)
    rows += [
        _row(name, "times torch", measured, "our step", "torch step", 1.05, more=False)
        for name, measured in seconds.items()
        if name.startswith("alone")
    ]
    return rows


def _row(
    work: str,
    unit: str,
    seconds: Measured,
    over: str,
    under: str,
    goal: float,
    *,
    more: bool,
) -> dict[str, Any]:
    ratio = seconds[over] / seconds[under]
    met = ratio >= goal if more else ratio <= goal
    limit = f"at {'least' if more else 'most'} {goal:g}"
    return {
        "work": work,
        "ratio": round(ratio, 3),
        "unit": unit,
        "goal": limit,
        "met": met,
    }


def provenance() -> dict[str, Any]:
    """Return what the figures depend on, without naming the machine."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "ranks": 2,
        "threads_per_rank": 1,
        "backend": "gloo",
        "load_average_at_start": os.getloadavg()[0],
        "median_of": REPEATS,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table, write the JSON; 0 also where a goal is missed."""
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(prog="gradparity bench scaler")
    parser.add_argument("--quick", action="store_true", help="3 timings each")
    parser.add_argument("--json", type=Path, default=here / "results" / "scaler.json")
    given = parser.parse_args(argv)
    report = {"provenance": provenance(), **measure(given.quick)}
    for row in report["rows"]:
        mark = "met" if row["met"] else "MISSED"
        print(
            f"{row['work']:34} {row['ratio']:7.2f} {row['unit']:24} "
            f"{row['goal']:14} {mark:7} {_limit(row)}"
        )
    for name, (collectives, syncs) in report["counts"].items():
        print(f"{name:34} {collectives} collective, {syncs} host synchronisations")
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
