"""The findings of docs/wild as workloads, for the judge.

    gradparity run --scaler none --workload gradparity.benchmarks.wild_workloads:Lasso

Each is the layout that a finding is about, and nothing else. DTensors stay DTensors up
to the loss: the judge's loop gets plain tensors from ``train_step``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor import distribute_tensor as distribute
from torch.distributed.tensor import parallel as tp
from torch.nn import functional as F

Pair = tuple[Any, Any]


class Rows:
    """A regression; the mesh axis is a tensor-parallel one."""

    meshes: tuple[dict[str, int], ...] = ({"tp": 2},)

    def model(self) -> nn.Module:
        """Two layers."""
        return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))

    def batch(self, step: int, seed: int) -> Pair:
        """Random features, and a target that depends on them."""
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(12, 8, generator=generator)
        return x, x.abs()[:, :4]

    def loss(self, output: Any, targets: Any) -> Any:
        """Mean squared error."""
        return F.mse_loss(output, targets)

    def optimizer(self, parameters: list[tuple[str, nn.Parameter]]) -> Any:
        """SGD, which hides no factor."""
        return torch.optim.SGD([p for _, p in parameters], lr=0.1)


class MseLoss(Rows):
    """The output stays split by columns, and so does the loss."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Columns, rows, and columns of the last layer as a DTensor."""
        axis = mesh["tp"]
        last = tp.ColwiseParallel(use_local_output=False)
        tp.parallelize_module(model, axis, {"0": tp.ColwiseParallel(
            output_layouts=Replicate()), "2": last})  # fmt: skip
        return model

    def loss(self, output: Any, targets: Any) -> Any:
        """The same, of a DTensor where the output is one."""
        if isinstance(output, Tensor) and hasattr(output, "device_mesh"):
            targets = distribute(targets, output.device_mesh, [Shard(1)])
            return F.mse_loss(output, targets).full_tensor()
        return F.mse_loss(output, targets)


class Lasso(Rows):
    """A group lasso on a weight whose rows are split."""

    penalty = staticmethod(lambda w: torch.linalg.vector_norm(w, dim=0).sum().square())

    def model(self) -> nn.Module:
        """As above, with the penalty added to each output."""
        return Penalised(self.penalty)

    def parallelize(self, model: Any, mesh: DeviceMesh) -> nn.Module:
        """Rows of the first weight over the ranks."""
        tp.parallelize_module(
            model, mesh["tp"], {"up": tp.ColwiseParallel(output_layouts=Replicate())}
        )
        return model  # type: ignore[no-any-return]


class Amax(Lasso):
    """A penalty on the largest element of a weight whose rows are split."""

    penalty = staticmethod(lambda w: w.square().amax())


class Penalised(nn.Module):
    """Adds a penalty on its first weight to what it returns."""

    def __init__(self, penalty: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 4)
        self.penalty = penalty

    def forward(self, x: Tensor) -> Tensor:
        """Features -> features."""
        extra = self.penalty(self.up.weight)
        if hasattr(extra, "full_tensor"):
            extra = extra.full_tensor()
        found: Tensor = self.down(self.up(x).tanh()) + 0.01 * extra
        return found


class Frequency(Rows):
    """An embedding that scales by frequency; the batch is a DTensor split by rows."""

    def model(self) -> nn.Module:
        """A table and a head."""
        table = nn.Embedding(5, 6, scale_grad_by_freq=True)
        return nn.Sequential(table, nn.Linear(6, 4))

    def batch(self, step: int, seed: int) -> Pair:
        """Tokens and features."""
        generator = torch.Generator().manual_seed(1000 * seed + step)
        tokens = torch.randint(5, (12, 4), generator=generator)
        return tokens, torch.randn(12, 4, 4, generator=generator)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Replicated parameters; rows are split inside."""
        axis = mesh["tp"]

        def split(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return distribute(inputs[0], mesh, [Shard(0)])

        def whole(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.full_tensor()

        return distribute_module(model, axis, None, split, whole)
