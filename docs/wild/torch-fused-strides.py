"""torch: fused optimizers on CPU take tensors of other strides for contiguous ones.

python torch-fused-strides.py; exit code 1 where the bug shows.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

LR = 0.1
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": torch.optim.SGD,
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "Adagrad": torch.optim.Adagrad,
}


def own_gradient(make: Any, dtype: torch.dtype, fused: bool) -> Tensor:
    """The weight after one step with a gradient that code of the user has made."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.zeros(6, 4, dtype=dtype))
    q, r = torch.linalg.qr(torch.randn(4, 6, dtype=torch.float64))
    # transposed, as low-rank and orthogonalised gradients often are
    weight.grad = (q @ r).to(dtype).t()
    make([weight], lr=LR, fused=fused, foreach=False).step()
    return weight.detach()


def channels_last(make: Any, dtype: torch.dtype, fused: bool) -> Tensor:
    """A kernel after a second step, which follows a change of the memory format."""
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 2, bias=False).to(dtype)
    images = torch.randn(2, 3, 5, 5).to(dtype)
    optimizer = make(layer.parameters(), lr=LR, fused=fused, foreach=False)
    for _ in range(2):
        optimizer.zero_grad()
        layer(images).square().sum().backward()
        optimizer.step()
        layer.to(memory_format=torch.channels_last)
    return layer.weight.detach()


def main() -> int:
    """Print what was found."""
    print("versions: torch", torch.__version__)
    worst: dict[str, float] = {}
    noise = 0.0
    for case in (own_gradient, channels_last):
        for name, make in OPTIMIZERS.items():
            exact = case(make, torch.float64, False)
            plain, fused = (case(make, torch.float32, f) for f in (False, True))
            off, rounding = (
                float((w - exact).norm() / exact.norm()) for w in (fused, plain)
            )
            noise = max(noise, rounding)
            worst[case.__name__] = max(worst.get(case.__name__, 0.0), off)
            print(f"{case.__name__}, {name}: fused {off:.1e}, not fused {rounding:.1e}")
    error = worst["own_gradient"]
    print("parameter: weight")
    print(f"relative error: {error:.2e}; {worst['channels_last']:.2e} of the kernel")
    print(f"reference: not fused, fp64; fp32 is off by {noise:.0e}")
    print("verdict:", "bug" if error > 1e-3 else "no bug")
    return int(error > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
