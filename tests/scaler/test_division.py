"""A call that cannot divide one gradient leaves all of them as they were.

An expanded gradient cannot be written to. The kernels go through the other gradients,
of its dtype and of others, before they come to it.
"""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from gradparity.tests.stepping import BOTH, scaled

CALLS: list[tuple[str, list[float]]] = [
    ("unscale_", []),
    ("step", []),
    *product(["clip_grad_norm_", "clip_and_step"], ([0.0], [0.5], [1e9])),
]


# regression: S9, T20
@BOTH
@pytest.mark.parametrize(("call", "asked"), CALLS)
@pytest.mark.parametrize("scale", [4.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_all_gradients_are_divided_or_none(
    make: Any, call: str, asked: list[float], scale: float, dtype: Any, place: int
) -> None:
    params = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    params.insert(place, nn.Parameter(torch.zeros(4, dtype=dtype)))
    for p in params:
        p.grad = torch.full_like(p, scale)
    bad = params[place]
    bad.grad = torch.full((1,), scale, dtype=dtype).expand(4)
    scaler, optimizer = scaled(make, scale), torch.optim.SGD(params, lr=1.0)
    for _ in range(2):  # also a retry
        with pytest.raises(RuntimeError, match="single memory location"):
            getattr(scaler, call)(optimizer, *asked)
        for p in params:
            assert p.grad is not None
            # the factor of a clip is no power of two
            assert p.grad.tolist() == pytest.approx([scale] * 4, rel=1e-6)
    bad.grad = torch.full((4,), scale, dtype=dtype)
    getattr(scaler, call)(optimizer, *asked)
    if call not in ("step", "clip_and_step"):
        scaler.step(optimizer)
    max_norm = min(asked[0], 12**0.5) if asked else 12**0.5
    moved = torch.cat([p.detach().double() for p in params])
    assert moved.norm().item() == pytest.approx(max_norm, rel=1e-5)
