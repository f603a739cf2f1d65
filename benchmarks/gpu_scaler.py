"""Times, kernels and host waits of the scaler's calls on a GPU, beside torch's.

    gradparity bench gpu-scaler --commit ID [--json FILE]

One process has plain tensors; then two ranks, which share the GPU over NCCL, have
DTensors. Both scalers alternate. A time is the median of calls, each from one device
synchronisation to the next. The end of the scaler's iteration is not timed. The
profiler counts kernels on the device and waits on the host.
The record becomes ``results/gpu_scaler.json``, with its table in docs/gpu-results.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gradparity.benchmarks.scaler import SCALE, SIZES
from gradparity.benchmarks.situations import Idle
from gradparity.benchmarks.validation.gpu import SCALER as RESULTS
from gradparity.benchmarks.validation.gpu import write_page
from gradparity.conformance.files import write_whole
from gradparity.conformance.rank.devices import nccl_version
from gradparity.multiprocess import Cluster
from gradparity.multiprocess.rank import flight_recorder
from gradparity.scaler import GradScaler

WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
WORK = ("step, fused", "step", "unscale_", "clip, fused", "clip")


def measured(count: int, shape: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    """Return a row for each kind of call; runs in one process or on every rank.

    Args:
        count: Number of gradients.
        shape: Local shape of each, fp32.
        repeats: Timings of each kind.
    """
    flight_recorder.uninstall()  # training has none
    params = [torch.nn.Parameter(_tensor(shape)) for _ in range(count)]
    for p in params:
        p.grad = _tensor(shape)
    gradients: list[Any] = [p.grad for p in params]
    whole = [getattr(g, "_local_tensor", g) for g in gradients]
    found = []
    for work in WORK:
        optimizer = Idle(params, lr=0.0)
        optimizer._step_supports_amp_scaling = "fused" in work  # torch's flag
        both = (torch.amp.GradScaler, GradScaler)
        scalers: list[Any] = [make("cuda", init_scale=SCALE) for make in both]
        acts = [_act(work, scaler, optimizer, params) for scaler in scalers]
        for scaler, act in zip(scalers, acts, strict=True):
            scaler.scale(torch.ones((), device="cuda"))
            for _ in range(12):  # the first iterations of a scaler read more
                _once(act, scaler, optimizer, whole)
        times: list[list[float]] = [[], []]
        for _ in range(repeats):
            for side, (scaler, act) in enumerate(zip(scalers, acts, strict=True)):
                times[side].append(_once(act, scaler, optimizer, whole))
        theirs, ours = (
            {
                "us": round(1e6 * statistics.median(t), 1),
                **_seen(a, s, optimizer, whole),
            }
            for t, a, s in zip(times, acts, scalers, strict=True)
        )
        found.append({"work": work, "torch": theirs, "ours": ours})
    return found


def _tensor(shape: tuple[int, ...]) -> Any:
    local = torch.full(shape, SCALE, device="cuda")
    if not dist.is_initialized():
        return local
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def _act(
    work: str, scaler: Any, optimizer: Any, params: Sequence[Any]
) -> Callable[[], object]:
    def clip_as_torch_does() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)

    if work == "unscale_":
        return lambda: scaler.unscale_(optimizer)
    if not work.startswith("clip"):
        return lambda: scaler.step(optimizer)
    if isinstance(scaler, GradScaler):
        return lambda: scaler.clip_and_step(optimizer, 1.0)
    return clip_as_torch_does


def _once(
    act: Callable[[], object], scaler: Any, optimizer: Any, whole: list[Any]
) -> float:
    if dist.is_initialized():
        dist.barrier()
    torch.cuda.synchronize()
    start = time.perf_counter()
    act()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    _end(scaler, whole)
    return seconds


def _end(scaler: Any, whole: list[Any]) -> None:
    scaler.update()
    torch._foreach_mul_(whole, 0.0)
    torch._foreach_add_(whole, SCALE)


def _seen(
    act: Callable[[], object], scaler: Any, optimizer: Any, whole: list[Any]
) -> dict[str, int]:
    from torch.profiler import ProfilerActivity, profile

    both = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with profile(activities=both) as profiled:
        act()
    torch.cuda.synchronize()
    _end(scaler, whole)
    events = list(profiled.events())
    on_device = [e.name for e in events if e.device_type.name == "CUDA"]
    moved = [name for name in on_device if name.startswith(("Memcpy", "Memset"))]
    # The profiler itself waits for the device once when it ends.
    waits = sum(e.name in WAITS for e in events) - 1
    return {
        "kernels": len(on_device) - len(moved),
        "copies": len(moved),
        "waits": max(0, waits),
    }


def _parts(repeats: int) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for name, (count, shape) in SIZES.items():
        yield f"one process, {name}", measured(count, shape, repeats)
    with Cluster(2, backend="nccl", share_devices=True) as two:
        for name, (count, shape) in SIZES.items():
            ranks = two.with_options(timeout_s=120).run(measured, count, shape, repeats)
            yield f"two ranks, {name}", ranks[0]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and record; 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="gpu_scaler", description=__doc__)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args(argv)
    parts: dict[str, Any] = {}
    failed = False
    try:
        for name, calls in _parts(given.repeats):
            parts[name] = calls
            print(name, json.dumps(calls), flush=True)
    except Exception:  # the parts that were measured are kept
        traceback.print_exc()
        failed = True
    record = {
        "provenance": {
            "commit": given.commit,
            "date": datetime.now(UTC).date().isoformat(),
            "torch": str(torch.__version__),
            "nccl": ".".join(map(str, nccl_version())),
            "python": platform.python_version(),
            "gpu": torch.cuda.get_device_name(),
            "median_of": given.repeats,
        },
        "parts": parts,
    }
    write_whole(given.json, json.dumps(record, indent=1) + "\n")
    if given.json == RESULTS:
        write_page()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
