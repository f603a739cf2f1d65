"""Each private name of torch that the scaler uses exists, with its arguments."""

import ast
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import sharded_grad_scaler
from torch.distributed.tensor import DTensor, Shard

import gradparity.scaler
from gradparity.multiprocess import Cluster
from gradparity.scaler import torch_internals as internals

ROOM = Path(gradparity.scaler.__file__).parent

SIGNATURES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "_check_scale_growth_tracker": (
        TorchGradScaler._check_scale_growth_tracker,
        ["self", "funcname"],
    ),
    "_lazy_init_scale_growth_tracker": (
        TorchGradScaler._lazy_init_scale_growth_tracker,
        ["self", "dev"],
    ),
    "_unscale_grads_": (
        TorchGradScaler._unscale_grads_,
        ["self", "optimizer", "inv_scale", "found_inf", "allow_fp16"],
    ),
    "_maybe_opt_step": (
        TorchGradScaler._maybe_opt_step,
        ["self", "optimizer", "optimizer_state", "args", "kwargs"],
    ),
    "_amp_update_scale_cpu_": (
        sharded_grad_scaler.ShardedGradScaler._amp_update_scale_cpu_,
        ["self", "found_inf"],
    ),
    "_is_supported_device": (sharded_grad_scaler._is_supported_device, ["tensor"]),
    "_process_group_name": (
        distributed_c10d._process_group_name,
        ["ranks", "use_hashed_name"],
    ),
}


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_signatures(name: str) -> None:
    function, parameters = SIGNATURES[name]
    assert list(inspect.signature(function).parameters) == parameters


SCHEMAS = {
    "_amp_foreach_non_finite_check_and_unscale_": (
        "(Tensor(a!)[] self, Tensor(b!) found_inf, Tensor inv_scale) -> ()"
    ),
    "_amp_update_scale_": (
        "(Tensor(a!) self, Tensor(b!) growth_tracker, Tensor found_inf, "
        "float scale_growth_factor, float scale_backoff_factor, int growth_interval) "
        "-> Tensor(a!)"
    ),
    "_foreach_norm": (
        "(Tensor[] self, Scalar ord=2, ScalarType? dtype=None) -> Tensor[]"
    ),
    "_foreach_mul_": "(Tensor(a!)[] self, Tensor other) -> ()",
}


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_schemas_of_kernels(name: str) -> None:
    packet = getattr(torch.ops.aten, name)
    overloads = [str(getattr(packet, o)._schema) for o in packet.overloads()]
    assert any(found.endswith(SCHEMAS[name]) for found in overloads), overloads


def test_kernels() -> None:
    tensors, found = [torch.tensor([2.0, 4.0])], torch.zeros(())
    internals.non_finite_check_and_unscale_(tensors, found, torch.tensor(0.5))
    assert tensors[0].tolist() == [1.0, 2.0] and found.item() == 0.0
    internals.foreach_mul_(tensors, torch.tensor(3.0))
    assert tensors[0].tolist() == [3.0, 6.0]
    [norm] = internals.foreach_norm([torch.tensor([3.0, 4.0])], 2.0, torch.float64)
    assert norm.dtype is torch.float64 and norm.item() == 5.0
    scale, tracker = torch.tensor(4.0), torch.tensor(1, dtype=torch.int32)
    internals.amp_update_scale_(scale, tracker, torch.zeros(()), 2.0, 0.5, 2)
    assert (scale.item(), tracker.item()) == (8.0, 0)


def test_no_compile_marks_the_code_and_wraps_nothing() -> None:
    def seen() -> bool:
        return inner()

    def inner() -> bool:
        return torch.compiler.is_compiling()

    assert internals.no_compile(seen) is seen
    calls = torch.compile(lambda x: (x + 1, inner(), seen()), backend="eager")
    # what it calls is compiled elsewhere, and not within it
    assert calls(torch.ones(1))[1:] == (True, False)


def test_grad_mode_and_torch_functions() -> None:
    internals.set_grad_enabled(False)
    assert not torch.is_grad_enabled()
    internals.set_grad_enabled(True)
    assert torch.is_grad_enabled()

    class Refuses(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise TypeError

    refuses = torch.ones(1).as_subclass(Refuses)
    with internals.DisableTorchFunctions():
        assert refuses.grad is None
    with pytest.raises(TypeError):
        _ = refuses.grad


def test_sparse_values() -> None:
    indices = torch.tensor([[1, 1]])
    sparse = torch.sparse_coo_tensor(
        indices, torch.ones(2), (3,), check_invariants=True
    )
    assert internals.sparse_values(sparse).tolist() == [1.0, 1.0]


def test_dtensors_and_groups(two: Cluster) -> None:
    def run() -> None:
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        local = torch.ones(2)
        made = DTensor.from_local(local, mesh["tp"], [Shard(0)])
        plain = torch.zeros(1)
        assert internals.dtensor_type() is DTensor
        [first, second] = internals.local_tensors([made, plain])
        assert torch.equal(first, local) and second is plain
        [spec, nothing] = internals.specs([made, plain])
        assert nothing is None and tuple(spec.placements) == (Shard(0),)
        assert tuple(spec.shape) == (4,) and spec.mesh is made.device_mesh
        world = dist.group.WORLD
        assert world is not None and "cpu" in internals.device_types(world)

    two.run(run)


# Names of torch's protocol, which the classes themselves override or re-export.
PROTOCOL = {
    "_MultiDeviceReplicator",
    "_GeneralMultiDeviceReplicator",
    "_is_supported_device",
}


def test_no_other_module_names_private_torch() -> None:
    """``torch.x._y`` and ``from torch.x import _y`` are in one module."""
    found = []
    for path in sorted(ROOM.glob("*.py")):
        if path.name == "torch_internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "")[:5] == "torch":
                found += [(path.name, alias.name) for alias in node.names]
            elif isinstance(node, ast.Attribute) and _is_torch(node.value):
                found.append((path.name, node.attr))
            elif isinstance(node, ast.Attribute) and node.attr in (
                "_spec",
                "_local_tensor",
                "_version",
                "_values",
                "_device_types",
            ):
                found.append((path.name, node.attr))
    private = {(p, n) for p, n in found if n[0] == "_" and n[:2] != "__"}
    assert len(found) > 20
    assert {(p, n) for p, n in private if n not in PROTOCOL} == set()


def _is_torch(node: ast.AST) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in ("torch", "dist", "_torch")
