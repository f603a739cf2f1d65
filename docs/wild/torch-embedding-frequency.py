"""torch: embedding(scale_grad_by_freq=True) on DTensors counts a rank's tokens only.

python torch-embedding-frequency.py; exit code 1 where the bug shows.
"""

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

RANKS, VOCABULARY, WIDTH = 2, 5, 3


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A table, tokens and a target, the same on all ranks."""
    seeded = torch.Generator().manual_seed(0)
    table = torch.randn(VOCABULARY, WIDTH, generator=seeded)
    tokens = torch.randint(VOCABULARY, (4, 6), generator=seeded)
    target = torch.randn(4, 6, WIDTH, generator=seeded)
    return table.to(dtype), tokens, target.to(dtype)


def gradient(table: Tensor, tokens: Tensor, target: Tensor, by: bool) -> Tensor:
    """Of the table."""
    leaf = table.detach().requires_grad_()
    found = torch.nn.functional.embedding(tokens, leaf, scale_grad_by_freq=by)
    (found - target).square().sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def rank_main(rank: int, folder: str, results: Any) -> None:
    """The rows of the batch are split over the ranks; the table is replicated."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    placements = Replicate(), Shard(0), Shard(0)
    whole = inputs(torch.float32)
    parts = [distribute_tensor(t, mesh, [p]) for t, p in zip(whole, placements)]
    found = [gradient(*parts, by).full_tensor().tolist() for by in (False, True)]
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def main() -> int:
    """Print what was found."""
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, results), RANKS)
        plain, scaled = results.get()

    def off(found: Any, by: bool) -> float:
        exact = gradient(*inputs(torch.float64), by)
        return float((torch.as_tensor(found) - exact).norm() / exact.norm())

    noise = off(gradient(*inputs(torch.float32), True), True)
    print("versions: torch", torch.__version__)
    print(f"without scale_grad_by_freq: off by {off(plain, False):.0e}")
    print("parameter: table")
    print(f"relative error: {off(scaled, True):.2e}")
    print(f"reference: plain tensors, fp64; fp32 is off by {noise:.0e}")
    print("verdict:", "bug" if off(scaled, True) > 1e-3 else "no bug")
    return int(off(scaled, True) > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
