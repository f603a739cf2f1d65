"""Options of the four trainers, their batches, and the curves to compare.

Not a script to run. Every script takes the same options. It trains up to ``--steps``.
If ``--folder`` holds a checkpoint, training goes on from it; at the end it saves one.
Each rank appends to ``curve-RANK.jsonl``: step, loss of the rank's rows, scale. Floats
in JSON are exact, so two runs are equal if and only if their files are equal.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from gradparity.fixtures import DATASETS, Batch

__all__ = ["Options", "batch_of", "leave", "parse", "report_step"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of the training, and its folder."""

    scaler: Callable[..., Any]
    """Class of the scaler; two runs that are compared differ only in it."""
    init_scale: float
    """Initial scale; the default overflows in fp16, so that steps are skipped."""
    steps: int
    """Total number of steps, including those before the checkpoint."""
    folder: Path
    """Folder of checkpoint and curves."""

    @property
    def rank(self) -> int:
        """Rank that torchrun gave this process; 0 without torchrun."""
        return int(os.environ.get("RANK", "0"))

    @property
    def ranks(self) -> int:
        """Number of ranks; 1 without torchrun."""
        return int(os.environ.get("WORLD_SIZE", "1"))


def parse(text: str, argv: Sequence[str] | None) -> Options:
    """Return the options of the command line; ``text`` is the script's description."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--scaler", default="gradparity.scaler:GradScaler", help="module:class")
    # 2^19 overflows in fp16 at once, so that the first steps show what a skip does.
    add("--init-scale", type=float, default=2.0**19, help="first scale (2^19)")
    add("--steps", type=int, default=12, help="train up to this step (12)")
    add("--folder", type=Path, default=Path("trained"), help="checkpoint and curves")
    parsed = parser.parse_args(argv)
    module, _, name = parsed.scaler.partition(":")
    parsed.scaler = getattr(importlib.import_module(module), name)
    parsed.folder.mkdir(parents=True, exist_ok=True)
    return Options(**vars(parsed))


def batch_of(step: int, index: int, count: int) -> Batch:
    """Return part ``index`` of ``count`` equal parts of the batch of ``step``."""
    return DATASETS["text"].batch(step, seed=0).shard(index, count)


def report_step(options: Options, step: int, loss: float, scale: float) -> None:
    """Write down one step on every rank; rank 0 prints it as well."""
    if options.rank == 0:
        print(f"step {step:3}  loss {loss:.6f}  scale {scale:g}", flush=True)
    with (options.folder / f"curve-{options.rank}.jsonl").open("a") as curve:
        curve.write(json.dumps([step, loss, scale]) + "\n")


def leave() -> None:
    """End a rank of torchrun at once, because Python's normal exit may abort.

    DDP keeps gloo's threads after the process group has ended. If a thread then frees a
    tensor, the process aborts: https://github.com/pytorch/pytorch/issues/190489
    """
    if not dist.is_initialized():
        return
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
