"""torch: the gradient of mse_loss() on sharded DTensors is too large by the ranks.

python torch-mse-loss-gradient.py; exit code 1 where the bug shows.
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
from torch.nn.functional import linear, mse_loss, smooth_l1_loss

RANKS, SHAPES = 2, ((3, 4), (8, 4), (8, 3))
LOSSES = {
    "mse_loss": mse_loss,
    "smooth_l1_loss": smooth_l1_loss,
    "squares, which is right": lambda x, y: (x - y).square().mean(),
}


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """A weight, rows and targets, the same on all ranks; the ranks share the rows."""
    seeded = torch.Generator().manual_seed(0)
    return [torch.randn(n, m, generator=seeded).to(dtype) for n, m in SHAPES]


def gradients(weight: Tensor, rows: Tensor, targets: Tensor) -> dict[str, Any]:
    """Each loss and the gradient of the weight for it."""
    found = {}
    for name, loss in LOSSES.items():
        leaf = weight.detach().requires_grad_()
        value = loss(linear(rows, leaf), targets)
        value.backward()
        found[name] = value.detach(), leaf.grad
    return found


def rank_main(rank: int, folder: str, results: Any) -> None:
    """The rows of the batch are split over the ranks; the weight is replicated."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    placements = Replicate(), Shard(0), Shard(0)
    tensors = zip(inputs(torch.float32), placements)
    found = gradients(*(distribute_tensor(t, mesh, [p]) for t, p in tensors))
    whole = {n: [t.full_tensor().tolist() for t in both] for n, both in found.items()}
    results.put(whole)  # the same on both ranks
    dist.destroy_process_group()


def main() -> int:
    """Print what was found."""
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, results), RANKS)
        found = results.get()
    exact, fp32 = gradients(*inputs(torch.float64)), gradients(*inputs(torch.float32))

    def off(value: Any, right: Tensor) -> float:
        return float((torch.as_tensor(value) - right).norm() / right.norm())

    print("versions: torch", torch.__version__)
    for name, both in exact.items():
        errors = [off(v, right) for v, right in zip(found[name], both)]
        print("{}: loss off by {:.0e}, gradient by {:.0e}".format(name, *errors))
    error = off(found["mse_loss"][1], exact["mse_loss"][1])
    print(f"parameter: weight\nrelative error: {error:.2e}")
    noise = off(fp32["mse_loss"][1], exact["mse_loss"][1])
    print(f"reference: plain tensors, fp64; fp32 is off by {noise:.0e}")
    print("verdict:", "bug" if error > 1e-3 else "no bug")
    return int(error > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
