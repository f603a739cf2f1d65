"""Methods of a scaler that take an optimizer, grouped by their effect.

The sets hold torch's names, and the names used by scalers that clip.
"""

from __future__ import annotations

__all__ = ["CLIPS", "STEPS", "TAKES_AN_OPTIMIZER"]

STEPS = frozenset({"step", "clip_and_step"})
"""Methods that step an optimizer."""
CLIPS = frozenset({"clip_grad_norm_", "clip_and_step"})
"""Methods that compute a norm and clip by it."""
TAKES_AN_OPTIMIZER = STEPS | CLIPS | {"unscale_"}
"""Methods whose first argument is an optimizer, or None on a rank without one."""
