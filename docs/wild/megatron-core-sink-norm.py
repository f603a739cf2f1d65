"""Megatron-Core: the norm leaves out attention sinks of ranks other than 0.

python megatron-core-sink-norm.py; exit code 1 where the bug shows.
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
from contextlib import nullcontext

from megatron.core import parallel_state
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

HEADS, SINKS = 4, torch.tensor([0.1, 0.2, 3.0, 4.0])


def on_cpu(function: Any) -> Any:  # Megatron-Core names CUDA
    return lambda *a, device=None, **k: function(*a, **k)


def rank_main(rank: int) -> tuple[float, torch.Tensor]:
    """Return the norm that Megatron reports, and the gradient of this rank's sinks."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        tensor_model_parallel_size=2,
        softmax_type="learnable",
    )
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # dropout is off
    layer = DotProductAttention(config, 1, AttnMaskType.no_mask, "self")
    mine = slice(2 * rank, 2 * rank + 2)
    layer.softmax_offset.data.copy_(SINKS[mine])
    whole = torch.randn(4, 5, 2, HEADS, 4, generator=torch.manual_seed(0))
    q, k, v, up = whole[:, :, :, mine].clone()
    out = layer(q, k, v, torch.zeros(1, 1, 5, 5, dtype=torch.bool))
    (out * up.reshape(out.shape)).sum().backward()
    sgd = torch.optim.SGD(layer.parameters(), lr=1.0)
    torch.tensor, torch.zeros = on_cpu(torch.tensor), on_cpu(torch.zeros)
    optimizer = FP32Optimizer(sgd, OptimizerConfig(), lambda *_: None)
    counted = optimizer.get_main_grads_for_grad_norm()
    norm = clip_grads.get_grad_norm_fp32(counted, 2, dist.group.WORLD)
    return float(norm), layer.softmax_offset.grad


if __name__ == "__main__":
    (norm, first), (_, second) = on_ranks(rank_main)
    exact = torch.cat([first, second]).double().norm()
    error = off(norm, exact)
    print(f"norm: {norm:.6f} is reported, {exact:.6f} is right")
    tell(
        not error < 1e-3,
        "megatron-core",
        parameter="softmax_offset",
        relative_error=f"{error:.2e} of the norm",
        reference="the fp64 norm of both ranks' gradients, each of its own heads",
    )
