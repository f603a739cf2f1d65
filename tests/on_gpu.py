"""Tests of ranks on CPUs that run on a GPU as well, if there is one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gradparity.multiprocess import Cluster
from gradparity.multiprocess.outcomes import RankOutcome
from gradparity.multiprocess.spec import CallOptions

ON_BOTH = (
    *("test_accelerators", "test_agreement", "test_calls_together"),
    *("test_groups_and_errors", "test_lacking", "test_meshes", "test_norm_groups"),
    *("test_transactions", "test_faulty"),
)
"""Test modules that use the fixture ``device`` and run on both types of device."""


class OnGpu(Cluster):
    """Ranks that share one GPU over NCCL; functions create their tensors on it."""

    def __init__(self, world_size: int) -> None:
        super().__init__(world_size, backend="nccl", share_devices=True)

    def submit(
        self, options: CallOptions, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> tuple[RankOutcome, ...]:
        """Call ``fn`` on every rank."""
        return super().submit(options, _on_gpu, fn, *args, **kwargs)


def _on_gpu(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.device("cuda"):
        return fn(*args, **kwargs)


def on_both(metafunc: pytest.Metafunc) -> None:
    """Run a test of the modules ``ON_BOTH`` on the CPU and on the GPU."""
    name = metafunc.module.__name__.rpartition(".")[2]
    if "device" in metafunc.fixturenames and name in ON_BOTH:
        on_gpu = pytest.param("cuda", marks=pytest.mark.gpu)
        metafunc.parametrize("device", ["cpu", on_gpu], indirect=True, scope="module")
