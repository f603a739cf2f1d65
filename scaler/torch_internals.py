"""Every private name of torch that the scaler uses, one function each.

``tests/scaler/test_torch_internals.py`` asserts that each name exists and has the
signature that is used here, so that a new torch fails there and not in a norm.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
T = TypeVar("T")


def no_compile(method: Callable[P, T]) -> Callable[P, T]:
    """Keep a method out of compiled graphs, with all that it calls.

    A compiled training step may call the scaler. ``scale`` is arithmetic and is
    compiled with the loss; the other methods read Python objects, communicate and
    branch on results, which a graph cannot hold: it breaks before and after each. The
    mark on the code costs a call nothing; ``torch.compiler.disable`` would wrap the
    method, which takes longer than a small kernel, and import ``torch._dynamo``.
    """
    function, dynamo = cast("Any", method), torch._C._dynamo.eval_frame
    strategy = dynamo._FrameExecStrategy(*[dynamo._FrameAction.SKIP] * 2)
    dynamo.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True
    return method


# Kernels and attributes are bound here as they are: a step calls them often, and a
# function around each would cost more than a small kernel.

non_finite_check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
"""(tensors, found_inf, inv_scale): multiply tensors of one device and dtype in place;
set found_inf to 1 if one of them was not finite."""

amp_update_scale_ = torch._amp_update_scale_
"""(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval):
move the scale in place by torch's rule."""

foreach_norm = torch._foreach_norm
"""(tensors, norm_type, dtype): the norm of each tensor, (), accumulated in dtype."""

foreach_mul_ = torch._foreach_mul_
"""(tensors, factor): multiply tensors in place by a factor, (), on their device."""

set_grad_enabled = torch._C._set_grad_enabled
"""(mode): set the grad mode; ``no_grad()`` takes longer than a small kernel."""

DisableTorchFunctions = torch._C.DisableTorchFunctionSubclass
"""(): a context in which subclasses are read as plain objects. Asking DTensor for its
torch function, which DTensor has turned off, takes as long as reading the attribute."""

sparse_values = torch.Tensor._values
"""(tensor): the values of a sparse tensor, coalesced or not, without a copy."""


def dtensor_type() -> Any:
    """Return ``DTensor``; before it is imported, the empty tuple, a type of nothing."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return () if module is None else module.DTensor


def local_tensors(gradients: Iterable[Any]) -> list[torch.Tensor]:
    """Return the local tensor of each DTensor; others as they are.

    The attribute is a tenth of the price of ``to_local``.
    """
    kind = dtensor_type()
    return [g._local_tensor if type(g) is kind else g for g in gradients]


def specs(gradients: Iterable[Any]) -> list[Any]:
    """Return mesh, placements and global shape of each DTensor; None for others."""
    kind = dtensor_type()
    return [g._spec if isinstance(g, kind) else None for g in gradients]


def device_types(group: torch.distributed.ProcessGroup) -> list[str]:
    """Return the types of device that a process group has a backend for."""
    return [device.type for device in group._device_types]
