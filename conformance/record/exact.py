"""Compare two recordings bit for bit: a resumed job, another version or kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .compare import (
    DIFFERENT,
    NO_STEP,
    NOT_COMPARABLE,
    SAME,
    UNDECIDED,
    Comparison,
    Side,
)
from .equal import other_inputs
from .modules import GRADIENT, OUTPUT

__all__ = ["compare_exactly"]


def compare_exactly(one: Side, other: Side) -> Comparison:
    """Compare all that was recorded bit for bit, step by step.

    Weights and states of the optimizer come first, then outputs of blocks and
    gradients.
    """
    a, b = one.run, other.run
    steps = sorted({s for s, _, _ in a.tensors} & {s for s, _, _ in b.tensors})
    if not steps:
        return Comparison(code=NOT_COMPARABLE, headline=NO_STEP)
    first = next(_inexact(one, other, steps), None)
    if first is not None:
        return Comparison(code=DIFFERENT, headline=first)
    both = {*a.tensors} & {*b.tensors}
    keys = [key for key in a.tensors if key in both and _is_exact(key)]
    parts = [
        key for key in keys if not (a.tensors[key].is_whole and b.tensors[key].is_whole)
    ]
    if not keys or len(parts) == len(keys):
        none = "no whole tensor is on both sides"
        return Comparison(code=UNDECIDED, headline=none)
    comparison = Comparison(
        code=SAME,
        headline=f"same, bit for bit: {len(keys) - len(parts)} tensors of "
        f"{len(steps)} steps",
    )
    if parts:
        step, kind, name = parts[0]
        comparison.facts.append(
            f"not compared: {len(parts)} tensors, because elements were not recorded "
            f"on both sides ({_called(kind)} of {name}, step {step}, first)"
        )
    return comparison


_ORDER = {OUTPUT: 1, GRADIENT: 2, "gradient": 3}
"""Kind of tensor -> its position in a step; weights and states come first."""


def _is_exact(key: tuple[int, str, str]) -> bool:
    return key[1] != "update"  # an update has no digest


def _called(kind: str) -> str:
    """Return a kind of tensor in words."""
    if kind == GRADIENT:
        return "the gradient of the output"
    state, dot, key = kind.partition(".")
    return f"the optimizer's {key}" if dot else f"the {state}"


def _inexact(one: Side, other: Side, steps: Sequence[int]) -> Iterator[str]:
    """Yield differences of two runs as text, in the order of a step's computation."""
    a, b = one.run, other.run
    own = {name: name for _, name in a.settings}
    for step in steps:
        yield from other_inputs(one, other, own, step)
        keys = [k for k in {**a.tensors, **b.tensors} if k[0] == step and _is_exact(k)]
        for key in sorted(keys, key=lambda key: _ORDER.get(key[1], 0)):
            what = f"{_called(key[1])} of {key[2]}"
            mine, its = a.tensors.get(key), b.tensors.get(key)
            if (mine is None or its is None) and key[1] in (OUTPUT, GRADIENT):
                continue  # one side was recorded without modules
            if mine is None or its is None:
                lacks = one if mine is None else other
                yield f"step {step}: {lacks.name} lacks {what}"
            elif (
                mine.is_whole and its.is_whole and mine.digest != its.digest
            ) or mine.shape != its.shape:
                yield f"step {step}: {what} has other bits"
