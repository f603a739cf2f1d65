"""Formulas that several parts of the comparison use; without torch.

The tested scaler has its own formulas, so that both do not share a mistake.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FP32_INSIDE",
    "FP32_UNIT",
    "bias_error",
    "clip_factor",
    "equal_but_for_rounding",
]

FP32_UNIT = 2.0**-24
"""Unit roundoff of fp32."""
FP32_INSIDE = 1024 * FP32_UNIT
"""Relative tolerance of fp64 runs of a model or loss that computes in fp32 inside. A
sum of 1,024 terms in fp32 (unit roundoff 2^-24) is off by this in the worst case. Far
larger differences arise if rows are cut in a layer that uses all of them."""
INSIDE_FP64 = 2.0**-40
"""Relative tolerance of sums in fp64 (unit roundoff 2^-53): up to 8,192 terms, each off
by one roundoff."""


def clip_factor(norm: float, clip_norm: float) -> float:
    """Return the factor of every gradient, as in torch's ``clip_grad_norm_``.

    Args:
        norm: norm of the whole unscaled gradient; nan gives nan.
        clip_norm: largest norm that is not changed.
    """
    factor = clip_norm / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor


def bias_error(betas: Iterable[float], steps_made: int) -> float:
    """Return the largest relative error of an Adam step with fp32 bias corrections.

    A correction is ``1 - beta**t``. Rounding beta changes the power by at most ``t``
    units, and rounding the power by one more. Relative to ``1 - beta**t`` this error is
    larger, and the result of the subtraction is rounded once more. The second
    correction is under a root, which halves its error.

    Args:
        betas: decay rates of the first and the second moment.
        steps_made: ``t``, including this step.
    """
    powers = [float(beta) ** steps_made for beta in betas]
    errors = [(steps_made + 1) * p / (1 - p) + 1 for p in powers if p < 1]
    return FP32_UNIT * sum(e * x for e, x in zip(errors, (1, 1 / 2), strict=False))


def equal_but_for_rounding(
    one: Mapping[str, NDArray[np.float64]], other: Mapping[str, NDArray[np.float64]]
) -> bool:
    """Return True if gradients of two fp64 runs differ by rounding only.

    Each tensor may differ by ``FP32_INSIDE`` of its own largest element, since a model
    may compute in fp32 inside. If large terms cancel in a tensor, their rounding
    remains. So a tensor may also differ by the rounding of the largest of all
    gradients: fp32 rounding if most tensors show it, else fp64 rounding.

    A small gradient that depends on how rows are cut still counts as a difference: for
    example the gradient of a gate under its own weak loss.
    """
    if one.keys() != other.keys():
        return False
    own = {n: float(np.abs(g).max(initial=0.0)) for n, g in one.items()}
    off = {n: float(np.abs(g - other[n]).max(initial=0.0)) for n, g in one.items()}
    largest = max(own.values(), default=0.0)
    shares = [off[n] / size for n, size in own.items() if size]
    inside_fp32 = bool(shares) and median(shares) > INSIDE_FP64
    floor = (FP32_INSIDE if inside_fp32 else INSIDE_FP64) * largest
    # A comparison with nan is false, so nan never counts as rounding.
    return all(off[n] <= max(FP32_INSIDE * own[n], floor) for n in own)
