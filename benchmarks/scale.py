"""Cost of a step of the scaler as the number of ranks grows.

    python benchmarks/scale.py [--quick] [--json FILE]
    python benchmarks/scale.py --tables FILE

1. Real: 2 to 32 gloo processes here, the agreement and a step of FSDP2 training, with
   torch's scaler beside ours: collectives, bytes, time, memory; then one scenario of
   the catalogue.
2. In one process: every rank of 256 and 1024 on meshes of one to four axes
   (``simulated_ranks.py``).
3. On paper: an alpha-beta model from the latency and bandwidth measured in 1
   (``scale_tables.py``).

``--tables`` prints the tables of a record. Those of ``results/scale.json`` are written
into docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradparity.benchmarks.scale_tables import tables
from gradparity.benchmarks.simulated_ranks import MESHES, Calls, compare, together
from gradparity.benchmarks.situations import COMMON, OURS, Idle, Rank
from gradparity.benchmarks.tables import write_between
from gradparity.conformance.report.records import read_report
from gradparity.multiprocess import Cluster, current_world
from gradparity.scaler import GradScaler

RESULTS = Path(__file__).resolve().parent / "results" / "scale.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
SIZES = (2, 4, 8, 16, 32)
LARGE = 1 << 23
"""Number of fp32 elements of the all-reduce that measures bandwidth."""
SCENARIO = "fsdp/{}/fp32/adamw/inf@r1s1:last/steps=3"
MAX_NORM = 1e9  # the gradients stay as they are


# - Real ranks


def agreement(repeats: int) -> dict[str, Any]:
    """Time the scaler's agreement on this rank, beside a bare all-reduce.

    Returns:
        ``ours``, ``torch`` and ``bare``: median seconds of a step. ``ours, clip`` and
        ``torch, clip``: of a step with clipping. ``calls``: by the same names, the
        collectives of one later step.
    """
    world = current_world()
    mesh = init_device_mesh("cpu", (world.world_size,))
    rank = Rank(world.rank, world.world_size, mesh)
    held = Idle([rank.parameter()], lr=0.0)
    message = torch.zeros(2, dtype=torch.int64)
    work: dict[str, Callable[[], Any]] = {"bare": lambda: dist.all_reduce(message)}
    calls = {}
    for name, (make, act) in WORK.items():
        scaler = make("cpu", init_scale=1024.0, growth_interval=2**20)
        scaler.scale(torch.ones(()))
        work[name] = partial(act, scaler, held)
        work[name]()  # the first iteration ends with one more message
        with Calls(mesh) as seen:
            work[name]()
        calls[name] = [[*call] for call in seen.seen]
    return {**_medians(work, repeats), "calls": calls}


def _step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)
    scaler.update()


def _our_clip(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.clip_and_step(optimizer, MAX_NORM)
    scaler.update()


def _torch_clip(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    parameters = optimizer.param_groups[0]["params"]
    torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
    _step(scaler, optimizer)


WORK: dict[str, tuple[Any, Callable[..., None]]] = {
    "ours": (GradScaler, _step),
    "torch": (torch.amp.GradScaler, _step),
    "ours, clip": (GradScaler, _our_clip),
    "torch, clip": (torch.amp.GradScaler, _torch_clip),
}
"""Name -> (class of the scaler, function that runs one iteration)."""


def _medians(work: dict[str, Callable[[], Any]], repeats: int) -> dict[str, Any]:
    # Each repeat runs all of them: other load on the machine then affects each.
    took: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats):
        for name, act in work.items():
            dist.barrier()
            start = time.perf_counter()
            act()
            took[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in took.items()}


def training(steps: int) -> dict[str, Any]:
    """Train with FSDP2 on this rank; measure a step and the scaler's part of it.

    Returns:
        ``step`` and ``scaler``: median seconds; ``calls`` and ``scaler_calls``: number
        of collectives; ``sent``: bytes that the scaler sent.
    """
    world = current_world()
    mesh = init_device_mesh("cpu", (world.world_size,))
    layers = [torch.nn.Linear(256, 256) for _ in range(8)]
    model = torch.nn.Sequential(*layers)
    for layer in (*layers, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = GradScaler("cpu")
    batch = torch.randn(32, 256)
    whole, own = [], []
    for _ in range(steps):
        dist.barrier()
        with Calls(mesh) as seen:
            start = time.perf_counter()
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            with Calls(mesh) as of_scaler:
                middle = time.perf_counter()
                _step(scaler, optimizer)
        end = time.perf_counter()
        whole.append(end - start)
        own.append(end - middle)
    return {
        "step": statistics.median(whole),
        "scaler_and_optimizer": statistics.median(own),
        "calls": len(seen.seen) + len(of_scaler.seen),
        "scaler_calls": len(of_scaler.seen),
        "sent": sum(call.size for call in of_scaler.seen),
    }


def bandwidth(repeats: int) -> float:
    """Return the median seconds of a large all-reduce."""
    tensor = torch.ones(LARGE)
    found: float = _medians({"": lambda: dist.all_reduce(tensor)}, repeats)[""]
    return found


def real(size: int, repeats: int) -> dict[str, Any]:
    """Measure one world of ``size`` processes; times are the slowest rank's."""
    began = time.perf_counter()
    with Cluster(size, start_timeout_s=600) as cluster:
        start_s = time.perf_counter() - began
        ranks = cluster.with_options(timeout_s=600).run(agreement, repeats)
        trained = cluster.with_options(timeout_s=600).run(
            training, max(3, repeats // 10)
        )
        memory = [_pss_mib(pid) for pid in cluster.pids]
    if any(rank["calls"] != ranks[0]["calls"] for rank in ranks):
        raise RuntimeError("the ranks issued different collectives")
    if any(rank["scaler_calls"] != trained[0]["scaler_calls"] for rank in trained):
        raise RuntimeError("the ranks issued different collectives in training")
    times = {n: max(rank[n] for rank in ranks) for n in ("bare", *WORK)}
    slowest = {
        n: max(rank[n] for rank in trained) for n in ("step", "scaler_and_optimizer")
    }
    return {
        "ranks": size,
        "seconds": times,
        "calls": ranks[0]["calls"],
        "training": {**trained[0], **slowest},
        "memory_mib_a_rank": round(statistics.mean(memory), 1),
        "start_s": round(start_s, 2),
        "scenario": scenario(size),
    }


def scenario(size: int) -> dict[str, Any]:
    """Run our scaler in one scenario of the catalogue, on ``size`` ranks."""
    chosen = SCENARIO.format(size)
    command = [sys.executable, "-m", "gradparity.conformance", "run", "--quiet"]
    command += ["--scaler", "gradparity.scaler:GradScaler", "--scenario", chosen]
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = subprocess.run([*command, "--out", folder], capture_output=True)
        took = time.perf_counter() - began
        report = read_report(Path(folder) / "report.jsonl")
    return {
        "id": chosen,
        "exit_code": done.returncode,
        "status": report.cases[0].status,
        "seconds": round(took, 1),
    }


def _pss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def latency(repeats: int) -> dict[str, float]:
    """Measure alpha and beta on two ranks, whose ring has two messages in sequence."""
    with Cluster(2) as cluster:
        bare = max(rank["bare"] for rank in cluster.run(agreement, repeats))
        large = max(cluster.run(bandwidth, 5))
    # In a ring of two each rank sends half of the data twice.
    return {"alpha_s": bare / 2, "beta_s_per_byte": large / (LARGE * 4)}


# - Simulated ranks


def simulated(world: int) -> list[dict[str, Any]]:
    """Compare all ranks of ``world``, on each of its meshes."""
    ours = partial(GradScaler, "cpu", init_scale=1024.0)
    rows = []
    for mesh in MESHES[world]:
        began = time.perf_counter()
        compared = compare(ours, mesh, COMMON)
        rows.append(
            {
                "how": "one after the other",
                "mesh": list(mesh),
                "ranks": world,
                "situations": len(COMMON),
                "different": [str(each) for each in compared.different[:16]],
                "bytes": {n: sum(x.size for x in c) for n, c in compared.calls.items()},
                "collectives": {n: len(c) for n, c in compared.calls.items()},
                "seconds": round(time.perf_counter() - began, 1),
            }
        )
        print(f"{world} ranks on {mesh}: {len(compared.different)} differ", flush=True)
    return rows


def threads(world: int) -> list[dict[str, Any]]:
    """Run all ranks of ``world`` at once, as threads with real collectives."""
    ours = partial(GradScaler, "cpu", init_scale=1024.0)
    rows = []
    for mesh in MESHES[world]:
        began = time.perf_counter()
        outcomes = together(ours, mesh, COMMON + OURS)
        apart = [i for i, each in enumerate(outcomes) if each != outcomes[0]]
        rows.append(
            {
                "how": "threads",
                "mesh": list(mesh),
                "ranks": world,
                "situations": len(COMMON + OURS),
                "different": [f"rank {i}" for i in apart[:16]],
                "seconds": round(time.perf_counter() - began, 1),
            }
        )
        print(f"{world} threads on {mesh}: {len(apart)} differ", flush=True)
    return rows


def axes_of_torch() -> dict[str, list[str]]:
    """Return shape of mesh -> groups over which torch's scaler reduces in a step."""
    make = partial(torch.amp.GradScaler, "cpu", init_scale=1024.0)
    found = {}
    for mesh in ((8,), (2, 4), (2, 2, 2)):
        calls = compare(make, mesh, COMMON[:1]).calls[COMMON[0].__name__]
        found[str(mesh)] = [call.group for call in calls[: len(calls) // 2]]
    return found


def provenance() -> dict[str, Any]:
    """Return versions and sizes on which the figures depend, without a host name."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads_per_rank": 1,
        "backend": "gloo",
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or read a record; print its tables, and write ours into the page."""
    parser = argparse.ArgumentParser(prog="gradparity bench scale")
    parser.add_argument("--quick", action="store_true", help="few ranks, few timings")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--tables", type=Path, metavar="FILE", help="of this record")
    given = parser.parse_args(argv)
    if given.tables is not None:
        record = json.loads(given.tables.read_text())
    else:
        record = measure(given.quick)
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    texts = {name: "\n".join(lines) for name, lines in tables(record).items()}
    for name, text in texts.items():
        print(f"\n{name}\n\n{text}")
    if (given.tables or given.json).resolve() == RESULTS:
        write_between(PAGE, texts)
    return 0


def measure(quick: bool) -> dict[str, Any]:
    """Run all parts and return the record."""
    repeats = 10 if quick else 50
    record: dict[str, Any] = {"provenance": provenance()}
    record["network"] = latency(10 * repeats)
    record["real"] = [real(size, repeats) for size in (SIZES[:2] if quick else SIZES)]
    record["torch_reduces_over"] = axes_of_torch()
    if quick:
        record["simulated"] = []
        return record
    record["simulated"] = [*threads(256), *simulated(256), *simulated(1024)]
    return record


if __name__ == "__main__":
    sys.exit(main())
