r"""torchao's low-bit optimizers as a workload: Adam whose moments are 8 or 4 bits.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torchao_optimizers:Eight

Needs torchao, and a C++ compiler: its optimizers compile their step.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchao.optim import AdamW4bit, AdamW8bit, AdamWFp8

from .shared import Named, Regression

# compiled code of one state would be taken for another's: see docs/wild
torch._functorch.config.enable_autograd_cache = False


class Eight(Regression):
    """Adam with 8-bit moments, under FSDP2."""

    rounds_state = True  # by blocks, and a rank's shards have others than the whole
    kind: Any = AdamW8bit

    def model(self) -> nn.Module:
        # parameters of fewer than 4,096 elements on a rank keep their moments in fp32
        return nn.Sequential(nn.Linear(16, 512), nn.Tanh(), nn.Linear(512, 4))

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        fully_shard(model, mesh=mesh)
        return model

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = self.kind([p for _, p in parameters], lr=1e-3)
        return made


class Four(Eight):
    """Adam with 4-bit moments, under FSDP2."""

    kind = AdamW4bit


class Fp8(Eight):
    """Adam with float8 moments, under FSDP2."""

    kind = AdamWFp8


class Replicated(Eight):
    """Adam with 8-bit moments, under DDP."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return DistributedDataParallel(model, process_group=mesh.get_group("dp"))
