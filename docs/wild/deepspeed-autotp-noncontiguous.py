"""DeepSpeed: AutoTP's LinearLayer does not sum a gradient that is not contiguous.

python deepspeed-autotp-noncontiguous.py; exit code 1 where the bug shows.
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
import deepspeed
from deepspeed.module_inject.layers import LinearLayer, set_autotp_mode
from torch import Tensor, nn

TOKENS, WIDTH, OUT = 6, 4, 8
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled


def modules(dtype: torch.dtype) -> tuple[Tensor, Any, Any]:
    """Return tokens, a projection and a token mixer, the same on all ranks."""
    torch.manual_seed(0)
    tokens, below = torch.randn(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
    mix = nn.Linear(TOKENS, OUT, bias=False)
    return tokens.to(dtype), below.to(dtype), mix.to(dtype)


def gradient(tokens: Tensor, below: Any, mix: Any, transposed: bool) -> Tensor:
    """Return the projection's gradient; tokens are mixed, as in an MLP-Mixer."""
    hidden = below(tokens).tanh().t()  # not contiguous
    mix(hidden if transposed else hidden.contiguous()).square().sum().backward()
    found: Tensor = below.weight.grad
    return found


def rank_main(rank: int) -> list[Tensor]:
    """Return the projection's gradients, with the mixer split over the ranks."""
    deepspeed.init_distributed("gloo")
    set_autotp_mode(training=True)
    found = []
    for transposed in (True, False):
        tokens, below, mix = modules(torch.float32)
        split = LinearLayer(mix, dist.group.WORLD)
        found.append(gradient(tokens, below, split, transposed))
    return found


if __name__ == "__main__":
    exact = gradient(*modules(torch.float64), True)
    noise = off(gradient(*modules(torch.float32), True), exact)
    errors = [[off(each, exact) for each in found] for found in on_ranks(rank_main)]
    bad, good = map(max, zip(*errors))
    print(f"with hidden.contiguous(): off by {good:.0e}")
    tell(
        not bad < 1e-3,
        "deepspeed",
        parameter="below.weight",
        relative_error=f"{bad:.2e}, on the worse rank",
        reference=f"one process, fp64; fp32 is off by {noise:.0e}",
    )
