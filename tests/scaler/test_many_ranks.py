"""A large world in one process: collectives of a rank ignore its gradients.

Larger worlds are in the benchmark; its record is what ``docs/scale.md`` shows.
"""

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradparity.benchmarks import scale
from gradparity.benchmarks.scale_tables import modelled, modelled_torch, tables
from gradparity.benchmarks.simulated_ranks import MESHES, compare, together
from gradparity.benchmarks.situations import (
    COMMON,
    OURS,
    Situation,
    alike,
    overflow,
    several_optimizers,
    without_gradients,
)
from gradparity.fixtures.faulty import PlainScaler
from gradparity.fixtures.faulty.collectives import (
    AsksForEachGradient,
    AsksTwiceWhenBad,
    SendsAnotherDtypeWhenBad,
)
from gradparity.scaler import GradScaler
from gradparity.scaler.sync import LENGTH
from gradparity.tests.docs_blocks import ROOT

OURS_MADE = partial(GradScaler, "cpu", init_scale=1024.0)
TORCHS = partial(torch.amp.GradScaler, "cpu", init_scale=1024.0)
# What follows the row of a clip depends on what all ranks sent, which a rank alone does
# not see: a clip, and a rank without an optimizer, are in `together` only.
SOME = (without_gradients, several_optimizers)
ROW = f"allgather_base over world of [{LENGTH}] float64"


@pytest.mark.parametrize(
    ("mesh", "situations"),
    [
        pytest.param((2, 2, 4, 4), SOME),
        *(
            pytest.param(mesh, situations, marks=pytest.mark.slow)
            for mesh, situations in zip(
                MESHES[256], [COMMON, SOME, SOME, COMMON], strict=True
            )
        ),
    ],
)
def test_many_ranks_issue_the_same(
    mesh: tuple[int, ...], situations: tuple[Situation, ...]
) -> None:
    compared = compare(OURS_MADE, mesh, situations)
    assert len(compared.calls) == len(situations)
    assert list(map(str, compared.different)) == []
    for name, calls in compared.calls.items():
        optimizers = 3 if name == "several_optimizers" else 1
        # One row a step in two iterations, and the first iteration is closed.
        assert list(map(str, calls)) == [ROW] * (2 * optimizers + 1), name


@pytest.mark.parametrize(
    "mesh",
    [pytest.param((64,), marks=pytest.mark.slow), (2, 2, 4, 4)],
    ids=str,
)
@pytest.mark.slow
def test_64_ranks_agree_with_each_other(mesh: tuple[int, ...]) -> None:
    found = together(OURS_MADE, mesh, COMMON + OURS)
    assert all(each == found[0] for each in found)
    assert {name: outcome.scale for name, outcome in found[0].items()} == {
        **dict.fromkeys((each.__name__ for each in COMMON + OURS), 1024.0),
        "overflow": 256.0,
    }


@pytest.mark.parametrize("make", [PlainScaler, partial(GradScaler, "cpu")])
def test_a_right_scaler_passes(make: Callable[[], Any]) -> None:
    assert compare(make, (4, 4), COMMON).different == []


@pytest.mark.parametrize(
    ("faulty", "situation", "apart"),
    [
        (AsksForEachGradient, without_gradients, 10),
        (AsksForEachGradient, several_optimizers, 4),
        (AsksTwiceWhenBad, overflow, 15),
        (SendsAnotherDtypeWhenBad, overflow, 15),
    ],
)
def test_ranks_that_issue_something_else_are_found(
    faulty: Callable[[], Any], situation: Any, apart: int
) -> None:
    found = compare(faulty, (4, 4), (situation,)).different
    assert len(found) == apart
    assert str(found[0]).startswith(f"{situation.__name__}: rank ")


def test_a_rank_that_raises_in_its_thread_is_reported() -> None:
    def make() -> Any:
        if dist.get_rank() == 3:
            raise LookupError("planted")
        return OURS_MADE()

    with pytest.raises(RuntimeError, match="of 4 raised"):
        together(make, (4,), (alike,))


@pytest.mark.filterwarnings("ignore")  # torch advises to flatten the axes
def test_torch_reduces_once_for_each_sharded_axis() -> None:
    record = json.loads(scale.RESULTS.read_text())
    assert scale.axes_of_torch() == record["torch_reduces_over"]
    for mesh, axes in record["torch_reduces_over"].items():
        many = mesh.count(",") if not mesh.endswith(",)") else 0
        # sharded over the first axis and the last
        assert axes == (["axis 0", f"axis {many}"] if many else ["world"])


# - The record and the page


def test_the_record_holds_what_the_page_claims() -> None:
    record = json.loads(scale.RESULTS.read_text())
    assert [each["ranks"] for each in record["real"]] == list(scale.SIZES)
    for each in record["real"]:
        size = LENGTH * each["ranks"]
        rows = ["alltoall_base", "world", f"[{size}] float64", 8 * size]
        assert each["calls"]["ours"] == each["calls"]["ours, clip"] == [rows]
        assert each["training"]["scaler_calls"] == 1
        assert each["training"]["sent"] == 8 * size
        assert each["scenario"]["status"] == "pass"
    assert len({each["training"]["calls"] for each in record["real"]}) == 1
    simulated = {(r["ranks"], r["how"], tuple(r["mesh"])) for r in record["simulated"]}
    one = "one after the other"
    assert simulated == {
        *((256, "threads", mesh) for mesh in MESHES[256]),
        *((world, one, mesh) for world in MESHES for mesh in MESHES[world]),
    }
    assert all(row["different"] == [] for row in record["simulated"])


def test_the_tables_of_the_page_are_those_of_the_record() -> None:
    record = json.loads(scale.RESULTS.read_text())
    page = (ROOT / "docs" / "scale.md").read_text()
    for name, lines in tables(record).items():
        assert "\n".join(lines) in page, (
            f"table {name}: gradparity bench scale --tables"
        )


def test_the_model_by_hand() -> None:
    net = {"alpha_s": 1.0, "beta_s_per_byte": 0.5}
    assert modelled("all-reduce, ring", 5, 100, net) == 8 + 0.5 * 160
    assert modelled("all-reduce, tree", 1000, 100, net) == 20 + 0.5 * 2000
    assert modelled("all-gather, ring", 5, 100, net) == 4 + 0.5 * 400
    assert modelled("all-gather, doubling", 1000, 100, net) == 10 + 0.5 * 99900
    assert modelled_torch("all-reduce, ring", 100, 2, net) == 2 * (18 + 0.5 * 7.2)
