"""Trainers as their users run them, with torch's scaler, with ours and without one.

Each function makes a trainer around one transformer, trains over ``batches`` and
returns the scaler it trained with. The arms differ only in the changes that
docs/integrations lists for the trainer.

Compute is in bf16. CPUs of this kind have no fp16 arithmetic; its emulation is some
forty times slower and would hide the cost of a scaler. Gradients are in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gradparity.fixtures import loss
from gradparity.fixtures.models import TransformerLM
from gradparity.scaler import GradScaler

ROWS, LENGTH, CLIP, RATE = 4, 64, 1.0, 1e-3
SETTINGS: dict[str, Any] = dict(init_scale=1024.0, growth_interval=2**20)
"""Settings of both scalers: no step overflows, and the scale never grows."""
ARMS = ("none", "torch", "ours")

Pair = dict[str, Tensor]


class Batches(Sized, Iterable[Pair], Protocol):
    """Batches of a run, one for each step."""


class Text(nn.Module):
    """A byte-level transformer that returns its loss, as transformers' Trainer asks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = TransformerLM(width=256, heads=8, hidden=1024, layers=4)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss of (B, T) bytes and their next bytes."""
        return {"loss": loss(self.model(inputs), labels)}

    def shard(self, mesh: Any) -> None:
        """Apply FSDP2 to each block and to the rest."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for part in (*self.model.blocks.values(), self):
            fully_shard(part, mesh=mesh, mp_policy=policy)


def scaler_of(arm: str) -> Any:
    """Make the scaler of an arm; it is disabled in the arm without a scaler."""
    if arm == "ours":
        return GradScaler("cpu", **SETTINGS)
    return torch.amp.GradScaler("cpu", **SETTINGS, enabled=arm == "torch")


def _use(accelerator: Any, arm: str) -> Any:
    from gradparity.examples.integrations.use_in_accelerate import use_scaler

    scaler = scaler_of(arm)
    if arm == "ours":
        use_scaler(accelerator, scaler)
    else:  # what Accelerate does by itself on a GPU
        accelerator.scaler = scaler
    return scaler


def _schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def accelerate_loop(arm: str, batches: Batches, *, sharded: bool) -> Any:
    """Train in the loop of Accelerate's own guide, under DDP or FSDP2."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, DistributedType, PartialState

    AcceleratorState._reset_state(reset_partial_state=True)
    plugin = None
    if sharded:  # it gives ranks of a CPU DDP whatever is asked for
        PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
        )
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=plugin)
    scaler, model = _use(accelerator, arm), Text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    model, optimizer, scheduler = accelerator.prepare(
        model, optimizer, _schedule(optimizer)
    )
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return scaler


def transformers_loop(arm: str, batches: Batches) -> Any:
    """Train by ``Trainer.train`` under DDP, with the Trainer's default optimizer."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        use_cpu=True,
        bf16=True,
        max_steps=len(batches),
        learning_rate=RATE,
        max_grad_norm=CLIP,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )

    class Own(Trainer):  # type: ignore[misc]  # its types are not followed
        def get_train_dataloader(self) -> Any:
            return batches

    trainer = Own(model=Text(), args=arguments)
    scaler = _use(trainer.accelerator, arm)
    trainer.train()
    return scaler


def lightning_loop(arm: str, batches: Batches) -> Any:
    """Train by ``Trainer.fit`` under ``ModelParallelStrategy``, with FSDP2."""
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.plugins.precision import MixedPrecision
    from pytorch_lightning.strategies import ModelParallelStrategy

    from gradparity.examples.integrations.use_in_lightning import (
        MixedPrecision as OurPrecision,
    )

    class Module(LightningModule):  # type: ignore[misc]  # its types are not followed
        def __init__(self) -> None:
            super().__init__()
            self.text = Text()

        def configure_model(self) -> None:
            self.text.shard(self.device_mesh["data_parallel"])

        def training_step(self, batch: Pair, _index: int) -> Tensor:
            value: Tensor = self.text(**batch)["loss"]
            return value

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=RATE)
            schedule = {"scheduler": _schedule(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    scaler = scaler_of(arm)
    if arm == "ours":
        plugin: Any = OurPrecision(scaler, device="cpu")
    else:
        plugin = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
    plugin.precision = "bf16-mixed"  # of autocast alone
    trainer = Trainer(
        strategy=ModelParallelStrategy(2, 1),
        plugins=[plugin],
        accelerator="cpu",
        devices=2,
        max_steps=len(batches),
        gradient_clip_val=CLIP,
        logger=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), batches)
    return scaler


def torchtitan_loop(arm: str, batches: Batches) -> Any:
    """Train with torchtitan's optimizers and clipping, in the order of ``train_step``.

    The model is under FSDP2. Torchtitan's own trainer needs an accelerator. Our scaler
    clips and steps as the recipe says; with torch's scaler, torchtitan clips.
    """
    from torchtitan.components.optimizer.optimizer import (
        OptimizersContainer,
        ParamGroupConfig,
    )
    from torchtitan.distributed.utils import clip_grad_norm_

    model, scaler = Text(), scaler_of(arm)
    model.shard(init_device_mesh("cpu", (2,)))
    group = ParamGroupConfig(
        pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": RATE}
    )
    config = OptimizersContainer.Config(param_groups=[group], implementation="fused")
    optimizers = OptimizersContainer(config, model_parts=[model])
    scheduler = _schedule(optimizers.optimizers[0])
    for batch in batches:
        optimizers.zero_grad()
        scaler.scale(model(**batch)["loss"]).backward()
        if arm == "ours":
            scaler.clip_and_step(optimizers, CLIP)
        else:
            scaler.unscale_(optimizers)
            clip_grad_norm_(model.parameters(), CLIP, foreach=True)
            scaler.step(optimizers)
        scaler.update()
        if arm != "ours" or not scaler.step_was_skipped(optimizers):
            scheduler.step()
    return scaler


def accelerate_ddp(arm: str, batches: Batches) -> Any:
    """Train in Accelerate's loop under DDP."""
    return accelerate_loop(arm, batches, sharded=False)


def accelerate_fsdp2(arm: str, batches: Batches) -> Any:
    """Train in Accelerate's loop under FSDP2."""
    return accelerate_loop(arm, batches, sharded=True)


LOOPS: dict[str, tuple[str, str, Callable[[str, Batches], Any]]] = {
    "accelerate, DDP": ("accelerate", "accelerate", accelerate_ddp),
    "accelerate, FSDP2": ("accelerate", "accelerate", accelerate_fsdp2),
    "transformers Trainer, DDP": ("transformers", "transformers", transformers_loop),
    "pytorch-lightning, ModelParallelStrategy, FSDP2": (
        "pytorch-lightning",
        "pytorch_lightning",
        lightning_loop,
    ),
    "torchtitan's step, FSDP2, fused": ("torchtitan", "torchtitan", torchtitan_loop),
}
"""Name -> (distribution, module, function that trains)."""
