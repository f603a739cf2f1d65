"""Speed of ``gradparity record`` and ``compare``: a step, a file, a comparison.

    gradparity bench record [--device cuda]

A recorded step is compared with the step before it, which is not recorded, in one
process: a transformer of 10 million parameters with AdamW in fp32, on a GPU one of 110
million in bf16 autocast. The comparison reads 2,000 tensors of 4,096 elements over
three steps. Results go to ``results/record.json``, of a GPU to
``results/record-cuda.json``. If one part fails, its error is printed, and the other
parts run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

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


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of a model and its batch."""

    width: int
    layers: int
    words: int
    length: int
    rows: tuple[int, ...]
    """Numbers of rows of the batches that are measured."""


SIZES = {
    "cpu": Size(width=512, layers=3, words=1024, length=128, rows=(1, 8)),
    "cuda": Size(width=768, layers=12, words=16384, length=512, rows=(8, 32)),
}


class Transformer(nn.Module):
    """Model from words to scores of the next words; heads are 64 wide."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.words = nn.Embedding(size.words, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True
        )
        layers = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.layers = layers
        self.head = nn.Linear(width, size.words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the scores of the next words."""
        scores: torch.Tensor = self.head(self.layers(self.words(words)))
        return scores


def batch(device: str, rows: int) -> torch.Tensor:
    """Return rows of words; each has one word more than the model's input."""
    size = SIZES[device]
    return torch.randint(size.words, (rows, size.length + 1), device=device)


def backward(model: nn.Module, words: torch.Tensor) -> None:
    """Compute the gradients of a batch; on a GPU in bf16."""
    device = words.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
        scores = model(words[:, :-1]).flatten(0, 1)
        loss = nn.functional.cross_entropy(scores, words[:, 1:].flatten())
    loss.backward()


def now(device: str) -> float:
    """Return the time after the device has finished all its work."""
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def overhead(device: str, pairs: int, rows: int) -> dict[str, float]:
    """Return the median milliseconds of a plain step and of a recorded one."""
    torch.manual_seed(0)
    model = Transformer(SIZES[device]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    words = batch(device, rows)
    times: list[float] = []
    with TemporaryDirectory() as folder:
        recorder = Recorder(Orders(out=folder, steps=(2, 2 * pairs + 3)))
        recorder.steps = range(2, 2 * pairs + 3, 2)
        recorder.install()
        for _ in range(2 * pairs + 2):
            begin = now(device)
            optimizer.zero_grad()
            backward(model, words)
            optimizer.step()
            times.append(now(device) - begin)
            recorder.done.clear()  # what is kept of a step is not timed here
        recorder.remove()
        if recorder.recording.notes:
            raise RuntimeError(recorder.recording.notes[0])
    plain, recorded = times[3::2], times[4::2]
    ratios = [b / a for a, b in zip(plain, recorded, strict=False)]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "step_ms": round(1e3 * median(plain), 1),
        "recorded_ms": round(1e3 * median(recorded), 1),
        "ratio": round(median(ratios), 2),
    }


def watched(device: str, steps: int, rows: int) -> dict[str, float]:
    """Return the fraction of a DDP step on two ranks that ``watch`` takes.

    On a GPU the ranks share it.
    """
    shared = device != "cpu"
    two = Cluster(
        2,
        backend="nccl" if shared else "gloo",
        share_devices=shared,
        timeout_s=300,
    )
    with two:
        shares = two.run(_share_of_watch, device, steps, rows)
    return {"share": round(max(shares), 4)}


def _share_of_watch(device: str, steps: int, rows: int) -> float:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(Transformer(SIZES[device]).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    words = batch(device, rows)
    watch = gradparity.watch(model, optimizer)
    own: list[float] = []
    run = watch.stepped

    def timed(*args: object) -> None:
        begin = now(device)
        run(*args)
        own.append(now(device) - begin)

    watch.handles.pop().remove()
    watch.handles.append(optimizer.register_step_post_hook(timed))
    times: list[float] = []
    for _ in range(steps):
        begin = now(device)
        optimizer.zero_grad()
        backward(model, words)
        optimizer.step()
        times.append(now(device) - begin)
    watch.close()
    return median(own) / median(times)


def recorded(folder: Path, factor: float) -> Path:
    """Record a job with many tensors; ``factor`` multiplies their initial values."""
    torch.manual_seed(0)
    named = nn.ModuleDict({"all": nn.Module()})
    for number in range(TENSORS):
        parameter = nn.Parameter(factor * torch.randn(SIDE, SIDE))
        named["all"].register_parameter(f"p{number}", parameter)
    recorder = Recorder(Orders(out=str(folder), steps=(0, STEPS)))
    recorder.install()
    optimizer = torch.optim.SGD(named.parameters(), lr=1e-3)
    for _ in range(STEPS):
        for parameter in named.parameters():
            parameter.grad = torch.randn_like(parameter) + parameter.detach()
        optimizer.step()
    recorder.write()  # it would wait for the optimizer of another recording
    recorder.remove()
    return folder / "rank-0.safetensors"


def comparison() -> dict[str, float]:
    """Return megabytes of a run, and seconds of comparing with three noise runs."""
    with TemporaryDirectory() as folder:
        one, other = Path(folder, "one"), Path(folder, "other")
        file = recorded(one / "plain", 1.0)
        size = file.stat().st_size / 1e6
        recorded(one / "nudged-1", 1.0 + 2.0**-20)
        runs = ["plain", "again", "nudged-1", "nudged-2"]
        for name, copy in (("plain", "again"), ("nudged-1", "nudged-2")):
            shutil.copytree(one / name, one / copy)
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
    """Measure, print and record; return 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="record", description=__doc__)
    parser.add_argument("--device", choices=[*SIZES], default="cpu")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", type=Path, help="where the record goes")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    device, pairs, size = given.device, given.pairs, SIZES[given.device]
    on_cpu = device == "cpu"
    path = given.json or (
        RESULTS if on_cpu else RESULTS.with_name(f"record-{device}.json")
    )
    parts: dict[str, Callable[[], dict[str, float]]] = {
        f"rows_{n}": partial(overhead, device, pairs, n) for n in size.rows
    }
    rows = size.rows[-1 if on_cpu else 0]
    parts["watch"] = partial(watched, device, 2 * pairs, rows)
    parts["compare"] = comparison
    record: dict[str, Any] = {
        "torch": str(torch.__version__),
        "device": device if on_cpu else torch.cuda.get_device_name(),
        "size": asdict(size),
    }
    failed = 0
    for name, measure in parts.items():
        try:
            record[name] = measure()
        except Exception as error:  # of one part: the others are still to come
            traceback.print_exc()
            record[name] = {"error": f"{type(error).__name__}: {error}"[:400]}
            failed = 1
        print(json.dumps({name: record[name]}), flush=True)
        write_whole(path, json.dumps(record, indent=1) + "\n")
    return failed


if __name__ == "__main__":  # ranks find by its name what is of no __main__
    from gradparity.benchmarks import record

    sys.exit(record.main())
