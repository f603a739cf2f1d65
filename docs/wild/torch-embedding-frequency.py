"""torch: embedding(scale_grad_by_freq=True) on DTensors counts a rank's tokens only.

python torch-embedding-frequency.py; exit code 1 where the bug shows.
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
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.functional import embedding

VOCABULARY, WIDTH = 5, 3


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return a table, tokens and a target, the same on all ranks."""
    seeded = torch.Generator().manual_seed(0)
    table = torch.randn(VOCABULARY, WIDTH, generator=seeded)
    tokens = torch.randint(VOCABULARY, (4, 6), generator=seeded)
    target = torch.randn(4, 6, WIDTH, generator=seeded)
    return table.to(dtype), tokens, target.to(dtype)


def gradient(table: Tensor, tokens: Tensor, target: Tensor, by: bool) -> Any:
    """Return the gradient of the table; ``by`` scales it by frequency."""
    leaf = table.detach().requires_grad_()
    (embedding(tokens, leaf, scale_grad_by_freq=by) - target).square().sum().backward()
    return leaf.grad


def rank_main(rank: int) -> list[Tensor]:
    """Return the table's gradient without and with scaling; the batch is split."""
    mesh = init_device_mesh("cpu", (2,))
    placements = Replicate(), Shard(0), Shard(0)
    whole = inputs(torch.float32)
    parts = [distribute_tensor(t, mesh, [p]) for t, p in zip(whole, placements)]
    return [gradient(*parts, by).full_tensor() for by in (False, True)]


if __name__ == "__main__":
    plain, scaled = on_ranks(rank_main)[0]
    exact = {by: gradient(*inputs(torch.float64), by) for by in (False, True)}
    noise = off(gradient(*inputs(torch.float32), True), exact[True])
    print(f"without scale_grad_by_freq: off by {off(plain, exact[False]):.0e}")
    tell(
        not off(scaled, exact[True]) < 1e-3,
        "torch",
        parameter="table",
        relative_error=f"{off(scaled, exact[True]):.2e}",
        reference=f"plain tensors, fp64; fp32 is off by {noise:.0e}",
    )
