"""Reinforcement learning in fp16: FSDP2 x tensor parallel trains, one rank samples.

    torchrun --nproc-per-node 4 examples/rl_fp16.py --dtype fp16 --out fp16.json

A byte-level language model learns by policy gradient to write vowels. Compare --dtype
bf16 and --scaler torch.amp:GradScaler: docs/rl.md. 40 steps take some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from gradparity.fixtures import DATASETS, TOPOLOGIES, loss
from gradparity.fixtures.models import TransformerLM

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROMPTS, SAMPLES, PROMPT, COMPLETION = 8, 8, 12, 20
KL = 0.05
SIZES: dict[str, Any] = dict(width=64, heads=4, hidden=128, layers=2)
VOWELS = torch.tensor([letter in b"aeiouAEIOU" for letter in range(256)])


def pretrained(steps: int = 60) -> nn.Module:
    """Return a model that knows some English: trained by rank 0, then broadcast."""
    torch.manual_seed(0)
    model = TransformerLM(**SIZES)
    if dist.get_rank() == 0:
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        for step in range(steps):
            batch = DATASETS["text"].batch(step, seed=1)
            optimizer.zero_grad()
            loss(model(batch.inputs), batch.targets).backward()
            optimizer.step()
    for parameter in model.requires_grad_(False).parameters():
        dist.broadcast(parameter, 0)
    return model


def log_probs(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the log-probability of each completed byte: (B, T) -> (B, COMPLETION)."""
    logits: Tensor = model(tokens)[:, PROMPT - 1 : -1].float()  # tp: an even number
    return logits.log_softmax(-1).gather(-1, tokens[:, PROMPT:, None])[..., 0]


@torch.no_grad()
def rollout(model: nn.Module, step: int) -> tuple[Tensor, Tensor]:
    """Return prompts with completions, and the completions' log-probabilities."""
    generator = torch.Generator().manual_seed(step)
    prompts = DATASETS["text"].batch(step, seed=2).inputs[:PROMPTS, :PROMPT]
    tokens, known = prompts.repeat_interleave(SAMPLES, 0), []
    for _ in range(COMPLETION):
        every = model(tokens)[:, -1].float().log_softmax(-1)
        drawn = torch.multinomial(every.exp(), 1, generator=generator)
        known.append(every.gather(1, drawn))
        tokens = torch.cat([tokens, drawn], 1)
    return tokens, torch.cat(known, 1)


def apart(model: nn.Module, mesh: DeviceMesh) -> int:
    """Count the replicated parameters that differ between tensor-parallel ranks."""
    count = 0
    for p in model.parameters():
        if isinstance(p, DTensor) and "tp" not in (p.device_mesh.mesh_dim_names or ()):
            here = p.to_local().detach()
            parts = [torch.empty_like(here) for _ in range(mesh["tp"].size())]
            dist.all_gather(parts, here, group=mesh.get_group("tp"))
            count += not torch.equal(parts[0], parts[-1])
    return count


def train(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train by REINFORCE with a KL term; the baseline is each prompt's mean reward."""
    dtype = DTYPES[options.dtype]
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    first, engine = pretrained(), TransformerLM(**SIZES).to(dtype)
    actor: Any = TransformerLM(**SIZES)
    actor.load_state_dict(first.state_dict())
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    actor = TOPOLOGIES["fsdp+tp"].apply(actor, mesh, policy)
    optimizer = torch.optim.AdamW(actor.parameters(), lr=2e-3)
    # 2^24 overflows in fp16 at once: the first steps are skipped, on purpose.
    made = {"init_scale": 2.0**24, "growth_interval": 8}
    scaler = resolve_name(options.scaler)("cpu", enabled=dtype == torch.float16, **made)
    told = []
    for step in range(options.steps):
        weights = {n: p.full_tensor() for n, p in actor.named_parameters()}
        engine.load_state_dict(weights)  # casts: the rollout computes as training does
        drawn: list[Any] = [rollout(engine, step) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(drawn)
        tokens, sampled = drawn[0]
        reward = VOWELS[tokens[:, PROMPT:]].float().mean(1).view(PROMPTS, SAMPLES)
        better = (reward - reward.mean(1, True)) / (reward.std(1, keepdim=True) + 1e-4)
        mine, old, advantage = (
            x.chunk(shape[0])[mesh.get_local_rank("dp")]
            for x in (tokens, sampled, better.view(-1, 1))
        )
        optimizer.zero_grad()
        new = log_probs(actor, mine)
        # exp(x) - x - 1: an estimate of the KL divergence that is never negative.
        ahead = log_probs(first, mine) - new
        kl = ahead.exp() - ahead - 1
        scaler.scale((KL * kl - advantage * new).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        off, kl = (new.detach() - old).abs(), kl.detach()
        row = [off.mean(), off.max(), off.sum(1).mean(), kl.mean(), scaler.get_scale()]
        seen = torch.empty(dist.get_world_size(), len(row))
        dist.all_gather([*seen], torch.tensor([*map(float, row)]))
        told.append(
            {
                "reward": float(reward.mean()),
                "kl": float(seen[:, 3].mean()),
                "off": float(seen[:, 0].mean()),
                "off_max": float(seen[:, 1].max()),
                "off_sequence": float(seen[:, 2].mean()),
                "scales": seen[:, 4].tolist(),
                "apart": apart(actor, mesh),
            }
        )
    return told


def main(argv: list[str] | None = None) -> None:
    """Run as one rank of torchrun; rank 0 writes the record."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    add = parser.add_argument
    add("--dtype", choices=DTYPES, default="fp16", help="of training and rollout")
    add("--scaler", default="gradparity.scaler:GradScaler", help="module:class")
    add("--steps", type=int, default=40, help="number of updates (40)")
    add("--out", type=Path, default=Path("rl.json"), help="record of every step")
    options = parser.parse_args(argv)
    dist.init_process_group("gloo")
    told = train(options)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(told))
        print(json.dumps(told[-1]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # what follows Python's end may abort: see examples/trainers/shared.py
