"""The comparison that all checks use, and its formulas."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from gradparity.conformance.comparison.compare import (
    Spread,
    compare,
    multiple_of,
    relative_floor,
    sizes,
)
from gradparity.conformance.formulas import clip_factor, equal_but_for_rounding


def test_a_difference_has_a_norm_and_a_largest_element() -> None:
    truth = np.array([3.0, 4.0])
    norm, largest = compare(np.array([3.0, 4.5]), truth, (1.0, 0.25), sizes(truth))
    assert (norm.measure, norm.error, norm.bound) == ("norm", 0.1, 0.2)
    assert (largest.measure, largest.error, largest.bound) == (
        "largest element",
        0.125,
        0.0625,
    )
    assert norm.ratio == 0.5 and largest.ratio == 2.0
    assert norm.absolute == largest.absolute == 0.5
    assert norm.compares and largest.compares


def test_a_difference_that_is_nan_is_beyond_every_bound() -> None:
    truth = np.ones(2)
    for found in compare(np.array([np.nan, 1.0]), truth, (9.0, 9.0), (1.0, 1.0)):
        assert found.ratio == math.inf and found.compares


def test_a_bound_of_zero_permits_equality_alone() -> None:
    zeros = np.zeros(2)
    assert all(m.ratio == 0.0 for m in compare(zeros, zeros, (0.0, 0.0), (0.0, 0.0)))
    off = compare(zeros + 1e-300, zeros, (0.0, 0.0), (0.0, 0.0))
    assert off[1].ratio == math.inf


def test_a_bound_as_large_as_the_truth_compares_nothing() -> None:
    truth = np.ones(1)
    (norm, _) = compare(truth, truth, (1.0, 1.0), sizes(truth))
    assert not norm.compares


def test_the_part_of_a_tensor_is_measured_by_the_whole() -> None:
    (norm, _) = compare(np.zeros(1), np.ones(1), (1.0, 1.0), (4.0, 2.0))
    assert (norm.error, norm.bound, norm.size) == (0.25, 0.25, 4.0)


def test_a_multiple_is_found_by_least_squares() -> None:
    truth = np.array([1.0, 2.0, 2.0])
    assert multiple_of(-3 * truth, truth) == (-3.0, 0.0)
    assert multiple_of(truth, np.zeros(3)) == (0.0, 1.0)
    factor, rest = multiple_of(np.array([2.0, -1.0, 0.0]), truth)
    assert (factor, rest) == (0.0, 1.0)


def test_the_floor_is_the_median_of_what_is_known_or_the_roundoff() -> None:
    own = dict.fromkeys("abcd", (2.0, 1.0))
    norms = {"a": 2.0, "b": 4.0, "c": 8.0, "d": math.inf}
    spreads = {name: Spread(noise=(norm, 0.0)) for name, norm in norms.items()}
    assert relative_floor(spreads, own, 0.25) == (2.0, 0.25)


def test_a_spread_grows_with_each_step_and_a_bound_is_eight_times_its_largest() -> None:
    spread = Spread().widened([(1.0, 0.5), (0.5, 0.75)])
    assert spread.noise == (1.0, 0.75)
    assert spread.widened([(0.25, 0.25)]).noise == (1.0, 0.75)
    assert spread.bound() == (8.0, 6.0)
    assert spread.bound((0.0, 2.0)) == (8.0, 16.0)
    # half of what another side changes counts
    assert spread.widened([(0.0, 0.0)], [(4.0, 1.0)]).bound() == (16.0, 6.0)


def test_a_run_that_is_not_finite_measures_nothing() -> None:
    spread = Spread().widened([(math.nan, 1.0), (1.0, 1.0)], [(math.inf, 1.0)])
    assert spread == Spread(noise=(1.0, 1.0))
    assert spread.widened([(math.inf, 1.0)]).bound() == (math.inf, math.inf)


@pytest.mark.parametrize("norm", [0.0, 0.2, 0.25, 3.0, math.inf, math.nan])
def test_the_clip_factor_is_that_of_torch(norm: float) -> None:
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    parameter.grad = torch.tensor([norm], dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([parameter], 0.25)
    expected = float(parameter.grad)
    found = norm * clip_factor(norm, 0.25)
    assert found == expected or (math.isnan(found) and math.isnan(expected))


def test_neither_needs_torch() -> None:
    program = (
        "import importlib.util, sys\n"
        "for path in sys.argv[1:]:\n"
        "    spec = importlib.util.spec_from_file_location('made', path)\n"
        "    module = importlib.util.module_from_spec(spec)\n"
        "    sys.modules['made'] = module\n"
        "    spec.loader.exec_module(module)\n"
        "assert 'torch' not in sys.modules\n"
    )
    paths = [str(sys.modules[f.__module__].__file__) for f in (compare, clip_factor)]
    subprocess.run([sys.executable, "-c", program, *paths], check=True)


@pytest.mark.parametrize(
    ("off", "equal"),
    [
        pytest.param({"big": 1e-5}, True, id="a model that computes in fp32 inside"),
        pytest.param({"big": 1e-3}, False, id="another value"),
        pytest.param({"gate": 1e-6}, False, id="a small gradient that is another one"),
        pytest.param({"gate": 1e-14}, True, id="terms that cancel, in fp64"),
        pytest.param({"big": 1e-7, "other": 1e-7, "gate": 1e-6}, True, id="or in fp32"),
        pytest.param({"big": math.nan}, False, id="no number"),
    ],
)
def test_rounding_is_distinguished_from_another_gradient(
    off: dict[str, float], equal: bool
) -> None:
    one = {n: np.array([size]) for n, size in SIZES.items()}
    other = {n: value + off.get(n, 0.0) for n, value in one.items()}
    assert equal_but_for_rounding(one, other) is equal
    assert equal_but_for_rounding(other, one) is equal


def test_gradients_of_other_tensors_are_other_gradients() -> None:
    one = {n: np.array([size]) for n, size in SIZES.items()}
    assert not equal_but_for_rounding(one, {"big": one["big"]})


SIZES = {"big": 1.0, "other": 1.0, "gate": 1e-4}
"""Largest elements of three gradients."""
