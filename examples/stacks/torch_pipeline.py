r"""torch's GPipe as a workload: unequal stages, two calls of it a step, clipping.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torch_pipeline:GPipe --topology pp2

Needs torch alone. Ends with PASS in about half a minute on two cores. Without
--topology it also runs dp2-pp2, stages that are replicas of DistributedDataParallel:
torch's schedule raises there in its second call, and the run ends with ERROR.

Gradients are not scaled by the schedule (``scale_grads=False``): over several calls it
would divide again what came before. The loss is divided instead.
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .shared import Pair, Regression

# Unequal on purpose: an even cut hides what depends on a stage's own parameters.
CUTS = {2: (0, 3, 8), 4: (0, 2, 3, 5, 8)}
"""Stages -> the layer at which each begins, and the end."""
MICRO_BATCHES = 6
"""Of the schedule, in each of two calls."""


def block() -> nn.Module:
    """Uses a weight twice."""
    # Used twice, so that its gradient is a sum of two parts of one backward.
    mix = nn.Linear(16, 16)
    return nn.Sequential(nn.LayerNorm(16), mix, nn.Tanh(), mix)


class GPipe(Regression):
    """Two stages."""

    meshes: tuple[dict[str, int], ...] = ({"pp": 2}, {"dp": 2, "pp": 2})
    model_axes = ("pp",)
    kind: Any = schedules.ScheduleGPipe
    placed: tuple[tuple[int, ...], ...] = ((0,), (1,))  # the stages of each rank
    clip_norm = 0.5

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), block(),
            block(), nn.LayerNorm(16), block(), nn.Linear(16, 4),
        )  # fmt: skip

    def micro_batches(self, batch: Pair) -> list[Pair]:
        return list(zip(*(t.chunk(2) for t in batch), strict=True))

    def data_parallel(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return DistributedDataParallel(module, process_group=mesh.get_group())

    def parallelize(self, model: Any, mesh: DeviceMesh) -> Any:
        group, count = mesh.get_group("pp"), sum(map(len, self.placed))
        mine = self.placed[dist.get_rank(group)]
        stack = SimpleNamespace(group=group, first=0 in mine, last=count - 1 in mine)
        parts = [model[CUTS[count][s] : CUTS[count][s + 1]] for s in mine]
        if "dp" in (mesh.mesh_dim_names or ()):
            parts = [self.data_parallel(part, mesh["dp"]) for part in parts]
        stages: Any = [
            PipelineStage(part, s, count, torch.device("cpu"), group=group)
            for part, s in zip(parts, mine, strict=True)
        ]
        single = issubclass(self.kind, schedules.PipelineScheduleSingle)
        stack.schedule = self.kind(
            stages[0] if single else stages, MICRO_BATCHES, scale_grads=False,
            loss_fn=lambda output, y: self.loss(output, y) / stack.parts,
        )  # fmt: skip
        named = [item for part in parts for item in part.named_parameters()]
        stack.named = {name.removeprefix("module."): p for name, p in named}
        stack.optimizer = self.optimizer(list(stack.named.items()))
        return stack

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        stack.optimizer.zero_grad()
        stack.parts, losses = len(micro_batches) * MICRO_BATCHES, []
        for x, y in micro_batches:
            found: list[Tensor] = []  # a call forgets what is in it
            known = {"target": y, "losses": found} if stack.last else {}
            stack.schedule.step(*([x] if stack.first else []), **known)
            losses += found
        parameters = list(stack.named.values())
        grads = [p.grad for p in parameters if p.grad is not None]
        # Clipping needs the norm over all stages: each has a part of the parameters.
        norm: Any = torch.nn.utils.get_total_norm(grads)
        norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).square()
        dist.all_reduce(norm, group=stack.group)
        torch.nn.utils.clip_grads_with_norm_(parameters, self.clip_norm, norm.sqrt())
        stack.optimizer.step()
        return (torch.stack(losses).sum() if losses else None), float(norm.sqrt())

    def weights(self, stack: Any) -> dict[str, Any]:
        return dict(stack.named)
