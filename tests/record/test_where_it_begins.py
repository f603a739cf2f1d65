"""Find where two synthetic runs begin to differ, from the outputs of their blocks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gradparity.conformance.record.compare import (
    DIFFERENT,
    SAME,
    Comparison,
    Side,
    compare,
)
from gradparity.conformance.record.merge import Run
from gradparity.conformance.record.modules import GRADIENT, OUTPUT
from gradparity.tests.record.runs import changed, nudged, on_rank_0, run, values, whole

BLOCKS = ("first", "second", "third")
WRONG = {("gradient", "b"): 1.5}
"""A wrong gradient of a parameter: without one, blocks are not compared."""


def with_blocks(plain: Run, draw: int = 0) -> Run:
    """Return a run with the outputs of three blocks, and gradients of these outputs."""
    tensors = {
        (step, kind, name): whole(values(step, name + kind, draw), draw)
        for kind, names in ((OUTPUT, BLOCKS), (GRADIENT, BLOCKS[::-1]))
        for step in range(2)
        for name in names
    }
    return replace(plain, tensors={**plain.tensors, **tensors})


ONE = Side(
    name="one",
    run=with_blocks(run()),
    noisy=[with_blocks(run(1), 1), *(with_blocks(nudged(n), n) for n in (2, 3))],
)


def against(other: Run) -> Comparison:
    return compare(ONE, Side(name="mesh", run=other))


def times(factors: Mapping[tuple[str, str], float], step: int = 0) -> Run:
    """Return a run in which some tensors of a step are multiplied by a factor."""
    other = with_blocks(run(4), 4)
    for (kind, name), factor in factors.items():
        sketch = other.tensors[step, kind, name].sketch
        assert sketch is not None
        other = changed(other, (step, kind, name), sketch=factor * sketch)
    return other


ALL = {("gradient", name): 2.0 for name in "abc"}
OUTPUTS = "outputs of blocks are the same (3 of 3 compared). "


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        (
            {(OUTPUT, "second"): 2.0, (OUTPUT, "third"): 0.5},
            "in forward. second is the first block whose output differs, after first, "
            "by 1 of its size, and noise explains ",
        ),
        (
            {(OUTPUT, "first"): 2.0},
            "in forward. first is the first block whose output differs, by ",
        ),
        (
            {(GRADIENT, "first"): 3.0},
            f"{OUTPUTS}In backward through second: the gradient of the output of first "
            "is the first that differs",
        ),
        (
            ALL | {(GRADIENT, name): 2.0 for name in BLOCKS},
            f"{OUTPUTS}So are the gradients of outputs, up to one factor. Each "
            "gradient of a parameter is 2.000 x that of one: the loss has another "
            "factor, or the sum over ranks",
        ),
        *(
            (
                factors,
                f"{OUTPUTS}So are the gradients of outputs. Gradients of parameters "
                "are computed, summed or kept in another way",
            )
            for factors in ({}, {("gradient", "a"): 1.5}, {("update", "a"): 1.5})
        ),
    ],
    ids=[
        *("forward", "first block", "backward", "loss", "parameters", "some"),
        "gradient and update",
    ],
)
def test_the_first_block_that_differs_is_named(
    factors: Mapping[tuple[str, str], float], words: str
) -> None:
    comparison = against(times(WRONG | dict(factors)))
    assert comparison.code == DIFFERENT
    assert comparison.lines[1].startswith(f"where: step 0: {words}"), comparison.lines


@pytest.mark.parametrize("step", [0, 1])
def test_weights_may_have_changed_before_a_later_step(step: int) -> None:
    """Code beside the optimizer changed them, such as a decay on one side alone."""
    where = against(times(WRONG | {(OUTPUT, "first"): 2.0}, step)).lines[1]
    assert where.startswith(f"where: step {step}: in forward. first is the first block")
    assert ("changed between steps" in where) == (step == 1)


def test_an_update_that_differs_alone_is_one_of_the_optimizer() -> None:
    told = (
        f"where: step 0: {OUTPUTS}So are the gradients of outputs and of parameters. "
        "The optimizer has another state, or makes another step"
    )
    assert against(times({("update", "b"): 1.5})).lines[1] == told


def test_the_gradient_of_the_last_output_may_differ() -> None:
    other = times(WRONG)
    key = 0, GRADIENT, "third"
    sketch = other.tensors[key].sketch
    assert sketch is not None
    other = changed(other, key, sketch=sketch + np.eye(len(sketch))[0])
    told = f"where: step 0: {OUTPUTS}In backward, in the loss or after third"
    assert against(other).lines[1] == told
    shares = {0: [(2,), (2,)]}
    one = replace(ONE, run=replace(ONE.run, shares={0: [(4,)]}))
    twice = compare(one, Side(name="mesh", run=replace(other, shares=shares))).lines[1]
    assert twice == told + (
        ". The sides have 1 and 2 forwards in this step: does each divide its loss by "
        "its own number of labels"
    )


def without(other: Run, kind: str) -> Run:
    tensors = {key: each for key, each in other.tensors.items() if key[1] != kind}
    return replace(other, tensors=tensors)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda other: replace(
                other,
                rows_of_ranks=on_rank_0({s: {3} for s in range(2)}),
                bags={0: [1], 1: [1]},
            ),
            "not known, rows are in other pieces or have other bits",
        ),
        (
            lambda other: without(other, GRADIENT),
            f"step 0: {OUTPUTS}Their gradients were not recorded on both sides",
        ),
        (
            lambda other: without(other, OUTPUT),
            "no block has an output on both sides",
        ),
    ],
    ids=["other pieces", "no gradients", "no outputs"],
)
def test_what_hides_the_block_is_named(change: Any, words: str) -> None:
    one = replace(ONE, run=replace(ONE.run, bags={0: [1], 1: [1]}))
    comparison = compare(one, Side(name="mesh", run=change(times(WRONG))))
    assert comparison.code == DIFFERENT
    assert comparison.lines[1].startswith(f"where: {words}"), comparison.lines


def test_nobody_asks_where_of_runs_that_are_the_same_or_kept_no_blocks() -> None:
    for other, code in ((times({}), SAME), (times({(OUTPUT, "first"): 2.0}), SAME)):
        comparison = against(other)
        assert comparison.code == code and comparison.blocks == []
        assert not any(line.startswith("where") for line in comparison.lines)
    several = {("gradient", name): 2.0 + n for n, name in enumerate("abc")}
    # the names of one or two tensors say enough
    for factors, asks in ((WRONG, 0), (ALL, 0), (several, 1)):
        plain = compare(
            Side(name="one", run=run(), noisy=(run(1), nudged(2), nudged(3))),
            Side(name="mesh", run=times(factors)),
        )
        assert plain.code == DIFFERENT
        assert not any(line.startswith("where") for line in plain.lines)
        told = [line for line in plain.lines if "both sides with --modules" in line]
        assert len(told) == asks
