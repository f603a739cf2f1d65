"""A training step with the scaler's calls in it may be compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from gradparity.multiprocess import Cluster
from gradparity.scaler import GradScaler
from gradparity.tests.products import pairs
from gradparity.tests.stepping import BOTH, FUSED, INF, parameter, scaled, sgd

# torch's own, of graphs that break
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "step": lambda scaler, optimizer: None,
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
    "clip_grad_norm_": lambda s, optimizer: s.clip_grad_norm_(optimizer, 100.0),
}
EACH_CALL = pytest.mark.parametrize("call", CALLS)


def compiled(scaler: Any, optimizer: Any, parameter: Any, call: str) -> Any:
    def iteration(factor: float) -> None:
        optimizer.zero_grad()
        scaler.scale((parameter * factor).sum()).backward()
        CALLS[call](scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()

    torch._dynamo.reset()
    return torch.compile(iteration, backend="eager")


@pairs(BOTH, FUSED, EACH_CALL)
@pytest.mark.few(2)
def test_compiled_steps_in_one_process(make: Any, fused: bool, call: str) -> None:
    p = torch.zeros(2, requires_grad=True)
    scaler = scaled(make, growth_interval=1)
    iteration = compiled(scaler, torch.optim.SGD([p], lr=1.0, fused=fused), p, call)
    for i in range(1, 4):
        iteration(1.0)
        assert p.tolist() == [-float(i)] * 2 and scaler.get_scale() == 4.0 * 2**i


@EACH_CALL
@pytest.mark.few(1)
def test_compiled_steps_are_agreed_on(two: Cluster, call: str) -> None:
    def run() -> tuple[list[float], float]:
        mesh = init_device_mesh("cpu", (2,))
        local = torch.zeros(2)
        p = torch.nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)]))
        scaler = scaled(GradScaler)
        iteration = compiled(scaler, torch.optim.SGD([p], lr=1.0), p, call)
        iteration(1.0)
        # one loss is not finite: no rank steps
        iteration(INF if dist.get_rank() == 1 else 1.0)
        held: list[float] = local.tolist()
        return held, scaler.get_scale()

    assert two.with_options(timeout_s=120).run(run) == [([-1.0, -1.0], 2.0)] * 2


def test_what_decides_is_not_compiled() -> None:
    p = torch.zeros(2, requires_grad=True)
    scaler, seen = scaled(GradScaler), list[bool]()

    class Looks(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.append(torch.compiler.is_compiling())

    iteration = compiled(scaler, Looks([p], lr=1.0), p, "step")
    iteration(1.0)
    assert seen == [False]


def test_the_first_scale_may_be_made_in_a_full_graph() -> None:
    torch._dynamo.reset()
    scaler = GradScaler("cpu", init_scale=4.0)
    step = torch.compile(scaler.scale, backend="eager", fullgraph=True)
    assert step(torch.ones(())).item() == 4.0 and scaler.get_scale() == 4.0


def test_b17_compiled_step_is_right() -> None:
    p = parameter(0.0)
    scaler, optimizer = scaled(), sgd(p)

    def step() -> None:
        scaler.step(optimizer)
        scaler.update()

    compiled_step = torch.compile(step, backend="eager")
    for gradient, value in ((4.0, -1.0), (INF, -1.0), (2.0, -2.0)):
        p.grad = torch.full_like(p, gradient)
        compiled_step()
        assert p.tolist() == [value, value]
    assert scaler.get_scale() == 2.0
