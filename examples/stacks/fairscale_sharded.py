r"""fairscale's ShardedDataParallel over OSS as a workload: ZeRO 2 by whole parameters.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.fairscale_sharded:Stack

Needs fairscale. Stack ends with PASS in half a minute, OptimizerClears with FAIL.
"""

from contextlib import nullcontext
from typing import Any

from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim import OSS
from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh

from .shared import Pair, Regression, weighted


class Stack(Regression):
    """Workload whose wrapper clears the gradients, as in fairscale's tutorial."""

    clip_norm = 0.1

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        group = mesh.get_group()
        own = OSS(model.parameters(), optim=optim.SGD, lr=0.1, group=group)
        stack = ShardedDataParallel(model, own, process_group=group)
        stack.own = own
        return stack

    def clear(self, stack: Any) -> None:
        stack.zero_grad()

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        self.clear(stack)
        losses: list[Any] = []
        for inputs, targets, share in weighted(micro_batches):
            last = len(losses) + 1 == len(micro_batches)
            with nullcontext() if last else stack.no_sync():
                losses.append(self.loss(stack(inputs), targets) * share)
                losses[-1].backward()
        norm = stack.own.clip_grad_norm(self.clip_norm)
        stack.own.step()
        return sum(losses).detach(), norm


class OptimizerClears(Stack):
    """Faulty: the optimizer clears gradients, but the buckets keep them.

    See docs/wild/fairscale-stale-bucket.md.
    """

    def clear(self, stack: Any) -> None:
        stack.own.zero_grad()
