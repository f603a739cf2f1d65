"""torch: on gloo, the backward of all_gather returns permuted gradients.

python torch-gather-permuted.py; exit code 1 where the bug shows.

Both ranks gather a matrix and weigh its elements; the weights are a transposed matrix.
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
from torch.distributed.nn.functional import all_gather


def weights(rank: int, dtype: torch.dtype) -> Tensor:
    """Return a 3 x 4 matrix, stored as the transpose of a 4 x 3 matrix."""
    return torch.randn(4, 3, generator=torch.manual_seed(rank)).to(dtype).t()


def rank_main(rank: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of a matrix, with weights transposed and in order."""
    transposed, gradients = weights(rank, torch.float32), []
    for weight in (transposed, transposed.contiguous()):
        matrix = torch.ones(3, 4, requires_grad=True)
        sum((each * weight).sum() for each in all_gather(matrix)).backward()
        gradients.append(matrix.grad)
    return tuple(gradients)


if __name__ == "__main__":
    gradient, in_order = on_ranks(rank_main)[0]
    exact = sum(weights(rank, torch.float64) for rank in range(2))
    print(f"with contiguous weights: off by {off(in_order, exact):.0e}")
    tell(
        not off(gradient, exact) < 1e-3,
        "torch",
        parameter="matrix, on rank 0",
        relative_error=f"{off(gradient, exact):.2e}",
        reference=f"the sum of the ranks' weights, fp64; in order fp32 is off by "
        f"{off(in_order, exact):.0e}",
    )
