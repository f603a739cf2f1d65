"""Megatron-Core: label smoothing under tensor parallel smooths over the local shard.

python megatron-core-label-smoothing.py; exit code 1 where the bug shows.
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
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

ROWS, VOCABULARY, SMOOTHING = 6, 8, 0.1


def inputs() -> tuple[Tensor, Tensor]:
    """Return logits and targets, the same on all ranks."""
    seeded = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, 1, VOCABULARY, generator=seeded)
    return logits, torch.randint(VOCABULARY, (ROWS, 1), generator=seeded)


def reference(dtype: torch.dtype) -> tuple[float, Any]:
    """Return loss and gradient by the documented rule: alpha / (K - 1) for others."""
    logits, targets = inputs()
    whole = logits.to(dtype).requires_grad_()
    target = torch.full_like(logits, SMOOTHING / (VOCABULARY - 1), dtype=dtype)
    target.scatter_(-1, targets.unsqueeze(-1), 1 - SMOOTHING)
    loss = -(target * whole.log_softmax(-1)).sum(-1).mean()
    loss.backward()
    return loss.item(), whole.grad


def rank_main(rank: int) -> tuple[float, Any]:
    """Return the loss, and the gradient of this rank's part of the logits."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    logits, targets = inputs()
    part = logits.chunk(2, -1)[rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(part.clone(), targets, SMOOTHING).mean()
    loss.backward()
    return loss.item(), part.grad


if __name__ == "__main__":
    losses, parts = zip(*on_ranks(rank_main))
    loss, exact = reference(torch.float64)
    error, noise = (
        off(torch.cat(parts, -1), exact),
        off(reference(torch.float32)[1], exact),
    )
    print("loss: {:.6f} and {:.6f} on the ranks, is {:.6f}".format(*losses, loss))
    tell(
        not error < 1e-3,
        "megatron-core",
        parameter="logits",
        relative_error=f"{error:.2e} of the gradient; of fp32 alone {noise:.0e}",
        reference="the documented target distribution on one process, fp64",
    )
