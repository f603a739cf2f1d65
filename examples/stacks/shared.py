"""Two small problems, on which the stacks are trained and compared.

Not a stack to run: a stack subclasses Regression or Tokens; see docs/stacks.md.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

Pair = tuple[Any, Any]
Named = list[tuple[str, nn.Parameter]]
VOCABULARY = 64


def weighted(micro_batches: list[Pair]) -> list[tuple[Any, Any, float]]:
    """Return (inputs, targets, share of the rows) of each micro-batch."""
    rows = sum(len(targets) for _, targets in micro_batches)
    return [(inputs, targets, len(targets) / rows) for inputs, targets in micro_batches]


class Regression:
    """Three layers learn absolute values; the loss is a mean over rows."""

    meshes: tuple[dict[str, int], ...] = ({"dp": 2},)

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4)
        )

    def batch(self, step: int, seed: int) -> Pair:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        x = torch.randn(24, 16, generator=generator)  # 2 ranks, 6 micro-batches
        return x, x.abs()[:, :4]

    def loss(self, output: Any, targets: Tensor) -> Any:
        return mse_loss(output, targets)

    def optimizer(self, parameters: Named) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in parameters], lr=0.1)


class Tokens(Regression):
    """Next-token prediction; some targets are left out, in some rows more of them."""

    most = 7  # targets of a row, from 1 on: a mean of means over parts is then wrong

    def batch(self, step: int, seed: int) -> Pair:
        generator = torch.Generator().manual_seed(1000 * seed + step)
        tokens = torch.randint(VOCABULARY, (24, 9), generator=generator)
        targets = tokens[:, 1:].clone()
        targets[torch.arange(8) >= torch.arange(24)[:, None] % self.most + 1] = -100
        return tokens[:, :-1], targets

    def loss(self, output: Any, targets: Tensor) -> Any:
        logits = getattr(output, "logits", output).flatten(0, 1)
        total = cross_entropy(logits, targets.flatten(), reduction="sum")
        return total, (targets != -100).sum()
