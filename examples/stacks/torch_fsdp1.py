r"""FullyShardedDataParallel of torch, the first FSDP, as workloads.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torch_fsdp1:Full

Ends with PASS in under half a minute on two cores; HybridOne ends with FAIL.
"""

from typing import Any

from torch import device, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from .shared import Regression


class Full(Regression):
    """Each layer is flattened and sharded; the optimizer gets views of the shards."""

    strategy, original = ShardingStrategy.FULL_SHARD, True

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        return FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            device_id=device("cpu"),
            sharding_strategy=self.strategy,
            use_orig_params=self.original,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )


class GradientsAndStates(Full):
    """Gradients and optimizer states are sharded; weights stay whole after forward."""

    strategy = ShardingStrategy.SHARD_GRAD_OP


class Hybrid(Full):
    """Hybrid sharding: shards within a group of ranks, replicas across groups."""

    meshes = ({"dp_replicate": 2, "dp_shard": 2},)
    strategy = ShardingStrategy.HYBRID_SHARD


class HybridOne(Hybrid):
    """Faulty: replicas of whole weights, see docs/wild/torch-fsdp1-hybrid-one.md."""

    meshes = ({"dp_replicate": 2, "dp_shard": 1},)
