r"""DistributedDataParallel with communication hooks, which reduce in half precision.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torch_ddp_hooks:Fp16

Ends with PASS in under half a minute on two cores.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from .shared import Regression


class Fp16(Regression):
    """Gradients are divided by the number of ranks and summed in fp16."""

    reduce_dtype, hook = torch.float16, staticmethod(default_hooks.fp16_compress_hook)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Any:
        stack = DistributedDataParallel(model, device_mesh=mesh)
        stack.register_comm_hook(mesh.get_group(), self.hook)
        return stack


class Plain(Fp16):
    """DDP with the hook that does what DDP does without a hook."""

    reduce_dtype, hook = torch.float32, staticmethod(default_hooks.allreduce_hook)
