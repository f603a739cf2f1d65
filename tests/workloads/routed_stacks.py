"""Workloads with a learned router; the docstring names the fault, if there is one."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel as tp
from torch.utils.checkpoint import checkpoint

from gradparity.tests.workloads.stacks import Batch, Named, Right

WIDTH, EXPERTS, ROWS = 8, 4, 64


class TopOne(Right):
    """No fault: each row goes to one of four experts."""

    meshes: object = ({"dp": 2}, {"tp": 2})
    k = 1

    def model(self) -> nn.Module:
        return Mixture(self.k)

    def batch(self, step: int, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(ROWS, WIDTH, generator=generator)
        return x, x.abs()[:, :4]

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if "dp" in (mesh.mesh_dim_names or ()):
            return super().parallelize(model, mesh)
        plan = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
        return tp.parallelize_module(model, mesh, plan)


class TopTwo(TopOne):
    """No fault: each row goes to two of four experts."""

    k = 2


class SteppedByAdam(TopTwo):
    """No fault: the sign of a small gradient decides a whole step."""

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for _, p in parameters], lr=1e-2)


class ByMaximum(TopOne):
    """No fault: the expert is that of the largest score."""

    def model(self) -> nn.Module:
        return Mixture(k=0)


class Recomputed(TopOne):
    """No fault: the forward runs again in backward."""

    def model(self) -> nn.Module:
        return Checkpointed(self.k)

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        assert isinstance(model, Checkpointed)
        super().parallelize(model.inner, mesh)
        return model


class Masked(TopTwo):
    """No fault: the last expert's score is the lowest number of its dtype."""

    def model(self) -> nn.Module:
        return Mixture(self.k, masks=True)


class ForgetsTheRouter(TopTwo):
    """The router's gradient is lost."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        found = super().parallelize(model, mesh)
        assert isinstance(found, Mixture)
        found.router.register_forward_hook(lambda _, __, scores: scores.detach())
        return found


class ChoosesBySomethingElse(TopTwo):
    """Experts are chosen by biased scores, on the ranks only."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        found = super().parallelize(model, mesh)
        assert isinstance(found, Mixture)
        found.bias = torch.tensor([0.0, 0.3, 0.0, 0.0])
        return found


class MaskedForgetsTheRouter(ForgetsTheRouter, Masked):
    """The router's gradient is lost, and the last expert is masked."""


class Mixture(nn.Module):
    def __init__(self, k: int, *, masks: bool = False) -> None:
        super().__init__()
        self.k, self.bias = k, torch.zeros(EXPERTS)
        self.masks = masks
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.down(self.up(x).tanh())
        scores = self.router(rows).float().softmax(-1)
        biased = scores + self.bias.to(scores.dtype)
        if self.masks:
            last = torch.arange(EXPERTS) == EXPERTS - 1
            biased = biased.masked_fill(last, torch.finfo(biased.dtype).min)
        if self.k:
            _, chosen = biased.topk(self.k, dim=-1)
        else:
            _, chosen = biased.max(-1, keepdim=True)
        weights = scores.gather(-1, chosen)
        outputs = torch.stack([expert(rows) for expert in self.experts], 1)
        taken = outputs.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 4))
        found: Tensor = (weights.unsqueeze(-1) * taken).sum(1)
        return found


class Checkpointed(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.inner = Mixture(k)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return found
