"""Variants and faults of the benchmark of recordings: a row for each, and no leak."""

import gc

from gradparity.benchmarks.recorded import RIGHT, RIGHT_ON_GPU, SMALL, Job, Llama, rows
from gradparity.conformance.record.compare import BROKEN, SAME

TINY = Job(width=32, heads=4, hidden=64, words=64, length=8, native=True)


def test_a_kind_that_cannot_run_is_a_row_and_no_model_stays() -> None:
    kinds = ("efficient attention", "fused", "half a gradient")
    broken, same, hurt = rows(TINY, half=True, seed=0, noise=1, kinds=kinds)
    assert (broken["kind"], broken["code"]) == (kinds[0], BROKEN)
    assert "scaled_dot_product_attention" in broken["said"]
    assert same["code"] == SAME
    assert hurt["code"] == 1 and not hurt["is_right"]
    gc.collect()
    models = [each for each in gc.get_objects() if isinstance(each, Llama)]
    assert len(models) == 1, "only the start of the job is kept"


def test_a_reference_that_cannot_run_is_the_only_row() -> None:
    (row,) = rows(Job(width=30, heads=4), half=False, seed=0, noise=0, kinds=RIGHT)
    assert row["code"] == BROKEN


def test_a_gpu_adds_its_kernels_and_leaves_out_four_ranks() -> None:
    large = Job(device="cuda")
    assert {*RIGHT_ON_GPU} <= {*large.kinds}
    assert [*large.meshes] == ["fsdp 2", "tp+sp 2"]
    assert not {*RIGHT_ON_GPU} & {*SMALL.kinds}
