"""A workload: copy this file and put your own training in.

    gradparity run --workload examples.workload:Stack --scaler none --quick

Run the command in the root of the repository. gradparity trains the model below on one
process and on each mesh, step by step, with accumulation, frozen layers and mixed
precision, and compares losses, gradients and updates on every rank. The run ends with
PASS after one to two minutes on two cores. A fault ends it with FAIL and names step,
rank and parameter: docs/start.md has one to try.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import parallel as tp


class Stack:
    """A small regression under FSDP, and under FSDP with tensor parallelism."""

    # Meshes to train on: axis -> size. Ranks along "dp" see different rows, along "tp"
    # the same ones; for names of your own declare data_axes and model_axes.
    meshes = ({"dp": 2}, {"dp": 2, "tp": 2})

    # The whole model, in fp32 on the CPU. torch is seeded before the call, so that all
    # ranks and the reference begin with the same weights.
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    # The global batch of a step: each rank gets its part of the rows. The generator is
    # made here, so equal arguments give equal numbers on every rank and in every run.
    def batch(self, step: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(16, 16, generator=generator)
        return x, x.abs()[:, :4]

    # The mean over the rows, or (sum, count) where not every row counts.
    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, targets)

    # Your layout: gradparity checks it. The policy has the dtypes of the precision
    # that is tried; leave the argument out if you do not call fully_shard.
    def parallelize(
        self, model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy
    ) -> nn.Module:
        if "tp" in (mesh.mesh_dim_names or ()):
            plan = {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()}
            tp.parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
        return model

    # An optimizer of some or all parameters, called after the layout.
    def optimizer(
        self, parameters: list[tuple[str, nn.Parameter]]
    ) -> torch.optim.AdamW:
        return torch.optim.AdamW([p for _, p in parameters], lr=1e-3)
