"""Each private name of torch that recording and watching use, one function each.

``tests/conformance/test_private_names.py`` asserts that each name exists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "around_clipping",
    "around_compiled",
    "buffers_of",
    "children_of",
    "in_join",
    "joinable",
    "parameters_in",
    "register_first",
    "scale_of",
    "version_of",
]


def children_of(module: nn.Module) -> Iterable[nn.Module | None]:
    """Return a module's children, without creating the object behind a lazy proxy."""
    children: dict[str, nn.Module | None] = module.__dict__["_modules"]
    return children.values()


def parameters_in(module: nn.Module) -> Iterable[nn.Parameter | None]:
    """Return a module's own parameters, without creating the object behind a proxy."""
    parameters: dict[str, nn.Parameter | None] = module.__dict__["_parameters"]
    return parameters.values()


def buffers_of(module: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module]]:
    """Yield the buffers of a module's ``state_dict``, without calling that.

    On a sharded model the call may need all ranks.

    Yields:
        name, buffer, and the module that holds it.
    """
    for path, each in module.named_modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and name not in each._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name, buffer, each


def around_compiled(
    module: nn.Module,
    before: Callable[[nn.Module, Any], None],
    after: Callable[[nn.Module, Any, Any], None],
) -> None:
    """Call two functions around each call of a module that was compiled in place.

    Hooks cannot do this: the compiled code does not call a hook that is added later.
    Copies of the module, and files with it, have no compiled code.
    """
    run: Any = module._compiled_call_impl

    # the recorder finds the keyword arguments of a call in the frame of this name
    @functools.wraps(run)
    def inner(*args: Any, **kwargs: Any) -> Any:
        before(module, args)
        output = run(*args, **kwargs)
        after(module, args, output)
        return output

    module._compiled_call_impl = inner


def around_clipping(before: Callable[[Any, float], None]) -> Callable[[], None]:
    """Call a function before torch clips gradients by a norm.

    Args:
        before: called with the norm and its limit.

    Returns:
        Function that puts torch's own functions back.
    """
    module: Any = torch.nn.utils.clip_grad
    clip = module._clip_grads_with_norm_

    @functools.wraps(clip)
    def observed(
        parameters: Any, max_norm: float, total_norm: Any, *args: Any, **kwargs: Any
    ) -> None:
        before(total_norm, max_norm)
        clip(parameters, max_norm, total_norm, *args, **kwargs)

    def put(function: Any) -> None:
        # clip_grad_norm_ calls the first one
        module._clip_grads_with_norm_ = function
        torch.nn.utils.clip_grads_with_norm_ = function

    put(observed)
    return functools.partial(put, clip)


def scale_of(scaler: Any) -> Tensor | None:
    """Return the scale of torch's ``GradScaler`` without waiting for its device."""
    return getattr(scaler, "_scale", None)


def register_first(tensor: Tensor, hook: Callable[[Tensor], Tensor]) -> Any:
    """Register a hook of a tensor's gradient that runs before the others.

    Returns:
        Handle whose ``remove`` removes the hook.
    """
    handle = tensor.register_hook(hook)
    hooks: Any = tensor._backward_hooks
    # autograd reads them in the order of insertion, which move_to_end() leaves
    (*others, own) = hooks.items()
    hooks.clear()
    hooks.update([own, *others])
    return handle


def joinable(objects: Iterable[Any]) -> list[Any]:
    """Return the objects that torch's ``join()`` accepts and whose constructors ran."""
    return [each for each in objects if hasattr(each, "_join_config")]


def in_join(objects: Iterable[Any]) -> bool:
    """Return True within torch's ``join()`` of one of the given joinable objects."""
    return any(each._join_config.enable for each in objects)


def version_of(tensor: Tensor) -> int | None:
    """Return how often torch has written into a tensor; None if it does not count."""
    return None if tensor.is_inference() else tensor._version
