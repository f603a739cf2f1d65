"""Run examples/rl_fp16.py in several precisions and write the tables of docs/rl.md.

gradparity bench rl; with ``--tables`` from the record alone.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from gradparity.benchmarks.tables import row, write_between
from gradparity.conformance.report.plots import Series, line_chart

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "rl.json"
PAGE = ROOT / "docs" / "rl.md"
STEPS = 24
OURS, TORCH = "gradparity.scaler:GradScaler", "torch.amp:GradScaler"
RUNS = {
    "fp16, ours": ("fp16", OURS),
    "fp16, torch's": ("fp16", TORCH),
    "bf16": ("bf16", OURS),
    "fp32": ("fp32", OURS),
}
"""Name -> (dtype, scaler); the scaler is enabled only in fp16."""
STYLE = (
    "<style>text{font:11px sans-serif;fill:#555}.title{font-weight:bold}"
    ".line{fill:none;stroke-width:1.6}.grid{stroke:#ccc;fill:none}.s0{stroke:#0b6}"
    ".s1{stroke:#c33;stroke-dasharray:5 3}.s2{stroke:#36c}.s3{stroke:#a70}</style>"
)


def run_one(dtype: str, scaler: str) -> dict[str, Any]:
    """Run once under torchrun; return its steps and seconds."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rl.json"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc-per-node", "4", str(ROOT / "examples" / "rl_fp16.py")]
        told = ["--dtype", dtype, "--scaler", scaler, "--steps", str(STEPS)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*launch, *told, "--out", str(out)], check=True, env=environment)
        steps = json.loads(out.read_text())
    return {"steps": steps, "seconds": round(time.monotonic() - start)}


def tables(record: Mapping[str, Any]) -> dict[str, str]:
    """Return name -> table of the page."""
    runs, made = record["runs"], record["provenance"]
    mismatch = [
        row("run", "mean", "largest", "a completion", "last KL", "last reward"),
        row(*["---"] * 6),
    ]
    ranks = [
        row(
            "run",
            "steps with one scale on all ranks",
            "with equal replicas",
            "scales at the end",
        ),
        row(*["---"] * 4),
    ]
    for name, run in runs.items():
        steps = run["steps"]
        mismatch.append(
            row(
                name,
                f"{fmean(s['off'] for s in steps):.1e}",
                f"{max(s['off_max'] for s in steps):.1e}",
                f"{fmean(s['off_sequence'] for s in steps):.1e}",
                f"{steps[-1]['kl']:.2f}",
                f"{steps[-1]['reward']:.2f}",
            )
        )
        if name.startswith("fp16"):
            same = sum(len(set(s["scales"])) == 1 for s in steps)
            equal = sum(s["apart"] == 0 for s in steps)
            last = ", ".join(f"{s:g}" for s in steps[-1]["scales"])
            ranks.append(
                row(name, f"{same} of {len(steps)}", f"{equal} of {len(steps)}", last)
            )
    seconds = ", ".join(f"{name} {run['seconds']} s" for name, run in runs.items())
    where = (
        f"`{made['command']}`, {made['machine']}, torch {made['torch']}, Python "
        f"{made['python']}, {made['date']}, load {made['load']}: {seconds}."
    )
    return {"mismatch": "\n".join(mismatch), "ranks": "\n".join(ranks), "made": where}


def plots(record: Mapping[str, Any]) -> None:
    """Draw two plots into files beside the page."""
    runs = record["runs"]
    off = [
        Series(
            label=name,
            values=[torch.tensor(s["off"]).log10().item() for s in run["steps"]],
            style=f"s{number}",
        )
        for number, (name, run) in enumerate(runs.items())
    ]
    fp16 = [(n, r["steps"]) for n, r in runs.items() if n.startswith("fp16")]
    scale = [
        Series(
            label=f"{name}, rank {rank}",
            values=[torch.tensor(s["scales"][rank]).log2().item() for s in steps],
            style=f"s{number * 2 + rank}",
        )
        for number, (name, steps) in enumerate(fp16)
        for rank in (0, 1)
    ]
    for file, title, series in (
        ("rl-mismatch", "log10 of the mean mismatch", off),
        ("rl-scale", "log2 of the scale", scale),
    ):
        head = '<svg xmlns="http://www.w3.org/2000/svg" '
        text = str(line_chart(title, series)).replace("<svg ", head, 1)
        where = PAGE.with_name(f"{file}.svg")
        draft = where.with_suffix(".new")
        draft.write_text(text.replace("<title>", f"{STYLE}<title>", 1) + "\n")
        draft.replace(where)


def main(argv: Sequence[str] = ()) -> None:
    """Run, record and write the page."""
    if "--tables" not in argv:
        load = round(os.getloadavg()[0], 1)
        record = {
            "provenance": {
                "command": "gradparity bench rl",
                "torch": torch.__version__,
                "python": platform.python_version(),
                "machine": f"{os.cpu_count()} cores, CPU, gloo",
                "load": load,
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
            },
            "runs": {name: run_one(*how) for name, how in RUNS.items()},
        }
        draft = RESULT.with_suffix(".new")
        draft.write_text(json.dumps(record, indent=1) + "\n")
        draft.replace(RESULT)
    record = json.loads(RESULT.read_text())
    write_between(PAGE, tables(record))
    plots(record)


if __name__ == "__main__":
    main(sys.argv[1:])
