"""Part of a standalone script whose reference runs on one rank.

Before the ranks start, a separate process runs the workload's ``train_step`` on a mesh
of size 1: once in fp64 for the truth, and twice in fp32 for the noise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ...fixtures import mapped
from .pieces import share
from .template import Expected, Key, Run, Training, begin, in_fp64

__all__ = ["OneRank"]


class OneRank:
    """Results of the workload on one rank, by step."""

    def __init__(self, folder: str, run: Run, work: Any) -> None:
        path = Path(folder, "one-rank")
        arguments = path, run, work
        mp.start_processes(train_alone, arguments, 1, start_method="fork")  # type: ignore[attr-defined,no-untyped-call]
        self.truth, *self.noisy = torch.load(path, weights_only=True)

    def expected(self, number: int, weights: Any) -> Expected:
        """Return the results of a step, and their noise up to that step."""
        expected = {}
        for key, true in self.truth[number].items():
            errors = [
                float((run[step][key] - self.truth[step][key]).norm())
                for run in self.noisy
                for step in range(number + 1)
                if key in run[step] and key in self.truth[step]
            ]
            expected[key] = true, max(errors, default=0.0)
        return expected


def plain(model: Any) -> Any:
    """Return the model unchanged."""
    return model


def wide(model: Any) -> Any:
    """Return the model in fp64."""
    return model.double()


def moved(model: Any) -> Any:
    """Return the model with weights moved by one unit roundoff."""
    source = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.is_floating_point():
            signs = torch.randint(2, p.shape, generator=source) * 2.0 - 1.0
            # 1 + 2**-24 is 1 in fp32, so multiply in fp64.
            p.data.copy_(p.data.double() * (1.0 + 2.0**-24 * signs.double()))
    return model


class Alone(Training):
    """A workload on one rank, which has the rows of all ranks."""

    def __init__(
        self, run: Run, work: Any, change: Callable[[Any], Any], mesh: Any
    ) -> None:
        self.change = change
        super().__init__(replace(run, mesh=dict.fromkeys(run.mesh, 1)), work, mesh)
        self.parts = 1  # of the rows, which ranks see
        for axis in run.data_axes:
            self.parts *= run.mesh[axis]

    def begun(self, model: Any) -> Any:
        """Return the model, changed for this run."""
        return self.change(model)

    def micro_batches(self, step: int) -> list[Any]:
        """Return micro-batches; the n-th has the rows of all ranks' n-th ones."""
        batch = self.work.batch(step, self.run.seed)
        if self.change is wide:
            batch = in_fp64(batch)
        if hasattr(self.work, "micro_batches"):
            return [*self.work.micro_batches(batch)]
        if hasattr(self.work, "shard"):
            return self.run.parts(batch)
        cut = [
            self.run.parts(mapped(batch, partial(share, number=n, of=self.parts)))
            for n in range(self.parts)
        ]
        return [joined(parts) for parts in zip(*cut, strict=True)]

    def values(self, step: int) -> dict[Key, Tensor]:
        """Return all results of a step, as whole tensors."""
        self.handed.clear()
        whole_values = {}
        for key, (values, places) in self.made(self.step(step)).items():
            whole_values[key] = torch.zeros(len(values), dtype=values.dtype)
            whole_values[key][places] = values
        return whole_values


def joined(parts: tuple[Any, ...]) -> Any:
    """Concatenate the rows of all parts."""
    columns: list[list[Tensor]] = [[] for _ in parts]
    for column, part in zip(columns, parts, strict=True):
        mapped(part, column.append)
    whole = iter([torch.cat(rows) for rows in zip(*columns, strict=True)])
    return mapped(parts[0], lambda _: next(whole))


def train_alone(rank: int, path: Path, run: Run, work: Any) -> None:
    """Save the results of the runs on one rank, for the truth and the noise.

    If the workload fails in fp64, its plain run is the truth.
    """
    begin(rank, 1, f"{path}-store")
    axes, runs = tuple(run.mesh), []
    for change in (wide, plain, moved):
        mesh = init_device_mesh("cpu", (1,) * len(axes), mesh_dim_names=axes)
        hooks = []
        try:
            training = Alone(run, work, change, mesh)
            hooks = training.watch()
            runs.append([training.values(step) for step in range(run.steps)])
        except Exception as error:
            # If the run in fp32 raises, report it as well.
            if change is not wide:
                print(f"one rank raised {type(error).__name__}: {error}", flush=True)
                sys.exit(1)
        finally:
            for hook in hooks:
                hook.remove()
    torch.save(runs, path)
    dist.destroy_process_group()
