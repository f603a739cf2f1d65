"""8-bit products: bounds come from the differences between correct runs."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gradparity.conformance import Scenario
from gradparity.conformance.comparison.parity import measure_parity
from gradparity.fixtures import PRECISIONS, Precision
from gradparity.tests.conformance.test_parity import traces_of


def precision(dtype: torch.dtype, *, scaled: bool) -> Precision:
    """Return the precision of CONTRIBUTING.md's recipe for 8-bit products.

    ``scaled`` adds a scale for each tensor.
    """

    def rounded(x: Tensor) -> Tensor:
        scale = x.abs().max().detach() / torch.finfo(dtype).max if scaled else 1.0
        return x + ((x / scale).to(dtype).to(x.dtype) * scale - x).detach()

    class Linear(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.linear(rounded(input), rounded(self.weight), self.bias)

    def convert(model: nn.Module) -> nn.Module:
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear
        return model

    name = f"{str(dtype).rpartition('.')[2]}{'-scaled' if scaled else ''}"
    return Precision(name=name, text="", compute_dtype=dtype, convert=convert)


MADE = [
    precision(dtype, scaled=scaled)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    for scaled in (False, True)
]


@pytest.fixture(params=MADE, ids=lambda made: made.name)
def eight_bits(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    monkeypatch.setitem(PRECISIONS, request.param.name, request.param)
    yield request.param.name


def scenario(eight_bits: str, seed: int = 0) -> Scenario:
    return Scenario.parse(f"ddp/2/{eight_bits}/sgd/none/steps=2,seed={seed}")


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_right_run_is_within_the_bounds(eight_bits: str, seed: int) -> None:
    of = scenario(eight_bits, seed)
    assert measure_parity(of, traces_of(of)).first_bad == {}


@pytest.mark.parametrize("factor", [0.0, 0.51, 0.6, 1.4])
def test_gradients_that_are_far_off_are_caught(eight_bits: str, factor: float) -> None:
    of = scenario(eight_bits)
    traces = traces_of(of)
    for values in traces[0].steps[0].gradients.values():
        values *= np.float32(factor)
    first = measure_parity(of, traces).first_bad["gradient"]
    assert first.step == 0 and first.bound < 0.4


def test_no_first_gradient_passes_unseen(eight_bits: str) -> None:
    of = scenario(eight_bits)
    for name in traces_of(of)[0].index:
        traces = traces_of(of)
        traces[0].steps[0].gradients[name] *= 0
        first = measure_parity(of, traces).first_bad["gradient"]
        assert first.parameter == name
