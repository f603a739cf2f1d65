"""fairscale: ShardedDataParallel keeps the gradients that OSS.zero_grad() clears.

python fairscale-stale-bucket.py; exit code 1 where the bug shows.
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
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS
from torch import Tensor, nn
from torch.nn.functional import mse_loss

LR, STEPS = 0.5, 3


def problem(dtype: torch.dtype) -> tuple[Any, Tensor, Tensor]:
    """Return the model, and all steps' features and targets: same on all ranks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    x, y = torch.randn(STEPS, 8, 4), torch.randn(STEPS, 8, 3)
    return model.to(dtype), x.to(dtype), y.to(dtype)


DEFAULT = 2**23  # elements of a bucket
WAYS: dict[str, tuple[Any, int]] = {
    "optimizer.zero_grad()": (lambda model, own: own.zero_grad(), DEFAULT),
    "optimizer.zero_grad(set_to_none=False)": (
        lambda model, own: own.zero_grad(set_to_none=False),  # torch < 2.0
        DEFAULT,
    ),
    "model.zero_grad()": (lambda model, own: model.zero_grad(), DEFAULT),
    "optimizer.zero_grad(), no buckets": (lambda model, own: own.zero_grad(), 0),
}


def rank_main(rank: int) -> dict[str, Tensor]:
    """Return way to clear gradients -> first layer's weight after all steps."""
    found = {}
    for way, (clear, size) in WAYS.items():
        model, x, y = problem(torch.float32)
        optimizer = OSS(model.parameters(), optim=torch.optim.SGD, lr=LR)
        sharded = ShardedDataParallel(model, optimizer, reduce_buffer_size=size)
        for rows, targets in zip(x.chunk(2, 1)[rank], y.chunk(2, 1)[rank]):
            clear(sharded, optimizer)
            mse_loss(sharded(rows), targets).backward()
            optimizer.step()
        found[way] = model[0].weight.detach()
    return found


def reference(dtype: torch.dtype) -> Tensor:
    """Return the first layer's weight after all steps on one process."""
    model, x, y = problem(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for rows, targets in zip(x, y):
        optimizer.zero_grad()
        mse_loss(model(rows), targets).backward()
        optimizer.step()
    return model[0].weight.detach()


if __name__ == "__main__":
    found, exact = on_ranks(rank_main)[0], reference(torch.float64)
    errors = {way: off(found[way], exact) for way in WAYS}
    for way, error in errors.items():
        print(f"{way}: the weight is off by {error:.1e}")
    noise = off(reference(torch.float32), exact)
    tell(
        not errors["optimizer.zero_grad()"] < 1e-4,
        "fairscale",
        parameter="0.weight after three steps",
        relative_error=f"{errors['optimizer.zero_grad()']:.2e}",
        reference=f"one process, fp64; fp32 is off by {noise:.0e}",
    )
