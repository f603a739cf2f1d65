"""Private names of torch that the scaler uses, each bound or wrapped once.

``tests/scaler/test_torch_internals.py`` asserts that each name exists with the expected
signature. So a change in torch fails that test, and does not make a norm wrong.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.distributed import distributed_c10d

P = ParamSpec("P")
T = TypeVar("T")


def no_compile(method: Callable[P, T]) -> Callable[P, T]:
    """Keep a method, and everything that it calls, out of compiled graphs.

    A compiled training step may call the scaler. ``scale`` is arithmetic and is
    compiled with the loss; the other methods read Python objects, communicate and
    branch on results, which a graph cannot hold, so the graph breaks before and after
    each. Marking the code object adds no time to a call. ``torch.compiler.disable``
    would wrap the method, which takes longer than a small kernel, and import
    ``torch._dynamo``.
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
set found_inf to 1 if any was not finite."""

amp_update_scale_ = torch._amp_update_scale_
"""(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval):
move the scale in place by torch's rule."""

foreach_norm = torch._foreach_norm
"""(tensors, norm_type, dtype): return the norm of each tensor, (), accumulated in
dtype."""

foreach_mul_ = torch._foreach_mul_
"""(tensors, factor): multiply tensors in place by a factor, (), on their device."""

set_grad_enabled = torch._C._set_grad_enabled
"""(mode): set the grad mode; ``no_grad()`` takes longer than a small kernel."""

DisableTorchFunctions = torch._C.DisableTorchFunctionSubclass
"""(): a context in which attributes of tensor subclasses are read directly. DTensor's
torch function is disabled, but looking it up takes as long as reading the attribute."""

sparse_values = torch.Tensor._values
"""(tensor): return the values of a sparse tensor, coalesced or not, without a copy."""


def dtensor_type() -> Any:
    """Return the type ``DTensor``; an empty tuple if it is not imported yet."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return () if module is None else module.DTensor


def local_tensors(gradients: Iterable[Any]) -> list[torch.Tensor]:
    """Return the local tensor of each DTensor, and other tensors unchanged.

    Reading the attribute takes a tenth of the time of ``to_local``.
    """
    kind = dtensor_type()
    return [g._local_tensor if type(g) is kind else g for g in gradients]


def specs(gradients: Iterable[Any]) -> list[Any]:
    """Return mesh, placements and global shape of each DTensor; None for others."""
    kind = dtensor_type()
    return [g._spec if isinstance(g, kind) else None for g in gradients]


def device_types(group: torch.distributed.ProcessGroup) -> list[str]:
    """Return the device types for which a process group has a backend."""
    return [device.type for device in group._device_types]


@contextmanager
def groups_named(name: str) -> Iterator[None]:
    """Use ``name`` for each process group that this thread creates in this context.

    torch derives the name of a group from the groups that the rank already has. Up to
    2.13 it uses their number, which may differ between members. From 2.14 on it also
    counts groups that only their members create, so later groups of all ranks may get
    different names. Ranks with different names wait for each other for ever, or connect
    to a rank of another group.
    """
    module, thread = distributed_c10d, threading.get_ident()
    own = module._process_group_name

    def given(*args: Any, **kwargs: Any) -> Any:
        mine = threading.get_ident() == thread
        return name if mine else own(*args, **kwargs)

    module._process_group_name = given
    try:
        yield
    finally:
        module._process_group_name = own
