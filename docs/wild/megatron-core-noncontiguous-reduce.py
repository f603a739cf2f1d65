"""Megatron-Core: a gradient that is not contiguous is not summed over the ranks.

python megatron-core-noncontiguous-reduce.py; exit code 1 where the bug shows.
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
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor

TOKENS, ROWS, WIDTH = 5, 3, 8


def weights(dtype: torch.dtype) -> list[Tensor]:
    """Return tokens, a projection of them and a head, the same on all ranks."""
    seeded = torch.Generator().manual_seed(0)
    shapes = (TOKENS, ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, 4)
    return [torch.randn(s, generator=seeded).to(dtype) for s in shapes]


def gradient(hidden: Tensor, below: Tensor, head: Tensor, split: bool) -> Any:
    """Return the projection's gradient; the head may be split by columns."""
    below.requires_grad_()
    states = (hidden @ below).tanh()
    if split:
        states = copy_to_tensor_model_parallel_region(states)
    # from (tokens, rows, width) to (rows, tokens, width), as losses want it
    (states.transpose(0, 1) @ head).square().sum().backward()
    return below.grad


def rank_main(rank: int) -> Tensor:
    """Return a replicated projection's gradient; the head's columns are split."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    hidden, below, head = weights(torch.float32)
    return gradient(hidden, below, head.chunk(2, 1)[rank], split=True)


if __name__ == "__main__":
    found = on_ranks(rank_main)
    exact, fp32 = (
        gradient(*weights(dtype), split=False)
        for dtype in (torch.float64, torch.float32)
    )
    errors, noise = [off(each, exact) for each in found], off(fp32, exact)
    tell(
        not max(errors) < 1e-3,
        "megatron-core",
        parameter="below, which is replicated",
        relative_error="{:.2e} on rank 0, {:.2e} on rank 1".format(*errors),
        reference=f"one process, fp64; fp32 without ranks is off by {noise:.0e}",
    )
