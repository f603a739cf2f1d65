"""torch: the gradient of amax(), amin() and the infinity norm of a DTensor is NaN.

python torch-amax-gradient.py; exit code 1 where the bug shows.
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

WEIGHT = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]  # the largest element lies on rank 1
CALLS = {
    "amax": lambda x: x.amax(),
    "amin": lambda x: (-x).amin(),
    "infinity norm": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "max, which is right": lambda x: x.max(),
}


def gradients(weight: Tensor) -> dict[str, Tensor]:
    """Return call -> gradient of the weight."""
    leaves = {name: weight.detach().requires_grad_() for name in CALLS}
    for name, leaf in leaves.items():
        CALLS[name](leaf).backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def rank_main(rank: int) -> tuple[str, dict[str, Tensor]]:
    """Return placements of a sum, and call -> gradient; the weight's rows are split."""
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.tensor(WEIGHT), mesh, [Shard(0)])
    found = {name: g.full_tensor() for name, g in gradients(weight).items()}
    return f"{weight.sum(dim=[]).placements}", found


if __name__ == "__main__":
    placements, found = on_ranks(rank_main)[0]
    exact = gradients(torch.tensor(WEIGHT, dtype=torch.float64))
    for name, right in exact.items():
        print(f"{name}: {found[name].tolist()}, should be {right.tolist()}")
    print("sum(dim=[]), of all dimensions, is", placements, "and not Partial")
    error = off(found["amax"], exact["amax"])
    tell(
        not all(off(found[name], right) < 1e-6 for name, right in exact.items()),
        "torch",
        parameter="weight",
        relative_error=f"{error}: the reference has norm 1",
        reference="the same call on a plain tensor, fp64",
    )
