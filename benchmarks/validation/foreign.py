"""Jobs in the loops of others, recorded as they are: on one process and on ranks.

    gradparity bench foreign [--job NAME]

Each job of ``foreign_jobs`` and ``megatron_jobs`` is recorded on one process with
noise, and compared with itself on two and on four ranks, and with three faults on two
ranks. The record is ``results/foreign.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gradparity.conformance.files import write_whole

RESULTS = Path(__file__).parents[1] / "results" / "foreign.json"
JOBS = {
    "plain": "torch",
    "accumulating": "torch",
    "fsdp2": "torch",
    "tensor-parallel": "torch",
    "context-parallel": "torch",
    "accelerate": "accelerate",
    "accelerate-fsdp2": "accelerate",
    "trainer": "transformers",
    "sft": "trl",
    "lightning": "pytorch-lightning",
    "zero1": "deepspeed",
    "zero2": "deepspeed",
    "zero3": "deepspeed",
    "megatron-tp": "megatron-core",
    "megatron-sp": "megatron-core",
    "megatron-pp": "megatron-core",
    "megatron-zero": "megatron-core",
    "megatron-bf16": "megatron-core",
    "megatron-ep": "megatron-core",
}
"""Job -> package of its training loop."""
SCRIPTS = {"megatron-core": "megatron_jobs.py"}
"""Package -> the script that has its jobs, if it is not ``foreign_jobs.py``."""
STARTS = {"megatron-pp", "megatron-ep"}
"""Jobs whose ranks begin from the weights of the job on one process, because a stage or
a rank of experts would draw other weights."""
FAULTS = {"half": 1, "twice": 1, "frozen": 1}
"""Fault -> exit code of the comparison that detects it."""
GRADPARITY = (sys.executable, "-m", "gradparity.conformance")


def command(job: str, ranks: int, fault: str = "") -> list[str]:
    """Return the command line of a job."""
    script = Path(__file__).with_name(SCRIPTS.get(JOBS[job], "foreign_jobs.py"))
    end = [str(script), job, *([fault] if fault else [])]
    if ranks == 1:
        return [sys.executable, *end]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    return [sys.executable, *launch, *where, *end]


def record(folder: Path, name: str, *options: str, of: Sequence[str]) -> float:
    """Record a job; return the seconds that it took."""
    begin = time.monotonic()
    program = [*GRADPARITY, "record", name, *options, "--", *of]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True)
    if not (folder / name / "run.json").exists():
        raise RuntimeError(f"{name}: {done.stdout[-500:]}{done.stderr[-1500:]}")
    return time.monotonic() - begin


def compare(folder: Path, name: str) -> tuple[int, list[str]]:
    """Return exit code and lines of a comparison with the recording ``one``."""
    program = [*GRADPARITY, "compare", "one", name]
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True)
    return done.returncode, (done.stdout or done.stderr).splitlines()


def rows(job: str) -> Iterator[dict[str, Any]]:
    """Yield the result of one job on ranks, and of each of its faults."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        keeps, begins = (
            (("--keep-start",), ("--start", "one")) if job in STARTS else ((), ())
        )
        record(folder, "one", *keeps, of=command(job, 1))
        cases = [(2, ""), (4, ""), *((2, fault) for fault in FAULTS)]
        for ranks, fault in cases:
            run = f"{ranks}{fault}"
            of = command(job, ranks, fault)
            seconds = record(folder, run, "--noise", "0", *begins, of=of)
            code, lines = compare(folder, run)
            size = sum(f.stat().st_size for f in (folder / run).rglob("*.safetensors"))
            yield {
                "job": job,
                "version": f"{JOBS[job]} {version(JOBS[job])}",
                "ranks": ranks,
                "fault": fault,
                "code": code,
                "expected": FAULTS.get(fault, 0),
                "said": lines[0],
                "start": next(x for x in lines if "start" in x),
                "seconds": round(seconds, 1),
                "run_kb": round(size / 1e3),
            }


def main(argv: Sequence[str] | None = None) -> int:
    """Record all jobs; return 1 if a result is not the expected one."""
    parser = argparse.ArgumentParser(prog="foreign", description=__doc__)
    parser.add_argument("--job", action="append", choices=JOBS)
    given = parser.parse_args(argv)
    kept = json.loads(RESULTS.read_text()) if given.job and RESULTS.exists() else []
    for job in given.job or JOBS:
        kept = [row for row in kept if row["job"] != job]
        for row in rows(job):
            kept.append(row)
            print(json.dumps(row), flush=True)
        write_whole(RESULTS, json.dumps(kept, indent=1) + "\n")
    wrong = [row for row in kept if row["code"] != row["expected"]]
    print(f"{len(kept)} comparisons, {len(wrong)} not as expected")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
