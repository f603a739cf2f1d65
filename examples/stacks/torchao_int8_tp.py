r"""Adapters beside torchao's frozen weights of 8 bits, under tensor parallelism.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torchao_int8_tp:Stack

Needs torchao. Its tensor does not support DTensor, so each rank keeps the codes and
scales of its own rows or columns.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torchao.prototype.quantized_training.int8 import (
    Int8QuantizedTrainingLinearWeight as Int8,
)

from . import torchao_int8


class Stack(torchao_int8.Stack):
    """The first layer is split by columns, the second by rows."""

    meshes = ({"tp": 2},)

    def parallelize(self, model: Any, mesh: DeviceMesh) -> nn.Module:
        size, rank = mesh.size(), mesh.get_local_rank()
        first, last = model[0].frozen, model[2].frozen
        codes, scales = first.weight.int_data, first.weight.scale
        keep(first, Int8(codes.chunk(size)[rank], scales.chunk(size)[rank]))
        # a row of the second one is on all ranks, and so is its scale
        codes, scales = last.weight.int_data, last.weight.scale
        keep(last, Int8(codes.chunk(size, 1)[rank].contiguous(), scales))

        def summed(_module: nn.Module, _inputs: Any, part: Tensor) -> Tensor:
            return DTensor.from_local(part, mesh, [Partial()]).full_tensor()

        last.register_forward_hook(summed)
        plan = {"0.wide": ColwiseParallel(), "2.narrow": RowwiseParallel()}
        return parallelize_module(model, mesh, plan)


def keep(layer: Any, part: Int8) -> None:
    """Replace a layer's weight by ``part``, the rank's own codes and scales."""
    layer.weight = nn.Parameter(part, requires_grad=False)
