"""Fixed text of a standalone script: training on ranks and on one process in fp64.

``standalone.py`` adds a workload, a :class:`Run` with its functions, a :class:`Scaled`
if a scaler is tested, and a call of :func:`main`.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...fixtures import mapped
from ..rank.local_parts import full_name

REFERENCE = "one process in fp64"
LIMIT = timedelta(seconds=120)  # for which ranks wait for each other
Key = tuple[str, str]  # ("gradient", name of the parameter)
Values = dict[Key, tuple[Tensor, Any]]  # elements and their places in the tensor
Expected = dict[Key, Tensor]  # all elements


@dataclass(frozen=True, kw_only=True)
class Run:
    """Settings of a script's training."""

    mesh: dict[str, int]
    data_axes: tuple[str, ...]  # ranks along them see different rows
    steps: int
    passes: Callable[..., None]  # forward and backward of a step
    seed: int = 0
    parallel: bool = True  # parallelize is called
    policy: tuple[Any, ...] = ()  # further arguments of parallelize
    loss_factor: float = 1.0
    autocast: torch.dtype | None = None  # of the forward pass
    limit: float = 1e-4  # of relative errors: far above the rounding of correct runs
    parts: Callable[[Any], list[Any]] = lambda batch: [batch]  # cuts a batch
    placed: Callable[..., Any] | None = None  # reads weights() and gradients()
    clip_norm: float = math.inf
    order: Callable[[Any], Any] = list  # sorts an optimizer's parameters


def flat(tensor: Tensor) -> Tensor:
    """Return all elements of a tensor over its mesh, with partial sums added up."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().double().flatten().clone()


def in_fp64(batch: Any) -> Any:
    """Return a copy of a value with floating tensors in fp64."""
    return mapped(batch, lambda t: t.double() if t.is_floating_point() else t)


class Training:
    """A workload laid out over a mesh, or on one process in fp64."""

    def __init__(self, run: Run, work: Any, mesh: Any) -> None:
        self.run, self.work, self.mesh = run, work, mesh
        self.share, self.shares = 0, 1  # part of the rows, number of parts
        for axis in run.data_axes if mesh else ():
            self.share = self.share * run.mesh[axis] + mesh.get_local_rank(axis)
            self.shares *= run.mesh[axis]
        if mesh and run.placed:
            self.module = self.build()
            placed_weights = run.placed(work.weights(self.module), self.shapes)
        else:  # numbered weights first: some workloads keep the last model they made
            twin = self.named(self.build(numbered=True))
            self.module = self.build()
            placed_weights = {
                n: (p, flat(twin[n]).long()) for n, p in self.named(self.module).items()
            }
        self.params = {name: tensor for name, (tensor, _) in placed_weights.items()}
        self.places = {name: places for name, (_, places) in placed_weights.items()}
        self.handed: dict[str, Tensor] = {}
        self.steps: list[list[str]] = []  # names that each running step has recorded
        pairs = [(n, p) for n, p in self.params.items() if p.requires_grad]
        self.own = hasattr(work, "train_step")
        if not (mesh and self.own):
            self.optimizer = work.optimizer(run.order(pairs))

    def build(self, numbered: bool = False) -> Any:
        """Return the model, laid out; if numbered, with element numbers as values."""
        torch.manual_seed(self.run.seed)
        model = self.work.model()
        if not self.mesh:
            model = model.double()
        self.shapes = {name: p.shape for name, p in model.named_parameters()}
        for p in model.parameters() if numbered else ():
            p.data.copy_(torch.arange(float(p.numel())).view_as(p))
        if not (self.mesh and self.run.parallel):
            return model
        return self.work.parallelize(model, self.mesh, *self.run.policy)

    def named(self, module: Any) -> dict[str, Any]:
        """Return a module's parameters by their names in the model."""
        named: Any = getattr(module, "named_parameters", dict)()
        return {full_name(n, self.shapes): p for n, p in dict(named).items()}

    def micro_batches(self, step: int) -> list[Any]:
        """Return this rank's micro-batches, each (inputs, targets)."""
        batch = self.work.batch(step, self.run.seed)
        if not self.mesh:
            batch = in_fp64(batch)
        elif hasattr(self.work, "shard"):
            batch = self.work.shard(batch, self.mesh)
        else:
            batch = mapped(batch, lambda t: t.chunk(self.shares)[self.share])
        if hasattr(self.work, "micro_batches"):
            return [*self.work.micro_batches(batch)]
        return self.run.parts(batch) if self.mesh else [batch]

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the context of each forward."""
        dtype = self.run.autocast if self.mesh else None
        return torch.autocast("cpu", dtype) if dtype else nullcontext()

    def step(self, number: int) -> Any:
        """Run one step without a scaler; return the gradient norm before clipping."""
        if self.mesh and self.own:
            step = self.work.train_step
            returned = step(self.module, self.micro_batches(number), None)
            return returned[1] if isinstance(returned, tuple) else None
        self.optimizer.zero_grad()
        self.run.passes(self, number, lambda loss, *_: loss)
        bound = getattr(self.work, "clip_norm", None) or self.run.clip_norm
        norm = None if self.mesh else clip_grad_norm_(self.params.values(), bound)
        self.optimizer.step()
        return norm

    def placed(self, kind: str, tensors: dict[str, Tensor]) -> Values:
        """Return weights or gradients with the positions of their elements."""
        method = getattr(self.work, f"{kind}s", None)  # the workload's own method
        if self.mesh and self.run.placed and method:
            parts = self.run.placed(method(self.module), self.shapes)
        else:
            parts = {name: (t, self.places[name]) for name, t in tensors.items()}
        return {(kind, name): (flat(t), at) for name, (t, at) in parts.items()}

    def watch(self) -> list[Any]:
        """Hook all optimizers; return the handles."""
        left = register_optimizer_step_post_hook(self.leave)
        return [register_optimizer_step_pre_hook(self.look), left]

    def leave(self, *_: Any) -> None:
        """Note that an optimizer has stepped."""
        self.steps.pop()

    def find(self) -> None:
        """Look up the parameters again, because a step may have replaced them."""
        if not (self.mesh and self.run.placed):
            self.params = self.named(self.module)

    def look(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Record gradients before an optimizer steps, or after its closure."""
        self.steps.append([])
        closure = (*args[1:], kwargs.get("closure"))[0]
        if closure is None:
            return self.keep(optimizer)

        def evaluated() -> Any:
            loss = closure()
            self.keep(optimizer)
            return loss

        if len(args) > 1:
            return (args[0], evaluated, *args[2:]), kwargs
        return args, {**kwargs, "closure": evaluated}

    def keep(self, optimizer: Any) -> None:
        """Record the first gradients that an optimizer has in a step."""
        self.find()
        for outer in self.steps[:-1]:  # a wrapper's step: the inner one counts
            while outer:
                del self.handed[outer.pop()]
        scale = getattr(optimizer, "grad_scale", None)  # fused ones divide by it
        used = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, p in self.params.items():
            if id(p) in used and p.grad is not None and name not in self.handed:
                self.handed[name] = p.grad.detach() / (1.0 if scale is None else scale)
                self.steps[-1].append(name)

    def made(self, norm: Any) -> Values:
        """Return gradients, weights and the norm after a step, by kind and name.

        Args:
            norm: norm that ``train_step`` returned; None without one.
        """
        self.find()
        results = self.placed("gradient", self.handed)
        if norm is not None:
            norm = torch.as_tensor(norm, dtype=torch.float64)
            results["norm", "all gradients"] = flat(norm), slice(None)
        return results | self.placed("weight", self.params)

    def expected(self, number: int, weights: list[Values]) -> Expected:
        """Return the result of a step on one process from the ranks' weights."""
        for weights_of_rank in weights:
            for (_, name), (values, at) in weights_of_rank.items():
                self.params[name].data.view(-1)[at] = values
        norm = self.step(number)
        grads = {n: p.grad for n, p in self.params.items() if p.grad is not None}
        results = self.placed("gradient", grads)
        results["norm", "all gradients"] = flat(norm), slice(None)
        # Other optimizers divide by values that may be only rounding; a train_step may
        # have a schedule.
        if type(self.optimizer) is torch.optim.SGD and not self.own:
            results |= self.placed("weight", self.params)
        return {key: values for key, (values, _) in results.items()}


def gathered(value: Any) -> list[Any]:
    """Gather a value from each rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def departures(run: Run, rows: list[Values], expected: Expected) -> Iterator[str]:
    """Yield a line for each value that differs from the reference."""
    for key, true in expected.items():
        size = float(true.norm()) or 1.0
        # A gradient that is small beside the others may be only rounding.
        alike = [float(t.norm()) for k, t in expected.items() if k[0] == key[0]]
        limit = run.limit * max(size, max(alike) / 10)
        for rank, row in enumerate(rows):
            values, places = row.get(key, (true, slice(None)))
            error = float((values - true[places]).norm())
            if not error <= limit:
                text = f"rank {rank}: {' of '.join(key)}: relative error"
                yield f"{text} {error / size:.2g}"


def train(run: Run, work: Any, scaled: Any) -> list[str]:
    """Train; return the differences of the first step that has any."""
    axes, sizes = zip(*run.mesh.items(), strict=True)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    training, compared = Training(run, work, mesh), 0
    alone = Training(run, work, None)
    training.watch()
    for step in range(run.steps):
        training.handed.clear()
        before = training.placed("weight", training.params)
        facts = scaled.step(training, step) if scaled else training.step(step)
        total = torch.ones(())
        dist.all_reduce(total)  # a stray collective of the step would pair with it
        if total != mesh.size():
            return [f"step {step}: a later all-reduce of ones gave {total:g}"]
        if wrong := scaled.violations(step, gathered(facts)) if scaled else []:
            return wrong
        if scaled and scaled.skips:
            compared += 1  # by its rule
            continue
        results = training.made(None if scaled else facts)
        compared += sum(kind == "gradient" for kind, _ in results)
        expected = alone.expected(step, gathered(before))
        if wrong := [*departures(run, gathered(results), expected)]:
            return [f"step {step}: {text}; reference: {REFERENCE}" for text in wrong]
    return [] if compared else sys.exit(3)  # no verdict


def on_rank(rank: int, folder: str, run: Run, work: Any, scaled: Any) -> None:
    """Train on one rank; exit with 1 if a value differs or an error is raised."""
    warnings.simplefilter("ignore")  # fully_shard warns of views
    world = math.prod(run.mesh.values())
    # a process group like that of torchrun's ranks
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world))
    dist.init_process_group("gloo", f"file://{folder}/store", LIMIT, world, rank)
    try:
        lines = train(run, work, scaled)
        if rank == 0:
            print("\n".join(lines) or "no violation", flush=True)
        dist.barrier()  # the first rank that ends with 1 has the others ended
    except Exception as error:
        print(f"rank {rank} raised {type(error).__name__}: {error}", flush=True)
        sys.exit(1)
    dist.destroy_process_group()
    sys.exit(bool(lines))


def main(run: Run, work: Any, scaled: Any = lambda: None) -> int:
    """Run the ranks; return 1 on a difference or error, 3 if nothing was compared."""
    world = math.prod(run.mesh.values())
    with tempfile.TemporaryDirectory() as folder:
        logging.disable(logging.WARNING)
        try:
            arguments = folder, run, work, scaled()
            mp.start_processes(on_rank, arguments, world, start_method="fork")  # type: ignore[attr-defined,no-untyped-call]
        except mp.ProcessExitedException as end:  # type: ignore[attr-defined]
            nothing = end.exit_code == 3
            if end.exit_code != 1:
                print("nothing was compared: no gradients" if nothing else end)
            return 3 if nothing else 1
    return 0
