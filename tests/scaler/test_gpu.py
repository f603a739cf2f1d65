"""Tests on an accelerator: no synchronisation, and capture in a CUDA graph.

Run with ``pytest -m gpu`` on a machine with a GPU; elsewhere the tests are skipped.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradparity.scaler import GradScaler
from gradparity.tests.on_gpu import OnGpu
from gradparity.tests.stepping import INF, WAYS


def on_device(fused: bool, clip: bool) -> tuple[Any, Any, Any, Any]:
    p = torch.zeros(4, device="cuda", requires_grad=True)
    slope = torch.ones(4, device="cuda")
    optimizer: Any = torch.optim.Adam([p], lr=0.5, fused=fused, capturable=fused)
    scaler = GradScaler("cuda", init_scale=4.0, growth_interval=3)

    def iteration() -> None:
        optimizer.zero_grad(set_to_none=False)
        scaler.scale((p * slope).sum()).backward()
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return p, slope, scaler, iteration


def captured(iteration: Callable[[], None], before: int) -> torch.cuda.CUDAGraph:
    """Capture one iteration, after ``before`` iterations on a separate stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(before):
            iteration()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        iteration()
    return graph


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("clip", [False, True])
def test_fused_step_never_synchronises(clip: bool) -> None:
    p, slope, scaler, iteration = on_device(True, clip)
    for _ in range(3):
        iteration()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for value in (1.0, INF, 1.0):
            slope.fill_(value)
            iteration()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(p.isfinite().all()) and scaler.get_scale() == 4.0


@pytest.mark.gpu
@pytest.mark.parametrize("clip", [False, True])
def test_captured_in_a_cuda_graph(clip: bool) -> None:
    values = (1.0, INF, 1.0, 1.0, 1.0, INF, 1.0)
    p, slope, scaler, iteration = on_device(True, clip)
    graph = captured(iteration, before=3)
    for value in values:
        slope.fill_(value)
        graph.replay()

    q, other_slope, eager, other = on_device(True, clip)
    for value in (1.0,) * 3 + values:
        other_slope.fill_(value)
        other()
    assert torch.equal(p, q) and scaler.get_scale() == eager.get_scale()


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
def test_skips_and_grows_on_the_device(fused: bool) -> None:
    p, slope, scaler, iteration = on_device(fused, False)
    for value, scale in ((1.0, 4.0), (INF, 2.0), (1.0, 2.0), (1.0, 2.0), (1.0, 4.0)):
        slope.fill_(value)
        before = p.detach().clone()
        iteration()
        assert torch.equal(p, before) is (value == INF)
        assert scaler.get_scale() == scale


# regression: S13
@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_parameters_on_the_cpu_are_divided_by_a_scale_on_the_gpu(
    way: Any, fused: bool
) -> None:
    """If the host did not wait for the copy, it would divide by an old scale."""
    p = torch.zeros(4, requires_grad=True)
    optimizer: Any = torch.optim.SGD([p], lr=1.0, fused=fused)
    scaler = GradScaler("cuda", init_scale=4.0, growth_interval=10_000)
    scaler.scale(torch.ones((), device="cuda"))
    behind = torch.randn(2048, 2048, device="cuda")
    for number in range(100):
        scale = 2.0 ** (number % 7)
        scaler.update(scale)
        for _ in range(5):  # work that the scale has to wait for
            behind = behind @ behind / 64
        p.grad = torch.full((4,), scale)
        before = p.detach().clone()
        way(scaler, optimizer)
        assert torch.equal(p, before - 1.0), number
        scaler.update()


# regression: S14
@pytest.mark.gpu
@pytest.mark.parametrize("clip", [False, True])
def test_a_graph_on_two_ranks_steps_as_eager_ranks_do(clip: bool) -> None:
    """An overflow on one rank skips on both, also when a graph is replayed."""

    def run() -> tuple[bool, float, float, Any]:
        rank = dist.get_rank()
        values = (1.0, INF, 1.0, 1.0, 1.0, INF, 1.0)
        p, slope, scaler, iteration = on_device(True, clip)
        graph = captured(iteration, before=12)
        for value in values:
            slope.fill_(value if rank else 1.0)
            graph.replay()
        slope.fill_(1.0)
        iteration()  # outside of the graph: the host reads

        q, other_slope, eager, other = on_device(True, clip)
        for value in (1.0,) * 12 + values + (1.0,):
            other_slope.fill_(value if rank else 1.0)
            other()
        return torch.equal(p, q), scaler.get_scale(), eager.get_scale(), p.tolist()

    with OnGpu(2) as two:
        first, second = two.run(run)
    assert first == second
    assert first[0] and first[1] == first[2]


# - The branches that an accelerator takes, as far as a CPU can follow them


def test_b05c_min_scale_keeps_kernels_from_overflowing() -> None:
    # Where the host cannot see the scale, a fused kernel divides unchecked: from 1 on
    # that cannot overflow, and the scale never leaves that range.
    from gradparity.scaler import InvalidSettingError, Policy

    policy = Policy(min_scale=1.0)
    p = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([p], lr=1.0, fused=True)
    scaler = GradScaler("cpu", init_scale=4.0, policy=policy)
    scaler.scale(torch.ones(()))
    for _ in range(6):
        p.grad = torch.full((2,), INF)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1.0
    p.grad = torch.full((2,), 3e38)
    scaler.step(optimizer)
    assert bool(p.isfinite().all())
    with pytest.raises(InvalidSettingError):
        GradScaler("cpu", init_scale=0.5, policy=policy)
