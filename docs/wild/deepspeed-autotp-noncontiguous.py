"""DeepSpeed: AutoTP's LinearLayer does not sum a gradient that is not contiguous.

python deepspeed-autotp-noncontiguous.py; exit code 1 where the bug shows.
"""

import os
import sys
import tempfile
from importlib.metadata import version
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.module_inject.layers import LinearLayer, set_autotp_mode
from torch import Tensor, nn

RANKS, TOKENS, WIDTH, OUT = 2, 6, 4, 8
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled


def modules(dtype: torch.dtype) -> tuple[Tensor, Any, Any]:
    """Tokens, a projection, and a layer that mixes tokens; the same on all ranks."""
    torch.manual_seed(0)
    tokens, below = torch.randn(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
    mix = nn.Linear(TOKENS, OUT, bias=False)
    return tokens.to(dtype), below.to(dtype), mix.to(dtype)


def gradient(tokens: Tensor, below: Any, mix: Any, transposed: bool) -> Tensor:
    """Of the projection: tokens are mixed, as in an MLP-Mixer."""
    hidden = below(tokens).tanh().t()  # not contiguous
    mix(hidden if transposed else hidden.contiguous()).square().sum().backward()
    found: Tensor = below.weight.grad
    return found


def rank_main(rank: int, folder: str, results: Any) -> None:
    """The gradient with this rank's rows of the mixing weight."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{RANKS}"}
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    deepspeed.init_distributed("gloo")
    set_autotp_mode(training=True)
    found = []
    for transposed in (True, False):
        tokens, below, mix = modules(torch.float32)
        split = LinearLayer(mix, dist.group.WORLD)
        found.append(gradient(tokens, below, split, transposed).tolist())
    results.put((rank, *found))
    dist.destroy_process_group()


def main() -> int:
    """Print what was found."""
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, results), RANKS)
        found = sorted(results.get() for _ in range(RANKS))
    exact = gradient(*modules(torch.float64), True)
    noise = (gradient(*modules(torch.float32), True) - exact).norm() / exact.norm()
    bad, good = (
        max(float((torch.tensor(f[i]) - exact).norm() / exact.norm()) for f in found)
        for i in (1, 2)
    )
    print("versions: deepspeed", version("deepspeed"), "torch", torch.__version__)
    print(f"with hidden.contiguous(): off by {good:.0e}")
    print(f"parameter: below.weight\nrelative error: {bad:.2e}, on the worse rank")
    print(f"reference: one process, fp64; fp32 is off by {noise:.0e}")
    print("verdict:", "bug" if bad > 1e-3 else "no bug")
    return int(bad > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
