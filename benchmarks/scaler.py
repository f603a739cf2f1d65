"""Time the scaler and torch's in one run, and write the record.

    python benchmarks/scaler.py [--quick] [--json FILE]

1. Two gloo ranks, one thread each, gradients as DTensor Shard(0) fp32: check, unscale
   and clip, and unscale alone, beside a bare read and the bare kernel on local tensors.
2. One process, plain tensors: a whole step.
3. Collectives and numbers that the host reads, counted in worlds of several sizes.

Without ``--json`` the record becomes ``results/scaler.json``, and the tables of
docs/scaler-speed.md are written from it.

Both sides of a ratio alternate within one run, so noise affects both. Ranks
start each repeat at the same time, and the slower one counts. Each figure is the median
over the repeats. The calls of a training loop between backward and the optimizer's
arithmetic are timed; the optimizer itself does nothing. Each repeat is an iteration,
which ends on both sides with an `update` that is not timed.
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

from gradparity.benchmarks.scaler_tables import (
    LARGE,
    OPTIMIZERS,
    SMALL,
    TINY,
    lines,
    rows,
    write_tables,
)
from gradparity.benchmarks.simulated_ranks import Calls
from gradparity.benchmarks.situations import Idle
from gradparity.benchmarks.together import start_together
from gradparity.multiprocess import Cluster
from gradparity.multiprocess.rank import flight_recorder
from gradparity.scaler import GradScaler

Measured = dict[str, float]  # what was timed -> seconds
Repeats = dict[str, list[float]]  # the same of each repeat

SCALE = 1024.0
SIZES = {SMALL: (500, (64, 64)), TINY: (2000, (16,)), LARGE: (1000, (256, 256))}
# Odd: the median is then one of the measured times.
REPEATS = {SMALL: 201, TINY: 101, LARGE: 61}
WORLDS = (2, 4, 8, 16)
WAYS = {
    "fused, clip": (True, True),
    "fused": (True, False),
    "not fused, clip": (False, True),
    "not fused": (False, False),
}
RESULTS = Path(__file__).resolve().parent / "results" / "scaler.json"


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
        # The slower rank of each repeat: training waits for it.
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
    """Time the scalers on gradients of one size; runs on every rank.

    Args:
        count: number of gradients.
        shape: local shape of each.
        repeats: number of timings of each kind.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    flight_recorder.uninstall()  # training has none
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def placed() -> Any:
        local = torch.randn(shape) * SCALE
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)

    params: list[Any] = [torch.nn.Parameter(placed()) for _ in range(count)]
    for p in params:
        p.grad = placed()
    locals_: list[Any] = [p.grad.to_local() for p in params]
    theirs, ours = _scaler(torch.amp.GradScaler), _scaler(GradScaler)
    ours_fused = _scaler(GradScaler)
    plain, fused = _optimizer(params, False), _optimizer(params, True)
    zero, inv = torch.zeros(()), torch.tensor(1.0)
    message = torch.zeros(2, dtype=torch.int64)

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

    def our_clip(scaler: Any, optimizer: Any) -> None:
        scaler.clip_and_step(optimizer, 1.0)

    def our_clip_then_step() -> None:
        ours.clip_grad_norm_(plain, 1.0)
        ours.step(plain)

    def then_step(scaler: Any) -> Callable[[], None]:
        def both() -> None:
            scaler.unscale_(plain)
            scaler.step(plain)

        return both

    def refill() -> None:
        torch._foreach_mul_(locals_, 0.0)  # nothing shrinks to a denormal
        torch._foreach_add_(locals_, SCALE)

    def ends(scaler: Any) -> Callable[[], None]:
        def clean() -> None:
            # Without it each repeat would be the first iteration of a scaler.
            scaler.update()
            refill()

        return clean

    work = {
        "torch clip, fused": (lambda: torch_clip(fused), ends(theirs)),
        "our clip, fused": (lambda: our_clip(ours_fused, fused), ends(ours_fused)),
        "torch clip": (lambda: torch_clip(plain), ends(theirs)),
        "our clip": (lambda: our_clip(ours, plain), ends(ours)),
        "our clip_grad_norm_ and step": (our_clip_then_step, ends(ours)),
        "torch unscale_": (lambda: theirs.unscale_(plain), ends(theirs)),
        "our unscale_": (lambda: ours.unscale_(plain), ends(ours)),
        "torch unscale_ and step": (then_step(theirs), ends(theirs)),
        "our unscale_ and step": (then_step(ours), ends(ours)),
        "bare read": (read, refill),
        "bare read, then a collective": (then_agree(read), refill),
        "bare kernel": (kernel, refill),
        "bare kernel, then a collective": (then_agree(kernel), refill),
    }
    return _alternate({k: _timed(*v) for k, v in work.items()}, repeats)


def alone(count: int, shape: tuple[int, ...], fused: bool, repeats: int) -> Measured:
    """Time step and update in one process with plain tensors."""
    torch.set_num_threads(1)
    params: list[Any] = [torch.nn.Parameter(torch.zeros(shape)) for _ in range(count)]
    for p in params:
        p.grad = torch.full(shape, SCALE)
    gradients = [p.grad for p in params]
    optimizer = _optimizer(params, fused)
    scale, found = torch.tensor(SCALE), torch.zeros(())
    inv = torch.tensor(1.0 if fused else 1 / SCALE)  # fused ones divide by themselves
    tracker = torch.zeros((), dtype=torch.int32)

    def with_scaler(scaler: Any) -> None:
        scaler.step(optimizer)
        scaler.update()

    def bare() -> None:
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inv)
        optimizer.step()
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, 2**20)

    def several(act: Callable[[], None]) -> Callable[[], float]:
        def run() -> None:
            for _ in range(max(1, 500 // count)):
                act()

        return _timed(run, lambda: torch._foreach_copy_(gradients, before))

    before = [gradient.clone() for gradient in gradients]
    theirs, ours = _scaler(torch.amp.GradScaler), _scaler(GradScaler)
    work = {
        "torch step": several(lambda: with_scaler(theirs)),
        "our step": several(lambda: with_scaler(ours)),
        "bare step": several(bare),
    }
    return _medians([_alternate(work, repeats)])


def counts(fused: bool, clip: bool) -> dict[str, int]:
    """Count the collectives of a later step, and the numbers that the host reads.

    Runs on every rank. One gradient is plain, one is on a mesh of one axis and, if
    there are enough ranks, one is on a mesh of two axes.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.profiler import ProfilerActivity, profile

    scaler, params = _scaler(GradScaler), _mix()
    optimizer = _optimizer([parameter for parameter, _ in params], fused)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for _ in range(2):
        for parameter, gradient in params:
            parameter.grad = gradient * 1.0
        with Calls(mesh) as calls, profile(activities=[ProfilerActivity.CPU]) as seen:
            if clip:
                scaler.clip_and_step(optimizer, 1.0)
            else:
                scaler.step(optimizer)
            scaler.update()
        events = {event.key: event.count for event in seen.key_averages()}
        found = {
            "collectives": len(calls.seen),
            "bytes": sum(call.size for call in calls.seen),
            "host_syncs": events.get("aten::_local_scalar_dense", 0),
        }
    return found


def many_optimizers(count: int, repeats: int) -> Measured:
    """Time an iteration of one optimizer for each parameter, in one process."""
    torch.set_num_threads(1)
    params = [torch.nn.Parameter(torch.zeros(16)) for _ in range(count)]
    gradients = [torch.full((16,), SCALE) for _ in params]
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient
    optimizers = [_optimizer([p], False) for p in params]

    def iteration(scaler: Any) -> None:
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()

    def refill() -> None:
        torch._foreach_mul_(gradients, SCALE)

    def bare() -> None:
        for gradient in gradients:
            torch._amp_foreach_non_finite_check_and_unscale_([gradient], found, inv)

    found, inv = torch.zeros(()), torch.tensor(1 / SCALE)
    theirs, ours = _scaler(torch.amp.GradScaler), _scaler(GradScaler)
    work: dict[str, Callable[[], float]] = {
        "torch step": _timed(lambda: iteration(theirs), refill),
        "our step": _timed(lambda: iteration(ours), refill),
        "bare step": _timed(bare, refill),
    }
    return _medians([_alternate(work, repeats)])


def _mix() -> list[tuple[Any, torch.Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    world = dist.get_world_size()
    local = torch.full((4, 4), SCALE)
    shapes = [(world,), (world // 2, 2)] if world > 2 else [(world,)]
    tensors = [local]
    for shape in shapes:
        placements = [Shard(dim) for dim in range(len(shape))]
        mesh = init_device_mesh("cpu", shape)
        tensors.append(DTensor.from_local(local, mesh, placements, run_check=False))
    return [(torch.nn.Parameter(tensor.clone()), tensor) for tensor in tensors]


def counted(ranks: int) -> dict[str, dict[str, int]]:
    """Return way of stepping -> counts, in a world of this size."""
    with Cluster(ranks) as cluster:
        return {way: cluster.run(counts, *how)[0] for way, how in WAYS.items()}


def measure(quick: bool) -> dict[str, Any]:
    """Run all parts; return ``rows``, ``seconds`` and ``counts`` of the record."""
    seconds: dict[str, Measured] = {}
    with Cluster(2) as cluster:
        for name, (count, shape) in SIZES.items():
            repeats = 3 if quick else REPEATS[name]
            per_rank = cluster.with_options(timeout_s=300).run(
                sharded, count, shape, repeats
            )
            seconds[name] = _medians(per_rank)
    for count, shape in ((1, (16,)), (500, (64, 64)), (2000, (16,)), (100, (256, 256))):
        for fused in (False, True):
            name = f"alone, {count} of {shape}{', fused' if fused else ''}"
            seconds[name] = alone(count, shape, fused, 5 if quick else 31)
    seconds[OPTIMIZERS] = many_optimizers(1000, 3 if quick else 11)
    return {
        "rows": rows(seconds),
        "seconds": seconds,
        "counts": {str(ranks): counted(ranks) for ranks in WORLDS},
    }


def provenance() -> dict[str, Any]:
    """Return versions and sizes on which the figures depend, without a host name."""
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
    """Measure, print the table, write the JSON; return 0 even if a goal is missed."""
    parser = argparse.ArgumentParser(prog="gradparity bench scaler")
    parser.add_argument("--quick", action="store_true", help="3 timings each")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args(argv)
    report = {"provenance": provenance(), **measure(given.quick)}
    print(*lines(report), sep="\n")
    given.json.parent.mkdir(parents=True, exist_ok=True)
    given.json.write_text(json.dumps(report, indent=2) + "\n")
    if given.json == RESULTS:
        write_tables(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
