"""Every name that torch's two modules define is where torch has it."""

import inspect
from types import ModuleType

import pytest
import torch
import torch.amp.grad_scaler as torch_grad_scaler
import torch.distributed.fsdp.sharded_grad_scaler as torch_sharded

import gradparity.scaler.grad_scaler as ours_grad_scaler
import gradparity.scaler.sharded as ours_sharded


def own_names(module: ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        and (inspect.isclass(value) or inspect.isfunction(value))
    }


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(torch_grad_scaler, ours_grad_scaler), (torch_sharded, ours_sharded)],
)
def test_module_names(theirs: ModuleType, ours: ModuleType) -> None:
    names = own_names(theirs)
    assert len(names) >= 3
    assert {name for name in names if not hasattr(ours, name)} == set()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (torch_grad_scaler.GradScaler, ours_grad_scaler.GradScaler),
        (torch_sharded.ShardedGradScaler, ours_sharded.ShardedGradScaler),
    ],
)
def test_class_names_and_order_of_arguments(theirs: type, ours: type) -> None:
    assert {name for name in dir(theirs) if not hasattr(ours, name)} == set()
    wanted = list(inspect.signature(theirs).parameters)
    assert list(inspect.signature(ours).parameters)[: len(wanted)] == wanted


def test_a_tensor_without_values_is_not_supported() -> None:
    assert ours_sharded._is_supported_device(torch.zeros(1))
    assert not ours_sharded._is_supported_device(torch.zeros(1, device="meta"))
