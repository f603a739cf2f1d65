r"""torch's pipeline schedules with data parallel stages: DDP, and FSDP2.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torch_pipeline_dp:ShardedZeroBubble

Needs torch alone. Each class takes about half a minute on two cores and ends with PASS
but for ReplicatedGPipe: with DDP torch's schedule raises in its second call, and the
run ends with ERROR. Looped BFS and interleaved 1F1B raise there, too.
"""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import schedules
from torch.nn.parallel import DistributedDataParallel

from .torch_interleaved import LoopedBfs


class Replicated(LoopedBfs):
    """1F1B of two stages, each on two ranks under DistributedDataParallel."""

    meshes: tuple[dict[str, int], ...] = ({"dp": 2, "pp": 2},)
    kind: Any = schedules.Schedule1F1B
    cuts: tuple[int, ...] = (0, 3, 8)
    placed: tuple[tuple[int, ...], ...] = ((0,), (1,))

    def schedule(self, stages: Any) -> Any:
        return super().schedule(stages[0])

    def spread(self, part: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return DistributedDataParallel(part, process_group=mesh.get_group("dp"))


class ReplicatedGPipe(Replicated):
    """GPipe of the same stages under DDP: **raises**."""

    kind: Any = schedules.ScheduleGPipe


class Sharded(Replicated):
    """1F1B of two stages, each on two ranks under FSDP2."""

    def spread(self, part: nn.Module, mesh: DeviceMesh) -> nn.Module:
        fully_shard(part, mesh=mesh["dp"])
        return part


class ShardedZeroBubble(LoopedBfs):
    """Zero bubble over four stages under FSDP2."""

    meshes = Replicated.meshes
    kind: Any = schedules.ScheduleInterleavedZeroBubble
    spread = Sharded.spread
