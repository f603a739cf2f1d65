"""Constraints: which choices torch itself can train together, pair by pair.

Pairs, so that a covering set can be built one choice at a time. Each gives the reason
why two choices do not go together, or the empty string.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..fixtures import MULTI_TENSOR, PRECISIONS, TOPOLOGIES
from .recipes import RECIPES

__all__ = ["PAIRS", "why_not"]

Reason = Callable[[str, str], str]


def _topology_data(topology: str, data: str) -> str:
    models = TOPOLOGIES[topology].models
    if data in models:
        return ""
    return (
        f"topology {topology!r} cannot lay out the model {data!r}: it takes "
        f"{', '.join(models)}"
    )


def _topology_precision(topology: str, precision: str) -> str:
    if not PRECISIONS[precision].needs_fully_shard or TOPOLOGIES[topology].fully_shards:
        return ""
    able = [name for name, t in TOPOLOGIES.items() if t.fully_shards]
    return (
        f"precision {precision!r} needs fully_shard, which topology {topology!r} does "
        f"not use: choose {' or '.join(able)}"
    )


_UNIFORM = ("single", "ddp", "fsdp1", "fsdp", "hsdp", "pp", "pp+fsdp")
"""Where all parameters of a rank are plain, or DTensors of one mesh."""


_PLAIN = ("single", "ddp", "fsdp1", "pp")
"""Where all parameters are plain tensors."""


def _topology_optimizer(topology: str, optimizer: str) -> str:
    if optimizer == "sgd-fused" and topology not in _PLAIN:
        return f"torch's fused SGD takes no DTensor: choose one of {', '.join(_PLAIN)}"
    if optimizer not in MULTI_TENSOR or topology in _UNIFORM:
        return ""
    return (
        f"torch's {optimizer} refuses the mixed tensors or meshes of topology "
        f"{topology!r}: choose one of {', '.join(_UNIFORM)}"
    )


def _topology_recipe(topology: str, recipe: str) -> str:
    if topology == "tp+sp" and recipe in ("clip-value", "clip-norm"):
        return "sequence-parallel norms have partial gradients, which cannot be clipped"
    if recipe == "compiled" and topology not in _COMPILED:
        return f"only {', '.join(_COMPILED)} are compiled here"
    return RECIPES[recipe].refuses(TOPOLOGIES[topology])


_COMPILED = ("single", "ddp", "fsdp", "tp")


def _recipe_data(recipe: str, data: str) -> str:
    if recipe == "compiled" and data != "digits":
        return "compiling the larger models takes minutes: choose data digits"
    return ""


PAIRS: Mapping[tuple[str, str], Reason] = {
    ("topology", "data"): _topology_data,
    ("topology", "precision"): _topology_precision,
    ("topology", "optimizer"): _topology_optimizer,
    ("topology", "recipe"): _topology_recipe,
    ("recipe", "data"): _recipe_data,
}
"""(field, field) of a scenario -> why two values do not go together."""


def why_not(choices: Mapping[str, str]) -> str:
    """The first reason why ``choices`` do not go together, or the empty string."""
    for (a, b), reason in PAIRS.items():
        if a in choices and b in choices and (text := reason(choices[a], choices[b])):
            return text
    return ""
