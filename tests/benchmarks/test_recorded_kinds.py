"""Benchmark of recordings: each variant or fault has a row, and models are freed."""

import gc

import pytest

from gradparity.benchmarks.validation.recorded import (
    RIGHT,
    RIGHT_ON_GPU,
    SMALL,
    Job,
    Llama,
    rows,
)
from gradparity.conformance.record.compare import BROKEN, SAME

TINY = Job(width=32, heads=4, hidden=64, words=256, length=16, native=True)


def test_a_kind_that_cannot_run_is_a_row_and_no_model_stays() -> None:
    kinds = ("efficient attention", "fused", "half a gradient")
    broken, same, hurt = rows(TINY, half=True, seed=0, noise=2, kinds=kinds)
    assert (broken["kind"], broken["code"]) == (kinds[0], BROKEN)
    assert "scaled_dot_product_attention" in broken["said"]
    assert same["code"] == SAME
    assert hurt["code"] == 1 and not hurt["is_right"]
    gc.collect()
    models = [each for each in gc.get_objects() if isinstance(each, Llama)]
    assert len(models) == 1, "only the start of the job is kept"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.slow
def test_right_kernels_of_a_small_job_in_bf16_are_the_same(seed: int) -> None:
    """Nudged runs must change bf16 values, which one fp32 unit seldom does."""
    kinds = ("explicit attention", "2 micro-batches", "half a gradient")
    *right, hurt = rows(TINY, half=True, seed=seed, noise=2, kinds=kinds)
    assert all(row["code"] == SAME for row in right), right
    assert hurt["code"] == 1


def test_a_reference_that_cannot_run_is_the_only_row() -> None:
    (row,) = rows(Job(width=30, heads=4), half=False, seed=0, noise=0, kinds=RIGHT)
    assert row["code"] == BROKEN


def test_a_gpu_adds_its_kernels_and_leaves_out_four_ranks() -> None:
    large = Job(device="cuda")
    assert {*RIGHT_ON_GPU} <= {*large.kinds}
    assert [*large.meshes] == ["fsdp 2", "tp+sp 2"]
    assert not {*RIGHT_ON_GPU} & {*SMALL.kinds}
