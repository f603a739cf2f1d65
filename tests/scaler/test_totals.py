"""Global norms add each shard and count each replica once, on CPU and accelerator."""

import math
from collections import defaultdict
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradparity.scaler.global_norm import MESHES, Checks, global_norm, norm_on_host

Row = tuple[float, float, float]
KINDS = {0.0: 0.0, -1.0: 7.0, -2.0: 7.0, -3.0: 8.0, -4.0: 8.0}
"""Mesh -> its kind. Mesh 0 is an unused entry; replicas of negative meshes are not yet
identified."""
ROUNDING = 20 * 2.0**-53
"""Relative error: each of 20 powers is rounded to 2**-52 of the largest, and the root
halves it."""
CHECKS = get_args(Checks)[:2]
NORMS = st.sampled_from([0.0, 0.25, 1.0, 2.0, 1024.0, math.inf, math.nan])


def entries(ranks: int) -> st.SearchStrategy[list[list[Row]]]:
    used = st.tuples(st.sampled_from([-1.0, -2.0, -3.0, -4.0]), NORMS).map(
        lambda pair: (pair[0], KINDS[pair[0]], pair[1])
    )
    unused = st.just((0.0, 0.0, 0.0))
    rank = st.lists(
        st.one_of(used, unused),
        min_size=MESHES,
        max_size=MESHES,
        unique_by=lambda row: row[0] or object(),
    )
    return st.lists(rank, min_size=ranks, max_size=ranks)


def plainly(rows: list[list[Row]], order: float) -> float:
    """Return the norm, counting meshes of one kind with equal sums once."""
    used = [row for rank in rows for row in rank if row[0]]
    norms = [norm for _, _, norm in used]
    if not all(map(math.isfinite, norms)):
        return math.nan if any(map(math.isnan, norms)) else math.inf
    if math.isinf(order):
        return max(norms, default=0.0)
    sums: dict[float, float] = defaultdict(float)
    for mesh, _, norm in used:
        sums[mesh] += norm**order  # exact: powers of two
    distinct = {(KINDS[mesh], total) for mesh, total in sums.items()}
    return float(sum(total for _, total in distinct) ** (1.0 / order))


@settings(deadline=None)  # the first call of a kernel is slow
@given(st.integers(1, 5).flatmap(entries), st.sampled_from([1.0, 2.0, math.inf]))
def test_it_is_what_plain_arithmetic_counts(
    rows: list[list[Row]], order: float
) -> None:
    table = torch.tensor(rows, dtype=torch.float64)
    flat = table.reshape(-1, 3).tolist()
    known = norm_on_host(flat, order, checks="")
    expected = torch.tensor(plainly(rows, order), dtype=torch.float64)
    for norm in (global_norm(table, order), torch.tensor(known, dtype=torch.float64)):
        torch.testing.assert_close(
            norm, expected, rtol=ROUNDING, atol=0, equal_nan=True
        )
    for checks in CHECKS:
        norm_of_it = norm_on_host(flat, order, checks)
        assert norm_of_it in (known, None) or math.isnan(plainly(rows, order))


@pytest.mark.parametrize(
    ("rows", "norm", "unclear"),
    [
        # two shards of one mesh
        ([[(-1.0, 7.0, 3.0)], [(-1.0, 7.0, 4.0)]], 5.0, ()),
        # meshes of one kind with equal sums: two replicas, if their bits are equal
        ([[(-1.0, 7.0, 3.0)], [(-2.0, 7.0, 3.0)]], 3.0, ("bits",)),
        # equal sums, but other kinds of one family
        ([[(-1.0, 7.0, 3.0)], [(-3.0, 8.0, 3.0)]], 18**0.5, CHECKS),
        # other sums: stages, or replicas beside parameters of their own
        ([[(-1.0, 7.0, 3.0)], [(-2.0, 7.0, 4.0)]], 5.0, CHECKS),
        # told apart: one kind is one thing, also where rounding differs
        ([[(1.0, 7.0, 3.0)], [(2.0, 7.0, 3.0000001)]], 3.0, ()),
        ([[(1.0, 7.0, 3.0)], [(3.0, 8.0, 4.0)]], 5.0, ()),
        # told apart, and no longer true
        ([[(1.0, 7.0, 3.0)], [(2.0, 7.0, 4.0)]], None, CHECKS),
    ],
)
def test_what_is_added_and_what_is_counted_once(
    rows: list[list[Row]], norm: float | None, unclear: tuple[Checks, ...]
) -> None:
    table = torch.tensor(rows, dtype=torch.float64)
    flat = table.reshape(-1, 3).tolist()
    none = [each for each in CHECKS if norm_on_host(flat, 2.0, each) is None]
    assert tuple(none) == unclear
    if norm is not None:
        told = norm_on_host(flat, 2.0, checks="")
        for each in (told, global_norm(table, 2.0).item()):
            assert each == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("order", [2.0, math.inf])
def test_replicas_count_once_wherever_their_ranks_lie(order: float) -> None:
    # Sums in another order differ in the last bit: then a replica is another shard.
    generator = torch.Generator().manual_seed(0)
    for trial in range(100):
        size = 2 + trial % 10
        shares = torch.rand(size, generator=generator, dtype=torch.float64)
        table = torch.zeros(2 * size, MESHES, 3, dtype=torch.float64)
        placed = torch.randperm(2 * size, generator=generator).split(size)
        for mesh, ranks in enumerate(placed, 1):
            table[ranks.sort().values, 0, 0] = -float(mesh)
            table[ranks.sort().values, 0, 1] = 7.0
            # Replicas may list their ranks in different orders.
            table[ranks, 0, 2] = shares
        whole = shares.norm(order).item()
        on_host = norm_on_host(table.reshape(-1, 3).tolist(), order, checks="")
        for norm in (global_norm(table, order).item(), on_host):
            assert norm == pytest.approx(whole, rel=1e-12, abs=0)


def test_a_table_of_many_ranks_is_no_square() -> None:
    """Memory grows linearly: comparing all pairs of 1e5 rows would need 10 GB."""
    mesh = torch.arange(1.0, 25001.0, dtype=torch.float64)
    used = torch.stack([-mesh, torch.full_like(mesh, 7.0), mesh], dim=1)
    table = torch.zeros(25000, MESHES, 3, dtype=torch.float64)
    table[:, 0] = used
    assert global_norm(table, math.inf).item() == 25000.0
    assert global_norm(table, 1.0).item() == pytest.approx(mesh.sum().item(), rel=1e-6)
