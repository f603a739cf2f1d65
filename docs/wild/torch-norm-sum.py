"""torch: the sum of norms of a DTensor is not the sum of norms.

python torch-norm-sum.py; exit code 1 where the bug shows.

A group lasso: the squared sum of the norms of a weight's columns, rows on the ranks.
"""

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 2


def weight(dtype: torch.dtype) -> Tensor:
    """The same on all ranks."""
    return torch.randn(4, 6, generator=torch.manual_seed(0)).to(dtype)


def penalty(leaf: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the norms of the columns, and the gradient of its square."""
    leaf.requires_grad_()
    total = torch.linalg.vector_norm(leaf, dim=0).sum()
    total.square().backward()
    assert leaf.grad is not None
    return total.detach(), leaf.grad


def rank_main(rank: int, folder: str, results: Any) -> None:
    """Of a weight whose rows are split over the ranks."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    sharded = distribute_tensor(weight(torch.float32), mesh, [Shard(0)])
    found = [t.full_tensor().tolist() for t in penalty(sharded)]
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def main() -> int:
    """Print what was found."""
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, results), RANKS)
        total, gradient = results.get()
    exact, right = penalty(weight(torch.float64))
    fp32 = penalty(weight(torch.float32))[1]

    def off(found: Any) -> float:
        return float((torch.as_tensor(found) - right).norm() / right.norm())

    print("versions: torch", torch.__version__)
    print(f"sum of norms: {total:.6f}, should be {float(exact):.6f}")
    print("parameter: weight")
    print(f"relative error: {off(gradient):.2e}")
    print(f"reference: a plain tensor, fp64; fp32 is off by {off(fp32):.0e}")
    print("verdict:", "bug" if off(gradient) > 1e-3 else "no bug")
    return int(off(gradient) > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
