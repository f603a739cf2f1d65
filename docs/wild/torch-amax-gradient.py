"""torch: the gradient of amax(), amin() and the infinity norm of a DTensor is NaN.

python torch-amax-gradient.py; exit code 1 where the bug shows.
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
WEIGHT = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]  # the largest element lies on rank 1
CALLS = {
    "amax": lambda x: x.amax(),
    "amin": lambda x: (-x).amin(),
    "infinity norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "max, which is right": lambda x: x.max(),
}


def gradients(weight: Tensor) -> dict[str, Tensor]:
    """Of each call for the same weight."""
    found = {}
    for name, call in CALLS.items():
        leaf = weight.detach().requires_grad_()
        call(leaf).backward()
        assert leaf.grad is not None
        found[name] = leaf.grad
    return found


def rank_main(rank: int, folder: str, results: Any) -> None:
    """The gradients of a weight whose rows are split over the ranks."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    weight = distribute_tensor(torch.tensor(WEIGHT), mesh, [Shard(0)])
    found = {n: g.full_tensor().tolist() for n, g in gradients(weight).items()}
    found["sum"] = f"{weight.sum(dim=[]).placements}"
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def main() -> int:
    """Print what was found."""
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, results), RANKS)
        found = results.get()
    exact = gradients(torch.tensor(WEIGHT, dtype=torch.float64))
    errors = {n: float((torch.tensor(found[n]) - g).norm()) for n, g in exact.items()}
    print("versions: torch", torch.__version__)
    for name, gradient in exact.items():
        print(f"{name}: {found[name]}, should be {gradient.tolist()}")
    print("sum(dim=[]), of all dimensions, is", found["sum"], "and not Partial")
    bug = not max(errors.values()) < 1e-6  # also where it is NaN
    print("parameter: weight")
    print(f"relative error: {errors['amax']}: the reference has norm 1")
    print("reference: the same call on a plain tensor, fp64")
    print("verdict:", "bug" if bug else "no bug")
    return int(bug)


if __name__ == "__main__":
    sys.exit(main())
