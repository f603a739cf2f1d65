"""Region of a difference: rows, columns and ranks, against elements that are known."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradparity.conformance.record.compare import DIFFERENT, Side
from gradparity.conformance.record.kept import Box, keep_values
from gradparity.conformance.record.page import write_page
from gradparity.conformance.record.regions import Region, region_of
from gradparity.conformance.status import rank_list
from gradparity.tests.record.runs import ONE, SIZE, against, changed, run

BOUND = 1e-3
"""Bound far below each difference in these tests, but above rounding."""


def cut(shape: tuple[int, ...], dim: int, ranks: int) -> list[tuple[int, Box]]:
    """Return the parts of a tensor that is sharded over a dim, as ``chunk`` cuts it."""
    parts, start = [], 0
    for rank in range(ranks):
        each = math.ceil(shape[dim] / ranks)
        size = max(0, min(each, shape[dim] - start))
        local = (*shape[:dim], size, *shape[dim + 1 :])
        offsets = [0] * len(shape)
        offsets[dim] = start
        parts.append((rank, Box(shape, tuple(offsets), local)))
        start += size
    return parts


def flat(shape: tuple[int, ...], ranks: int) -> list[tuple[int, Box]]:
    """Return parts that are ranges of the flattened tensor, one for each rank."""
    each = math.prod(shape) // ranks
    return [(rank, Box(shape, (rank * each,), (each,))) for rank in range(ranks)]


def found(difference: torch.Tensor, parts: list[tuple[int, Box]]) -> Region:
    """Return the region of a difference, from its sketch."""
    shape = tuple(difference.shape)
    whole = Box(shape, (0,) * len(shape), shape)
    sketch = keep_values(difference, whole).sketch
    assert sketch is not None
    return region_of(shape, sketch.double().numpy(), BOUND, parts)


WHOLE, LONG, WIDE = (12, 20), (64, 96), (16, 8, 32)


@pytest.mark.parametrize(
    ("shape", "parts", "place", "text", "ranks"),
    [
        (LONG, cut(LONG, 0, 4), (20, 5), "rows 16 to 31 of 64 and columns 0 to 23", 1),
        (LONG, cut(LONG, 1, 2), (20, 90), "columns 72 to 95 of 96", 1),
        # 3 shards of 22, 22 and 20 rows: a tile lies in two of them
        (LONG, cut(LONG, 0, 3), (20, 5), "rows 16 to 31 of 64", 2),
        (LONG, flat(LONG, 4), (63, 95), "rows 48 to 63 of 64", 1),
        (WHOLE, cut(WHOLE, 0, 4), (11, 0), "rows 9 to 11 of 12", 1),
        (WIDE, cut(WIDE, 1, 2), (0, 7, 31), "columns 192 to 255 of 256", 1),
        ((4096,), cut((4096,), 0, 8), (4095,), "elements 3840 to 4095 of 4096", 1),
        ((7,), cut((7,), 0, 2), (6,), "element 6 of 7", 1),
        ((2,), cut((2,), 0, 2), (1,), "element 1 of 2", 1),
    ],
)
def test_one_wrong_element_is_found_and_who_holds_it(
    shape: tuple[int, ...],
    parts: list[tuple[int, Box]],
    place: tuple[int, ...],
    text: str,
    ranks: int,
) -> None:
    difference = torch.zeros(shape)
    difference[place] = 1.0
    region = found(difference, parts)
    assert text in region.text
    assert len(region.holders) == ranks
    assert all(
        (region.shares[rank] == 1) == (rank in region.holders) for rank, _ in parts
    )
    assert str(region) == f"{region.text}, held by {rank_list(region.holders)}"


def test_tiles_at_both_ends_are_a_part_of_it() -> None:
    difference = torch.zeros(LONG)
    difference[0, 0] = difference[63, 95] = 1.0
    ends = [Box(LONG, (row, 0), (16, 96)) for row in (0, 48)]
    parts = [(0, ends[0]), (0, ends[1]), (1, Box(LONG, (16, 0), (32, 96)))]
    assert str(found(difference, parts)) == "a part of it, held by rank 0"


def test_a_difference_of_all_elements_has_no_region() -> None:
    region = found(torch.ones(LONG), cut(LONG, 0, 4))
    assert str(region) == ""
    # a sketch is an estimate
    assert [*region.shares.values()] == pytest.approx([0.5] * 4, rel=0.1)


def test_replicas_hold_all_of_it() -> None:
    difference = torch.zeros(LONG)
    difference[0] = 1.0
    box = Box(LONG, (0, 0), LONG)
    assert str(found(difference, [(0, box), (1, box)])) == "rows 0 to 15 of 64"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_elements_that_are_not_finite_have_a_region(bad: float) -> None:
    difference = torch.full(LONG, 0.1)
    difference[40, 0] = bad
    region = found(difference, cut(LONG, 0, 4))
    assert region.holders == (2,) and region.shares == {0: 0.0, 1: 0.0, 2: 1.0, 3: 0.0}


def halves(values: Any) -> Any:
    """Return a run on two ranks in which the gradient of b has these values."""
    box = Box((SIZE,), (0,), (SIZE // 2,))
    other = Box((SIZE,), (SIZE // 2,), (SIZE // 2,))
    return changed(
        run(4), (0, "gradient", "b"), sketch=values, parts=((0, box), (1, other))
    )


def test_the_verdict_names_rows_and_rank_and_the_page_shows_ranks(
    tmp_path: Path,
) -> None:
    sketch = ONE.run.tensors[0, "gradient", "b"].sketch
    assert sketch is not None
    second = halves(np.concatenate([sketch[: SIZE // 2], 2 * sketch[SIZE // 2 :]]))
    comparison = against(second)
    assert comparison.code == DIFFERENT
    assert comparison.lines[1] == "where in b: elements 8 to 15 of 16, held by rank 1"
    page = write_page(tmp_path, ONE, Side(name="mesh", run=second), comparison)
    by_rank = page.read_text().partition("By rank of mesh")[2]
    assert "gradient of b" in by_rank and by_rank.count('class="h0"') == 1
    everywhere = against(halves(2 * sketch))
    assert not [line for line in everywhere.lines if line.startswith("where")]
    page = write_page(tmp_path, ONE, Side(name="mesh", run=second), everywhere)
    assert "By rank" not in page.read_text()
