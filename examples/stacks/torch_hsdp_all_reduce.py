r"""FSDP2's hybrid sharding, all-reduced after the last micro-batch, as a workload.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torch_hsdp_all_reduce:Branch

EachUsed ends with PASS, Branch with FAIL: docs/wild/torch-hsdp-all-reduce.md.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from .shared import Pair, Regression, weighted


class Net(nn.Sequential):
    """Model in which rows whose first feature is 0 skip the middle layer."""

    def forward(self, x: Tensor) -> Any:
        hidden = self[0](x).tanh()
        if (mine := x[:, :1] != 0).any():
            hidden = self[1](hidden).tanh().where(mine, hidden)
        return self[2](hidden)


class EachUsed(Regression):
    """HSDP in which each micro-batch uses all layers and reduce-scatters gradients."""

    meshes, passed_by = ({"dp_replicate": 2, "dp_shard": 1},), 0

    def model(self) -> nn.Module:
        return Net(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))

    def batch(self, step: int, seed: int) -> Pair:
        x, targets = super().batch(step, seed)
        x.unflatten(0, (2, 12))[:, 12 - self.passed_by :, 0] = 0  # of both ranks
        return x, targets

    def parallelize(self, model: Any, mesh: Any) -> Any:
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
        model.own = self.optimizer([*model.named_parameters()])
        return model

    def train_step(self, stack: Any, micro_batches: list[Pair], scaler: Any) -> Any:
        losses: list[Any] = []
        stack.own.zero_grad()
        for inputs, targets, share in weighted(micro_batches):
            stack.set_requires_all_reduce(len(losses) + 1 == len(micro_batches))
            losses.append(self.loss(stack(inputs), targets) * share)
            losses[-1].backward()
        stack.own.step()
        return sum(losses).detach()


class Branch(EachUsed):
    """Faulty: the last of two micro-batches does not use the middle layer."""

    passed_by = 6
