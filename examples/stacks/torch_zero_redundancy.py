r"""ZeroRedundancyOptimizer beside DistributedDataParallel, as a workload.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torch_zero_redundancy:Stack

Ends with PASS in under half a minute on two cores.
"""

from contextlib import nullcontext
from typing import Any, ClassVar

from torch import nn, optim
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from .shared import Named, Pair, Regression, weighted


class Stack(Regression):
    """Each rank steps some whole parameters and broadcasts them."""

    clip_norm, buckets = 0.1, False
    settings: ClassVar[dict[str, Any]] = {"lr": 0.05, "momentum": 0.9}

    def optimizer(self, parameters: Named) -> optim.Optimizer:
        return optim.SGD([p for _, p in parameters], **self.settings)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        stack: Any = DistributedDataParallel(model, device_mesh=mesh)
        stack.own = ZeroRedundancyOptimizer(
            stack.parameters(),
            optimizer_class=optim.SGD,
            process_group=mesh.get_group(),
            parameters_as_bucket_view=self.buckets,
            **self.settings,
        )
        return stack

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        stack.own.zero_grad()
        total = 0.0
        for number, (inputs, targets, share) in enumerate(weighted(micro_batches), 1):
            last = number == len(micro_batches)
            with nullcontext() if last else stack.no_sync():
                loss = self.loss(stack(inputs), targets) * share
                loss.backward()
            total += loss.detach()
        norm = clip_grad_norm_(stack.parameters(), self.clip_norm)
        stack.own.step()
        return total, norm


class Buckets(Stack):
    """Like Stack, but parameters are views of buckets, which are broadcast."""

    buckets = True
