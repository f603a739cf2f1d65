"""torch: the sum of norms of a DTensor is not the sum of norms.

python torch-norm-sum.py; exit code 1 where the bug shows.

The loss is a group lasso: it sums the norms of the columns of a weight, and squares the
sum. Each rank holds some rows of the weight.
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
from torch.distributed.tensor import Shard, distribute_tensor


def weight(dtype: torch.dtype) -> Tensor:
    """Return a weight, the same on all ranks."""
    return torch.randn(4, 6, generator=torch.manual_seed(0)).to(dtype)


def penalty(leaf: Tensor) -> tuple[Any, Any]:
    """Return the sum of the columns' norms, and the gradient of its square."""
    leaf.requires_grad_()
    total = torch.linalg.vector_norm(leaf, dim=0).sum()
    total.square().backward()
    return total.detach(), leaf.grad


def rank_main(rank: int) -> list[Tensor]:
    """Return sum and gradient for a weight whose rows are split over the ranks."""
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(weight(torch.float32), mesh, [Shard(0)])
    return [found.full_tensor() for found in penalty(sharded)]


if __name__ == "__main__":
    total, gradient = on_ranks(rank_main)[0]
    right, exact = penalty(weight(torch.float64))
    noise = off(penalty(weight(torch.float32))[1], exact)
    print(f"sum of norms: {total:.6f}, should be {right:.6f}")
    tell(
        not off(gradient, exact) < 1e-3,
        "torch",
        parameter="weight",
        relative_error=f"{off(gradient, exact):.2e}",
        reference=f"a plain tensor, fp64; fp32 is off by {noise:.0e}",
    )
