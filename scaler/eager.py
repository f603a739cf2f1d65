"""What torch.compile leaves alone: the bookkeeping of a scaler.

A compiled training step may contain the scaler's calls. `scale` is arithmetic and is
compiled with the loss; the other calls look at Python objects, talk to other ranks and
decide, of which a graph keeps nothing: it breaks before and after each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

__all__ = ["eager"]

P = ParamSpec("P")
T = TypeVar("T")


def eager(call: Callable[P, T]) -> Callable[P, T]:
    """Keep a call out of graphs; what is compiled by itself within it stays so."""
    return cast("Callable[P, T]", torch.compiler.disable(call))
