"""Ranks: processes that lay a stack out, train it and return observations."""

from __future__ import annotations

import inspect
import math
import queue
import traceback
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from ....fixtures import local
from ...rank.local_parts import full_name

__all__ = [
    "Layout",
    "Pair",
    "Phase",
    "Row",
    "Rows",
    "Stack",
    "checksum",
    "differing_replicas",
    "mapped",
    "train_on_ranks",
]

Pair = tuple[Any, Any]  # (inputs, targets)
Row = dict[str, Any]
Rows = dict[int, dict[int, Row]]  # step -> rank -> what it saw


@dataclass(frozen=True, kw_only=True)
class Stack:
    """A workload with its training settings."""

    workload: Any  # has model(), batch(step, seed), loss(output, targets), optimizer()
    seed: int = 0
    loss_factor: float = 1.0
    own: bool = False  # whether the workload is the user's
    context: Callable[[], Any] = nullcontext  # of the forward pass
    train_step: Any = None  # this and the next five are the workload's
    micro_batches: Any = None
    shard: Any = None
    weights: Any = None
    gradients: Any = None
    clip_norm: float | None = None
    counted: bool = False  # the loss is (sum, count)
    cut: Callable[[int], list[int]] | None = None  # rows -> those of micro-batches
    unsynced: Callable[[Any], Any] | None = None  # context of all but the last
    frozen: tuple[str, ...] = ()  # parameters that do not train
    recomputed: bool = False  # each layer's forward runs again in backward
    compiled: bool = False


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One run, in which the ranks of a mesh train some of the steps."""

    mesh: dict[str, int]
    data_axes: tuple[str, ...]  # ranks along them see different rows
    steps: range
    passes: Any = None  # forward and backward of one step
    parallelize: Any = None  # None: the model stays as it is
    further: tuple[Any, ...] = ()  # arguments of it
    faults: tuple[Any, ...] = ()


class Layout:
    """A stack that is laid out on this rank."""

    def __init__(self, stack: Stack, phase: Phase) -> None:
        self.stack, self.phase = stack, phase
        sizes, axes = tuple(phase.mesh.values()), tuple(phase.mesh)
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
        self.rows, self.shares = 0, 1  # which of the batch this rank sees, of how many
        for axis in phase.data_axes:
            self.rows = self.rows * phase.mesh[axis] + self.mesh.get_local_rank(axis)
            self.shares *= phase.mesh[axis]
        self.module = self.build()

    def build(self, numbered: bool = False) -> Any:
        """The stack; if ``numbered``, each element of a parameter is its number."""
        stack, phase = self.stack, self.phase
        torch.manual_seed(stack.seed)
        model = stack.workload.model()
        self.shapes = {n: p.shape for n, p in model.named_parameters()}
        if stack.frozen:
            for name in stack.frozen:
                model.get_parameter(name).requires_grad_(False)
        if stack.recomputed:
            for layer in [m for m in model if [*m.parameters()]]:
                again = partial(checkpoint, layer.forward, use_reentrant=False)
                layer.forward = again
        if numbered:
            for p in model.parameters():
                p.data.copy_(torch.arange(float(p.numel())).view_as(p))
        if phase.parallelize:
            model = phase.parallelize(model, self.mesh, *phase.further)
        if stack.compiled:
            model.compile(backend="aot_eager")
        return model

    def parameters(self) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
        """Of each name the parameter, and the places of its local elements."""
        params, numbers = (
            {full_name(n, self.shapes): p for n, p in module.named_parameters()}
            for module in (self.module, self.build(numbered=True))
        )
        places = {n: local(p.detach()).flatten().long() for n, p in numbers.items()}
        return params, places

    def batch(self, step: int) -> Pair:
        """This rank's rows of a batch."""
        whole = self.stack.workload.batch(step, self.stack.seed)
        rows: Pair = mapped(whole, lambda t: t.chunk(self.shares)[self.rows])
        return rows


def mapped(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """A nest of tensors with each one changed."""
    if isinstance(tree, dict):
        return {key: mapped(value, change) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        values = [mapped(value, change) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return change(tree) if torch.is_tensor(tree) else tree


def checksum(*tensors: Tensor) -> int:
    """Of the bits of the local elements."""
    whole = [local(t.detach()).contiguous().view(-1) for t in tensors]
    return zlib.crc32(b"".join(t.view(torch.uint8).numpy().tobytes() for t in whole))


def differing_replicas(ranks: dict[int, Row]) -> list[str]:
    """Parameters of which ranks hold the same elements with other values."""
    copies: dict[tuple[str, int], set[int]] = defaultdict(set)
    for row in ranks.values():
        for key, value in row["replicas"].items():
            copies[key].add(value)
    return [*dict.fromkeys(n for (n, _), values in copies.items() if len(values) > 1)]


def train_on_ranks(
    train: Callable[..., Iterator[Row]], stack: Stack, phase: Phase, folder: str
) -> tuple[Rows, list[str]]:
    """The observations and errors of the ranks of a phase."""
    # fork hands the stack over as it is: a workload need not be picklable
    fork, world = mp.get_context("fork"), math.prod(phase.mesh.values())
    log = fork.Queue()
    common = world, log, f"file://{folder}/rendezvous-{phase.steps.start}"
    ranks = [
        fork.Process(
            target=rank_main, args=(rank, *common, train, stack, phase, folder)
        )
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    rows: Rows = defaultdict(dict)
    errors: list[str] = []
    ended = 0
    while ended < world:
        try:
            # ranks end together: once one has ended or raised, a silent one waits in
            # vain
            rank, step, row = log.get(timeout=3 if errors or ended else 120)
        except queue.Empty:
            errors += [] if errors else ["the ranks hang"]
            break
        if isinstance(row, dict):
            rows[step][rank] = row
        else:
            ended += 1
            errors += [f"step {step}: rank {rank} raised {row}"] if row else []
    for process in ranks:
        process.kill() if errors else process.join()
    return {s: r for s, r in rows.items() if len(r) == world}, errors


def rank_main(
    rank: int, world: int, log: Any, address: str, train: Any, *training: Any
) -> None:
    """One rank: write the rows that ``train`` yields, one a step, to ``log``."""
    stack, phase, _ = training
    step = phase.steps.start
    try:
        dist.init_process_group("gloo", address, rank=rank, world_size=world)
        for row in train(*training):
            log.put((rank, step, row))
            step += 1
        log.put((rank, None, None))
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:300]}"
        if stack.own:
            for frame in traceback.extract_tb(error.__traceback__):
                if frame.filename == inspect.getfile(type(stack.workload)):
                    text += f" ({frame.name}, line {frame.lineno}: {frame.line})"
        log.put((rank, step, text))
    # the queue writes in a thread, which must end before the process
    log.close()
    log.join_thread()
