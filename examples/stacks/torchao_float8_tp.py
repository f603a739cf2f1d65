r"""torchao's float8 training under tensor parallelism, with its own styles.

    gradparity run --quick --precision fp32 --scaler none \
        --workload examples.stacks.torchao_float8_tp:Stack

Needs torchao.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torchao.float8.float8_tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
)

from .torchao_float8 import Tensorwise


class Stack(Tensorwise):
    """Two layers are split over ranks, by columns and by rows; the third is whole."""

    meshes = ({"tp": 2},)

    def parallelize(  # type: ignore[override]  # no policy: nothing is fully sharded
        self, model: nn.Module, mesh: DeviceMesh
    ) -> nn.Module:
        plan = {"0": Float8ColwiseParallel(), "2": Float8RowwiseParallel()}
        return parallelize_module(model, mesh["tp"], plan)
