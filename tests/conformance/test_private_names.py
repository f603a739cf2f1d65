"""Each private name of torch that gradparity uses exists, with its arguments.

ruff ensures that only one module of a package uses them (SLF001, PLC2701).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from gradparity.conformance.rank import torch_internals as internals
from gradparity.conformance.record import torch_internals as of_recording
from gradparity.multiprocess import Cluster


def test_signatures_of_private_names_are_as_expected() -> None:
    timeout = inspect.signature(distributed_c10d._set_pg_timeout)
    assert list(timeout.parameters) == ["timeout", "group"]
    mode = inspect.signature(internals.TorchDispatchMode.__torch_dispatch__)
    assert list(mode.parameters) == ["self", "func", "types", "args", "kwargs"]
    assert not internals.TorchDispatchMode.ignore_compile_internals()
    assert internals.Observer.ignore_compile_internals()
    assert issubclass(internals.AsyncCollectiveTensor, Tensor)
    assert internals.AsyncCollectiveTensor is collectives.AsyncCollectiveTensor


def test_private_names_of_autograd_work() -> None:
    seen: list[Any] = []

    def hook(gradient: Tensor) -> None:
        node = internals.current_node()
        seen.append((internals.in_backward(), internals.input_shapes(node)))

    assert not internals.in_backward() and internals.current_node() is None
    x = torch.ones(2, 3, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    y.sum().backward()
    assert seen == [(True, [(2, 3)])]
    assert not internals.in_backward()
    made = internals.nodes_made()
    x.detach() * 2
    assert internals.nodes_made() == made
    x * 2
    assert internals.nodes_made() > made


def test_the_scale_of_a_scaler_is_read() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    scale = of_recording.scale_of(scaler)
    assert scale is not None and scale.item() == 8.0


def test_a_hook_that_is_registered_first_runs_first() -> None:
    x = torch.ones(2, requires_grad=True)
    seen: list[float] = []
    x.register_hook(lambda gradient: seen.append(gradient.sum().item()))
    handle = of_recording.register_first(x, lambda gradient: gradient * 3)
    x.sum().backward()
    handle.remove()
    x.sum().backward()
    assert seen == [6, 2]


def test_writes_into_a_tensor_are_counted() -> None:
    x = torch.ones(2, 2)
    first = of_recording.version_of(x[0])
    torch._foreach_add_([x], 1)
    assert of_recording.version_of(x[0]) != first
    with torch.inference_mode():
        assert of_recording.version_of(torch.ones(2)) is None


def test_private_names_of_operators_work() -> None:
    bernoulli, view = torch.ops.aten.bernoulli.p, torch.ops.aten.view.default
    declared = internals.arguments_of(bernoulli)
    assert [a.name for a in declared] == ["self", "p", "generator"]
    assert declared[2].has_default_value() and declared[2].default_value is None
    assert internals.makes_view(view) and not internals.makes_view(bernoulli)
    assert not internals.makes_view(torch.ops.aten.add_.Tensor)


def test_the_loss_function_of_a_schedule_is_replaced(two: Cluster) -> None:
    def losses() -> list[float]:
        mesh = init_device_mesh("cpu", (2,))
        first, cpu = dist.get_rank() == 0, torch.device("cpu")
        part = torch.nn.Linear(2, 2)
        stage = PipelineStage(part, dist.get_rank(), 2, cpu, group=mesh.get_group())
        schedule = ScheduleGPipe(stage, 2, loss_fn=torch.nn.functional.mse_loss)
        internals.set_loss_function(schedule, lambda output, _: output.sum() * 0 + 3)
        found: list[Tensor] = []
        x = torch.ones(4, 2)
        schedule.step(x) if first else schedule.step(target=x, losses=found)
        return [loss.item() for loss in found]

    assert two.run(losses) == [[], [3.0, 3.0]]


def test_a_dispatch_mode_sees_operators() -> None:
    class Names(internals.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
            self.seen: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Names() as names:
        torch.ones(2) + 1
    assert names.seen == ["aten.ones.default", "aten.add.Tensor"]


def test_ranks_of_a_group(two: Cluster) -> None:
    def ranks() -> Any:
        seen: list[tuple[int, ...]] = []

        class Groups(internals.TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                for declared, value in zip(
                    internals.arguments_of(func), args, strict=False
                ):
                    if declared.name in ("process_group", "group_name"):
                        seen.append(internals.ranks_of(value))
                return func(*args, **(kwargs or {}))

        group = dist.group.WORLD
        assert group is not None
        with Groups():  # type: ignore[no-untyped-call]  # untyped in torch
            dist.all_reduce(torch.ones(1))
            collectives.all_reduce(torch.ones(1), "sum", group).sum()
        return [*seen, internals.ranks_of(group)]

    assert two.run(ranks) == [[(0, 1)] * 3] * 2


def test_private_names_of_recording_work() -> None:
    outer = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert list(of_recording.children_of(outer)) == [outer[0]]
    own = map(id, of_recording.parameters_in(outer[0]))
    assert [*own] == [*map(id, outer.parameters())]
    calls, layer = list[str](), torch.nn.Linear(2, 2)
    layer.compile(backend="eager")
    of_recording.around_compiled(
        layer, lambda *_: calls.append("before"), lambda *_: calls.append("after")
    )
    layer(torch.ones(1, 2))
    assert calls == ["before", "after"]

    def body() -> list[bool]:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        seen = [of_recording.in_join([model])]
        with model.join():
            seen.append(of_recording.in_join(of_recording.joinable([model, outer])))
            model(torch.ones(1, 2)).sum().backward()
        return seen

    with Cluster(world_size=2) as cluster:
        assert cluster.run(body) == [[False, True]] * 2
