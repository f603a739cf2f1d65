r"""torch's schedules with two stages a rank, on the loop of torch_pipeline_calls.py.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torch_interleaved:Interleaved

Needs torch alone. Each class ends with PASS in about half a minute on two cores.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules

from .torch_pipeline_calls import OneForwardOneBackward


class LoopedBfs(OneForwardOneBackward):
    """Four stages: each rank has two that are not neighbours."""

    kind: Any = schedules.ScheduleLoopedBFS
    cuts: tuple[int, ...] = (0, 2, 3, 5, 8)  # where each stage begins, and the end
    placed: tuple[tuple[int, ...], ...] = ((0, 2), (1, 3))  # the stages of each rank

    def spread(self, part: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return part  # torch_pipeline_dp.py has data parallelism here

    def parallelize(self, model: Any, mesh: DeviceMesh) -> Any:
        group, count = mesh.get_group("pp"), len(self.cuts) - 1
        mine = self.placed[mesh.get_local_rank("pp")]
        parts = [model[self.cuts[s] : self.cuts[s + 1]] for s in mine]
        parts = [self.spread(part, mesh) for part in parts]
        stack = SimpleNamespace(group=group, first=0 in mine, last=count - 1 in mine)
        stack.schedule = self.schedule(
            [
                PipelineStage(part, s, count, torch.device("cpu"), group=group)
                for part, s in zip(parts, mine, strict=True)
            ]
        )
        named = [item for part in parts for item in part.named_parameters()]
        stack.named = {name.removeprefix("module."): p for name, p in named}
        stack.optimizer = self.optimizer(list(stack.named.items()))
        return stack


class Interleaved(LoopedBfs):
    """1F1B over four stages."""

    kind: Any = schedules.ScheduleInterleaved1F1B
