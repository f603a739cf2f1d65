"""Methods of a scaler that are about an optimizer, by their effect.

The table has torch's names and the names of scalers that clip.
"""

from __future__ import annotations

__all__ = ["CLIPS", "STEPS", "TAKES_AN_OPTIMIZER"]

STEPS = frozenset({"step", "clip_and_step"})
"""Asks an optimizer to step."""
CLIPS = frozenset({"clip_grad_norm_", "clip_and_step"})
"""Clips by a norm that the scaler takes itself."""
TAKES_AN_OPTIMIZER = STEPS | CLIPS | {"unscale_"}
"""Takes an optimizer first, or None on a rank that lacks the optimizer."""
