"""A GAN with alternating steps: its reference is the same step on one rank.

gradparity run --workload examples.gan:Gan --scaler none --topology dp2

The critic steps before the gradients of the maker are computed, so gradparity's own
loop cannot be the reference. With ``reference = "one rank"`` the same ``train_step`` on
one rank is the reference. A fault that also occurs on one rank is then not detected.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel


class Gan:
    """Two networks under data parallelism, each with an optimizer."""

    meshes = ({"dp": 2},)
    reference = "one rank"

    def model(self) -> nn.Module:
        maker = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
        critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        return nn.ModuleDict({"maker": maker, "critic": critic})

    # Everything random belongs here, where it has rows: also the noise.
    def batch(self, step: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        noise = torch.randn(16, 4, generator=generator)
        return noise, torch.randn(16, 8, generator=generator).sin()

    def parallelize(self, model: Any, mesh: DeviceMesh) -> Any:
        for name in ("maker", "critic"):
            network = model[name]
            model[name] = DistributedDataParallel(
                network, process_group=mesh.get_group("dp")
            )
        model.optimizers = {
            name: torch.optim.Adam(network.parameters(), lr=1e-2)
            for name, network in model.items()
        }
        return model

    def train_step(self, stack: Any, micro_batches: list[Any], scaler: Any) -> Tensor:
        total = torch.zeros(())
        for noise, real in micro_batches:
            stack.optimizers["critic"].zero_grad()
            fake = stack["maker"](noise).detach()
            loss = softplus(-stack["critic"](real)) + softplus(stack["critic"](fake))
            loss.mean().backward()
            stack.optimizers["critic"].step()
            stack.optimizers["maker"].zero_grad()
            softplus(-stack["critic"](stack["maker"](noise))).mean().backward()
            stack.optimizers["maker"].step()
            total = total + loss.detach().mean() / len(micro_batches)
        return total
