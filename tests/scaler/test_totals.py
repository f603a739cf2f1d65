"""Each shard added, each replica counted once: on a host as on a device."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from gradparity.scaler.global_norm import (
    MESHES,
    AmbiguousError,
    _norm_on_device,
    global_norm,
)

Norm = Callable[[torch.Tensor, float], float]
KINDS = {0.0: 0.0, 1.0: 7.0, 2.0: 7.0, 3.0: 8.0, 4.0: 8.0}
"""Of each identity; 0 is an unused entry."""
ROUNDING = 20 * 2.0**-53
"""A device rounds each of 20 powers to 2**-52 of the largest; then the root."""
NORMS = st.sampled_from([0.0, 0.25, 1.0, 2.0, 1024.0, math.inf, math.nan])


def entries(ranks: int) -> st.SearchStrategy[list[list[tuple[float, float, float]]]]:
    used = st.tuples(st.sampled_from([1.0, 2.0, 3.0, 4.0]), NORMS).map(
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


@settings(deadline=None)  # the first call of a kernel is slow
@given(st.integers(1, 5).flatmap(entries), st.sampled_from([1.0, 2.0, math.inf]))
def test_host_and_device_count_alike(
    rows: list[list[tuple[float, float, float]]], order: float
) -> None:
    table = torch.tensor(rows, dtype=torch.float64)
    try:
        host = on_host(table, order)
    except AmbiguousError:  # the bits of the gradients decide, which no table has
        reject()
    torch.testing.assert_close(
        host,
        on_device(table, order),
        rtol=ROUNDING,
        atol=0,
        equal_nan=True,
    )


@pytest.mark.parametrize(
    ("rows", "norm"),
    [
        # two shards of one mesh
        ([[(1.0, 7.0, 3.0)], [(1.0, 7.0, 4.0)]], 5.0),
        # two replicas: meshes of one kind with equal sums
        ([[(1.0, 7.0, 3.0)], [(2.0, 7.0, 3.0)]], 3.0),
        # equal sums, but other kinds
        ([[(1.0, 7.0, 3.0)], [(3.0, 8.0, 3.0)]], 18**0.5),
    ],
)
def test_what_is_added_and_what_is_counted_once(
    rows: list[list[tuple[float, float, float]]], norm: float
) -> None:
    assert global_norm(torch.tensor(rows, dtype=torch.float64), 2.0) == pytest.approx(
        norm, rel=ROUNDING
    )


def on_host(table: torch.Tensor, order: float) -> float:
    """The norm as the host counts it."""
    norm = global_norm(table, order)
    assert isinstance(norm, float)  # arithmetic with tensors costs ten times as much
    return norm


def on_device(table: torch.Tensor, order: float) -> float:
    """The norm as an accelerator counts it."""
    return _norm_on_device(table.reshape(-1, 3), order).item()


BOTH = pytest.mark.parametrize("norm_of", [on_host, on_device])


@BOTH
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_replicas_count_once_wherever_their_ranks_lie(
    norm_of: Norm, order: float
) -> None:
    # Sums in another order differ in the last bit: then a replica is another shard.
    generator = torch.Generator().manual_seed(0)
    for trial in range(100):
        size = 2 + trial % 10
        shares = torch.rand(size, generator=generator, dtype=torch.float64)
        table = torch.zeros(2 * size, MESHES, 3, dtype=torch.float64)
        placed = torch.randperm(2 * size, generator=generator).split(size)
        for mesh, ranks in enumerate(placed, 1):
            table[ranks.sort().values, 0, 0] = float(mesh)
            table[ranks.sort().values, 0, 1] = 7.0
            # Replicas may list their ranks in different orders.
            table[ranks, 0, 2] = shares
        whole = shares.norm(order)
        assert norm_of(table, order) == pytest.approx(whole.item(), rel=1e-12, abs=0)


@BOTH
def test_a_table_of_many_ranks_is_no_square(norm_of: Norm) -> None:
    """1e5 rows against 1e5 rows would need 10 GB."""
    mesh = torch.arange(1.0, 25001.0, dtype=torch.float64)
    used = torch.stack([mesh, torch.full_like(mesh, 7.0), mesh], dim=1)
    table = torch.zeros(25000, MESHES, 3, dtype=torch.float64)
    table[:, 0] = used
    assert norm_of(table, math.inf) == 25000.0
