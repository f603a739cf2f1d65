r"""Accelerate 1.15.0 in fp16 as a workload: optimizer, schedule, clipping, checkpoint.

    gradparity run --quick --precision fp16-autocast \
        --workload examples.integrations.accelerate_step:Ddp

Needs accelerate. Ends with PASS with our scaler, in under a minute on two cores. With
--scaler torch.amp:GradScaler it is Accelerate's own step. docs/integrations lists which
checks fail with which scaler, also for the other classes here.

On a CPU Accelerate makes no fp16 scaler (accelerator.py, line 566), and uses DDP even
if you ask for FSDP. This file replaces both.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..stacks.on_cpu import accelerate_takes_fsdp
from .shared import Pair, Place, Stepped, weighted
from .use_in_accelerate import use_scaler


class Ddp(Stepped):
    """Distributed data parallel (DDP)."""

    meshes = ({"ddp": 2},)

    def accelerator(self) -> Any:
        AcceleratorState._reset_state(reset_partial_state=True)
        return Accelerator(cpu=True)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        accelerator = self.accelerator()
        optimizer = self.optimizer([*model.named_parameters()])
        scheduler = self.scheduler(optimizer)
        accelerator.scaler = place = Place()
        stack, *others = accelerator.prepare(model, optimizer, scheduler)
        accelerator.native_amp = True
        accelerator.state._mixed_precision = "fp16"  # after prepare: no second autocast
        stack.optimizer, stack.scheduler = others
        stack.accelerator, stack.place, stack.skipped = accelerator, place, 0
        return stack

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        accelerator, total = stack.accelerator, 0.0
        stack.place.use(scaler)
        accelerator.gradient_accumulation_steps = len(micro_batches)
        for inputs, targets, share in weighted(micro_batches):
            with accelerator.accumulate(stack):
                loss = self.loss(stack(inputs), targets) * share
                accelerator.backward(loss * len(micro_batches))  # divides by it
                total += loss.item()
                norm = None
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(
                        stack.parameters(), self.clip_norm
                    )
                stack.optimizer.step()
                stack.scheduler.step()
                stack.optimizer.zero_grad()
        # What Accelerate says, and not what happened: gradparity compares the two.
        stack.skipped += accelerator.optimizer_step_was_skipped
        return total, norm

    def weights(self, stack: Any) -> dict[str, Any]:
        named = stack.named_parameters()
        return {name.removeprefix("module."): p for name, p in named}

    def skipped_steps(self, stack: Any) -> int:
        count: int = stack.skipped
        return count

    def save_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        stack.place.use(scaler)
        stack.accelerator.save_state(folder)

    def load_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        stack.place.use(scaler)
        stack.accelerator.load_state(folder)


class DdpFused(Ddp):
    """DDP with a fused AdamW."""

    fused = True


class Fsdp2(Ddp):
    """Layers with more than 100 elements are units of FSDP2."""

    meshes = ({"fsdp": 2},)

    def accelerator(self) -> Any:
        accelerate_takes_fsdp()
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100
        )
        return Accelerator(cpu=True, fsdp_plugin=plugin)


class Fsdp2Fused(Fsdp2):
    """FSDP2 with a fused AdamW."""

    fused = True


class Fsdp2Ours(Fsdp2):
    """FSDP2 with our integration, :func:`use_scaler`.

    The optimizer has no state here, so ``save_state`` and ``load_state`` step it.
    """

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        stack = super().parallelize(model, mesh)
        use_scaler(stack.accelerator, stack.place)
        return stack


class Fsdp2FusedOurs(Fsdp2Ours):
    """FSDP2 with our integration and a fused AdamW."""

    fused = True
