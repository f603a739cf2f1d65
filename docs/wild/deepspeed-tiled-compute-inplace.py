"""DeepSpeed: sequence_tiled_compute divides its incoming gradient in place.

python deepspeed-tiled-compute-inplace.py; exit code 1 where the bug shows.
One process: the fault needs no ranks.
"""

import sys
from importlib.metadata import version
from typing import Any

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

VOCABULARY, WIDTH, LENGTH = 12, 8, 16
ROWS = torch.randint(VOCABULARY, (1, LENGTH), generator=torch.manual_seed(1))


class Model(nn.Module):
    """An embedding, a router with an auxiliary loss, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Embedding(VOCABULARY, WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Of the head."""
        return cross_entropy(self.head(x).flatten(0, 1), y.flatten())

    def forward(self, tiles: int) -> Any:
        """The mean loss of each next token, and a router's z-loss."""
        x, y = self.body(ROWS), ROWS.roll(-1, 1)
        auxiliary = self.router(x).logsumexp(-1).square().mean()
        if not tiles:
            return self.loss(x, y) + auxiliary
        tiled = sequence_tiled_compute(
            self.loss, LENGTH, tiles, {"x": x, "y": y}, {}, "x", [self.head.weight],
            output_unshard_dimension=0, output_reduction="mean",
        )  # fmt: skip
        return tiled + auxiliary


def gradients(dtype: torch.dtype, tiles: int) -> dict[str, Tensor]:
    """Of both losses together."""
    model = Model().to(dtype)
    model(tiles).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def main() -> int:
    """Print what was found."""
    found, exact = gradients(torch.float32, 4), gradients(torch.float64, 0)
    fp32 = gradients(torch.float32, 0)

    def off(g: Tensor, n: str) -> float:
        return float((g - exact[n]).norm() / exact[n].norm())

    worst = max(exact, key=lambda n: off(found[n], n))
    print("versions: deepspeed", version("deepspeed"), "torch", torch.__version__)
    print("errors:", {n: f"{off(found[n], n):.1e}" for n in exact})
    print("parameter:", worst)
    print(f"relative error: {off(found[worst], worst):.2e}")
    print(f"reference: untiled, fp64; fp32 is off by {off(fp32[worst], worst):.0e}")
    print("verdict:", "bug" if off(found[worst], worst) > 1e-3 else "no bug")
    return int(off(found[worst], worst) > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
