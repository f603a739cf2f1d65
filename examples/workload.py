"""A user's stack, for ``gradparity run --workload examples.workload:Stack``."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import parallel as tp


class Stack:
    """A small regression under FSDP, and under FSDP with tensor parallelism."""

    meshes = ({"dp": 2}, {"dp": 2, "tp": 2})

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def batch(self, step: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(16, 16, generator=generator)
        return x, x.abs()[:, :4]

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, targets)

    def parallelize(
        self, model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy
    ) -> nn.Module:
        if "tp" in (mesh.mesh_dim_names or ()):
            plan = {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()}
            tp.parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
        return model

    def optimizer(
        self, parameters: list[tuple[str, nn.Parameter]]
    ) -> torch.optim.AdamW:
        return torch.optim.AdamW([p for _, p in parameters], lr=1e-3)
