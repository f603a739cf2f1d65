"""Megatron-Core's own loop on CPU ranks; trains a tiny GPT for three steps.

    python megatron_jobs.py JOB [FAULT]
    torchrun --nproc-per-node 2 megatron_jobs.py JOB [FAULT]

Nothing here knows of gradparity: ``gradparity bench foreign`` records these jobs as
they are. A job on ranks trains the same rows as on one process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WORDS, LENGTH, ROWS, STEPS = 128, 16, 8, 3
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Job:
    """Layout on ranks; the job on one process has none."""

    tensor_parallel: bool = False
    sequence_parallel: bool = False
    pipeline: bool = False
    """True for two stages; then the last stage's head is also tied to the embedding on
    the first stage."""
    distributed_optimizer: bool = False
    dtype: torch.dtype = torch.float32
    gated: bool = False
    experts: bool = False
    """True for four experts in each layer, two of them on each rank."""


JOBS = {
    "megatron-tp": Job(tensor_parallel=True, gated=True),
    "megatron-sp": Job(tensor_parallel=True, sequence_parallel=True, gated=True),
    "megatron-pp": Job(pipeline=True),
    "megatron-zero": Job(distributed_optimizer=True),
    "megatron-bf16": Job(
        tensor_parallel=True,
        distributed_optimizer=True,
        dtype=torch.bfloat16,
        gated=True,
    ),
    "megatron-ep": Job(experts=True, distributed_optimizer=True),
}


def replace_cuda() -> None:
    """Let Megatron run on a CPU although it asks for CUDA; leave out on GPUs."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def without_device(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*arguments: Any, **keywords: Any) -> Tensor:
            if "cuda" in str(keywords.get("device")):
                keywords["device"] = "cpu"
            return make(*arguments, **keywords)

        return made

    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        setattr(torch, name, without_device(getattr(torch, name)))
    type_of = Tensor.type

    def type_on_gpu(tensor: Tensor, *arguments: Any, **keywords: Any) -> Any:
        kind: Any = type_of(tensor, *arguments, **keywords)
        return kind.replace("torch.", "torch.cuda.") if isinstance(kind, str) else kind

    cpu: dict[str, Any] = {
        "current_device": lambda: torch.device("cpu"),
        "FloatTensor": torch.FloatTensor,
        "IntTensor": torch.IntTensor,
        "synchronize": lambda: None,
    }
    for name, stand_in in cpu.items():
        setattr(torch.cuda, name, stand_in)
    methods: dict[str, Any] = {"type": type_on_gpu, "cuda": lambda tensor, *_: tensor}
    for name, stand_in in methods.items():
        setattr(Tensor, name, stand_in)
    WrappedTorchNorm.__new__ = _tagged_norm
    moe_utils.te_general_gemm = None  # defined only by Transformer Engine
    # no dropout draws numbers
    CudaRNGStatesTracker.fork = lambda *_: nullcontext()


def _tagged_norm(
    _: Any, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any
) -> nn.Module:
    """Return torch's norm, tagged like Apex's norms on GPUs.

    Megatron sums the gradients of tagged parameters over tensor-parallel ranks.
    """
    norm = nn.LayerNorm(hidden_size, eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # Megatron's
    return norm


def hurt(model: Any, fault: str) -> None:
    """Plant a fault in the second layer or the head, on the ranks that hold it."""
    for layer in model.decoder.layers:
        experts = getattr(layer.mlp, "experts", None)
        mlp = layer.mlp if experts is None else experts.local_experts[0]
        weight = mlp.linear_fc1.weight
        if layer.layer_number == 2 and fault == "half":  # of a gradient
            weight.register_hook(lambda gradient: gradient / 2)
        if layer.layer_number == 2 and fault == "frozen":
            weight.requires_grad_(False)
    norm = getattr(model.decoder, "final_layernorm", None)
    if fault == "twice" and norm is not None:  # the gradient that comes from the head

        def doubled(_: nn.Module, __: Any, output: Tensor) -> None:
            output.register_hook(lambda gradient: 2 * gradient)

        norm.register_forward_hook(doubled)


def main(name: str, fault: str = "") -> None:
    """Run one job."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    job = JOBS[name]
    replace_cuda()
    torch.set_num_threads(1)
    if WORLD > 1:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    split = 2 if WORLD > 1 else 1
    tp = split if job.tensor_parallel else 1
    pp = split if job.pipeline else 1
    ep = split if job.experts else 1
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    experts: dict[str, Any] = {}
    if job.experts:
        experts = {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
            "expert_model_parallel_size": ep,
        }
    half = job.dtype == torch.bfloat16
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=8,
        num_query_groups=4,
        gated_linear_unit=job.gated,
        activation_func=nn.functional.silu if job.gated else nn.functional.gelu,
        add_bias_linear=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        sequence_parallel=job.sequence_parallel and tp > 1,
        bf16=half,
        params_dtype=job.dtype,
        pipeline_dtype=job.dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
        **experts,
    )
    torch.manual_seed(0)
    model = GPTModel(
        config,
        gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=experts.get("num_moe_experts")
        ),
        WORDS,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=job.pipeline,
    )
    hurt(model, fault)
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=job.distributed_optimizer,
        ),
        Float16Module(config, model) if half else model,
    )
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        clip_grad=1.0,
        bf16=half,
        params_dtype=job.dtype,
        use_distributed_optimizer=job.distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(settings, [ddp])

    ranks = parallel_state.get_data_parallel_world_size()
    own = ROWS // ranks
    first = parallel_state.get_data_parallel_rank() * own
    words = torch.randint(
        WORDS, (STEPS, ROWS, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    places = torch.arange(LENGTH)
    hidden = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)

    def forward(batches: Iterator[Tensor], model: Any) -> Any:
        batch = next(batches)
        losses = model(batch, places.expand_as(batch), hidden, labels=batch.roll(-1, 1))
        return losses, lambda output: (output.mean(), {})

    for step in range(STEPS):
        rows = words[step, first : first + own]
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(rows.chunk(2)),
            model=[ddp],
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=own // 2,
            forward_only=False,
        )
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
