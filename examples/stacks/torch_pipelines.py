r"""More of torch's pipeline schedules: four stages, backward in two parts, FSDP2.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torch_pipelines:ZeroBubbleV

Needs torch alone. Each class is one schedule, on the loop of torch_pipeline.py, and
takes about half a minute on two cores. They end with PASS but for FrozenStage, whose
plain runs FAIL, and for LoopedBfs and Interleaved, which torch refuses on dp2-pp2: add
--topology pp2. docs/stacks.md has the table.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules

from .torch_pipeline import GPipe


class OneForwardOneBackward(GPipe):
    """Backward as soon as there is one."""

    kind: Any = schedules.Schedule1F1B


class LoopedBfs(GPipe):
    """Four stages: each rank has two that are not neighbours."""

    kind: Any = schedules.ScheduleLoopedBFS
    placed: tuple[tuple[int, ...], ...] = ((0, 2), (1, 3))


class Interleaved(LoopedBfs):
    """1F1B over four stages."""

    kind: Any = schedules.ScheduleInterleaved1F1B


class InterleavedZeroBubble(LoopedBfs):
    """Backward in two parts, of inputs and of weights."""

    meshes: tuple[dict[str, int], ...] = ({"pp": 2},)
    kind: Any = schedules.ScheduleInterleavedZeroBubble


class ZeroBubbleV(InterleavedZeroBubble):
    """The first rank also has the last stage."""

    kind: Any = schedules.ScheduleZBVZeroBubble
    placed: tuple[tuple[int, ...], ...] = ((0, 3), (1, 2))


class DualPipeV(ZeroBubbleV):
    """Forward and backward overlap."""

    kind: Any = schedules.ScheduleDualPipeV


class ShardedOneForwardOneBackward(OneForwardOneBackward):
    """FSDP2 over ``dp``."""

    meshes: tuple[dict[str, int], ...] = ({"dp": 2, "pp": 2},)

    def data_parallel(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        fully_shard(module, mesh=mesh)
        return module


class ShardedZeroBubble(InterleavedZeroBubble):
    """FSDP2 over ``dp``, with backward in two parts."""

    meshes: tuple[dict[str, int], ...] = ({"dp": 2, "pp": 2},)
    data_parallel = ShardedOneForwardOneBackward.data_parallel


class FrozenStage(InterleavedZeroBubble):
    """The first stage does not train, **and then the second one does not either**."""

    def model(self) -> nn.Module:
        model = super().model()
        model.get_submodule("0").requires_grad_(False)
        return model
