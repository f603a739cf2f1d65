"""Formulas that several parts of the judge compute with, each written once.

Needs no torch. What is judged has its own: a mistake here must not be shared by it.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["FP32_UNIT", "bias_error", "clip_factor"]

FP32_UNIT = 2.0**-24
"""Unit roundoff of fp32."""


def clip_factor(norm: float, clip_norm: float) -> float:
    """The factor of every gradient, as ``torch.nn.utils.clip_grad_norm_`` has it.

    Args:
        norm: of the whole unscaled gradient; nan gives nan.
        clip_norm: the largest norm that is left as it is.
    """
    factor = clip_norm / (norm + 1e-6)
    return 1.0 if factor > 1.0 else factor


def bias_error(betas: Iterable[float], steps_made: int) -> float:
    """Largest relative error of a step of Adam with bias corrections in fp32.

    A correction is ``1 - beta**t``. Rounding of beta changes the power by at most
    ``t`` units, its own rounding by one more, and this error is relative to what the
    subtraction leaves, which rounds once. The second correction is under a root.

    Args:
        betas: of the first and the second moment.
        steps_made: ``t``, with this step.
    """
    powers = [float(beta) ** steps_made for beta in betas]
    errors = [(steps_made + 1) * p / (1 - p) + 1 for p in powers if p < 1]
    return FP32_UNIT * sum(e * x for e, x in zip(errors, (1, 1 / 2), strict=False))
