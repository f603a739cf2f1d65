"""Megatron-Core: learned attention sinks of ranks other than 0 miss in the norm.

python megatron-core-sink-norm.py; exit code 1 where the bug shows.
"""

import sys
import tempfile
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from megatron.core import parallel_state
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

RANKS, HEADS, SINKS = 2, 4, torch.tensor([0.1, 0.2, 3.0, 4.0])


def on_cpu(function: Any) -> Any:  # Megatron-Core names CUDA
    return lambda *a, device=None, **k: function(*a, **k)


def rank_main(rank: int, folder: str, results: Any) -> None:
    """The norm that Megatron's optimizer reports for the gradients of the sinks."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    config = TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=HEADS, attention_dropout=0.0,
        tensor_model_parallel_size=RANKS, softmax_type="learnable",
    )  # fmt: skip
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
    results.put((rank, float(norm), layer.softmax_offset.grad.tolist()))
    dist.destroy_process_group()


def main() -> int:
    """Print what was found."""
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (folder, results), RANKS)
        (_, norm, first), (_, _, second) = sorted(results.get() for _ in range(RANKS))
    exact = torch.tensor(first + second, dtype=torch.float64).norm()
    error = float(abs(norm - exact) / exact)
    print(
        "versions: megatron-core", version("megatron-core"), "torch", torch.__version__
    )
    print(f"norm: {norm:.6f} is reported, {float(exact):.6f} is right")
    print("parameter: softmax_offset")
    print(f"relative error: {error:.2e} of the norm")
    print("reference: the fp64 norm of both ranks' gradients, each of its own heads")
    print("verdict:", "bug" if error > 1e-3 else "no bug")
    return int(error > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
