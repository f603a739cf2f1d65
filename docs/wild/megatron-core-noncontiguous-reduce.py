"""Megatron-Core: a gradient that is not contiguous is not summed over the ranks.

python megatron-core-noncontiguous-reduce.py; exit code 1 where the bug shows.
"""

import sys
import tempfile
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor

TOKENS, ROWS, WIDTH, RANKS = 5, 3, 8, 2


def weights(dtype: torch.dtype) -> list[Tensor]:
    """Hidden states, a projection into them, and a head; the same on all ranks."""
    seeded = torch.Generator().manual_seed(0)
    shapes = (TOKENS, ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, 4)
    return [torch.randn(s, generator=seeded).to(dtype) for s in shapes]


def gradient(hidden: Tensor, below: Tensor, head: Tensor, split: bool) -> Tensor:
    """Of the projection below a head that may be split by columns."""
    below.requires_grad_()
    states = (hidden @ below).tanh()
    if split:
        states = copy_to_tensor_model_parallel_region(states)
    # from (tokens, rows, width) to (rows, tokens, width), as losses want it
    (states.transpose(0, 1) @ head).square().sum().backward()
    assert below.grad is not None
    return below.grad


def reference(dtype: torch.dtype) -> Tensor:
    """The gradient on one process."""
    return gradient(*weights(dtype), split=False)


def rank_main(rank: int, store: str, results: Any) -> None:
    """The gradient of a replicated projection, with this rank's columns of the head."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    hidden, below, head = weights(torch.float32)
    found = gradient(hidden, below, head.chunk(RANKS, 1)[rank], split=True)
    results.put((rank, found.tolist()))
    dist.destroy_process_group()


def main() -> int:
    """Print what was found."""
    results = mp.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(rank_main, (f"{folder}/store", results), RANKS, join=False)
        found = sorted(results.get() for _ in range(RANKS))
        ranks.join()
    exact, fp32 = reference(torch.float64), reference(torch.float32)
    errors = [float((torch.tensor(g) - exact).norm() / exact.norm()) for _, g in found]
    noise = float((fp32 - exact).norm() / exact.norm())
    print(
        "versions: megatron-core", version("megatron-core"), "torch", torch.__version__
    )
    print("parameter: below, which is replicated")
    print("relative error: {:.2e} on rank 0, {:.2e} on rank 1".format(*errors))
    print(f"reference: one process, fp64; fp32 without ranks is off by {noise:.0e}")
    print("verdict:", "bug" if max(errors) > 1e-3 else "no bug")
    return int(max(errors) > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
