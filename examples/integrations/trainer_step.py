r"""transformers 5.23.0 in fp16 as a workload: one step of ``Trainer`` a call.

    gradparity run --quick --precision fp16-autocast \
        --workload examples.integrations.trainer_step:Fsdp2

Needs transformers and accelerate. Ends with PASS with our scaler, in one to three
minutes on two cores. The same with --scaler torch.amp:GradScaler is the Trainer's own
step; docs/integrations lists which checks fail with which scaler.

trainer.py, lines 1928 to 1944: clip, optimizer step, and the schedule unless
``accelerator.optimizer_step_was_skipped``.
"""

from __future__ import annotations

from typing import Any

from accelerate.state import AcceleratorState, PartialState
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import Trainer, TrainingArguments

from ..stacks.hf_trainer import Stack
from ..stacks.on_cpu import accelerate_takes_fsdp
from .shared import Pair, Place


class Fsdp2(Stack):
    """A tiny Llama."""

    checkpoint = "scaler"
    meshes = ({"fsdp": 2},)
    optim = "sgd"

    def arguments(self) -> Any:
        made = TrainingArguments(
            use_cpu=True,
            fsdp=True,
            fsdp_config={"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"},
            max_steps=1,
            optim=self.optim,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=self.clip_norm,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        accelerate_takes_fsdp()
        return made

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        stack = Trainer(model, self.arguments())
        place = stack.accelerator.scaler = Place()
        stack.create_optimizer()
        stack.create_scheduler(1000)
        accelerator = stack.accelerator
        prepared = accelerator.prepare(model, stack.optimizer, stack.lr_scheduler)
        stack.model, stack.optimizer, stack.lr_scheduler = prepared
        stack.model_wrapped = stack.model
        accelerator.native_amp = True
        accelerator.state._mixed_precision = "fp16"
        stack.place, stack.skipped, stack.moved = place, 0, 0
        return stack

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        stack.place.use(scaler)
        found = super().train_step(stack, micro_batches, scaler)
        stack.skipped += stack.accelerator.optimizer_step_was_skipped
        stack.moved += stack.lr_scheduler.state_dict()[
            "last_epoch"
        ]  # train() makes one
        return found

    def weights(self, stack: Any) -> dict[str, Any]:
        named = stack.model.named_parameters()
        return {name.removeprefix("module."): p for name, p in named}

    def lr_schedule(self, stack: Any) -> int:
        moved: int = stack.moved
        return moved

    def skipped_steps(self, stack: Any) -> int:
        count: int = stack.skipped
        return count

    def save_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        stack.place.use(scaler)
        stack._save_scaler(folder)

    def load_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        stack.place.use(scaler)
        stack._load_scaler(folder)


class Ddp(Fsdp2):
    """Distributed data parallel."""

    meshes = ({"ddp": 2},)

    def arguments(self) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState(cpu=True)
        return TrainingArguments(
            use_cpu=True,
            max_steps=1,
            optim=self.optim,
            learning_rate=0.1,
            lr_scheduler_type="constant",
            max_grad_norm=self.clip_norm,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
