r"""The first FSDP without shards, averaged after the last micro-batch, as a workload.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torch_fsdp1_no_shard:NoShardBranch

NoShard ends with PASS, NoShardBranch with FAIL: docs/wild/torch-fsdp1-no-shard.md.
"""

from contextlib import nullcontext
from typing import Any

from torch import device
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import Linear

from .shared import Pair, weighted
from .torch_hsdp_all_reduce import EachUsed


class NoShard(EachUsed):
    """Each layer is a unit, which averages its gradients as DDP does."""

    meshes = ({"dp": 2},)

    def parallelize(self, model: Any, mesh: Any) -> Any:
        stack: Any = FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            device_id=device("cpu"),
            sharding_strategy=ShardingStrategy.NO_SHARD,
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy({Linear}),
        )
        stack.own = self.optimizer([*stack.named_parameters()])
        return stack

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        losses: list[Any] = []
        stack.own.zero_grad()
        for inputs, targets, share in weighted(micro_batches):
            last = len(losses) + 1 == len(micro_batches)
            with nullcontext() if last else stack.no_sync():
                losses.append(self.loss(stack(inputs), targets) * share)
                losses[-1].backward()
        stack.own.step()
        return sum(losses).detach()


class NoShardBranch(NoShard):
    """Faulty: the last of two micro-batches does not use the middle layer."""

    passed_by = 6
