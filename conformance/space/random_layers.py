"""Random layers of a workload: find them and turn them off."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "equal_outputs",
    "generators_of",
    "probabilities",
    "turn_off_random_layers",
]

_SCALED = nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d
"""Dropouts that multiply the elements they keep by 1 / (1 - p)."""
_DROPOUTS = (*_SCALED, nn.AlphaDropout, nn.FeatureAlphaDropout)
_PROBABILITIES = ("drop", "jitter")
"""Substrings of attribute names that hold a probability or a size of noise."""


def probabilities(model: nn.Module) -> dict[str, float]:
    """Return the probabilities, by name, of dropouts that scale the elements they keep.

    Dropouts in eval mode, as in a teacher, are left out.
    """
    modules = model.named_modules()
    return {n: float(m.p) for n, m in modules if isinstance(m, _SCALED) and m.training}


def generators_of(module: nn.Module) -> list[torch.Generator]:
    """Return the generators that a module has as attributes, without submodules."""
    return [g for g in vars(module).values() if isinstance(g, torch.Generator)]


def turn_off_random_layers(stack: object) -> None:
    """Set the probability of every random layer to 0, so that runs can be compared.

    Torch's dropouts are set, and attributes of modules and of their classes whose name
    contains ``drop`` or ``jitter`` and whose value is from 0 to 1. Torch's attention
    and recurrent layers and transformers' models have such attributes.

    Args:
        stack: a module, or an object that holds modules.
    """
    # an engine or a trainer keeps its module in an attribute
    objects = [stack, *getattr(stack, "__dict__", {}).values()]
    for root in [h for h in objects if isinstance(h, nn.Module)]:
        for module in root.modules():
            if isinstance(module, _DROPOUTS):
                module.p = 0.0
            # also attributes of the class: an attribute of the module hides them
            for name, value in _attributes(module).items():
                # a probability, and not a module, a flag or a number of layers
                is_number = isinstance(value, float) and 0.0 < value <= 1.0
                if is_number and any(word in name for word in _PROBABILITIES):
                    setattr(module, name, 0.0)


def _attributes(module: nn.Module) -> dict[str, object]:
    attributes: dict[str, object] = {}
    for kind in reversed(type(module).__mro__):
        if kind is not nn.Module:  # nn.Module itself has a hundred attributes
            attributes |= vars(kind)
    return attributes | vars(module)


def equal_outputs(one: Any, other: Any) -> bool:
    """Return True if the tensors in two outputs are equal."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return equal_outputs([*one.values()], [*other.values()])
    if isinstance(one, tuple | list):
        return all(map(equal_outputs, one, other))
    return True
