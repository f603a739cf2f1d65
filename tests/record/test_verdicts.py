"""Verdicts on two recordings, from made-up runs: no job is run."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradparity.conformance.record.batches import inputs_of, rows_of_blocks
from gradparity.conformance.record.compare import (
    DIFFERENT,
    NOT_COMPARABLE,
    SAME,
    UNDECIDED,
    Side,
    compare,
)
from gradparity.conformance.record.differences import KINDS, _without_flips
from gradparity.conformance.record.equal import OTHER_DATA, _resumed
from gradparity.conformance.record.exact import compare_exactly
from gradparity.conformance.record.files import (
    Call,
    Recording,
    Settings,
    Stored,
    read_run,
    write_rank,
)
from gradparity.conformance.record.kept import IDLE, RESULT, Box, keep_values
from gradparity.conformance.record.merge import Run, read_merged
from gradparity.conformance.record.modules import OUTPUT
from gradparity.conformance.record.page import write_page
from gradparity.conformance.record.rows import keep_rows
from gradparity.tests.record.runs import (
    NAMES,
    ONE,
    SIZE,
    against,
    changed,
    nudged,
    on_rank_0,
    run,
    values,
    whole,
)


def test_what_noise_explains_is_the_same() -> None:
    found = against(run(4))
    assert found.code == SAME, found.lines
    assert found.lines[0].startswith("same: 12 tensors of 2 steps, the largest")
    assert all(0 < row.ratio < 1 for row in found.rows)


def rounded(fine: Run) -> Run:
    """Return a run with a thousand times the noise, as in 16 bits."""
    tensors = {
        key: each
        if each.sketch is None
        else replace(each, sketch=1000 * each.sketch - 999 * values(key[0], key[2]))
        for key, each in fine.tensors.items()
    }
    return replace(fine, tensors=tensors)


@pytest.mark.parametrize(
    ("in_16_bits", "kind", "count", "code"),
    [
        (True, "update", 1, SAME),
        (True, "update", 2, DIFFERENT),
        (True, "gradient", 1, DIFFERENT),
        (False, "update", 1, DIFFERENT),
    ],
)
def test_rounding_may_flip_an_element_of_an_update_in_16_bits(
    in_16_bits: bool, kind: str, count: int, code: int
) -> None:
    other, one = run(4), ONE
    if in_16_bits:
        other = rounded(other)
        one = replace(ONE, noisy=[rounded(each) for each in ONE.noisy])
    flipped = other.tensors[1, kind, "b"].sketch
    assert flipped is not None
    flipped = flipped.copy()
    flipped[:count] *= -1
    assert against(changed(other, (1, kind, "b"), sketch=flipped), one).code == code


def with_muon(draws: int) -> Side:
    """Return a side whose optimizer makes updates of a and b orthogonal, with noise."""
    noise = [run(1), *(nudged(draw) for draw in range(2, 2 + draws))]
    for each in noise[1:]:
        for name in "ab":
            update = each.tensors[1, "update", name]
            assert update.sketch is not None
            far = 1e3 * update.sketch - 999 * values(1, name)
            each.tensors[1, "update", name] = replace(update, sketch=far)  # type: ignore[index]  # a dict
    return replace(ONE, run=replace(ONE.run, orthogonal=frozenset("ab")), noisy=noise)


def test_the_noise_of_muon_is_not_that_of_other_tensors() -> None:
    off = changed(run(4), (1, "update", "c"), sketch=1.001 * values(1, "c"))
    muon = with_muon(2)
    assert against(run(4), muon).code == SAME
    assert "the update of c" in against(off, with_muon(6)).headline
    alone = replace(muon, run=replace(muon.run, orthogonal=frozenset()))
    assert against(off, alone).code == SAME  # a and b are the median


@pytest.mark.parametrize(
    ("draws", "step", "kind", "size", "code"),
    [
        (2, 1, "gradient", 1e-4, UNDECIDED),
        (6, 1, "gradient", 1e-4, DIFFERENT),
        (2, 1, "gradient", 1e-2, DIFFERENT),
        (2, 0, "gradient", 1e-4, DIFFERENT),  # before Muon has made an update
        (2, 1, "all", 1.5e-5, UNDECIDED),
        (6, 1, "all", 1.5e-5, DIFFERENT),
        (2, 0, "all", 1.5e-5, DIFFERENT),
    ],
)
def test_a_small_difference_after_a_step_of_muon_needs_more_noise_runs(
    draws: int, step: int, kind: str, size: float, code: int
) -> None:
    other = run(4)
    for name in NAMES if kind == "all" else "c":
        off = (1 + size) * values(step, name)
        other = changed(other, (step, "gradient", name), sketch=off)
    found = against(other, with_muon(draws))
    assert found.code == code, found.headline
    wayout = "Muon amplifies rounding, and the noise runs are few. Record one with"
    assert (f"{wayout} --noise 6" in found.headline) == (code == UNDECIDED)


def idle(given: Run, *moves: tuple[float, int]) -> Run:
    """Return a run with updates of elements of b without a gradient.

    Args:
        given: run to change.
        moves: for each step, the factor of the update and the digest of the elements.
    """
    tensors = {
        (step, IDLE, "b"): replace(whole(factor * values(step, "b"), at), square=0.0)
        for step, (factor, at) in enumerate(moves)
    }
    return replace(given, tensors={**given.tensors, **tensors})


@pytest.mark.parametrize(
    ("moves", "noisy", "code"),
    [
        ([(1, 7), (1, 7)], 7, SAME),
        ([(1, 7), (0, 7)], 7, DIFFERENT),
        ([(0, 8), (1, 7)], 7, SAME),  # other elements have no gradient
        ([(0, 8), (0, 7)], 7, SAME),  # and may have moved otherwise in the step before
        ([(0, 7), (1, 7)], 8, SAME),  # rounding decides which ones have none
    ],
)
def test_decay_and_momentum_move_elements_without_a_gradient(
    moves: list[tuple[float, int]], noisy: int, code: int
) -> None:
    right = [(1.0, 7), (1.0, 7)]
    one = Side(
        name="one",
        run=idle(ONE.run, *right),
        noisy=[idle(ONE.noisy[0], *right)]
        + [idle(each, (1, noisy), (1, 7)) for each in ONE.noisy[1:]],
    )
    compared = against(idle(run(4), *moves), one)
    assert compared.code == code, compared.lines
    if code == DIFFERENT:
        text = "step 1: the update of elements of b without a gradient is zero: it "
        assert compared.lines[0].startswith(text)
    else:
        rows = [row for row in compared.rows if row.kind == IDLE]
        assert len(rows) == 2 * (moves == right)
        told = any("2 updates of elements without a gr" in t for t in compared.facts)
        assert told is (not rows), compared.facts


def test_a_step_without_noise_has_that_of_the_steps_before() -> None:
    """Moved weights may round to the same bf16 numbers once a step has moved all."""
    plain = ONE.run.tensors

    def still(noisy: Run) -> Run:
        # b is a small tensor, in which no step shows any noise
        own = {k: plain[k] for k in plain if k[0] == 1 or k[2] == "b"}
        weights = {k: t for k, t in noisy.tensors.items() if k[1] == "weight"}
        return replace(noisy, tensors={**noisy.tensors, **own, **weights})

    side = replace(ONE, noisy=[still(each) for each in ONE.noisy])
    # at the first step b shows no noise on the other side either
    first = {k: plain[k] for k in plain if k[0] == 0 and k[2] == "b"}
    other = replace(run(4), tensors={**run(4).tensors, **first})
    found = against(other, side)
    assert found.code == SAME, found.lines
    off = changed(other, (1, "gradient", "b"), sketch=1.001 * values(1, "b"))
    assert against(off, side).code == DIFFERENT


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ((0, 0.5), "is 0.500 x that of one"),
        ((0, 1 / 65536), "is 1.53e-05 x that of one"),
        ((0, 1.01), "is 1.010 x that of one"),
        ((0, 0.0), "is zero"),
        ((0, 1.0001), ""),
        ((1, 0.0), "is the tensor of the step before"),
        (
            (0.1, 0.9),
            "is 0.900 x that of one plus 0.100 x that of the step before, as without "
            "zero_grad()",
        ),
        ((0.02, 0.98), ""),
    ],
)
def test_multiples_of_this_step_and_the_one_before_are_named(
    factors: tuple[float, float], words: str
) -> None:
    key = (1, "gradient", "b")
    sketch = factors[0] * values(0, "b") + factors[1] * values(1, "b")
    wrong = changed(run(4), key, sketch=sketch)
    found = against(wrong)
    assert found.code == DIFFERENT
    which = f"{words}: it " if words else ""
    assert found.lines[0].startswith(f"step 1: the gradient of b {which}differs by ")


@pytest.mark.parametrize("side", ["one", "other", "none"])
@pytest.mark.parametrize(("factor", "is_rounding"), [(1.004, True), (1.02, False)])
def test_rounding_to_16_bits_is_noise(
    side: str, factor: float, is_rounding: bool
) -> None:
    """Nudged runs of a small model may repeat the rounding of a gradient exactly."""
    key = (1, "gradient", "b")
    other = changed(run(4), key, sketch=factor * values(1, "b"))
    one, dtypes = ONE, {"b": "bfloat16"}
    if side == "one":
        one = replace(ONE, run=replace(ONE.run, in_16_bits=dtypes))
    elif side == "other":
        other = replace(other, in_16_bits=dtypes)
    found = against(other, one)
    codes = {"one": SAME, "other": UNDECIDED, "none": DIFFERENT}
    assert found.code == (codes[side] if is_rounding else DIFFERENT), found.lines


@pytest.mark.parametrize(
    ("size", "factor", "code"),
    [
        (1, 1.09, SAME),
        (1, 1.13, DIFFERENT),
        (2, 1.02, SAME),
        (2, 1.06, DIFFERENT),
        (3, 1.012, SAME),
        (3, 1.02, DIFFERENT),
    ],
)
def test_rounded_summands_of_a_few_numbers_may_cancel(
    size: int, factor: float, code: int
) -> None:
    def few(plain: Run) -> Run:
        small = {
            key: replace(
                each,
                shape=(size,),
                held=size,
                sketch=None if each.sketch is None else each.sketch[:size],
            )
            for key, each in plain.tensors.items()
            if key[2] == "b"
        }
        rounded = {"b": "bfloat16"}
        return replace(plain, tensors={**plain.tensors, **small}, in_16_bits=rounded)

    one = Side(name="one", run=few(ONE.run), noisy=[few(each) for each in ONE.noisy])
    sketch = factor * values(1, "b")[:size]
    other = changed(few(run(4)), (1, "gradient", "b"), sketch=sketch)
    found = against(other, one)
    assert found.code == code, found.lines


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_of_another_dtype_are_named(dtype: str) -> None:
    other = replace(run(4), outputs=frozenset({dtype}))
    assert against(other).code == SAME
    wrong = changed(other, (1, "gradient", "b"), sketch=2 * values(1, "b"))
    told = (
        "precision: the model returns float32 in one and bfloat16 in mesh. Record both "
        "in one precision"
    )
    assert (told in against(wrong).lines) == (dtype == "bfloat16")


def test_zeros_of_the_first_side_and_more_tensors_are_named() -> None:
    runs = [
        changed(each, (1, "gradient", "b"), sketch=np.zeros(SIZE))
        for each in (ONE.run, *ONE.noisy)
    ]
    one = replace(ONE, run=runs[0], noisy=runs[1:])
    wrong = changed(run(4), (1, "update", "b"), sketch=2 * values(1, "b"))
    first = against(wrong, one).lines[0]
    assert first.startswith("step 1: the gradient of b is zero in one: it ")
    assert "; 1 more tensor there (of 12 compared)" in first


def test_losses_are_printed_where_both_sides_have_them() -> None:
    one = replace(ONE, run=replace(ONE.run, losses={0: 2.0, 1: 1.5}))
    told = "loss, a mean over ranks, at steps 0: 2 and 2.5"
    assert told in against(replace(run(4), losses={0: 2.5}), one).lines
    assert not any(line.startswith("loss") for line in against(run(4), one).lines)


def test_a_difference_without_noise_is_beyond_every_bound() -> None:
    row = replace(against(run(4)).rows[0], distance=0.1, bound=0.0)
    assert row.ratio == math.inf and row.differs
    assert replace(row, distance=0.0).ratio == 0.0
    assert replace(row, bound=0.2).ratio == 0.5


def test_a_gradient_of_the_step_before_is_recognised() -> None:
    late = changed(run(4), (1, "gradient", "b"), sketch=values(0, "b"))
    assert "is the tensor of the step before" in against(late).lines[0]


@pytest.mark.parametrize(("step", "ratio"), [(0, "5.0"), (1, "4.6")])
def test_a_difference_that_is_spread_over_all_tensors_is_one(
    step: int, ratio: str
) -> None:
    """All tensors are off by 5 times their noise, each less than the limit of 8.

    The noise of a step includes that of the steps before.
    """
    other = run()
    for key, each in run().tensors.items():
        if key[1] == "gradient" and key[0] == step:
            away = max(each.distance(noisy.tensors[key]) for noisy in ONE.noisy)
            assert each.sketch is not None
            off = np.zeros(SIZE)
            off[0] = 5 * away
            other = changed(other, key, sketch=each.sketch + off)
    found = against(other)
    assert found.code == DIFFERENT, found.lines
    text = f"step {step} differs as a whole: the median tensor differs by {ratio} times"
    assert text in found.lines[0]


def test_noise_as_large_as_every_tensor_decides_nothing() -> None:
    noisy = [
        replace(
            of,
            tensors={
                key: each if each.sketch is None else replace(each, sketch=-each.sketch)
                for key, each in of.tensors.items()
            },
        )
        for of in (run(), nudged(2), nudged(3))
    ]
    found = against(run(4), replace(ONE, noisy=noisy))
    assert found.code == UNDECIDED
    assert found.lines[0] == "nothing was compared: noise is as large as every tensor"


@pytest.mark.parametrize(
    ("number", "again", "words"),
    [
        (0, changed(run(1), (0, "weight", "b"), digest=7), "other values of b"),
        (
            0,
            replace(run(1), rows_of_ranks=on_rank_0({0: {1, 3}})),
            "other rows at step 0",
        ),
        (
            1,
            replace(run(2), rows_of_ranks=on_rank_0({1: {1, 3}})),
            "other rows at step 1",
        ),
        (2, run(3, steps=1), "has no step 1"),
    ],
)
def test_a_job_that_does_not_repeat_itself_has_no_noise(
    number: int, again: Run, words: str
) -> None:
    noisy = [*ONE.noisy]
    noisy[number] = again
    told = compare(replace(ONE, noisy=noisy), Side(name="mesh", run=run(4)))
    assert told.code == NOT_COMPARABLE
    name = f"nudged-{number} of one" if number else "again of one"
    assert told.lines[0].startswith(name)
    assert words in told.lines[0]
    assert "so its noise cannot be used" in told.lines[0]


def test_clipping_at_every_step_is_named() -> None:
    def clipped(of: Run, squares: Sequence[float]) -> Run:
        for step, square in enumerate(squares):
            of = changed(of, (step, "gradient", "a"), square=square)
        return of

    one = replace(ONE, run=clipped(ONE.run, [1.0, 0.99999]))
    mesh = clipped(run(4), [1.00001, 1.0])
    told = compare(one, Side(name="mesh", run=mesh))
    assert told.code == SAME
    assert any(line.startswith("clipped: the norm of the whole") for line in told.lines)
    for square in (0.9, math.nan):  # nan: still to be summed
        one_step = changed(mesh, (1, "gradient", "a"), square=square)
        told = compare(one, Side(name="mesh", run=one_step))
        assert not any(line.startswith("clipped:") for line in told.lines)


def test_without_noise_nothing_is_decided() -> None:
    found = against(run(4), replace(ONE, noisy=()))
    assert found.code == UNDECIDED and "record it with --noise 2" in found.lines[0]
    one = Side(name="mesh", run=run(4))
    found = compare(one, ONE)
    told = "mesh has no noise: give the side that has some first: compare one mesh"
    assert found.code == UNDECIDED and found.lines[0] == told


def test_a_renamed_tensor_is_found_by_its_bits() -> None:
    found = against(run(4, names=("lm.a", "lm.b", "lm.c")))
    assert found.code == SAME
    assert "3 of 3 tensors have equal bits, 3 under another name" in found.lines[1]


def test_a_start_that_was_rounded_is_reported() -> None:
    in_bf16 = changed(run(4), (0, "weight", "a"), digest=100)
    found = against(in_bf16)
    assert found.code == SAME and "1 of them after rounding to bf16" in found.lines[1]
    # neither side is rounded: a weight is off by less than bf16 can tell
    off = changed(run(4), (0, "weight", "a"), digest=1007)
    found = against(off)
    assert found.code == NOT_COMPARABLE
    assert found.lines[0].startswith(
        "starts differ: 1 of 3 tensors began with other values, a first. Rounded to "
        "bf16 they are equal: "
    )


def test_a_step_without_any_gradient_is_a_step() -> None:
    """HSDP shows no gradients while it accumulates them."""
    other = run(4)
    kept = {k: t for k, t in other.tensors.items() if k[0] == 0 or k[1] == "weight"}
    lacks = frozenset((1, name) for name in "abc")
    found = against(replace(other, tensors=kept, without_gradient=lacks))
    assert found.code == DIFFERENT
    assert found.lines[0] == "step 1: mesh has no gradient of a"


def test_ranks_that_begin_otherwise_are_named() -> None:
    """Rank 0 differs at the start, from the first side and from the other ranks."""
    key = (0, "weight", "b")
    other = changed(run(4), key, digest=99, rounded=9, unlike=(1, 2, 3))
    found = against(replace(other, replicas={key: (1, 2, 3)}))
    assert found.code == NOT_COMPARABLE
    assert found.lines[0].startswith("starts differ: 1 of 3 tensors")
    assert found.lines[1] == (
        "replicas of b differ at the start: other bits on rank 1, 2, 3 of mesh than on "
        "the first rank with it"
    )


def test_rows_in_pieces_with_the_same_tokens_are_the_same_rows() -> None:
    rows = on_rank_0({0: {1, 2}, 1: {5, 6, 7, 8}})
    one = replace(ONE, run=replace(run(), bags={1: [77]}))
    found = against(replace(run(4), rows_of_ranks=rows, bags={1: [77]}), one)
    assert found.code == SAME
    assert (
        "rows: equal at 2 of 2 steps; at 1 only as a whole, cut in other pieces"
        in found.lines
    )
    assert (
        against(replace(run(4), rows_of_ranks=rows, bags={1: [78]}), one).code
        == NOT_COMPARABLE
    )
    assert against(replace(run(4), rows_of_ranks=rows)).code == NOT_COMPARABLE


@pytest.mark.parametrize(
    ("mine", "its", "has_tokens", "code"),
    [
        ({0: [5, 1], 1: [5, 2]}, {0: [5, 1], 1: [5, 2]}, False, SAME),
        # the first input never changes, such as a table
        ({0: [5, 1], 1: [5, 2]}, {0: [5, 1], 1: [5, 3]}, False, NOT_COMPARABLE),
        # the job computes it, such as a hidden state
        ({0: [5, 1], 1: [6, 2]}, {0: [5, 1], 1: [7, 2]}, False, SAME),
        ({0: [5, 1], 1: [6, 2]}, {0: [5, 1], 1: [7, 2]}, True, NOT_COMPARABLE),
        ({0: [5, 1], 1: [6, 2]}, {0: [5, 1], 1: [6, 3]}, True, SAME),
        # another seed, beside a mask that changes
        ({0: [6, 1], 1: [7, 2]}, {0: [5, 1], 1: [8, 2]}, False, NOT_COMPARABLE),
        # with one step no input is known to change
        ({1: [5, 1]}, {1: [5, 1]}, False, SAME),
        ({1: [5, 1]}, {1: [5, 2]}, False, NOT_COMPARABLE),
        ({1: [5, 1]}, {1: [5, 2]}, True, SAME),
        # all are constant: the batch is
        ({0: [5], 1: [5]}, {0: [5], 1: [5]}, False, SAME),
        ({0: [5], 1: [5]}, {0: [5], 1: [6]}, False, NOT_COMPARABLE),
    ],
)
def test_inputs_in_pieces_are_compared_one_by_one(
    mine: dict[int, Any], its: dict[int, Any], has_tokens: bool, code: int
) -> None:
    given = replace(run(), bags=mine, has_tokens=has_tokens)
    rows = on_rank_0({0: {1, 2}, 1: {5, 6, 7, 8}})
    other = replace(run(4), rows_of_ranks=rows, bags=its, has_tokens=has_tokens)
    assert against(other, replace(ONE, run=given)).code == code


@pytest.mark.parametrize(
    ("ranks", "count"),
    [
        ([[[1], [2, 3]], [[1], [4, 5]]], 0),  # the first input is a table
        ([[[1], [2, 3]], [[1], [3, 4]]], 1),  # one row of the second is twice
        ([[[1], [2, 3]], [[1], [2, 3]]], 0),  # ranks of one model
        ([[[2, 3]], [[3, 4]], [[4, 2]], [[3, 4]]], 3),
        ([[[2, 3], [8, 9]], [[4, 5], [9, 7]]], 0),  # the second input is a mask
    ],
)
def test_rows_that_a_sampler_repeats_are_counted(
    ranks: list[list[list[int]]], count: int, tmp_path: Path
) -> None:
    for rank, inputs in enumerate(ranks):
        recording = Recording(world_size=len(ranks))
        recording.rows_of_floats = {0: [torch.tensor(rows) for rows in inputs]}
        recording.bags = {0: [[sum(rows) for rows in inputs]]}
        write_rank(tmp_path, rank, recording)
    merged = read_merged(tmp_path)
    assert merged.repeated == {0: count}
    tables = {tuple(inputs[0]) for inputs in ranks}
    assert merged.bags[0][0] == sum(map(sum, tables))


@pytest.mark.parametrize(
    ("received", "names", "expected"),
    [
        (False, "ab", {0}),
        (True, "ab", {0, 1}),  # the job computes gradients of its inputs
        (False, "aa", {0, 1}),  # of those of one rank alone
    ],
)
def test_activations_of_a_later_stage_are_no_rows(
    received: bool, names: str, expected: set[int], tmp_path: Path
) -> None:
    box = Box((2,), (0,), (2,))
    part = Stored.of(box, keep_values(torch.ones(2), box))
    for rank, name in enumerate(names):
        tensors = {f"0/0/{kind}/0/{name}": part for kind in ("weight", "gradient")}
        recording = Recording(world_size=2, tensors=tensors)
        x = torch.full((3, 2), float(rank), requires_grad=received or rank == 1)
        keep_rows(recording, 0, [x])
        recording.bags, recording.rows_of_blocks = {}, {0: [torch.tensor([rank])]}
        write_rank(tmp_path, rank, recording)
    ranks = dict(read_run(tmp_path))
    assert inputs_of(ranks)[0].keys() == rows_of_blocks(ranks, 0).keys() == expected
    assert len(read_merged(tmp_path).rows[0]) == len(expected)


def test_a_padded_batch_is_a_lead_where_jobs_differ() -> None:
    padded = replace(run(4), repeated={0: 1})
    wrong = changed(padded, (0, "gradient", "b"), sketch=2 * values(0, "b"))
    lead = (
        f"rows: several ranks of mesh got the same 1 of {len(padded.rows[0])} rows at "
        "step 0: a sampler may pad the batch. Drop the rest (drop_last=True)"
    )
    assert lead in against(wrong).leads
    assert against(padded).leads == []


def test_weights_that_one_side_changes_between_steps_are_a_lead() -> None:
    """Both change b, and the mesh also c."""

    def leaves(given: Run, *names: str) -> Run:
        results = {
            (0, RESULT, name): replace(given.tensors[1, "weight", name], digest=digest)
            for digest, name in enumerate(names)
        }
        return replace(given, tensors={**given.tensors, **results})

    wrong = changed(run(4, steps=3), (1, "gradient", "a"), sketch=np.ones(SIZE))
    one = replace(ONE, run=leaves(run(), "b"))
    lead = (
        "between steps 0 and 1, something other than the optimizer changes 1 tensor of "
        "mesh (c first), and not in one"
    )
    assert lead in against(leaves(wrong, "b", "c"), one).leads
    assert not any("between" in each for each in against(leaves(wrong, "b"), one).leads)


@pytest.mark.parametrize(
    ("shares", "lead"),
    [
        ([[2, 10, 4], [3, 15, 6]], "rows: at step 0 a forward of mesh has 2 to 3. A"),
        ([[2, 14, 0, 9, 5], [2, 14, 0, 11, 3]], "labels that count: at step 0 a forw"),
        ([[2, 10, 0], [2, 14, 0]], ""),  # one of them is padded more
        ([[2, 9, 5], [2, 9, 5]], ""),
        ([[4, 20, 8]], ""),
    ],
)
def test_unequal_shares_are_a_lead(shares: list[list[int]], lead: str) -> None:
    wrong = changed(run(4), (0, "gradient", "b"), sketch=2 * values(0, "b"))
    leads = against(replace(wrong, shares={0: shares})).leads
    assert [each[: len(lead)] for each in leads if " to " in each] == [lead] * bool(
        lead
    )
    one = replace(ONE, run=replace(ONE.run, shares={0: shares}))
    leads = against(replace(wrong, shares={0: shares}), one).leads
    assert not [each for each in leads if "mean of their means" in each]


@pytest.mark.parametrize(
    ("factor", "ranks", "forwards", "lead"),
    [
        (2, 2, 0, "the factor is 2, and mesh has 2 ranks: does one side add up"),
        (
            0.25,
            4,
            0,
            "the factor is 1 / 4, and mesh has 4 ranks: does one side average",
        ),
        (3, 1, 3, "the factor is 3, and mesh has 3 forwards in a step: does one"),
        (2, 2, 4, "the factor is 2, and mesh has 2 ranks and 2 forwards in a step: d"),
        (3, 2, 0, ""),
        (0, 2, 0, ""),
    ],
)
def test_a_factor_that_is_a_number_of_ranks_or_forwards_is_told(
    factor: float, ranks: int, forwards: int, lead: str
) -> None:
    other = replace(run(4), ranks=ranks, shares={0: [[1]] * forwards})
    for name in NAMES:
        other = changed(other, (0, "gradient", name), sketch=factor * values(0, name))
    leads = [each for each in against(other).leads if "the factor is" in each]
    assert [each[: len(lead)] for each in leads] == [lead] * bool(lead)


@pytest.mark.parametrize(
    ("statistics", "unlike", "lead"),
    [
        (2.0, (), "batch norms: n.running_mean differs, too. They normalise the rows"),
        (1.0, (1,), "batch norms: ranks of mesh have different n.running_mean: each"),
        (1.0, (), ""),
    ],
)
def test_batch_norms_that_see_other_rows_are_a_lead(
    statistics: float, unlike: tuple[int, ...], lead: str
) -> None:
    key = (0, "buffer", "n.running_mean")

    def has(given: Run, factor: float) -> Run:
        mean = whole(factor * values(0, "n"), 1)
        return replace(given, tensors={**given.tensors, key: mean})

    one = replace(
        ONE, run=has(ONE.run, 1), noisy=[has(each, 1 + 1e-7) for each in ONE.noisy]
    )
    other = has(changed(run(4), (0, "gradient", "b"), sketch=np.ones(SIZE)), statistics)
    other = replace(other, replicas={key: unlike} if unlike else {})
    found = against(other, one)
    assert found.headline.startswith("step 0: the gradient of b differs"), found.lines
    assert [each[: len(lead)] for each in found.leads if "batch norms" in each] == (
        [lead] if lead else []
    )


def test_a_training_that_was_not_recorded_is_told() -> None:
    text = "not recorded: Adam of 2 tensors in mesh, as it first stepped after all"
    mesh = Side(name="mesh", run=run(4), late="Adam of 2 tensors")
    for compares in (compare, compare_exactly):
        lines = compares(replace(ONE, run=run(4)), mesh).lines
        assert sum(line.startswith(text) for line in lines) == 1


def not_proved() -> Run:
    """Return a run with one tensor that has another name and other bits."""
    other = run(4, names=("a", "b", "x"))
    return changed(other, (0, "weight", "x"), digest=77)


def all_other() -> Run:
    """Return a run whose tensors all have other names and other bits."""
    other = run(4, names=("x", "y", "z"))
    tensors = {key: replace(each, digest=99) for key, each in other.tensors.items()}
    return replace(other, tensors=tensors)


@pytest.mark.parametrize(
    ("other", "code", "words"),
    [
        (
            changed(run(4), (0, "weight", "a"), digest=99, rounded=9),
            NOT_COMPARABLE,
            "starts differ: 1 of 3 tensors began with other values, a first. Begin",
        ),
        (
            replace(run(4), rows_of_ranks=on_rank_0({0: {1, 2}, 1: {1, 3}})),
            NOT_COMPARABLE,
            "rows differ at step 1: the model was given 2 rows in one and 2 rows in "
            "mesh, 1 of them on both sides",
        ),
        (
            replace(run(4), settings={(0, "b"): {"lr": 0.2}}),
            NOT_COMPARABLE,
            "settings differ at step 0: lr of b is 0.1 in one and 0.2 in mesh",
        ),
        (
            replace(run(4), drew=frozenset({1}), drops=("drop",)),
            UNDECIDED,
            "random numbers were drawn in forward at step 1 of mesh: drop",
        ),
        (
            replace(run(4), unstepped=("b",)),
            DIFFERENT,
            "mesh does not train b: no recorded optimizer steps it",
        ),
        (
            replace(run(4), without_gradient=frozenset({(1, "c")})),
            DIFFERENT,
            "step 1: mesh has no gradient of c",
        ),
        (
            replace(run(4), replicas={(1, "weight", "c"): (2, 3)}),
            DIFFERENT,
            "step 1: replicas of c differ: other bits on rank 2, 3 of mesh than on",
        ),
        (
            replace(run(4), replicas={(0, "weight", "c"): (2,)}),
            DIFFERENT,
            "than on the first rank with it. If these are different tensors, declare "
            "them: gradparity.record(model, optimizer, places=...)",
        ),
        (
            changed(
                replace(run(4), replicas={(0, "weight", "c"): (2,)}),
                (0, "weight", "c"),
                shape=(SIZE // 2,),
            ),
            NOT_COMPARABLE,
            "c has shape [16] in one, and [8] with other values on each rank of mesh",
        ),
        (
            replace(
                run(4), replicas={(1, "weight", "c"): (2,), (0, "gradient", "c"): (2,)}
            ),
            DIFFERENT,
            "first rank with it. Its gradient differs from step 0 on",
        ),
        (run(4, steps=0), NOT_COMPARABLE, "the two sides recorded no step"),
        (
            all_other(),
            NOT_COMPARABLE,
            "starts differ: no tensor has equal bits. Begin both",
        ),
        (
            replace(run(4), tensors={k: t for k, t in run(4).tensors.items() if k[0]}),
            NOT_COMPARABLE,
            "the sides begin at steps 0 and 1",
        ),
    ],
    ids=[
        "start",
        "rows",
        "settings",
        "drew",
        "unstepped",
        "none",
        "replicas",
        "replicas-at-the-start",
        "parts-of-one-tensor",
        "replicas-of-gradients",
        "steps",
        "all",
        "begins",
    ],
)
def test_what_must_be_equal_comes_first(other: Run, code: int, words: str) -> None:
    found = against(other)
    assert found.code == code, found.lines
    assert words in found.lines[0]


def test_a_parameter_that_one_side_does_not_train_comes_first() -> None:
    """A parameter trained on one side only is reported first, unless renamed."""
    frozen = run(4)
    two = {key: each for key, each in frozen.tensors.items() if key[2] != "b"}
    found = against(replace(frozen, tensors=two))
    assert found.code == DIFFERENT
    assert found.lines[0].startswith("mesh does not train b: ")
    more = {key: each for key, each in ONE.run.tensors.items() if key[2] != "b"}
    found = against(run(4), replace(ONE, run=replace(ONE.run, tensors=more)))
    assert found.code == DIFFERENT
    assert found.lines[0].startswith("one does not train b: ")
    assert "tie" not in found.lines[0]
    assert against(replace(frozen, tensors=two, unnamed=1)).code == SAME
    assert against(not_proved()).code == SAME


@pytest.mark.parametrize(("shape", "is_named"), [((4, 4), True), ((SIZE,), False)])
def test_a_tensor_that_may_be_tied_on_one_side_is_named(
    shape: tuple[int, ...], is_named: bool
) -> None:
    """Vectors are not named: those of layer norms all begin alike."""

    def alike(plain: Run) -> Run:
        start = replace(plain.tensors[0, "weight", "a"], shape=shape)
        ends = {(0, "weight", name): start for name in "ab"}
        return replace(plain, tensors={**plain.tensors, **ends})

    mesh = alike(run(4))
    left = {key: each for key, each in mesh.tensors.items() if key[2] != "b"}
    other = replace(mesh, tensors=left)
    found = against(other, Side(name="one", run=alike(ONE.run)))
    assert found.code == DIFFERENT
    words = (
        "b and a of one began equal and do not stay so. mesh has a alone and may tie"
    )
    assert (words in found.lines[0]) == is_named


def test_a_tensor_that_is_tied_on_one_side_may_be_a_copy_on_the_other() -> None:
    """A pipeline keeps one copy on its first stage and one on its last."""

    def alike(plain: Run) -> Run:
        tied = {
            (step, kind, "b"): replace(each, shape=(4, 4))
            for (step, kind, name), each in plain.tensors.items()
            if name == "a"
        }
        first = {
            key: replace(each, shape=(4, 4)) if key[2] == "a" else each
            for key, each in plain.tensors.items()
        }
        return replace(plain, tensors={**first, **tied})

    def without_b(plain: Run) -> Run:
        left = {key: each for key, each in plain.tensors.items() if key[2] != "b"}
        return replace(plain, tensors=left)

    one = replace(
        ONE,
        run=without_b(alike(ONE.run)),
        noisy=[without_b(alike(each)) for each in ONE.noisy],
    )
    found = against(alike(run(4)), one)
    assert found.code == SAME, found.lines
    assert "tied: b of mesh keeps the bits of a, and one has the latter alone" in (
        found.lines
    )
    # a tensor that the other side has and does not train is no copy, and neither is
    # one that never moves
    frozen = replace(one, run=replace(one.run, unstepped=("b",)))
    assert against(alike(run(4)), frozen).lines[0].startswith("one does not train b")
    still = alike(run(4))
    for name in "ab":
        start = still.tensors[0, "weight", name]
        for key in [k for k in still.tensors if k[1:] == ("weight", name)]:
            still = changed(still, key, digest=start.digest)
    assert against(still, one).code == DIFFERENT
    untied = changed(alike(run(4)), (1, "weight", "b"), digest=7)
    found = against(untied, one)
    assert found.code == DIFFERENT
    assert found.lines[0].startswith("step 1: b and a of mesh began equal")


def test_unequal_replicas_are_told_before_the_rows_that_they_compute() -> None:
    mixed = replace(run(4), rows_of_ranks=on_rank_0({0: {1}, 1: {2}}))
    one = replace(ONE, run=replace(ONE.run, rows_of_ranks=on_rank_0({0: {1}, 1: {3}})))
    assert against(mixed, one).lines[0].startswith("rows differ at step 1")
    for step, start in ((1, "step 1: replicas of a"), (2, "rows differ at step 1")):
        unlike = replace(mixed, replicas={(step, "weight", "a"): (1,)})
        assert against(unlike, one).lines[0].startswith(start)


@pytest.mark.parametrize("key", ["fused", "is_expert_parallel"])
def test_a_choice_of_an_implementation_is_no_other_setting(key: str) -> None:
    mine, its = ({(0, "b"): {"lr": 0.1, key: value}} for value in (None, True))
    one = replace(ONE, run=replace(ONE.run, settings=mine))
    assert against(replace(run(4), settings=its), one).code == SAME


def test_what_was_not_compared_is_reported() -> None:
    other = replace(not_proved(), replicas={(0, "gradient", "a"): (1,)}, unnamed=2)
    other = replace(other, notes=("rank 0: rows: no",))
    told = "\n".join(against(other).lines)
    assert "not compared: 1 of 3 tensors, because no tensor of the other" in told
    assert (
        "replicas differ: the gradient of a at step 0 has other bits on rank 1" in told
    )
    assert "not compared: 2 parameters that no module names" in told
    assert "the recorder noted: rank 0: rows: no" in told


def test_how_many_ranks_each_side_has_is_reported() -> None:
    assert "ranks: 1 in one, 4 in mesh" in against(replace(run(4), ranks=4)).lines


@pytest.mark.parametrize(("steps", "code"), [(1, UNDECIDED), (2, SAME)])
def test_one_step_shows_no_factor_of_sums_that_the_optimizer_makes(
    steps: int, code: int
) -> None:
    one = replace(
        ONE,
        run=run(steps=steps),
        noisy=[run(1, steps=steps), *(nudged(n, steps=steps) for n in (2, 3))],
    )
    found = against(
        changed(run(4, steps=steps), (0, "gradient", "a"), digest=None), one
    )
    assert found.code == code
    assert ("record 2 steps" in found.lines[0]) == (code == UNDECIDED)
    assert any(line.startswith("not summed when") for line in found.lines)


def test_a_part_that_nobody_holds_is_not_compared() -> None:
    other = changed(run(4), (0, "gradient", "a"), held=SIZE - 1)
    found = against(other)
    assert len(found.rows) == 11
    assert "not compared: 1 gradient, because elements" in found.lines[-1]


def test_bits_are_compared_step_by_step() -> None:
    one, same = Side(name="one", run=run()), Side(name="mesh", run=run())
    found = compare_exactly(one, same)
    assert (found.code, found.lines) == (
        SAME,
        ["same, bit for bit: 12 tensors of 2 steps"],
    )
    other = changed(run(), (1, "weight", "b"), digest=5)
    found = compare_exactly(one, Side(name="mesh", run=other))
    assert (found.code, found.lines) == (
        DIFFERENT,
        ["step 1: the weight of b has other bits"],
    )
    settings = replace(run(), settings={(0, "a"): {"lr": 0.2, "fused": None}})
    found = compare_exactly(one, Side(name="mesh", run=settings))
    assert found.lines == [
        "settings differ at step 0: lr of a is 0.1 in one and 0.2 in mesh"
    ]
    kernel = replace(run(), settings={(0, "a"): {"lr": 0.1, "fused": True}})
    assert compare_exactly(one, Side(name="mesh", run=kernel)).code == SAME
    drew = replace(other, drew=frozenset({1}), drops=("drop",))
    # a weight differs before the forward of its step
    assert not compare_exactly(one, Side(name="mesh", run=drew)).leads
    drew = changed(drew, (1, "weight", "b"), digest=run().starts["b"][1].digest)
    drew = changed(drew, (0, "gradient", "b"), digest=5)
    both = changed(drew, (0, "weight", "b"), digest=5)
    assert compare_exactly(one, Side(name="mesh", run=both)).lines == [
        "step 0: the weight of b has other bits",
        "1 more difference in that step",
        "step 0: the gradient of b has other bits",
    ]
    found = compare_exactly(one, Side(name="mesh", run=drew))
    assert found.leads[0].startswith("random numbers are drawn in forward from step 1")
    assert ": drop. A resumed job must restore" in found.leads[0]


def test_bits_are_compared_on_all_ranks() -> None:
    one = Side(name="one", run=run())
    odd = changed(run(), (1, "weight", "b"), odd=frozenset({5}), unlike=(1,))
    found = compare_exactly(one, Side(name="mesh", run=odd))
    assert (found.code, found.lines) == (
        DIFFERENT,
        ["step 1: the weight of b has other bits on rank 1 of mesh than on its first"],
    )
    same = Side(name="two", run=odd)
    assert compare_exactly(same, Side(name="mesh", run=odd)).code == SAME
    rates = {0: {"lr": 0.1}, 1: {"lr": 0.3}}
    found = compare_exactly(
        one, Side(name="mesh", run=replace(run(), other_settings={(1, "a"): rates}))
    )
    assert found.lines == [
        "step 1: ranks of mesh have different settings for a: lr is 0.1 on rank 0 and "
        "0.3 on rank 1"
    ]
    mesh = Side(name="mesh", run=replace(run(), absent={(1, "a"): (1,)}))
    assert compare_exactly(one, mesh).lines == [ABSENT]


ABSENT = "step 1: rank 1 of mesh does not step a, and other ranks do"


def test_a_rank_that_leaves_out_a_step_is_told(tmp_path: Path) -> None:
    """If it is the last step, no weights of a later one show it."""
    for rank, count in enumerate((2, 1)):
        calls = [
            Call(
                optimizer=0,
                kind="SGD",
                step=step,
                settings=[Settings(names=["a"], values={"lr": 0.1})],
            )
            for step in range(count)
        ]
        recording = Recording(world_size=2, calls=calls)
        write_rank(tmp_path, rank, recording)
        # under torch's join() rank 1 has no rows any more
        recording.rows = {step: [torch.tensor([5 + rank])] for step in range(count)}
        write_rank(tmp_path / "join", rank, recording)
    absent = read_merged(tmp_path).absent
    assert read_merged(tmp_path / "join").absent == {}
    assert absent == {(1, "a"): (1,)}
    mesh = Side(name="mesh", run=replace(run(4), absent=absent))
    found = compare(ONE, mesh)
    assert (found.code, found.headline) == (DIFFERENT, ABSENT)
    failed = compare(ONE, replace(mesh, code=1))  # told why it has fewer steps
    assert failed.code == SAME


def test_an_inf_of_one_rank_and_a_weight_that_one_rank_leaves() -> None:
    """One step shows neither what a rank that skips does, nor weights it gets."""
    odd = Side(name="mesh", run=replace(run(4), skipping={(1, "a"): (1,)}))
    found = compare(ONE, odd)
    assert found.code == DIFFERENT
    told = "step 1: rank 1 of mesh has found an inf and does not step a, and other"
    assert found.headline.startswith(told)
    short = replace(ONE, run=run(steps=1))
    for steps, code in ((1, UNDECIDED), (2, SAME)):
        of = run(4, steps=steps)
        found = against(replace(of, left={"a": (1,)}), short if steps == 1 else ONE)
        assert found.code == code, found.lines
        assert ("gets the new values: record 2 steps" in found.headline) == (code == 4)


def test_rounding_does_not_hide_a_narrower_precision() -> None:
    other = replace(run(4), in_16_bits={"b": "bfloat16"})
    found = against(other)
    assert found.code == UNDECIDED
    assert found.headline.startswith(
        "precision: modules with 1 of 3 tensors return bfloat16 in mesh, and none does "
        "in one (b first)"
    )
    narrow = replace(ONE, run=replace(ONE.run, in_16_bits={"a": "bfloat16"}))
    assert against(other, narrow).code == SAME
    wider = against(run(4), narrow)
    assert wider.code == SAME
    assert "precision: modules return bfloat16 in one, and none is known to in " in (
        "\n".join(wider.facts)
    )
    # hooks do not see the modules of a compiled model, and noise shows the precision
    coarse = replace(ONE, noisy=[rounded(each) for each in ONE.noisy])
    assert against(other, coarse).code == SAME


def test_loose_bounds_are_told() -> None:
    far = [replace(each, tensors={**each.tensors}) for each in ONE.noisy]
    for noisy in far:
        for step, kind, name in itertools.product((0, 1), KINDS, NAMES):
            sketch = 1.02 * values(step, name)
            noisy.tensors[step, kind, name] = whole(sketch, 1)  # type: ignore[index]
    (told_once,) = [
        line
        for line in against(run(4), replace(ONE, noisy=far)).lines
        if line.startswith("loose")
    ]
    assert told_once.startswith("loose: noise explains 16% of the median tensor's size")


def test_zeros_are_no_comparison() -> None:
    def zeros(of: Run) -> Run:
        tensors = {
            key: each if each.sketch is None else replace(each, sketch=0 * each.sketch)
            for key, each in of.tensors.items()
        }
        return replace(of, tensors=tensors)

    one = Side(name="one", run=zeros(ONE.run), noisy=[*map(zeros, ONE.noisy)])
    found = against(zeros(run(4)), one)
    assert found.code == UNDECIDED
    assert "all gradients and updates are zero on both sides" in found.headline


def test_noise_needs_two_nudged_runs() -> None:
    """An interrupted recording had its second run as all of its noise."""
    few = replace(ONE, noisy=ONE.noisy[:2])
    found = against(run(4), few)
    assert found.code == UNDECIDED
    assert found.headline.startswith("one has too few of its noise runs: record it")
    found = compare(few, replace(ONE, name="mesh"))
    assert "give the side that has some first: compare mesh one" in found.headline


def test_the_weights_after_the_last_common_step_are_compared_to_the_bit() -> None:
    """A longer recording has them as the start of a step, a shorter one as its end."""
    short, end = run(steps=1), (1, "weight", "a")
    tensors = {**short.tensors, end: run(steps=2).tensors[end]}
    one = Side(name="one", run=replace(short, tensors=tensors))
    mesh = Side(name="mesh", run=run(steps=2))
    for first, second in ((one, mesh), (mesh, one)):
        found = compare_exactly(first, second)
        assert (found.code, found.lines) == (
            SAME,
            [
                "same, bit for bit: 7 tensors of 1 step",
                "compared: step 0; mesh also has step 1",
            ],
        )
    other = Side(name="mesh", run=changed(run(steps=2), end, digest=5))
    assert compare_exactly(one, other).lines[:1] == [
        "step 1: the weight of a has other bits"
    ]
    moved = {(1, "buffer", "mean"): whole(None, 4)}  # by the forward of step 1
    ended = {(1, "buffer", "mean"): whole(None, 3)}
    first = replace(one, run=replace(one.run, tensors={**one.run.tensors, **ended}))
    later = replace(mesh, run=replace(mesh.run, tensors={**mesh.run.tensors, **moved}))
    assert compare_exactly(first, later).code == SAME
    lacks = Side(name="mesh", run=short)  # as long, and without the weight at its end
    assert compare_exactly(one, lacks).lines == ["step 1: mesh lacks the weight of a"]


def test_the_update_of_a_scalar_is_compared_in_16_bits() -> None:
    mine, its = whole(np.ones(1), 1), whole(-np.ones(1), 2)
    assert _without_flips(mine, its) == 2
    mine, its = whole(np.ones(4), 1), whole(np.array([1.0, 1, 1, -1]), 2)
    assert _without_flips(mine, its) == 0


def test_rows_of_another_step_ask_for_the_first_step() -> None:
    other = replace(run(4), rows_of_ranks=on_rank_0({0: {3, 4}, 1: {5, 6}}))
    found = against(other)
    assert found.code == NOT_COMPARABLE
    assert found.headline.endswith("record it with --first N")
    tensors = {
        (step + 3, kind, name): each
        for (step, kind, name), each in run(4).tensors.items()
    }
    later = replace(run(4), tensors=tensors, rows_of_ranks=on_rank_0({3: {8, 9}}))
    assert _resumed(later, later) == OTHER_DATA
    fewer = replace(run(4), rows_of_ranks=on_rank_0({0: {1}, 1: {1, 2}}))
    assert "Fewer rows come from a step that" in against(fewer).headline


@pytest.mark.parametrize(
    ("of_ranks", "told"),
    [
        ([{1, 2}, {1, 2}], ". Ranks 0, 1 of mesh got the same rows: are they data"),
        ([{1, 2}, {5, 6}], ". Rank 1 of mesh got other rows. Give both"),
        ([{1}, {2, 3}], ". Fewer rows come from a step that only one scaler skips, "),
        ([{5}, {6}], "0 of them on both sides. Give both the same data in the same"),
    ],
)
def test_ranks_whose_rows_differ_are_named(of_ranks: list[set[int]], told: str) -> None:
    by_rank = dict(enumerate(map(frozenset, of_ranks)))
    whole = replace(ONE.run, rows_of_ranks=on_rank_0({0: {1, 2, 3, 4}}))
    other = replace(run(4), rows_of_ranks={0: by_rank})
    found = against(other, replace(ONE, run=whole))
    assert found.code == NOT_COMPARABLE and told in found.headline


def test_runs_for_the_noise_whose_weights_were_not_moved_decide_nothing() -> None:
    found = against(run(4), replace(ONE, noisy=(run(1), nudged(2), run(3))))
    assert found.code == UNDECIDED
    told = "nudged-2 of one began with the weights of plain, so there is no noise: "
    assert found.lines[0].startswith(told)
    assert "gradparity.record(model, optimizer)" in found.lines[0]


def test_copies_that_no_module_has_need_a_job_without_them() -> None:
    names = [f"parameter {n}" for n in range(3)]
    noisy = (run(1, names), run(2, names), run(3, names))
    one = Side(name="one", run=run(names=names), noisy=noisy)
    found = against(run(4, names), one)
    assert found.code == UNDECIDED
    assert "the optimizer steps copies that are in no module." in found.lines[0]


def test_weights_on_which_no_gradient_depends_measure_no_noise() -> None:
    """A noise run is valid if one nonzero gradient changed with the nudged weights."""
    same = nudged(2)
    for name in NAMES:
        same = changed(same, (0, "gradient", name), digest=0)
    found = against(run(4), replace(ONE, noisy=(run(1), same, nudged(3))))
    assert found.code == UNDECIDED
    assert found.lines[0].startswith("nudged-1 of one began with other weights than")
    assert "does not compute with the tensors that the optimizer" in found.lines[0]
    assert "16 bits" not in found.lines[0]
    narrow = replace(ONE.run, in_16_bits={"a": "bfloat16"})
    one = replace(ONE, run=narrow, noisy=(run(1), same, nudged(3)))
    assert "16 bits round the moved weights away, or" in against(run(4), one).lines[0]
    moved = changed(same, (0, "gradient", "b"), digest=2)
    one = replace(ONE, noisy=(run(1), moved, nudged(3)))
    assert against(run(4), one).code == SAME
    zero = changed(run(), (0, "gradient", "b"), sketch=np.zeros(SIZE))
    assert against(run(4), replace(one, run=zero)).code == UNDECIDED


@pytest.mark.parametrize(
    ("factor", "code"), [(1 + 1e-4, SAME), (1.2, NOT_COMPARABLE), (math.nan, 2)]
)
def test_rows_that_the_job_computes_may_differ_by_rounding(
    factor: float, code: int
) -> None:
    """A critic gets data, and rows that a generator computes."""
    data = {1: (1.0, 0.5, -0.2, 0.1)}
    mine = {**data, 2: (2.0, 1.0, 0.3, -0.7)}
    its = {**data, 3: tuple(factor * x for x in mine[2])}
    one, other = (
        replace(side, rows_of_ranks=on_rank_0({0: sums}), sums={0: sums})
        for side, sums in ((run(), mine), (run(4), its))
    )
    found = against(other, Side(name="one", run=one, noisy=ONE.noisy))
    assert found.code == code, found.lines
    told = "at 1 up to rounding: the job computed some of them"
    assert any(told in line for line in found.lines) == (code == SAME)
    fewer = replace(other, rows_of_ranks=on_rank_0({0: data}), sums={0: data})
    assert against(fewer, Side(name="one", run=one)).code == NOT_COMPARABLE
    far = {**mine, 4: (9.0, 5.0, -3.0, 2.0)}  # no row of the other side is near it
    more = replace(one, rows_of_ranks=on_rank_0({0: far}), sums={0: far})
    assert against(other, Side(name="one", run=more)).code == NOT_COMPARABLE


def test_of_replicas_that_differ_the_one_that_is_furthest_apart_is_named() -> None:
    """Clipping by another norm on each rank changes the gradients of all tensors."""
    keys = [
        (step, kind, n)
        for step, kind in ((1, "weight"), (0, "gradient"))
        for n in "abc"
    ]
    other = replace(run(4), replicas=dict.fromkeys(keys, (1,)))
    for name, apart in zip("abc", (0.1, 1.25, 0.1), strict=True):
        other = changed(other, (0, "gradient", name), apart=apart)
    first = against(other).lines[0]
    assert first.startswith("step 1: replicas of b differ: other bits on rank 1 of ")
    assert first.endswith("Its gradient differs from step 0 on, by 1.2 of its size")
    # the first step counts before the distance
    other = replace(other, replicas={(0, "weight", "c"): (1,), **other.replicas})
    assert against(other).lines[0].startswith("step 0: replicas of c differ")


@pytest.mark.parametrize(
    ("gradients", "names", "code"),
    [
        ((1,), "ab", UNDECIDED),
        ((1,), "a", DIFFERENT),  # as of one layer that begins to train unseen by DDP
        ((), "ab", DIFFERENT),
        ((0, 1), "ab", DIFFERENT),
    ],
)
def test_replicas_that_differ_after_the_last_step_alone(
    gradients: tuple[int, ...], names: str, code: int
) -> None:
    """A job may begin to average weights after the step, as local SGD does."""
    keys = [(2, "weight", name) for name in names]
    keys += [(step, "gradient", name) for step in gradients for name in names]
    found = against(replace(run(4), replicas=dict.fromkeys(keys, (1,))))
    assert found.code == code
    assert found.headline.startswith("step 2: replicas of a differ")
    assert found.headline.endswith("record one step more") == (code == UNDECIDED)


@pytest.mark.parametrize("names", ["abc", "ab", "a"])
def test_names_with_other_shapes_are_told(names: str) -> None:
    """Such as of a wrong declaration, or of a vocabulary that is padded."""
    other = run(4)
    for key, mine in other.tensors.items():
        if key[1] == "weight" and key[2] in names:
            digest = (mine.digest or 0) + 1
            wider = replace(mine, shape=(2, *mine.shape), digest=digest)
            other = replace(other, tensors={**other.tensors, key: wider})
    found = against(other)
    assert "a has shape [16] in one, and [2, 16] in mesh" in found.headline
    if names == "abc":
        assert found.code == NOT_COMPARABLE
        assert found.headline.startswith("starts differ: a has shape [")
        assert "If ranks hold parts of it, declare them" in found.headline
    else:
        assert found.code == UNDECIDED
        assert ("too little" in found.headline) == (names == "ab")
        assert found.headline.endswith("give both sides the same shape, padded or not")


def test_a_side_that_has_fewer_steps_is_reported() -> None:
    tensors = {key: each for key, each in run(4).tensors.items() if not key[0]}
    short = Side(name="mesh", run=replace(run(4), tensors=tensors))
    told = "compared: step 0; one also has step 1"
    found = compare(ONE, short)
    assert (found.code, found.lines[1]) == (SAME, told)
    found = compare(ONE, replace(short, code=7))
    assert (found.code, found.lines[0]) == (UNDECIDED, f"{told}: mesh ended with 7")
    # also where something else is in the way of numbers
    other = replace(short.run, replicas={(0, "weight", "c"): (1,)})
    assert told in compare(ONE, replace(short, run=other)).lines
    found = compare(ONE, replace(short, run=run(4), code=7))
    assert found.code == SAME
    assert "the command of mesh ended with 7 after its recorded steps" in found.facts


UNIT, SUM = 2.0**-23, 6.0


def clips(draw: int, *norms: float, limit: float = 100.0) -> Run:
    """Return a run whose ranks clip by these norms at step 1."""
    calls = {rank: [[norm, limit, UNIT]] for rank, norm in enumerate(norms)}
    return replace(run(draw), norms={1: calls})


@pytest.mark.parametrize(
    ("norms", "limit", "told"),
    [
        ((SUM, SUM), 100.0, ""),
        ((SUM * (1 + 1e-5), SUM), 100.0, ""),
        ((math.nan, math.nan), 100.0, ""),  # a DTensor that is yet to be summed
        ((SUM, 4.0), 100.0, "step 1: rank 1 of mesh clips by the norm 4, and one by 6"),
        ((3.0, 3.0), 100.0, "mesh clips by the norm 3, and one by 6, 0.500 x that"),
        ((12.0, 12.0), 10.0, "mesh clips by the norm 12, and one by 6, 2.000 x that"),
        ((3.0, 4.0), math.inf, ""),  # a job that only logs its norm
    ],
)
def test_a_norm_that_is_not_the_whole_one_differs_below_its_limit_too(
    norms: Sequence[float], limit: float, told: str
) -> None:
    one = replace(ONE, run=clips(0, SUM, limit=limit))
    found = against(clips(4, *norms, limit=limit), one)
    assert found.code == (DIFFERENT if told else SAME)
    assert told in found.headline
    is_idle = "The limit is not reached, so no gradient differs" in found.headline
    assert not any(line.startswith("same") for line in found.lines[1:])
    assert is_idle == (told != "" and max(norms) <= limit)


def test_the_side_with_unequal_norms_is_the_wrong_one() -> None:
    one = replace(ONE, run=clips(0, SUM, 4.0))
    found = against(clips(4, SUM), one)
    assert found.headline.startswith("step 1: rank 1 of one clips by the norm 4, and m")


def test_norms_that_cannot_be_compared_are_left_alone() -> None:
    one = replace(ONE, run=clips(0, SUM))
    assert against(clips(4, 3.0, limit=50.0), one).code == SAME  # a setting, see there
    twice = replace(run(4), norms={1: {0: [[3.0, 100.0, UNIT]] * 2}})
    assert against(twice, one).code == SAME
    assert against(replace(clips(4, 3.0), norms={}), one).code == SAME
    coarse = replace(run(4), norms={1: {0: [[SUM * 1.01, 100.0, 2.0**-7]]}})
    assert against(coarse, one).code == SAME


@pytest.mark.parametrize(
    ("norms", "end"),
    [
        ({0: [[math.nan, 100.0, UNIT]]}, "sides clip. They make other calls"),
        ({0: [[SUM, 100.0, UNIT]] * 2}, "sides clip. They make other calls"),
        ({0: [[SUM, 100.0, UNIT]]}, ""),
        ({}, "gradients are clipped: one calls torch's clipping, and mesh does not"),
        # a job that asks for the norm alone does not clip
        ({0: [[SUM, math.nan, UNIT]]}, "gradients are clipped: one calls torch's"),
    ],
)
def test_norms_that_were_not_compared_are_listed(norms: Any, end: str) -> None:
    one = replace(ONE, run=clips(0, SUM))
    found = against(replace(run(4), norms={1: norms}), one)
    lines = [fact for fact in found.facts if fact.startswith("not compared: the norms")]
    assert found.code == SAME and len(lines) == bool(end)
    assert all(f"by which the {end}" in line for line in lines)


def test_unequal_norms_are_the_cause_of_gradients_that_differ() -> None:
    one = replace(ONE, run=clips(0, SUM, limit=1.0))
    key = (1, "gradient", "b")
    for norms, is_cause in (((SUM, 4.0), True), ((3.0, 3.0), False)):
        mesh = clips(4, *norms, limit=1.0)
        found = against(changed(mesh, key, sketch=2 * values(1, "b")), one)
        assert found.code == DIFFERENT and "gradient of b" in found.headline
        assert ("clips by the norm" in str(found.leads[:1])) == is_cause


def later(run: Run, name: str = "c") -> Run:
    """Return the run without step 0 of one parameter."""
    tensors = {k: w for k, w in run.tensors.items() if k[0] or k[2] != name}
    return replace(run, tensors=tensors)


def test_a_parameter_that_joins_later_is_compared() -> None:
    one = replace(ONE, run=later(ONE.run), noisy=[later(each) for each in ONE.noisy])
    found = against(later(run(4)), one)
    assert found.code == SAME and len(found.rows) == 10
    moved = changed(later(run(4)), (1, "weight", "c"), digest=5)
    found = against(moved, one)
    assert found.code == SAME
    told = "start: 2 of 3 tensors have equal bits, and 1 that join later are matched"
    assert found.lines[1].startswith(told)
    key = (1, "gradient", "c")
    wrong = against(changed(moved, key, sketch=2 * values(1, "c")), one)
    assert wrong.code == DIFFERENT and "the gradient of c is 2.000 x" in wrong.lines[0]
    divided = against(replace(later(run(4)), left={"a": (1,), "c": (1,)}), one)
    assert divided.code == UNDECIDED  # the next step shows what rank 1 has of c
    assert "rank 1 of mesh holds c and does not step it" in divided.lines[0]
    assert divided.lines[0].endswith("it gets the new values: record one step more")
    early = against(run(4), one)
    assert early.code == DIFFERENT
    assert early.lines[0] == "step 0: one does not step c, and mesh does"


def test_equal_starts_under_other_names_are_paired_by_their_first_gradients() -> None:
    """Norm weights all start as ones, and each side has them in another order."""

    def norms(given: Run, names: Sequence[str]) -> Run:
        for step, name in itertools.product(range(2), names):
            given = changed(given, (step, "weight", name), digest=5 + step)
        return given

    one = Side(
        name="one",
        run=norms(run(), NAMES),
        noisy=(norms(run(1), NAMES), nudged(2), nudged(3)),
    )
    names = ("z", "x", "y")
    other = norms(run(4, names), names)
    tensors = {key: other.tensors[key] for key in sorted(other.tensors)}
    found = against(replace(other, tensors=tensors), one)
    assert found.code == SAME, found.lines
    assert "3 under another name" in found.lines[1]
    fewer = {key: each for key, each in tensors.items() if key[2] != "z"}
    found = against(replace(other, tensors=fewer), one)  # one has no partner
    assert any("2 under another name" in line for line in found.lines), found.lines


def test_rows_may_have_other_padding() -> None:
    """Padding may differ between sides: only one of them pads row 1."""
    given = (
        ({1: (10, 11), 2: (20, 21)}, {3: (1, 31), 4: (20, 41)}, SAME),
        ({1: (10, 11), 2: (20, 21)}, {3: (1, 31), 4: (40, 41)}, NOT_COMPARABLE),
        ({1: (10, 11)}, {1: (10, 11), 4: (40, 41)}, NOT_COMPARABLE),
    )
    for mine, its, code in given:
        one, other = (
            replace(side, rows_of_ranks=on_rank_0({0: rows}), unpadded={0: rows})
            for side, rows in ((run(), mine), (run(4), its))
        )
        found = against(other, replace(ONE, run=one))
        assert found.code == code, found.lines
        if code == SAME:
            assert "rows: equal at 1 of 2 steps; at 1 but for padding" in found.lines


def test_a_rate_may_be_a_number_or_a_tensor_of_fp32() -> None:
    mine, its = ({(0, "b"): {"lr": lr}} for lr in (1e-3, float(np.float32(1e-3))))
    one = replace(ONE, run=replace(ONE.run, settings=mine))
    assert against(replace(run(4), settings=its), one).code == SAME
    for lr in (1.000001e-3, None, [1e-3]):
        other = {(0, "b"): {"lr": lr}}
        assert against(replace(run(4), settings=other), one).code == NOT_COMPARABLE


@pytest.mark.parametrize("moves", [False, True])
def test_zeros_that_move_nothing_are_as_good_as_no_gradient(moves: bool) -> None:
    key = (0, "gradient", "b")
    other = changed(run(4), key, sketch=np.zeros(SIZE))
    weight = replace(other.tensors[0, "weight", "b"], digest=5 if moves else 2000)
    other = replace(other, tensors={**other.tensors, (1, "weight", "b"): weight})
    tensors = {k: w for k, w in ONE.run.tensors.items() if k != key}
    lacks = replace(ONE.run, tensors=tensors, without_gradient=frozenset({(0, "b")}))
    found = against(other, replace(ONE, run=lacks))
    told = "step 0: one has no gradient of b. That of mesh is zero, and its optimizer m"
    assert found.lines[0].startswith(told if moves else "same: "), found.lines


def test_ranks_with_other_settings_are_named() -> None:
    ranks: dict[int, dict[str, Any]] = {
        0: {"lr": 0.1, "fused": None},
        1: {"lr": 0.2, "fused": True},
    }
    found = against(replace(run(4), other_settings={(1, "b"): ranks}))
    assert found.code == DIFFERENT
    assert found.lines[0] == (
        "step 1: ranks of mesh have different settings for b: lr is 0.1 on rank 0 and "
        "0.2 on rank 1"
    )
    assert not [line for line in found.lines if line.startswith("settings: equal")]
    ranks[1]["lr"] = 0.1
    assert against(replace(run(4), other_settings={(1, "b"): ranks})).code == SAME


def test_a_rank_that_does_not_step_a_parameter_is_named() -> None:
    left = replace(run(4), left={"b": (1,)})
    assert against(left).code == SAME  # another rank may step it for all
    # stepped for the first time in the last recorded step
    assert against(replace(run(4), left={"joins": (1,)})).code == SAME
    wrong = changed(left, (1, "gradient", "b"), sketch=2 * values(1, "b"))
    fact = "rank 1 does not step b, and other ranks do. Step 1: the gradient of b is"
    assert against(wrong).lines[0].startswith(fact)
    # each rank has its share of the parameters
    divided = against(replace(wrong, left={"a": (1,), "b": (1,), "c": (0,)}))
    assert divided.code == DIFFERENT and "does not step" not in divided.lines[0]
    found = against(changed(left, (0, "weight", "b"), held=SIZE // 2))
    assert found.code == DIFFERENT
    told = "rank 1 of mesh does not step its elements of b, and other ranks step theirs"
    assert found.lines[0] == told


def test_a_step_that_both_skip_is_not_compared() -> None:
    skips = frozenset((0, name) for name in NAMES)
    one = replace(ONE, run=replace(ONE.run, skipped=skips))
    tensors = {
        key: replace(each, sketch=each.sketch * math.nan, bad=SIZE)
        if key[0] == 0 and each.sketch is not None
        else each
        for key, each in run(4).tensors.items()
    }
    found = against(replace(run(4), tensors=tensors, skipped=skips), one)
    assert found.code == SAME and len(found.rows) == 6
    assert "3 gradients, because a scaler skips the step on both" in found.lines[-1]
    found = against(run(4), one)
    assert found.code == DIFFERENT
    assert found.lines[0] == (
        "step 0: one has found an inf and skips a, and mesh steps it"
    )


def test_what_is_not_finite_on_both_sides_is_not_compared() -> None:
    key = (1, "gradient", "b")
    bad = {"sketch": values(1, "b") * math.inf, "bad": 3}
    one = replace(ONE, run=changed(ONE.run, key, **bad))
    noisy = [changed(each, key, **bad) for each in ONE.noisy]
    found = against(changed(run(4), key, **bad), replace(one, noisy=noisy))
    assert found.code == SAME and len(found.rows) == 11
    assert "not compared: 1 gradient, because they are not finite" in found.lines[-1]
    for mine, its in ((one.run, run(4)), (ONE.run, changed(run(4), key, **bad))):
        found = against(its, replace(ONE, run=mine, noisy=noisy[:0] or ONE.noisy))
    assert found.code == DIFFERENT
    told = "step 1: the gradient of b has 3 non-finite elements, and 0 in one: it "
    assert found.lines[0].startswith(told)
    # a run for the noise overflows where the first one did not: nobody knows
    found = against(run(4), replace(ONE, noisy=noisy))
    assert found.code == SAME and "noise is as large as" in found.lines[-1]


ODD = 'a/b\x1b[31m <i>\n"é'


def test_a_name_with_odd_characters_is_kept_and_escaped(tmp_path: Path) -> None:
    names = (ODD, "b", "c")
    noisy = (run(1, names), nudged(2, names), nudged(3, names))
    one = replace(ONE, run=run(names=names), noisy=noisy)
    mesh = Side(name="<mesh>", run=run(4, names))
    path = write_page(tmp_path / "page", one, mesh, compare(one, mesh))
    text = path.read_text()
    assert text.count("a/b [31m &lt;i&gt; &#34;é") >= 2 and "&lt;mesh&gt;" in text
    assert "\x1b" not in text
    box = Box((2,), (0,), (2,))
    part = Stored.of(box, keep_values(torch.ones(2), box))
    written = Recording(tensors={f"0/0/gradient/0/{ODD}": part})
    write_rank(tmp_path / "run", 0, written)
    assert read_merged(tmp_path / "run").names("gradient", 0) == [ODD]


def test_a_page_begins_with_where_a_difference_begins(tmp_path: Path) -> None:
    mesh = Side(name="mesh", run=run(4))
    found = compare(ONE, mesh)
    block = replace(found.rows[0], kind=OUTPUT, name="blocks.1")
    where = "where: step 0: in forward."
    found = replace(found, leads=[where], blocks=[block])
    text = write_page(tmp_path, ONE, mesh, found).read_text()
    marks = (found.headline, where, "<ul", "Outputs of blocks", "<h2>Gradients")
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)


@pytest.mark.parametrize(("ratio", "shown"), [(2e20, "2e+20"), (4321, "4321")])
def test_a_large_share_of_a_bound_is_short_on_the_page(
    tmp_path: Path, ratio: float, shown: str
) -> None:
    mesh = Side(name="mesh", run=run(4))
    found = compare(ONE, mesh)
    found.rows[0] = replace(found.rows[0], distance=ratio, bound=1.0)
    assert f">{shown}<" in write_page(tmp_path, ONE, mesh, found).read_text()


@pytest.mark.parametrize(
    ("count", "kind", "code"),
    [
        (3, "update", UNDECIDED),
        (2, "update", DIFFERENT),  # of a sharpness-aware optimizer
        (3, "gradient", DIFFERENT),  # the first gradients of a step need no search
    ],
)
def test_a_line_search_amplifies_rounding(count: int, kind: str, code: int) -> None:
    other = changed(run(4), (1, kind, "b"), sketch=2 * values(1, "b"))
    found = against(replace(other, evaluations={1: count}))
    assert found.code == code
    assert ("evaluated its closure 3 times" in found.headline) == (code == UNDECIDED)
    assert "the " + kind in found.headline


def test_an_update_may_round_each_weight_to_either_side() -> None:
    """An update may be wrong by one rounding unit of the weights, and not by more."""
    update = values(1, "b")
    off = update.copy()
    off[3] += 1e-4
    key = (1, "update", "b")
    assert against(changed(run(4), key, sketch=off)).code == DIFFERENT
    # weights near 1 in fp32 have a unit of 1.2e-7; here one of 1e-4
    other = changed(run(4), key, sketch=off, square=SIZE * 1e-8)
    assert against(other).code == SAME
    other = changed(run(4), key, sketch=1.5 * update, square=SIZE * 1e-8)
    assert against(other).code == DIFFERENT


def with_norms(plain: Run, norms: Sequence[float]) -> Run:
    """Return a run whose whole gradient has these norms."""
    sizes = {
        (step, "gradient", name): (norm if name == "a" else 0.0) ** 2
        for step, norm in enumerate(norms)
        for name in {key[2] for key in plain.tensors}
    }
    return replace(
        plain,
        tensors={
            key: replace(each, square=sizes.get(key, each.square))
            for key, each in plain.tensors.items()
        },
    )


def test_a_side_that_alone_clips_to_one_norm_is_named() -> None:
    steps = len(run(4).steps)
    sketch = run(4).tensors[1, "gradient", "b"].sketch
    assert sketch is not None
    other = changed(run(4), (1, "gradient", "b"), sketch=sketch + 1, digest=5)
    sizes = [0.5 + 0.1 * step for step in range(steps)]
    one = replace(ONE, run=with_norms(ONE.run, [0.5] * steps))
    told = [line for line in against(with_norms(other, sizes), one).lines]
    (line,) = (line for line in told if line.startswith("clipped:"))
    assert "is 0.5 at each step of one, and 0.5, 0.6" in line
    assert "do both clip by the norm of all shards?" in line
    assert told[1] == line
    calls = replace(one.run, norms={step: {0: [(0.7, 0.5, 0.0)]} for step in (0, 1)})
    told = against(with_norms(other, sizes), replace(one, run=calls)).lines
    assert told[1].endswith(": one calls torch's clipping, and mesh does not")


def test_a_weight_that_a_rank_does_not_step_is_named_before_the_worst_one() -> None:
    sketch = run(4).tensors[1, "gradient", "b"].sketch
    assert sketch is not None
    other = changed(run(4), (1, "gradient", "b"), sketch=sketch + 1, digest=5)
    told = against(replace(other, left={"c": (1,)})).lines
    fact = (
        "rank 1 does not step c, and other ranks do. Step 1: the gradient of b differs"
    )
    assert told[0].startswith(fact)


def test_shards_of_all_weights_are_named_where_no_step_was_recorded() -> None:
    told = against(replace(run(4), tensors={}, unnamed=1))
    assert told.code == NOT_COMPARABLE
    assert "step 1 tensor that no module has, with other values" in told.lines[0]


@pytest.mark.parametrize(
    ("counts", "is_named"),
    [
        ({0: 4, 1: 8}, True),
        ({0: 4, 1: 4, 2: 8, 3: 3}, True),
        ({0: 4, 1: 4}, False),
        ({0: 4, 1: 5}, False),
        ({0: 8, 1: 8, 2: 4}, False),
    ],
)
def test_a_rank_with_the_rows_of_two_steps_is_named(
    counts: dict[int, int], is_named: bool
) -> None:
    one = replace(ONE, run=replace(ONE.run, rows_of_ranks=on_rank_0({1: {1, 2}})))
    mesh = replace(run(4), rows_of_ranks=on_rank_0({1: {1, 2, 3}}), counts={1: counts})
    (line, *_) = against(mesh, one).lines
    assert ("does it leave out an earlier step?" in line) is is_named
    assert ("without shuffling" in line) is not is_named
