r"""torch.compile over FSDP2: layers compiled first, or the whole model afterwards.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torch_compiled_fsdp2:Layers

Needs a C++ compiler. Ends with PASS in one to two minutes on two cores.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from .shared import Regression


class Layers(Regression):
    """Each layer is compiled and is a unit of FSDP2, as torchtitan lays models out."""

    def parallelize(self, model: nn.Sequential, mesh: DeviceMesh) -> Any:
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.compile()
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model


class Whole(Layers):
    """torch.compile(model) after fully_shard."""

    def parallelize(self, model: nn.Sequential, mesh: DeviceMesh) -> Any:
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return torch.compile(model)
