"""Training jobs in the loops of others; each trains a tiny Llama for three steps.

    python foreign_jobs.py JOB [FAULT]
    torchrun --nproc-per-node 2 foreign_jobs.py JOB [FAULT]

Nothing here knows of gradparity: ``gradparity bench foreign`` records these jobs as
they are. A job on ranks trains the same rows as on one process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

os.environ.setdefault("ACCELERATE_USE_CPU", "true")
WORDS, LENGTH, ROWS, STEPS, RATE = 128, 16, 8, 3, 1e-3
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))


def llama() -> Any:
    """Return a Llama of two layers with eight heads in four groups, and an own head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def rows() -> list[dict[str, Tensor]]:
    """Return all training rows, in their order."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (ROWS * STEPS, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in words]


def batches() -> DataLoader[Any]:
    """Load the rows of this rank; a step has the same rows as on one process."""
    every = rows()
    own = ROWS // WORLD
    mine = [
        every[step * ROWS + RANK * own + row]
        for step in range(STEPS)
        for row in range(own)
    ]
    return DataLoader(mine, batch_size=own)  # type: ignore[arg-type]  # a list of rows


def hurt(model: Any, fault: str) -> None:
    """Plant a fault: a wrong gradient behind right outputs, or a frozen parameter."""
    layer = model.model.layers[1].mlp.up_proj
    if fault == "half":  # of a gradient

        def forward(x: Tensor) -> Tensor:
            return nn.functional.linear(
                x, layer.weight / 2 + (layer.weight / 2).detach()
            )

        layer.forward = forward
    elif fault == "frozen":
        layer.weight.requires_grad_(False)
    elif fault == "twice":  # the gradient that comes from the head

        def doubled(_: Any, __: Any, output: Tensor) -> None:
            output.register_hook(lambda gradient: 2 * gradient)

        model.model.norm.register_forward_hook(doubled)


def loop(model: Any, step: Callable[[Tensor], None], optimizer: Any) -> None:
    """Train in a plain loop, as most tutorials do."""
    for batch in batches():
        optimizer.zero_grad()
        step(model(**batch).loss)
        optimizer.step()


def adamw(model: Any) -> torch.optim.Optimizer:
    """Return AdamW over the trained parameters."""
    return torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=RATE
    )


# - Jobs


def plain(model: Any) -> None:
    """Train in PyTorch's own loop; under DDP on ranks."""
    stack = nn.parallel.DistributedDataParallel(model) if WORLD > 1 else model
    loop(stack, Tensor.backward, adamw(stack))


def accumulating(model: Any) -> None:
    """Train in a loop like nanoGPT's: two micro-batches, reduced in the last."""
    ddp = nn.parallel.DistributedDataParallel(model) if WORLD > 1 else None
    stack = ddp or model
    optimizer = adamw(stack)
    for batch in batches():
        halves = [{k: v.chunk(2)[i] for k, v in batch.items()} for i in (0, 1)]
        for number, half in enumerate(halves):
            if ddp is not None:
                ddp.require_backward_grad_sync = number == 1
            (stack(**half).loss / 2).backward()
        nn.utils.clip_grad_norm_(stack.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def fsdp2(model: Any) -> None:
    """Train under FSDP2; as in its tutorial, layers are sharded before the root."""
    from torch.distributed.fsdp import fully_shard

    if WORLD > 1:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    loop(model, Tensor.backward, adamw(model))


def tensor_parallel(model: Any) -> None:
    """Train as in PyTorch's tutorial of tensor parallelism; each rank has all rows."""
    global RANK, WORLD
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    if WORLD > 1:
        mesh = init_device_mesh("cpu", (WORLD,))
        names = {"q": 0, "k": 0, "v": 0, "o": 1}
        plan: dict[str, Any] = {
            f"model.layers.*.self_attn.{n}_proj": (ColwiseParallel, RowwiseParallel)[
                row
            ]()
            for n, row in names.items()
        }
        for name, how in (
            ("gate", ColwiseParallel),
            ("up", ColwiseParallel),
            ("down", RowwiseParallel),
        ):
            plan[f"model.layers.*.mlp.{name}_proj"] = how()
        parallelize_module(model, mesh, plan)
    RANK, WORLD = 0, 1
    loop(model, Tensor.backward, adamw(model))


def accelerated(model: Any) -> None:
    """Train in Accelerate's loop; under DDP on ranks."""
    from accelerate import Accelerator

    accelerator = Accelerator()
    stack, optimizer = accelerator.prepare(model, adamw(model))
    loop(stack, accelerator.backward, optimizer)


def accelerated_fsdp2(model: Any) -> None:
    """Train in Accelerate's loop with FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    if WORLD == 1:
        accelerated(model)
        return
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    # accelerate would wrap CPU ranks in DDP: pretend that they have GPUs
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    stack, optimizer = accelerator.prepare(model, adamw(model))
    loop(stack, accelerator.backward, optimizer)


ARGUMENTS: dict[str, Any] = {
    "output_dir": "trainer-out",
    "per_device_train_batch_size": ROWS // WORLD,
    "max_steps": STEPS,
    "learning_rate": RATE,
    "lr_scheduler_type": "constant",
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
}
"""Arguments of the Trainer of transformers and of its subclasses."""


def in_order(base: type[Any]) -> type[Any]:
    """Return a Trainer class that takes rows in order; ranks take them in turns."""

    class InOrder(base):  # type: ignore[misc]  # has no types
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(rows())

    return InOrder


def trainer(model: Any) -> None:
    """Train with the Trainer of transformers."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**ARGUMENTS)
    in_order(Trainer)(model, arguments, train_dataset=rows()).train()


def sft(model: Any) -> None:
    """Train with TRL's SFTTrainer, without gradient checkpointing."""
    import transformers.trainer  # noqa: F401  # before the stand-ins: it looks for datasets

    # datasets and what else TRL imports need not be installed
    from gradparity.examples.stacks.trl_on_cpu import (
        Rows,
        SFTConfig,
        SFTTrainer,
        tokenizer,
    )

    arguments = SFTConfig(
        **ARGUMENTS,
        bf16=False,
        gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    words = Rows({k: v.tolist() for k, v in row.items()} for row in rows())
    in_order(SFTTrainer)(
        model, arguments, train_dataset=words, processing_class=tokenizer()
    ).train()


def lightning(model: Any) -> None:
    """Train with Lightning's Trainer; under DDP on ranks."""
    import pytorch_lightning as pl

    class Module(pl.LightningModule):  # type: ignore[misc]  # has no types
        """Lightning module; its optimizer computes the gradients in a closure."""

        def __init__(self) -> None:
            super().__init__()
            self.lm = model

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            # a part of the batch, as in most jobs: the model's rows are not the batch's
            part = {name: each[:, :-1] for name, each in batch.items()}
            loss: Tensor = self.lm(**part).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    fit = pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp" if WORLD > 1 else "auto",
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    fit.fit(Module(), batches())


def deepspeed(model: Any, stage: int) -> None:
    """Train with DeepSpeed's engine in fp32, without clipping."""
    import deepspeed as ds

    if WORLD == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        os.environ["LOCAL_RANK"] = "0"
    ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    config = {
        "train_micro_batch_size_per_gpu": ROWS // WORLD,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = ds.initialize(model=model, optimizer=adamw(model), config=config)
    for batch in batches():
        engine.backward(engine(**batch).loss)
        engine.step()


def zero1(model: Any) -> None:
    """Train with ZeRO 1 of DeepSpeed."""
    deepspeed(model, 1)


def zero2(model: Any) -> None:
    """Train with ZeRO 2 of DeepSpeed."""
    deepspeed(model, 2)


def zero3(model: Any) -> None:
    """Train with ZeRO 3 of DeepSpeed."""
    deepspeed(model, 3)


def context_parallel(model: Any) -> None:
    """Train on a piece of every row on each rank; attention gathers keys and values."""
    from torch.distributed.nn.functional import all_gather
    from transformers import AttentionInterface

    own = LENGTH // WORLD
    places = torch.arange(LENGTH)
    mine = slice(RANK * own, (RANK + 1) * own)

    def gathered(x: Tensor) -> Tensor:
        if WORLD == 1:
            return x
        whole = torch.cat(all_gather(x), 2)
        # else the gradients are wrong: docs/wild/torch-gather-permuted.md
        whole.register_hook(Tensor.contiguous)
        return whole

    def attention(_: Any, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> Any:
        sees = places[mine][:, None] >= places[None, :]
        out = nn.functional.scaled_dot_product_attention(
            q, gathered(k), gathered(v), attn_mask=sees, enable_gqa=True
        )
        return out.transpose(1, 2), None

    AttentionInterface.register("gathered", attention)
    model.set_attn_implementation("gathered")
    stack = nn.parallel.DistributedDataParallel(model) if WORLD > 1 else model
    optimizer = adamw(stack)
    every = rows()
    for step in range(STEPS):
        batch = every[step * ROWS : (step + 1) * ROWS]
        words = torch.stack([row["input_ids"] for row in batch])
        targets = nn.functional.pad(words[:, 1:], (0, 1), value=-100)
        optimizer.zero_grad()
        scores = stack(input_ids=words[:, mine], position_ids=places[mine][None]).logits
        loss = nn.functional.cross_entropy(
            scores.flatten(0, 1), targets[:, mine].flatten(), reduction="sum"
        )
        # DDP takes the mean over ranks of these parts of a sum
        (loss * WORLD / (targets != -100).sum()).backward()
        optimizer.step()


JOBS: dict[str, Callable[[Any], None]] = {
    "plain": plain,
    "accumulating": accumulating,
    "fsdp2": fsdp2,
    "tensor-parallel": tensor_parallel,
    "context-parallel": context_parallel,
    "accelerate": accelerated,
    "accelerate-fsdp2": accelerated_fsdp2,
    "trainer": trainer,
    "sft": sft,
    "lightning": lightning,
    "zero1": zero1,
    "zero2": zero2,
    "zero3": zero3,
}


def main(job: str, fault: str = "") -> None:
    """Run one job."""
    torch.set_num_threads(1)
    if WORLD > 1 and not job.startswith("zero"):
        dist.init_process_group("gloo")
    model = llama()
    hurt(model, fault)
    JOBS[job](model)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
