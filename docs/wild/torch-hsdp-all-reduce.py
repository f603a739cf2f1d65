"""torch: FSDP2's set_requires_all_reduce loses what the last micro-batch does not use.

python torch-hsdp-all-reduce.py; exit code 1 where the bug shows.
"""

# - The frame, the same in all scripts. Exit code 1: bug, 0: no bug, 3: no verdict.
import os
import sys
import tempfile
from importlib.metadata import version
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def crashed(*error: Any) -> NoReturn:
    """Print an error, such as a failed import, and exit with 3: no verdict."""
    sys.__excepthook__(*error)
    sys.exit(3)


def as_rank(rank: int, main: Any, given: Any, ranks: int, folder: str) -> None:
    """Run main on one rank of a process group, and save its result."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
    os.environ |= {name: str(number) for name, number in where.items()}
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=ranks
    )
    try:
        torch.save(main(rank, *given), f"{folder}/{rank}.pt")
        dist.barrier()  # no rank leaves while another still needs it
    finally:
        dist.destroy_process_group()


def on_ranks(main: Any, *given: Any, ranks: int = 2) -> list[Any]:
    """Run main(rank, *given) on all ranks; return their results, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(as_rank, (main, given, ranks, folder), ranks)
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(ranks)]


def off(found: Any, exact: torch.Tensor) -> float:
    """Return the relative error of a gradient; a missing one counts as zero."""
    return float(((0 if found is None else found) - exact).norm() / exact.norm())


def tell(bug: bool, package: str, **lines: str) -> NoReturn:
    """Print versions, lines and verdict; exit with 1 for a bug, else 0."""
    versions = {name: version(name) for name in dict.fromkeys((package, "torch"))}
    print("versions:", *(f"{name} {number}" for name, number in versions.items()))
    for key, text in lines.items():
        print(f"{key.replace('_', ' ')}: {text}")
    print("verdict:", "bug" if bug else "no bug", flush=True)
    sys.exit(int(bug))


sys.excepthook = crashed
# - The finding
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import mse_loss

STEPS, PARTS, RANKS = 2, 2, 4


class Net(nn.Sequential):
    def forward(self, x: Tensor, branch: bool) -> Tensor:
        hidden = self[0](x).tanh()
        return self[2](self[1](hidden).tanh() if branch else hidden)


def problem(dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    """Return a model, and inputs and targets by step, rank and micro-batch."""
    torch.manual_seed(0)
    model, shape = Net(*(nn.Linear(4, 4) for _ in "123")), (STEPS, RANKS, PARTS, 3, 4)
    return model.to(dtype), torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)


WAYS = {
    "set_requires_all_reduce(last)": "set_requires_all_reduce",
    "set_requires_gradient_sync(last)": "set_requires_gradient_sync",
    "all-reduced in each": None,
}
UNUSED = (0, PARTS - 1)  # by all ranks: the last micro-batch of the first step


def rank_main(rank: int) -> dict[str, list[Any]]:
    """Return way to accumulate -> gradient of the middle layer in each step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found: dict[str, list[Any]] = {way: [] for way in WAYS}
    for way, declare in WAYS.items():
        model, x, y = problem(torch.float32)
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
        for step in range(STEPS):
            model.zero_grad()
            for part in range(PARTS):
                if declare:
                    getattr(model, declare)(part == PARTS - 1)
                output = model(x[step, rank, part], (step, part) != UNUSED)
                mse_loss(output, y[step, rank, part]).div(PARTS).backward()
            gradient = model[1].weight.grad
            found[way].append(None if gradient is None else gradient.full_tensor())
    return found


def reference(dtype: torch.dtype) -> list[Tensor]:
    """Return the middle layer's gradient in each step, from one process."""
    (model, x, y), found = problem(dtype), []
    for step in range(STEPS):
        model.zero_grad()
        for part in range(PARTS):
            output = model(x[step, :, part], (step, part) != UNUSED)
            mse_loss(output, y[step, :, part]).div(PARTS).backward()
        found.append(model[1].weight.grad.clone())
    return found


if __name__ == "__main__":
    found, exact = on_ranks(rank_main, ranks=RANKS)[0], reference(torch.float64)
    errors = {way: [*map(off, found[way], exact)] for way in WAYS}
    for way, (one, two) in errors.items():
        print(f"{way}: the gradient is off by {one:.1e} in step 1, {two:.1e} in step 2")
    lost = max(errors["set_requires_all_reduce(last)"])
    noise = max(map(off, reference(torch.float32), exact))
    tell(
        not lost < 1e-3,
        "torch",
        parameter="1.weight",
        relative_error=f"{lost:.2e}",
        reference=f"one process, fp64; fp32 is off by {noise:.0e}",
    )
