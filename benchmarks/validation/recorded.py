"""Right variants of a job and faults in it: what ``gradparity compare`` says of each.

    gradparity bench recorded --seeds 3
    gradparity bench recorded --device cuda --noise 5 --seeds 1

A small Llama is trained as one process would, in fp32 and with products rounded to bf16
as tensor cores do; on a GPU one of 101 million parameters, with products in bf16.
``compare`` must call its right variants the same, and report its faults, by numbers or
by rows and settings. The record is ``results/recorded.json``, of a GPU
``results/recorded-cuda.json``. A variant that cannot run is a row with code 3.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from gradparity.conformance.files import write_whole
from gradparity.conformance.record.compare import BROKEN, SAME, Side, compare
from gradparity.conformance.record.merge import read_merged
from gradparity.conformance.record.orders import Orders
from gradparity.conformance.record.recorder import Recorder
from gradparity.multiprocess import Cluster

RESULTS = Path(__file__).parents[1] / "results" / "recorded.json"


@dataclass(frozen=True, kw_only=True)
class Job:
    """Sizes of the model and its data, and the device on which it is trained."""

    width: int = 128
    layers: int = 4
    heads: int = 8
    groups: int = 2
    hidden: int = 352
    words: int = 1024
    length: int = 64
    rows: int = 8
    device: str = "cpu"
    native: bool = False
    """True if bf16 kernels of the device round the products. Else operands are rounded,
    and products are in fp32."""

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.width // self.heads

    @property
    def meshes(self) -> dict[str, tuple[int, int]]:
        """Variants on ranks; on a GPU, where two ranks share it, only small ones."""
        most = 4 if self.device == "cpu" else 2
        return {k: mesh for k, mesh in MESHES.items() if math.prod(mesh) <= most}

    @property
    def kinds(self) -> list[str]:
        """Variants and faults; the slow ones come last."""
        own = () if self.device == "cpu" else RIGHT_ON_GPU
        return [*RIGHT, *own[:-1], *FAULTS, *own[-1:], *self.meshes]


SMALL = Job()
LARGE = Job(
    width=768,
    layers=12,
    heads=12,
    groups=4,
    hidden=2048,
    words=16384,
    length=512,
    device="cuda",
    native=True,
)
STEPS = 3
REFERENCE = "the reference"
MESHES = {
    "fsdp 2": (2, 1),
    "fsdp 4": (4, 1),
    "tp+sp 2": (1, 2),
    "fsdp 2 x tp+sp 2": (2, 2),
}
RIGHT = (
    *("rows in another order", "2 micro-batches", "4 micro-batches", "checkpointing"),
    *("foreach", "fused", "explicit attention", "loss in chunks"),
)
RIGHT_ON_GPU = (
    *("math attention", "efficient attention", "a loop over parameters"),
    *("cuBLAS sums in fp32", "compiled blocks"),
)
FAULTS = (
    *(
        "half a gradient",
        "twice a gradient",
        "positions off by 1",
        "a micro-batch lost",
    ),
    *(
        "norms not summed",
        "clipped by a local norm",
        "bias twice",
        "other heads in a group",
    ),
    *("labels of a row shifted", "gradient not zeroed", "parameter not stepped"),
    *("local token count", "decay of norms", "eps 1e-6", "stale weight", "rate + 1 %"),
    *(
        "beta2 0.999",
        "no master weights",
        "loss in bf16",
        "sums in bf16",
        "one weight off",
    ),
)


class Linear(nn.Linear):
    """Linear layer that uses a bf16 kernel with fp32 sums, or rounds as it does."""

    rounds = native = False

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the weight."""
        return _product(x, self.weight, self.bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not Linear.rounds:
        return F.linear(x, weight, bias)
    x, weight = x.bfloat16(), weight.bfloat16()
    bias = None if bias is None else bias.bfloat16()
    if Linear.native:
        return F.linear(x, weight, bias)
    bias = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), bias).bfloat16()


class Block(nn.Module):
    """Attention with grouped heads, then a gated feed-forward layer."""

    explicit = repeated = doubled = False

    def __init__(self, job: Job) -> None:
        super().__init__()
        width, groups = job.width, job.groups * job.head
        self.head = job.head
        self.norm_1 = nn.RMSNorm(width, eps=1e-5)
        self.q = Linear(width, width, bias=False)
        self.k = Linear(width, groups, bias=False)
        self.v = Linear(width, groups, bias=False)
        self.o = Linear(width, width)
        self.norm_2 = nn.RMSNorm(width, eps=1e-5)
        self.gate = Linear(width, job.hidden, bias=False)
        self.up = Linear(width, job.hidden, bias=False)
        self.down = Linear(job.hidden, width, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Return x plus both branches."""
        y = self.norm_1(x)
        heads = [w(y).unflatten(-1, (-1, self.head)) for w in (self.q, self.k, self.v)]
        q, k, v = _turned(heads[0], turns), _turned(heads[1], turns), heads[2]
        n = q.shape[2] // k.shape[2]
        if self.repeated:
            k, v = k.repeat(1, 1, n, 1), v.repeat(1, 1, n, 1)
        else:
            k, v = k.repeat_interleave(n, 2), v.repeat_interleave(n, 2)
        q, k, v = (z.transpose(1, 2) for z in (q, k, v))
        if self.explicit:
            length = q.shape[2]
            later = q.new_ones((length, length), dtype=torch.bool).triu(1)
            scores = (q.float() @ k.float().transpose(2, 3)) / math.sqrt(self.head)
            shares = scores.masked_fill(later, -torch.inf).softmax(-1).to(q.dtype)
            o = shares.float() @ v.float()
        elif Linear.native:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            q32, k32, v32 = q.float(), k.float(), v.float()
            o = F.scaled_dot_product_attention(q32, k32, v32, is_causal=True)
        y = self.o(o.to(q.dtype).transpose(1, 2).flatten(2))
        x = x + (y + self.o.bias.to(y.dtype) if self.doubled else y)
        z = self.norm_2(x)
        found: Tensor = x + self.down(F.silu(self.gate(z)) * self.up(z))
        return found


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    cos, sin = turns.cos()[None, :, None], turns.sin()[None, :, None]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Llama(nn.Module):
    """Model from words to scores; split into parts, so the loss may be in chunks."""

    shift = 0
    recompute = False

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.pairs = job.head // 2
        self.words = nn.Embedding(job.words, job.width)
        self.blocks = nn.ModuleList(Block(job) for _ in range(job.layers))
        self.norm = nn.RMSNorm(job.width, eps=1e-5)
        self.head = Linear(job.width, job.words, bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                spread = torch.randn_like(parameter)
                norm = "norm" in name
                parameter.copy_(1 + 0.05 * spread if norm else 0.02 * spread)

    def forward(self, words: Tensor, chunks: int = 1) -> Tensor:
        """Return scores of the next words."""
        at = torch.arange(words.shape[1], dtype=torch.float32)
        at[len(at) // 2 :] += self.shift
        turns = at[:, None] * 10000.0 ** (-torch.arange(self.pairs) / self.pairs)
        turns = turns.to(words.device)
        x = self.words(words)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, turns, use_reentrant=False)
            else:
                x = block(x, turns)
        return torch.cat([self.head(part) for part in self.norm(x).chunk(chunks, 1)], 1)


@functools.lru_cache(maxsize=1)
def started(job: Job, seed: int) -> Llama:
    """Return the model before its first step; weights are always drawn on the CPU."""
    torch.manual_seed(seed)
    return Llama(job).to(job.device)


def batch(job: Job, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return words of a random bigram language, and labels; row lengths differ."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    every = torch.Generator().manual_seed(5)
    follow = torch.randint(job.words, (job.words, 4), generator=every)
    rows = [torch.randint(job.words, (job.rows,), generator=generator)]
    for _ in range(job.length):
        ways = torch.randint(4, (job.rows,), generator=generator)
        rows.append(follow[rows[-1], ways])
    words = torch.stack(rows, 1)
    shape, length = (job.rows, 1), job.length
    ends = torch.randint(length // 2, length + 1, shape, generator=generator)
    labels = words[:, 1:].masked_fill(torch.arange(length) >= ends, -100)
    return words[:, :-1].contiguous().to(job.device), labels.to(job.device)


def laid_out(model: Llama, device: str, data: int, tensor: int) -> int:
    """Lay a model out; return the rank's index among ranks with different rows."""
    if data * tensor == 1:
        return 0
    mesh = init_device_mesh(device, (data, tensor), mesh_dim_names=("data", "tensor"))
    if tensor > 1:
        plan: dict[str, Any] = {
            "words": tp.RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1)
            ),
            "norm": tp.SequenceParallel(),
            "head": tp.ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Replicate()
            ),
        }
        for number in range(len(model.blocks)):
            at = f"blocks.{number}."
            plan |= {at + name: tp.SequenceParallel() for name in ("norm_1", "norm_2")}
            plan |= {
                at + name: tp.ColwiseParallel(input_layouts=Shard(1))
                for name in ("q", "k", "v", "gate", "up")
            }
            plan |= {
                at + name: tp.RowwiseParallel(output_layouts=Shard(1))
                for name in ("o", "down")
            }
        tp.parallelize_module(model, mesh["tensor"], plan)
    if data > 1:
        for block in (*model.blocks, model):
            fully_shard(block, mesh=mesh["data"])
        for module in model.modules():
            if isinstance(
                module, FSDPModule
            ):  # sums: the loss is a share of all tokens
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    return mesh.get_local_rank("data")


@contextmanager
def recording(model: Llama, orders: Orders) -> Iterator[None]:
    """Record training inside of the block, and uninstall the recorder at its end."""
    recorder = Recorder(orders)
    recorder.roots.add(model)
    recorder.install()
    try:
        yield
        if recorder.recording.notes:
            raise RuntimeError(recorder.recording.notes[0])
    finally:
        recorder.remove()


def _attention_of(kind: str) -> AbstractContextManager[None]:
    if kind == "math attention":
        return sdpa_kernel(SDPBackend.MATH)
    if kind == "efficient attention":
        return sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
    return nullcontext()


def train(out: str, job: Job, half: bool, seed: int, kind: str, nudge: int = 0) -> None:
    """Train three steps as one variant or with one fault, and record them."""
    torch.set_num_threads(1)
    Linear.rounds, Linear.native = half, job.native
    if job.device != "cpu":
        torch.set_float32_matmul_precision("highest")
        products = torch.backends.cuda.matmul
        reduced = kind != "cuBLAS sums in fp32"
        products.allow_bf16_reduced_precision_reduction = reduced
    model = copy.deepcopy(started(job, seed))
    with recording(model, Orders(out=out, steps=(0, STEPS), nudge=nudge)):
        with _attention_of(kind):
            _train(model, job, seed, kind)


def _train(model: Llama, job: Job, seed: int, kind: str) -> None:
    model.shift = int(kind == "positions off by 1")
    model.recompute = kind == "checkpointing"
    block = model.blocks[2]
    assert isinstance(block, Block)
    block.repeated = kind == "other heads in a group"
    block.doubled = kind == "bias twice"
    for each in model.blocks:
        each.explicit = kind == "explicit attention"  # type: ignore[assignment]
        if kind == "compiled blocks":
            each.compile()
    if kind == "one weight off":
        block.k.weight.data[5, 7] *= 1.001
    data, tensor = MESHES.get(kind, (1, 1))
    here = laid_out(model, job.device, data, tensor)
    named = dict(model.named_parameters())
    if kind == "norms not summed":
        for module in model.modules():
            if isinstance(module, nn.RMSNorm):
                vars(module)["forward"] = _half_of_the_weight(module)
    own = {n for n in named if "norm" in n or "bias" in n}
    one_group = kind == "decay of norms"
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in named.items() if n not in own or one_group]},
        {
            "params": [
                p
                for n, p in named.items()
                if n in own and not one_group
                if (kind, n) != ("parameter not stepped", "blocks.1.norm_2.weight")
            ],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=3.03e-4 if kind == "rate + 1 %" else 3e-4,
        betas=(0.9, 0.999 if kind == "beta2 0.999" else 0.95),
        eps=1e-6 if kind == "eps 1e-6" else 1e-8,
        weight_decay=0.1,
        foreach={"foreach": True, "a loop over parameters": False}.get(kind),
        fused=True if kind == "fused" else None,
    )
    before = dict[str, Tensor]()
    down = model.blocks[1].down
    assert isinstance(down, Linear)
    for step in range(STEPS):
        words, labels = batch(job, seed, step)
        count = (labels >= 0).sum()
        if kind == "labels of a row shifted":
            labels[3] = labels[3].roll(1)
        order = torch.arange(job.rows)
        if kind == "rows in another order":
            drawn = torch.Generator().manual_seed(step)
            order = torch.randperm(job.rows, generator=drawn)
        parts = int(kind[0]) if "micro-batches" in kind else 1
        parts = 4 if kind in ("a micro-batch lost", "sums in bf16") else parts
        parts = 2 if kind == "local token count" else parts
        cuts = list(order.view(data, -1)[here].chunk(parts))
        for cut in cuts:
            scores = model(words[cut], 4 if kind == "loss in chunks" else 1)
            if isinstance(scores, DTensor):
                scores = scores.full_tensor()
            scores = scores.bfloat16() if kind == "loss in bf16" else scores.float()
            mine = labels[cut]
            tokens = count if kind != "local token count" else 2 * (mine >= 0).sum()
            loss = F.cross_entropy(
                scores.flatten(0, 1), mine.flatten(), reduction="sum"
            )
            lost = kind == "a micro-batch lost" and cut is cuts[-1]
            (loss / tokens * (not lost)).backward()
            if kind == "sums in bf16":
                for parameter in named.values():
                    assert parameter.grad is not None
                    parameter.grad.copy_(parameter.grad.bfloat16().float())
        _hurt(kind, named, before)
        if kind == "clipped by a local norm":
            for side in (0, 1):
                halves = [
                    p.grad.chunk(2)[side] for p in named.values() if p.grad is not None
                ]
                norm = torch.stack([g.norm() for g in halves]).norm()
                for gradient in halves:
                    gradient.mul_((1 / norm).clamp(max=1))
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        old = down.weight.detach().clone() if kind == "stale weight" else None
        optimizer.step()
        if old is not None:
            vars(down)["forward"] = _with_weight(down, old)
        if kind == "no master weights":
            for parameter in named.values():
                parameter.data.copy_(parameter.data.bfloat16().float())
        optimizer.zero_grad()


def _hurt(kind: str, named: dict[str, nn.Parameter], before: dict[str, Tensor]) -> None:
    for fault, name, factor in (
        ("half a gradient", "blocks.2.o.weight", 0.5),
        ("twice a gradient", "blocks.0.norm_2.weight", 2.0),
    ):
        gradient = named[name].grad
        if kind == fault and gradient is not None:
            gradient.mul_(factor)
    gradient = named["words.weight"].grad
    if kind == "gradient not zeroed" and gradient is not None:
        gradient.add_(before.get("words", torch.zeros(())))
        before["words"] = gradient.clone()


def _half_of_the_weight(norm: nn.RMSNorm) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        cut = x.shape[1] // 2
        y = F.rms_norm(x, norm.normalized_shape, None, norm.eps)
        first = y[:, :cut] * norm.weight
        return torch.cat((first, y[:, cut:] * norm.weight.detach()), 1)

    return forward


def _with_weight(layer: Linear, old: Tensor) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return _product(x, layer.weight + (old - layer.weight).detach())

    return forward


def run(out: Path, job: Job, half: bool, seed: int, kind: str) -> None:
    """Train and record one variant or fault, on ranks if it needs some."""
    ranks = math.prod(MESHES.get(kind, (1, 1)))
    if ranks == 1:
        train(str(out), job, half, seed, kind)
        return
    shared = job.device != "cpu"
    cluster = Cluster(
        ranks,
        backend="nccl" if shared else "gloo",
        share_devices=shared,
        timeout_s=300,
    )
    with cluster:
        cluster.run(train, str(out), job, half, seed, kind)


def rows(
    job: Job, half: bool, seed: int, noise: int, kinds: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the result of each variant and each fault; an error counts as its result.

    Args:
        job: sizes and device of each training.
        half: True rounds products to bf16.
        seed: seed of weights and data.
        noise: number of nudged runs of the reference.
        kinds: variants and faults.
    """
    one = None
    with TemporaryDirectory() as name:
        for kind in (REFERENCE, *kinds):
            begin = time.perf_counter()
            try:
                if one is None:
                    one = _reference(Path(name), job, half, seed, noise)
                    seconds = time.perf_counter() - begin
                    print(f"reference: {seconds:.1f} s", file=sys.stderr, flush=True)
                    continue
                out = Path(name, kind.replace(" ", "-"))
                run(out, job, half, seed, kind)
                result = _compared(one, out)
            except Exception as error:  # of one kind: the others are still to come
                traceback.print_exc()
                text = f"{type(error).__name__}: {error}"[:400]
                result = {"code": BROKEN, "share": 0.0, "said": text}
            yield {
                "kind": kind,
                "is_right": kind not in FAULTS,
                "precision": "bf16" if half else "fp32",
                "seed": seed,
                **result,
                "seconds": round(time.perf_counter() - begin, 1),
            }
            if one is None:
                return
            gc.collect()  # models and what has hooked them know each other


def _reference(folder: Path, job: Job, half: bool, seed: int, noise: int) -> Side:
    names = ("plain", "again", *(f"nudged-{number + 1}" for number in range(noise)))
    for number, name in enumerate(names):
        train(str(folder / name), job, half, seed, "", nudge=max(0, number - 1))
        gc.collect()
    plain, *noisy = [read_merged(folder / name) for name in names]
    return Side(name="one", run=plain, noisy=noisy)


def _compared(one: Side, out: Path) -> dict[str, Any]:
    found = compare(one, Side(name="other", run=read_merged(out)))
    ratios = [row.ratio for row in found.rows if row.bound < 1 or row.differs]
    return {
        "code": found.code,
        "share": round(max(ratios, default=0.0), 3),
        "said": found.lines[0],
        "whole": "".join(line for line in found.lines if line.startswith("median")),
    }


def summary(kept: Sequence[dict[str, Any]], device: str) -> dict[str, Any]:
    """Return counts over all rows so far."""
    right = [row for row in kept if row["is_right"]]
    told = dict[str, list[str]]()
    for precision in dict.fromkeys(row["precision"] for row in kept):
        of = [row for row in kept if row["precision"] == precision]
        missed = {row["kind"] for row in of if row["code"] not in (1, 2)}
        told[precision] = sorted({row["kind"] for row in of} & {*FAULTS} - missed)
    return {
        "torch": str(torch.__version__),
        "device": "cpu" if device == "cpu" else torch.cuda.get_device_name(),
        "right": len(right),
        "wrongly_different": sum(row["code"] not in (SAME, BROKEN) for row in right),
        "broken": sum(row["code"] == BROKEN for row in kept),
        "largest_share": max((row["share"] for row in right), default=0.0),
        "told": told,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and record; return 1 if a right variant fails or cannot run."""
    parser = argparse.ArgumentParser(prog="recorded", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--precision", choices=("fp32", "bf16"), action="append")
    parser.add_argument("--noise", type=int, default=2, help="nudged runs")
    parser.add_argument("--kind", action="append", help="only this one; again for more")
    parser.add_argument("--json", type=Path, help="where the record goes")
    given = parser.parse_args(argv)
    job = SMALL if given.device == "cpu" else LARGE
    path = given.json or (
        RESULTS if job is SMALL else RESULTS.with_name("recorded-cuda.json")
    )
    kept: list[dict[str, Any]] = []
    for precision in given.precision or ["fp32", "bf16"]:
        for seed in range(given.seeds):
            half, kinds = precision == "bf16", given.kind or job.kinds
            for row in rows(job, half, seed, given.noise, kinds):
                kept.append(row)
                print(json.dumps(row), flush=True)
                counts = summary(kept, job.device)
                write_whole(path, json.dumps(counts | {"rows": kept}, indent=1) + "\n")
    print(json.dumps(counts, indent=1))
    return int(bool(counts["wrongly_different"] or counts["broken"]))


if __name__ == "__main__":  # ranks find by its name what is of no __main__
    from gradparity.benchmarks.validation import recorded

    sys.exit(recorded.main())
