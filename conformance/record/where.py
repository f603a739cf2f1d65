"""Find the model's block in which a step begins to differ, from outputs of blocks.

The result is only a hint. The loss of a rank may be a mean over its own rows or its
micro-batch, which scales its gradients. So gradients of outputs are compared up to one
factor, taken from the last block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .differences import Row, rows_of_sides
from .merge import Run, Side
from .modules import GRADIENT, OUTPUT

__all__ = ["where_it_begins"]


def where_it_begins(
    one: Side,
    other: Side,
    step: int,
    factor: str,
    *,
    is_update: bool,
    is_first: bool,
) -> tuple[list[Row], str]:
    """Compare the blocks at a step that differs.

    Args:
        one: the reference.
        other: the side to check.
        step: first step that differs.
        factor: factor of all gradients of parameters, in words; else empty.
        is_update: true if updates differ, and no gradient.
        is_first: true if no step was recorded before.

    Returns:
        Rows of the blocks, and a sentence on where the step differs. Both are empty if
        no blocks were recorded. Rows are also empty if the outputs are not comparable;
        the sentence then gives the reason.
    """
    every = one.run.names(OUTPUT, step)
    if every and one.run.rows.get(step) != other.run.rows.get(step):
        why = "rows are in other pieces or have other bits"
        return [], f"where: not known, {why}, so outputs of blocks are not compared"
    names = {name: name for name in every}
    forward = list(rows_of_sides(one, other, names, [step], [OUTPUT]))
    if not forward:
        return [], "where: no block has an output on both sides" if every else ""
    start = f"where: step {step}:"
    of = f"({len(forward)} of {len(every)} compared)"
    if any(row.differs for row in forward):
        changed = "" if is_first else ". Weights may also have changed between steps"
        return forward, f"{start} in forward. {_in_forward(forward)} {of}{changed}"
    backward = _backward(one, other, step, [row.name for row in forward])
    if any(row.differs for row in backward):
        forwards = [len(side.run.shares.get(step, ())) for side in (one, other)]
        text = _in_backward(backward, forwards)
    elif not backward:
        text = "Their gradients were not recorded on both sides"
    # gradients of outputs are compared up to one common factor
    elif factor:
        text = (
            "So are the gradients of outputs, up to one factor. Each gradient of a "
            f"parameter {factor}: the loss has another factor, or the sum over ranks"
        )
    elif is_update:
        text = (
            "So are the gradients of outputs and of parameters. The optimizer has "
            "another state, or makes another step"
        )
    else:
        text = (
            "So are the gradients of outputs. Gradients of parameters are computed, "
            "summed or kept in another way"
        )
    return forward + backward, f"{start} outputs of blocks are the same {of}. {text}"


def _in_forward(rows: Sequence[Row]) -> str:
    """Name the first block whose output differs."""
    number, row = next((n, row) for n, row in enumerate(rows) if row.differs)
    before = f", after {rows[number - 1].name}" if number else ""
    words = f": it {row.words}" if row.words else ""
    return (
        f"{row.name} is the first block whose output differs{before}, by "
        f"{row.distance:.2g} of its size, and noise explains {row.bound:.2g}{words}"
    )


def _in_backward(rows: Sequence[Row], forwards: Sequence[int]) -> str:
    """Name the first block, from the end on, whose output gradient differs.

    Args:
        rows: gradients of outputs, from the last block to the first.
        forwards: number of forwards in the step, on all ranks, of each side.
    """
    number, row = next((n, row) for n, row in enumerate(rows) if row.differs)
    if not number:
        first, second = forwards
        where = f"In backward, in the loss or after {row.name}"
        if first and second and first != second:
            where += (
                f". The sides have {first} and {second} forwards in this step: does "
                "each divide its loss by its own number of labels"
            )
        return where
    return (
        f"In backward through {rows[number - 1].name}: the gradient of the output of "
        f"{row.name} is the first that differs"
    )


def _backward(one: Side, other: Side, step: int, names: Sequence[str]) -> list[Row]:
    """Compare the gradients of outputs, from the last block to the first.

    Returns no rows if ``_scaled`` finds no factor between the two sides.
    """
    last = [n for n in names if (step, GRADIENT, n) in one.run.tensors][-1:]
    scaled = _scaled(other, one.run, step, last[0]) if last else None
    if scaled is None:
        return []
    own = {name: name for name in names}
    return list(rows_of_sides(one, scaled, own, [step], [GRADIENT]))[::-1]


def _scaled(side: Side, reference: Run, step: int, last: str) -> Side | None:
    """Scale gradients of all outputs by one factor, taken from block ``last``.

    With this factor the block's gradient agrees with the reference. Returns the scaled
    side, or None if no such factor is known.
    """
    mine = reference.tensors.get((step, GRADIENT, last))
    its = side.run.tensors.get((step, GRADIENT, last))
    if mine is None or its is None or not its.is_whole or not its.norm:
        return None
    assert mine.sketch is not None and its.sketch is not None
    factor = float(mine.sketch @ its.sketch) / its.norm**2

    def scaled(run: Run) -> Run:
        tensors = {
            key: replace(whole, sketch=whole.sketch * np.float32(factor))
            if key[1] == GRADIENT and whole.sketch is not None
            else whole
            for key, whole in run.tensors.items()
        }
        return replace(run, tensors=tensors)

    return replace(side, run=scaled(side.run), noisy=[scaled(n) for n in side.noisy])
