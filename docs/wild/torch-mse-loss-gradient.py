"""torch: the gradient of mse_loss() on sharded DTensors is too large by the ranks.

python torch-mse-loss-gradient.py; exit code 1 where the bug shows.
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
from torch.nn.functional import linear, mse_loss, smooth_l1_loss

SHAPES = (3, 4), (8, 4), (8, 3)
LOSSES = {
    "mse_loss": mse_loss,
    "smooth_l1_loss": smooth_l1_loss,
    "squares, which is right": lambda x, y: (x - y).square().mean(),
}


def inputs(dtype: torch.dtype) -> list[Tensor]:
    """Return a weight, rows and targets, the same on all ranks."""
    seeded = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=seeded).to(dtype) for shape in SHAPES]


def gradients(weight: Tensor, rows: Tensor, targets: Tensor) -> dict[str, Any]:
    """Return loss function -> (loss, gradient of the weight)."""
    found = {}
    for name, loss in LOSSES.items():
        leaf = weight.detach().requires_grad_()
        value = loss(linear(rows, leaf), targets)
        value.backward()
        found[name] = value.detach(), leaf.grad
    return found


def rank_main(rank: int) -> dict[str, list[Tensor]]:
    """Return each loss and gradient; rows are split, the weight is replicated."""
    mesh = init_device_mesh("cpu", (2,))
    placements = Replicate(), Shard(0), Shard(0)
    tensors = zip(inputs(torch.float32), placements)
    found = gradients(*(distribute_tensor(t, mesh, [p]) for t, p in tensors))
    return {name: [t.full_tensor() for t in both] for name, both in found.items()}


if __name__ == "__main__":
    found = on_ranks(rank_main)[0]
    exact, fp32 = gradients(*inputs(torch.float64)), gradients(*inputs(torch.float32))
    for name, both in exact.items():
        errors = map(off, found[name], both)
        print("{}: loss off by {:.0e}, gradient by {:.0e}".format(name, *errors))
    error, noise = (
        off(each["mse_loss"][1], exact["mse_loss"][1]) for each in (found, fp32)
    )
    tell(
        not error < 1e-3,
        "torch",
        parameter="weight",
        relative_error=f"{error:.2e}",
        reference=f"plain tensors, fp64; fp32 is off by {noise:.0e}",
    )
