"""Speed of ``gradparity record`` and ``compare``: a step, a file, a comparison.

    python -m gradparity.benchmarks.record

A recorded step is compared with the step before it, which is not recorded, in one
process: a transformer of 10 million parameters with AdamW in fp32. The comparison reads
2,000 tensors of 4,096 elements over three steps. Results go to ``results/record.json``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import msgspec
import torch
from torch import nn

import gradparity
from gradparity.conformance.files import write_whole
from gradparity.conformance.record.orders import Manifest, Orders
from gradparity.conformance.record.recorder import Recorder
from gradparity.multiprocess import Cluster

RESULTS = Path(__file__).parent / "results" / "record.json"
TENSORS, SIDE, STEPS = 2000, 64, 3


class Transformer(nn.Module):
    """10.2 million parameters: 3 layers of width 512, 1,024 words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1024, 512)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(512, 1024, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next words."""
        scores: torch.Tensor = self.head(self.layers(self.words(words)))
        return scores


def overhead(device: str, pairs: int, rows: int) -> dict[str, float]:
    """Median time of a step, and of a recorded one, in milliseconds."""
    torch.manual_seed(0)
    model = Transformer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    words = torch.randint(1024, (rows, 129), device=device)
    times: list[float] = []
    with TemporaryDirectory() as folder:
        recorder = Recorder(Orders(out=folder, steps=(2, 2 * pairs + 3)))
        recorder.steps = range(2, 2 * pairs + 3, 2)
        recorder.install()
        for _ in range(2 * pairs + 2):
            begin = time.perf_counter()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(
                model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()
            )
            loss.backward()
            optimizer.step()
            if device != "cpu":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
            recorder.done.clear()  # what is kept of a step is not timed here
        recorder.written = True
    plain, recorded = times[3::2], times[4::2]
    ratios = [b / a for a, b in zip(plain, recorded, strict=False)]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_ms": round(1e3 * median(plain), 1),
        "recorded_ms": round(1e3 * median(recorded), 1),
        "ratio": round(median(ratios), 2),
    }


def watched(steps: int, rows: int) -> dict[str, float]:
    """The share of a DDP step on two ranks that ``watch`` takes."""
    with Cluster(2) as two:
        shares = two.run(_share_of_watch, steps, rows)
    return {"share": round(max(shares), 4)}


def _share_of_watch(steps: int, rows: int) -> float:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    words = torch.randint(1024, (rows, 129))
    watch = gradparity.watch(model, optimizer)
    own: list[float] = []
    run = watch._stepped

    def timed(*args: object) -> None:
        begin = time.perf_counter()
        run(*args)
        own.append(time.perf_counter() - begin)

    watch._handles.pop().remove()
    watch._handles.append(optimizer.register_step_post_hook(timed))
    times: list[float] = []
    for _ in range(steps):
        begin = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten()
        ).backward()
        optimizer.step()
        times.append(time.perf_counter() - begin)
    watch.close()
    return median(own) / median(times)


def comparison() -> dict[str, float]:
    """Megabytes of a run, and seconds of a comparison with three noisy runs."""
    torch.manual_seed(0)
    model = nn.ParameterList(torch.randn(SIDE, SIDE) for _ in range(TENSORS))
    named = nn.ModuleDict({"all": nn.Module()})
    for number, parameter in enumerate(model):
        named["all"].register_parameter(f"p{number}", parameter)
    with TemporaryDirectory() as folder:
        one, other = Path(folder, "one"), Path(folder, "other")
        recorder = Recorder(Orders(out=str(one / "plain"), steps=(0, STEPS)))
        recorder.install()
        optimizer = torch.optim.SGD(named.parameters(), lr=1e-3)
        for _ in range(STEPS):
            for parameter in named.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        file = one / "plain" / "rank-0.safetensors"
        size = file.stat().st_size / 1e6
        runs = ["plain", "again", "nudged-1", "nudged-2"]
        for name in runs[1:]:
            shutil.copytree(one / "plain", one / name)
        manifest = Manifest(command=[], steps="0:3", runs=runs, complete=True)
        (one / "run.json").write_bytes(msgspec.json.encode(manifest))
        shutil.copytree(one, other)
        manifest.runs = runs[:1]
        (other / "run.json").write_bytes(msgspec.json.encode(manifest))
        begin = time.perf_counter()
        program = [sys.executable, "-m", "gradparity.conformance", "compare"]
        done = subprocess.run([*program, str(one), str(other)], capture_output=True)
        seconds = time.perf_counter() - begin
        assert done.returncode == 0, done.stdout + done.stderr
    return {"tensors": TENSORS, "run_mb": round(size, 1), "seconds": round(seconds, 1)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(prog="record", description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=10)
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = {
        "torch": str(torch.__version__),
        "device": given.device,
        **{
            f"rows_{rows}": overhead(given.device, given.pairs, rows) for rows in (1, 8)
        },
        "watch": watched(2 * given.pairs, 8),
        "compare": comparison(),
    }
    text = json.dumps(found, indent=1)
    print(text)
    write_whole(RESULTS, text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
