"""Compare two recordings bit for bit: a resumed job, another version or kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..status import counted
from .beside import late
from .compare import (
    DIFFERENT,
    NOT_COMPARABLE,
    SAME,
    UNDECIDED,
    Comparison,
    Side,
    tell_steps,
)
from .differences import UPDATES
from .equal import listed, no_step, other_inputs, step_on_ranks
from .kept import BUFFER, ORIGINAL, RESULT
from .merge import Run
from .modules import GRADIENT, OUTPUT
from .whole import Key

__all__ = ["compare_exactly"]


def compare_exactly(one: Side, other: Side) -> Comparison:
    """Compare rows, settings and tensors of two recordings bit for bit, step by step.

    Only the first step that differs is reported: its rows and settings, then weights
    and optimizer states, then outputs of blocks and gradients. If no step differs,
    weights and states after the last common step are compared.
    """
    a, b = one.run, other.run
    steps = sorted({*a.steps} & {*b.steps})
    if not steps:
        return Comparison(code=NOT_COMPARABLE, headline=no_step(one, other))
    if differences := list(_first_inexact(one, other, steps)):
        (kind, first), *others = differences
        different = Comparison(code=DIFFERENT, headline=first)
        if others:
            more = counted(len(others), "more difference")
            different.facts.append(f"{more} in that step")
            # a resumed job may have lost its settings and the states of its optimizer
            firsts: dict[str, str] = {}
            for each, text in differences:
                firsts.setdefault(each, text)
            different.facts += [*firsts.values()][1 : MORE + 1]
        # weights, states and settings differ before random numbers are drawn
        if (drew := a.drew | b.drew) and kind in _ORDER:
            where = f": {', '.join(b.drops[:4])}" if b.drops else ""
            different.leads.append(
                f"random numbers are drawn in forward from step {min(drew)} on{where}. "
                "A resumed job must restore the states of the random generators"
            )
        tell_steps(different, one, other, steps)
        return different
    both = {*a.tensors} & {*b.tensors}
    keys = [k for k in a.tensors if k in both and k[0] in steps and _is_exact(k)]
    keys += _ends(a, b, steps)  # both have all of these: none is lacking
    parts = [
        key for key in keys if not (a.tensors[key].is_whole and b.tensors[key].is_whole)
    ]
    if not keys or len(parts) == len(keys):
        none = "no whole tensor is on both sides"
        return Comparison(code=UNDECIDED, headline=none)
    comparison = Comparison(
        code=SAME,
        headline=f"same, bit for bit: {len(keys) - len(parts)} tensors of "
        f"{counted(len(steps), 'step')}",
    )
    if parts:
        step, kind, name = parts[0]
        comparison.facts.append(
            f"not compared: {len(parts)} tensors, because elements were not recorded "
            f"on both sides ({_called(kind)} of {name}, step {step}, first)"
        )
    tell_steps(comparison, one, other, steps)
    comparison.facts += late(one, other)
    return comparison


MORE = 3
"""Largest number of further kinds of tensors of which a difference is shown."""
_NOT_EXACT = (*UPDATES, RESULT)
"""Kinds that are not compared: an update has no digest, and the result of a step is the
weight of the next one."""
_ORDER = {BUFFER: 1, OUTPUT: 2, GRADIENT: 3, "gradient": 4}
"""Kind of tensor that is read after the forward of a step -> its position in the step.
Weights and states are read before, and come first."""


def _is_exact(key: tuple[int, str, str]) -> bool:
    return key[1] not in _NOT_EXACT


def _called(kind: str) -> str:
    """Return a kind of tensor in words."""
    if kind == GRADIENT:
        return "the gradient of the output"
    if kind == BUFFER:
        return "the value"
    if kind == ORIGINAL:
        return "the value in the model"
    state, dot, key = kind.partition(".")
    return f"the optimizer's {key}" if dot else f"the {state}"


def _ends(a: Run, b: Run, steps: Sequence[int]) -> list[Key]:
    """Return the keys of weights and states after the last common step.

    If one side has more steps, it recorded these weights and states when its next step
    began. They then belong only to parameters that the next step moves. Then only keys
    that both sides have are returned.
    """
    end = steps[-1] + 1
    keys = [*{**a.tensors, **b.tensors}]
    if a.steps != b.steps:
        # by the next step, the job has moved buffers and written copies back
        moved = (BUFFER, ORIGINAL)
        keys = [key for key in a.tensors if key in b.tensors and key[1] not in moved]
    left_out = {*_ORDER, *_NOT_EXACT} - {BUFFER}
    return [key for key in keys if key[0] == end and key[1] not in left_out]


def _first_inexact(
    one: Side, other: Side, steps: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Yield kind and sentence of each difference at the first step that differs.

    The kind is "" for rows and settings. If no step differs, the weights and states
    after the last step are compared.
    """
    a, b = one.run, other.run
    own = {name: name for _, name in a.settings}
    every = {**a.tensors, **b.tensors}
    for step in steps:
        pairs = [("", text) for text in other_inputs(one, other, own, step)]
        mine, its = (_of_ranks(run, step) for run in (a, b))
        for side in () if mine == its else (one, other):
            pairs += [("", text) for text in step_on_ranks(side, step)]
        keys = [key for key in every if key[0] == step and _is_exact(key)]
        for key in sorted(keys, key=lambda key: _ORDER.get(key[1], 0)):
            pairs += [(key[1], text) for text in _unlike(one, other, key)]
        if pairs:
            yield from pairs
            return
    for key in _ends(a, b, steps):
        yield from ((key[1], text) for text in _unlike(one, other, key))


def _of_ranks(run: Run, step: int) -> list[object]:
    """Return one step's ``other_settings``, ``absent`` and ``skipping`` of a run."""
    maps = run.other_settings, run.absent, run.skipping
    return [{k: v for k, v in each.items() if k[0] == step} for each in maps]


def _unlike(one: Side, other: Side, key: Key) -> Iterator[str]:
    """Yield a sentence if a tensor differs between the sides, or on ranks of one side.

    A tensor that one side lacks is reported unless it is a block's output, the gradient
    of an output, or a buffer.
    """
    step, kind, name = key
    what = f"{_called(kind)} of {name}"
    mine, its = one.run.tensors.get(key), other.run.tensors.get(key)
    if mine is None or its is None:
        # with --modules alone, or where the model is compiled as a function
        if kind not in (OUTPUT, GRADIENT, BUFFER):
            yield f"step {step}: {(one if mine is None else other).name} lacks {what}"
    elif (
        mine.is_whole and its.is_whole and mine.digest != its.digest
    ) or mine.shape != its.shape:
        yield f"step {step}: {what} has other bits"
    elif mine.odd != its.odd:
        side, ranks = (other, its.unlike) if its.odd else (one, mine.unlike)
        yield (
            f"step {step}: {what} has other bits on rank {listed(ranks)} of "
            f"{side.name} than on its first"
        )
