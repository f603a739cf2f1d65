"""Notes each collective that a rank issues: 20 microseconds, twice that when cold.

Wraps the methods of ``ProcessGroup``, where every function of ``torch.distributed``
ends, and the functional collectives (DTensor), which never pass there.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from .flight_records import RecordWriter

_METHODS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)

_FUNCTIONS = (
    "all_gather_single",
    "all_gather_tensor",
    "all_gather_into_tensor_coalesced",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "broadcast",
    "permute_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)

_QUIET = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.dirname(functools.__file__) + os.sep,
)
"""Code that calls collectives on behalf of the test."""

_MAX_FRAMES = 80


class _Nesting(threading.local):
    inside = False


def install(writer: RecordWriter) -> None:
    """Note every later collective of this process in ``writer``."""
    nesting = _Nesting()
    for name in _METHODS:
        _wrap(dist.ProcessGroup, name, _group_of_method, writer, nesting)
    for name in _FUNCTIONS:
        _wrap(functional, name, _group_of_function, writer, nesting)


def uninstall() -> None:
    """Note no more: for what is timed, and runs without a harness elsewhere."""
    while _wrapped:
        setattr(*_wrapped.pop())


_wrapped: list[tuple[Any, str, Any]] = []
"""Owner, name and what was there before."""


def _wrap(
    owner: Any,
    name: str,
    group_of: Callable[[tuple[Any, ...], dict[str, Any]], str],
    writer: RecordWriter,
    nesting: _Nesting,
) -> None:
    wrapped = getattr(owner, name, None)
    if wrapped is None:  # another version of torch
        return

    @functools.wraps(wrapped)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        # One method of a group may call another: the outer one is what was issued. A
        # compiler that traces through here must not see a write to memory.
        if nesting.inside or torch.compiler.is_compiling():
            return wrapped(*args, **kwargs)
        nesting.inside = True
        try:
            # Before the call, which may never return: then it is the last record.
            writer.record(
                group_of(args, kwargs), name, _tensors(args), _caller(sys._getframe(1))
            )
            return wrapped(*args, **kwargs)
        finally:
            nesting.inside = False

    # Put back later as it is in the class, not as getattr returns it, bound.
    _wrapped.append((owner, name, vars(owner)[name]))
    setattr(owner, name, recorded)


def _group_of_method(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return _name(args[0])


def _group_of_function(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    if "group" in kwargs:
        return _name(kwargs["group"])
    # Their groups differ in position, but none of the other arguments looks like one.
    for argument in args[1:]:
        if isinstance(argument, dist.ProcessGroup | DeviceMesh | tuple):
            return _name(argument)
    return "?"


def _name(group: Any) -> str:
    if isinstance(group, tuple) and len(group) == 2:
        group = group[0].get_group(group[1])
    elif isinstance(group, DeviceMesh):
        group = group.get_group()
    if isinstance(group, str):
        return group
    if group is dist.group.WORLD:
        return "the default group"
    return str(getattr(group, "group_name", "?"))


def _tensors(args: tuple[Any, ...]) -> str:
    found = _flat(args)
    if not found:
        return "-"
    first = f"{str(found[0].dtype).removeprefix('torch.')}{list(found[0].shape)}"
    return first if len(found) == 1 else f"{first} and {len(found) - 1} more"


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _flat(part)]
    return []


def _caller(frame: FrameType | None) -> str:
    nearest = frame
    for _ in range(_MAX_FRAMES):
        if frame is None:
            break
        if not frame.f_code.co_filename.startswith(_QUIET):
            nearest = frame
            break
        frame = frame.f_back
    if nearest is None:
        return "?"
    return f"{os.path.basename(nearest.f_code.co_filename)}:{nearest.f_lineno}"
