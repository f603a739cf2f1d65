"""Megatron-Core: label smoothing under tensor parallel smooths over the local shard.

python megatron-core-label-smoothing.py; exit code 1 where the bug shows.
"""

import sys
import tempfile
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

ROWS, VOCABULARY, SMOOTHING, RANKS = 6, 8, 0.1, 2


def inputs() -> tuple[Tensor, Tensor]:
    """Logits and targets, the same on all ranks."""
    seeded = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, 1, VOCABULARY, generator=seeded)
    return logits, torch.randint(VOCABULARY, (ROWS, 1), generator=seeded)


def reference(dtype: torch.dtype) -> tuple[float, Tensor]:
    """Loss and gradient of the documented target: alpha / (K - 1) for all others."""
    logits, targets = inputs()
    whole = logits.to(dtype).requires_grad_()
    target = torch.full_like(logits, SMOOTHING / (VOCABULARY - 1), dtype=dtype)
    target.scatter_(-1, targets.unsqueeze(-1), 1 - SMOOTHING)
    loss = -(target * whole.log_softmax(-1)).sum(-1).mean()
    loss.backward()
    assert whole.grad is not None
    return loss.item(), whole.grad


def rank_main(rank: int, store: str, results: Any) -> None:
    """Loss and gradient of this rank's part of the vocabulary."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    logits, targets = inputs()
    part = logits.chunk(RANKS, -1)[rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(part.clone(), targets, SMOOTHING).mean()
    loss.backward()
    assert part.grad is not None
    results.put((rank, loss.item(), part.grad.tolist()))
    dist.destroy_process_group()


def main() -> int:
    """Print what was found."""
    results = mp.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(rank_main, (f"{folder}/store", results), RANKS, join=False)
        found = sorted(results.get() for _ in range(RANKS))
        ranks.join()
    gradient = torch.cat([torch.tensor(part) for *_, part in found], -1)
    loss, exact = reference(torch.float64)
    fp32 = reference(torch.float32)[1]
    error = float((gradient - exact).norm() / exact.norm())
    noise = float((fp32 - exact).norm() / exact.norm())
    print(
        "versions: megatron-core", version("megatron-core"), "torch", torch.__version__
    )
    print(f"loss: {found[0][1]:.6f} and {found[1][1]:.6f} on the ranks, is {loss:.6f}")
    print("parameter: logits")
    print(f"relative error: {error:.2e} of the gradient; of fp32 alone {noise:.0e}")
    print("reference: the documented target distribution on one process, fp64")
    print("verdict:", "bug" if error > 1e-3 else "no bug")
    return int(error > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
