r"""torchao's optimizers with state in 8 and 4 bits, under FSDP2.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torchao_optimizers:Adam8

Needs torchao, and a C++ compiler: the optimizers compile their step.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.optim import AdamW4bit, AdamW8bit

from .shared import Named, Pair, Regression

class Adam8(Regression):
    """State of matrices with 4096 elements or more is rounded, by blocks of 256."""

    optimizer_class: Any = AdamW8bit

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 16), nn.Tanh(), nn.Linear(16, 4))

    def parallelize(
        self, model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy
    ) -> nn.Module:
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = self.optimizer_class([p for _, p in parameters], lr=1e-2)
        return made


class Adam4(Adam8):
    """The same in 4 bits, by blocks of 128."""

    optimizer_class = AdamW4bit
