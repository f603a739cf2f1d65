r"""fairseq2 0.8.1 in fp16 as a workload: its loss scaler in the order of its trainer.

    gradparity run --quick --precision fp16-autocast \
        --workload examples.integrations.fairseq2_step:Fsdp2

Runs with our scaler by default. With --scaler torch.amp:GradScaler it runs with the
scaler that the package uses. docs/integrations lists which checks fail with which.

Needs fairseq2, installed with --no-deps. optim/fp16_loss_scaler.py runs as it is. The
order is that of trainer.py, lines 587 to 630: backward, unscale, clip, step, and the
schedule only if ``overflowed`` is not set.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grad_norm_

from .absent import stand_in
from .shared import Pair, Sharded

stand_in("fairseq2")

from fairseq2.optim.fp16_loss_scaler import StandardFloat16LossScaler  # noqa: E402


class Fsdp2(Sharded):
    """Fully sharded; fairseq2 then chooses ``ShardedGradScaler`` by itself."""

    meshes = ({"fsdp": 2}, {"replicate": 2, "fsdp": 2}, {"ddp": 2})
    checkpoint = "scaler"

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        stack = super().parallelize(model, mesh)
        names, size = mesh.mesh_dim_names or (), dist.get_world_size()
        replicas = size if "ddp" in names else size // mesh["fsdp"].size()
        root = SimpleNamespace(size=size, as_process_group=lambda: dist.group.WORLD)
        gangs: Any = SimpleNamespace(root=root, rdp=SimpleNamespace(size=replicas))
        stack.fp16, stack.skipped = StandardFloat16LossScaler(gangs), 0
        stack.fp16._grad_scaler = stack.place
        return stack

    def weights(self, stack: Any) -> dict[str, Any]:
        named = stack.module.named_parameters()
        return {name.removeprefix("module."): p for name, p in named}

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        stack.place.use(scaler)
        loss = self.passes(stack, micro_batches, lambda x: Scaled(stack.fp16, x))
        stack.fp16.unscale_grads_(stack.optimizer)
        norm = clip_grad_norm_(stack.module.parameters(), self.clip_norm)
        result = stack.fp16.run_optimizer_step(stack.optimizer)
        stack.optimizer.zero_grad(set_to_none=True)
        stack.skipped += result.overflowed
        if not result.overflowed:
            stack.scheduler.step()
        return loss, norm

    def skipped_steps(self, stack: Any) -> int:
        count: int = stack.skipped
        return count

    def save_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        stack.place.use(scaler)
        torch.save(stack.fp16.state_dict(), f"{folder}/{dist.get_rank()}.pt")

    def load_checkpoint(self, stack: Any, scaler: Any, folder: str) -> None:
        stack.place.use(scaler)
        path = f"{folder}/{dist.get_rank()}.pt"
        stack.fp16.load_state_dict(torch.load(path, weights_only=True))


class Scaled:
    """Loss whose ``backward`` goes through the loss scaler."""

    def __init__(self, fp16: Any, loss: Any) -> None:
        self.fp16, self.loss = fp16, loss

    def backward(self) -> None:
        self.fp16.backward(self.loss)


class Fsdp2Fused(Fsdp2):
    """FSDP2 with a fused AdamW."""

    fused = True
