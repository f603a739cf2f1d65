r"""torch's GPipe as a workload: two unequal stages.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torch_pipeline:GPipe

Needs torch alone. Ends with PASS in under half a minute on two cores.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from .shared import Pair, Regression


class GPipe(Regression):
    """GPipe; each rank has one stage, and only the weights of this stage."""

    meshes: tuple[dict[str, int], ...] = ({"pp": 2},)
    model_axes = ("pp",)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(16, 32),
            nn.Tanh(),
            nn.Linear(32, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 16),
            nn.Tanh(),
            nn.LayerNorm(16),
            nn.Linear(16, 4),
        )

    def micro_batches(self, batch: Pair) -> list[Pair]:
        return [batch]  # the schedule cuts it

    def schedule(self, stage: Any) -> Any:
        return ScheduleGPipe(stage, n_microbatches=6, loss_fn=self.loss)

    def parallelize(self, model: Any, mesh: DeviceMesh) -> Any:
        rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
        # Unequal on purpose: an even cut hides what depends on a stage's parameters.
        part = model[3:] if rank else model[:3]
        stage = PipelineStage(part, rank, 2, torch.device("cpu"), group=group)
        stack = SimpleNamespace(group=group, first=rank == 0, last=rank == 1)
        stack.schedule = self.schedule(stage)
        stack.named = dict(part.named_parameters())
        stack.optimizer = self.optimizer(list(stack.named.items()))
        return stack

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        ((x, y),) = micro_batches
        losses: list[torch.Tensor] = []
        stack.optimizer.zero_grad()
        known = {"target": y, "losses": losses} if stack.last else {}
        stack.schedule.step(*([x] if stack.first else []), **known)
        stack.optimizer.step()
        return torch.stack(losses).mean() if losses else None

    def weights(self, stack: Any) -> dict[str, Any]:
        return dict(stack.named)
