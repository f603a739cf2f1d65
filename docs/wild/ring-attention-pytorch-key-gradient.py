"""ring-attention-pytorch: gradients of keys and values are wrong where a ring is used.

python ring-attention-pytorch-key-gradient.py; exit code 1 where the bug shows.
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
from unittest.mock import patch

from ring_attention_pytorch import ring_flash_attention as flash
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

RANKS, LENGTH = 2, 8
WAYS = "ring", "ring, received alone", "no ring"
ring_pass = flash.ring_pass


def problem(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return (queries, keys, values) of whole sequences, and the output's gradient."""
    torch.manual_seed(0)
    *inputs, gradient = torch.randn(4, 1, LENGTH, 2, 4).to(dtype)
    return [t.requires_grad_() for t in inputs], gradient


def received(passes: int, x: Tensor) -> Tensor:
    """Return the tensor that ring_pass received: the first of its results."""
    return ring_pass(passes, x)[0]


def rank_main(rank: int) -> dict[str, list[Tensor]]:
    """Return way -> output and gradients: of this rank's part, or of the whole."""
    found = {}
    for way in WAYS:
        inputs, gradient = problem(torch.float32)
        ring, size = way != "no ring", LENGTH // RANKS
        parts = [t.chunk(RANKS, 1)[rank] if ring else t for t in (*inputs, gradient)]
        used = received if way == "ring, received alone" else ring_pass
        with patch.object(flash, "ring_pass", used):
            output = flash.ring_flash_attn(
                *parts[:3], causal=True, bucket_size=size, ring_reduce_col=ring
            )
            output.backward(parts[3])
        found[way] = [output.detach(), *(t.grad for t in inputs)]
    return found


def reference(dtype: torch.dtype) -> list[Tensor]:
    """Return output and gradients by torch's attention, on one process."""
    inputs, gradient = problem(dtype)
    heads = (t.transpose(1, 2) for t in inputs)
    output = scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2)
    output.backward(gradient)
    return [output.detach(), *(t.grad for t in inputs)]


if __name__ == "__main__":
    ranks, exact = on_ranks(rank_main), reference(torch.float64)
    for way in reversed(WAYS):
        # each rank has the gradient of its part, and zeros elsewhere
        outputs, *gradients = zip(*(found[way] for found in ranks))
        whole = [torch.cat(outputs, 1), *map(sum, gradients)]
        if way == "no ring":
            whole = list(ranks[0][way])
        errors = [*map(off, whole, exact)]
        told = "{}: output off by {:.1e}, gradients of queries by {:.1e}, of keys by "
        print((told + "{:.1e}, of values by {:.1e}").format(way, *errors))
    noise = off(reference(torch.float32)[2], exact[2])
    tell(
        not errors[2] < 1e-3,
        "ring-attention-pytorch",
        parameter="keys",
        relative_error=f"{errors[2]:.2e}; {errors[3]:.2e} of values",
        reference=f"one process, fp64; fp32 is off by {noise:.0e}",
    )
