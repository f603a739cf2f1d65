"""Right variants of a job and faults in it: what ``gradparity compare`` says of each.

    python -m gradparity.benchmarks.recorded --seeds 3

A small Llama is trained as one process would, in fp32 and with products rounded to bf16
as tensor cores do. Its variants must be the same, and its faults must be told, by the
numbers or by what must be equal exactly. The record is ``results/recorded.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
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
from torch.utils.checkpoint import checkpoint

from gradparity.conformance.files import write_whole
from gradparity.conformance.record.compare import Side, compare
from gradparity.conformance.record.merge import read_merged
from gradparity.conformance.record.orders import Orders
from gradparity.conformance.record.recorder import Recorder
from gradparity.multiprocess import Cluster

RESULTS = Path(__file__).parent / "results" / "recorded.json"
WIDTH, LAYERS, HEADS, GROUPS, HIDDEN, WORDS, LENGTH, ROWS = (
    128,
    4,
    8,
    2,
    352,
    1024,
    64,
    8,
)
STEPS = 3
MESHES = {
    "fsdp 2": (2, 1),
    "fsdp 4": (4, 1),
    "tp+sp 2": (1, 2),
    "fsdp 2 x tp+sp 2": (2, 2),
}
RIGHT = (
    *("rows in another order", "2 micro-batches", "4 micro-batches", "checkpointing"),
    *("foreach", "fused", "explicit attention", "loss in chunks", *MESHES),
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
    """Rounds operands and results as a bf16 kernel with fp32 sums does."""

    rounds = False

    def forward(self, x: Tensor) -> Tensor:
        """Return x times the weight."""
        if not Linear.rounds:
            return F.linear(x, self.weight, self.bias)
        bias = None if self.bias is None else self.bias.bfloat16().float()
        weight = self.weight.bfloat16().float()
        return F.linear(x.bfloat16().float(), weight, bias).bfloat16()


class Block(nn.Module):
    """Attention with grouped heads, then a gated feed-forward layer."""

    explicit = repeated = doubled = False

    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.norm_1 = nn.RMSNorm(WIDTH, eps=1e-5)
        self.q = Linear(WIDTH, WIDTH, bias=False)
        self.k = Linear(WIDTH, GROUPS * head, bias=False)
        self.v = Linear(WIDTH, GROUPS * head, bias=False)
        self.o = Linear(WIDTH, WIDTH)
        self.norm_2 = nn.RMSNorm(WIDTH, eps=1e-5)
        self.gate = Linear(WIDTH, HIDDEN, bias=False)
        self.up = Linear(WIDTH, HIDDEN, bias=False)
        self.down = Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """Return x plus both branches."""
        y = self.norm_1(x)
        heads = [
            w(y).unflatten(-1, (-1, WIDTH // HEADS)) for w in (self.q, self.k, self.v)
        ]
        q, k, v = _turned(heads[0], turns), _turned(heads[1], turns), heads[2]
        n = q.shape[2] // k.shape[2]
        if self.repeated:
            k, v = k.repeat(1, 1, n, 1), v.repeat(1, 1, n, 1)
        else:
            k, v = k.repeat_interleave(n, 2), v.repeat_interleave(n, 2)
        q32, k32, v32 = (z.transpose(1, 2).float() for z in (q, k, v))
        if self.explicit:
            length = q32.shape[2]
            later = torch.ones(length, length, dtype=torch.bool).triu(1)
            scores = (q32 @ k32.transpose(2, 3)) / math.sqrt(WIDTH // HEADS)
            o = (
                scores.masked_fill(later, -torch.inf).softmax(-1).to(q.dtype).float()
                @ v32
            )
        else:
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
    """Words in, scores of words out; in parts, so that the loss may be in chunks."""

    shift = 0
    recompute = False

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.head = Linear(WIDTH, WORDS, bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                spread = torch.randn_like(parameter)
                norm = "norm" in name
                parameter.copy_(1 + 0.05 * spread if norm else 0.02 * spread)

    def forward(self, words: Tensor, chunks: int = 1) -> Tensor:
        """Return scores of the next words."""
        at = torch.arange(words.shape[1], dtype=torch.float32)
        at[len(at) // 2 :] += self.shift
        half = WIDTH // HEADS // 2
        turns = at[:, None] * 10000.0 ** (-torch.arange(half) / half)
        x = self.words(words)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, turns, use_reentrant=False)
            else:
                x = block(x, turns)
        return torch.cat([self.head(part) for part in self.norm(x).chunk(chunks, 1)], 1)


def batch(seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Words of a random bigram language, and labels of rows of other lengths."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    follow = torch.randint(
        WORDS, (WORDS, 4), generator=torch.Generator().manual_seed(5)
    )
    rows = [torch.randint(WORDS, (ROWS,), generator=generator)]
    for _ in range(LENGTH):
        rows.append(follow[rows[-1], torch.randint(4, (ROWS,), generator=generator)])
    words = torch.stack(rows, 1)
    ends = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=generator)
    labels = words[:, 1:].masked_fill(torch.arange(LENGTH) >= ends, -100)
    return words[:, :-1].contiguous(), labels


def laid_out(model: Llama, data: int, tensor: int) -> int:
    """Lay a model out; return the place of this rank among those with other rows."""
    if data * tensor == 1:
        return 0
    mesh = init_device_mesh("cpu", (data, tensor), mesh_dim_names=("data", "tensor"))
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
        for number in range(LAYERS):
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


def train(out: str, half: bool, seed: int, kind: str, nudge: int = 0) -> None:
    """Train three steps as one variant or with one fault, and record them."""
    torch.set_num_threads(1)
    Linear.rounds = half
    torch.manual_seed(seed)
    model = Llama()
    model.shift = int(kind == "positions off by 1")
    model.recompute = kind == "checkpointing"
    block = model.blocks[2]
    assert isinstance(block, Block)
    block.repeated = kind == "other heads in a group"
    block.doubled = kind == "bias twice"
    for each in model.blocks:
        each.explicit = kind == "explicit attention"  # type: ignore[assignment]
    if kind == "one weight off":
        block.k.weight.data[5, 7] *= 1.001
    data, tensor = MESHES.get(kind, (1, 1))
    here = laid_out(model, data, tensor)
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
        foreach=True if kind == "foreach" else None,
        fused=True if kind == "fused" else None,
    )
    recorder = Recorder(Orders(out=out, steps=(0, STEPS), nudge=nudge))
    recorder.roots.add(model)
    recorder.install()
    before = dict[str, Tensor]()
    down = model.blocks[1].down
    assert isinstance(down, Linear)
    for step in range(STEPS):
        words, labels = batch(seed, step)
        count = (labels >= 0).sum()
        if kind == "labels of a row shifted":
            labels[3] = labels[3].roll(1)
        order = torch.arange(ROWS)
        if kind == "rows in another order":
            order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(step))
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
    if recorder.recording.notes:
        raise RuntimeError(recorder.recording.notes[0])


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
        weight = layer.weight + (old - layer.weight).detach()
        if not Linear.rounds:
            return F.linear(x, weight)
        return F.linear(x.bfloat16().float(), weight.bfloat16().float()).bfloat16()

    return forward


def rows(seeds: int, halves: Sequence[bool]) -> Iterator[dict[str, Any]]:
    """Yield the result of each variant and each fault."""
    with (
        Cluster(world_size=4, backend="gloo") as four,
        Cluster(world_size=2, backend="gloo") as two,
    ):
        for half in halves:
            for seed in range(seeds):
                with TemporaryDirectory() as folder:
                    yield from _of_seed(Path(folder), half, seed, {2: two, 4: four})


def _of_seed(
    folder: Path, half: bool, seed: int, clusters: dict[int, Cluster]
) -> Iterator[dict[str, Any]]:
    for number, name in enumerate(("plain", "again", "nudged-1", "nudged-2")):
        train(str(folder / name), half, seed, "", nudge=max(0, number - 1))
    names = ("plain", "again", "nudged-1", "nudged-2")
    plain, *noisy = [read_merged(folder / name) for name in names]
    one = Side(name="one", run=plain, noisy=noisy)
    for kind in (*RIGHT, *FAULTS):
        out = folder / kind.replace(" ", "-")
        size = math.prod(MESHES.get(kind, (1, 1)))
        if size == 1:
            train(str(out), half, seed, kind)
        else:
            clusters[size].run(train, str(out), half, seed, kind)
        found = compare(one, Side(name="other", run=read_merged(out)))
        ratios = [row.ratio for row in found.rows if row.bound < 1 or row.differs]
        yield {
            "kind": kind,
            "is_right": kind in RIGHT,
            "precision": "bf16" if half else "fp32",
            "seed": seed,
            "code": found.code,
            "share": round(max(ratios, default=0.0), 3),
            "said": found.lines[0],
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and record; 1 if a right variant is accused."""
    parser = argparse.ArgumentParser(prog="recorded", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--precision", choices=("fp32", "bf16"), action="append")
    given = parser.parse_args(argv)
    kept = []
    chosen = given.precision or ["fp32", "bf16"]
    for row in rows(given.seeds, [each == "bf16" for each in chosen]):
        kept.append(row)
        print(json.dumps(row), flush=True)
    right = [row for row in kept if row["is_right"]]
    accused = [row for row in right if row["code"] != 0]
    summary = {
        "torch": str(torch.__version__),
        "right": len(right),
        "accused": len(accused),
        "largest_share": max(row["share"] for row in right),
        "told": {
            precision: sorted(
                kind
                for kind in FAULTS
                if all(
                    row["code"] in (1, 2)
                    for row in kept
                    if (row["kind"], row["precision"]) == (kind, precision)
                )
            )
            for precision in chosen
        },
    }
    write_whole(RESULTS, json.dumps(summary | {"rows": kept}, indent=1) + "\n")
    print(json.dumps(summary, indent=1))
    return int(bool(accused))


if __name__ == "__main__":
    sys.exit(main())
