"""ring-attention-pytorch: where it shards sequences, gradients of other ranks are lost.

python ring-attention-pytorch-gather-gradient.py; exit code 1 where the bug shows.
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
from ring_attention_pytorch import RingAttention
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

RANKS, LENGTH, DIM = 2, 8, 6
SHARD = LENGTH // RANKS
AUTO = "ring, auto_shard_seq"
RING = {"ring_attn": True, "ring_seq_size": SHARD, "bucket_size": SHARD}
WAYS: dict[str, dict[str, Any]] = {
    AUTO: RING | {"auto_shard_seq": True},
    "ring, sharded by hand": RING | {"auto_shard_seq": False},
    "no ring": {"ring_attn": False},
}


def problem(dtype: torch.dtype, **settings: Any) -> tuple[Any, Tensor, Tensor]:
    """Return the layer, inputs and targets of all sequences: same on all ranks."""
    torch.manual_seed(0)
    attention = RingAttention(DIM, dim_head=4, heads=2, causal=True, **settings)
    x, y = torch.randn(2, RANKS, LENGTH, DIM).to(dtype)
    return attention.to(dtype), x, y


def rank_main(rank: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Return way -> (mean loss of the ranks, gradient of to_out)."""
    found = {}
    for way, settings in WAYS.items():
        model, x, y = problem(torch.float32, **settings)
        # its own sequence, or its own part of all of them
        dim = 1 if way == "ring, sharded by hand" else 0
        x, y = (t.chunk(RANKS, dim)[rank] for t in (x, y))
        stack = DistributedDataParallel(model)
        loss = mse_loss(stack(x), y)
        loss.backward()
        dist.all_reduce(mean := loss.detach() / RANKS)
        found[way] = mean, model.to_out.weight.grad
    return found


def reference(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return loss and gradient of to_out on one process, for all sequences."""
    model, x, y = problem(dtype, force_regular_attn=True)
    loss = mse_loss(model(x), y)
    loss.backward()
    return loss.detach(), model.to_out.weight.grad


if __name__ == "__main__":
    found, exact = on_ranks(rank_main)[0], reference(torch.float64)
    errors = {way: [*map(off, found[way], exact)] for way in WAYS}
    for way, (loss, gradient) in errors.items():
        print(f"{way}: loss off by {loss:.1e}, gradient by {gradient:.1e}")
    noise = off(reference(torch.float32)[1], exact[1])
    tell(
        not errors[AUTO][1] < 1e-3,
        "ring-attention-pytorch",
        parameter="to_out.weight",
        relative_error=f"{errors[AUTO][1]:.2e}",
        reference=f"one process, fp64; fp32 is off by {noise:.0e}",
    )
