r"""Adapters beside frozen weights of torchao's: 8-bit integers with a scale a row.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torchao_int8:Stack

Needs torchao. The weights are parameters that do not train, so FSDP2 shards them.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torchao import quantize_
from torchao.prototype.quantized_training import int8_weight_only_quantized_training

from .shared import Regression


class Adapted(nn.Module):
    """A frozen 8-bit layer with a trained adapter of two small layers."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(width, out, bias=False)
        quantize_(self.frozen, int8_weight_only_quantized_training())
        self.frozen.requires_grad_(False)
        self.narrow = nn.Linear(width, 4, bias=False)
        self.wide = nn.Linear(4, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.frozen(x) + self.wide(self.narrow(x))
        return adapted


class Stack(Regression):
    """Adapters under FSDP2, which gathers codes and scales."""

    def model(self) -> nn.Module:
        return nn.Sequential(Adapted(16, 32), nn.Tanh(), Adapted(32, 4))

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if mesh.size() == 1:  # pytorch/pytorch#197999
            raise ValueError("FSDP2 gathers no scales on one rank")
        for layer in model.children():
            if isinstance(layer, Adapted):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
