"""Records each collective that a rank issues: 20 microseconds, twice that when cold.

Wraps the methods of ``ProcessGroup``, where every function of ``torch.distributed``
ends, and the functional collectives (DTensor), which never pass there.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from ..outcomes import TensorShape
from .flight_records import RecordWriter

METHODS = (
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
"""Of process groups; a group need not have all."""

_IN_PLACE = frozenset({"allreduce", "allreduce_coalesced", "broadcast", "reduce"})
"""Methods that answer in the tensors that they are given."""

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

# A record stays cheap where only torch's frames are on a deep stack.
_MAX_FRAMES = 80


class _Nesting(threading.local):
    inside = False
    waited = False


def install(writer: RecordWriter, *groups: type[dist.ProcessGroup]) -> None:
    """Record every later collective of this process in ``writer``.

    Args:
        writer: Where to.
        *groups: Classes of process groups in Python, beside torch's own.
    """
    global _writer
    _writer = writer
    nesting = _Nesting()
    # By what the collective gave back to wait for: a Work, or a tensor.
    # Weak, since much is never waited for; by identity, since tensors compare by
    # element.
    pending = WeakIdKeyDictionary()
    method = _Kind(_group_of_method, _shapes_of_method)
    function = _Kind(_group_of_function, _shapes_of_function)
    for owner in (dist.ProcessGroup, *groups):
        for name in METHODS:
            _wrap(owner, name, method, writer, nesting, pending)
    for name in _FUNCTIONS:
        _wrap(functional, name, function, writer, nesting, pending)
    _wrap_wait(dist.Work, "wait", writer, nesting, pending)
    _wrap_wait(functional, "wait_tensor", writer, nesting, pending)


def uninstall() -> None:
    """Stop recording: for timed code that otherwise runs without a harness."""
    while _wrapped:
        setattr(*_wrapped.pop())


@contextmanager
def redirected(
    writer: RecordWriter, *groups: type[dist.ProcessGroup]
) -> Iterator[None]:
    """Record collectives in another writer inside this context."""
    before = _writer
    uninstall()
    install(writer, *groups)
    try:
        yield
    finally:
        uninstall()
        if before is not None:
            install(before)


_writer: RecordWriter | None = None
_wrapped: list[tuple[Any, str, Any]] = []
"""Owner, name and what was there before."""


class _Kind(NamedTuple):
    """The recorded parts of a call, for methods of a group and for functions."""

    group_of: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    shapes_of: Callable[[str, tuple[Any, ...]], tuple[list[TensorShape], ...]]


def _wrap(
    owner: Any,
    name: str,
    kind: _Kind,
    writer: RecordWriter,
    nesting: _Nesting,
    pending: WeakIdKeyDictionary,
) -> None:
    # The class's own methods only: an inherited one is wrapped in the base, once.
    wrapped = getattr(owner, name) if name in vars(owner) else None
    if wrapped is None:  # another version of torch
        return

    @functools.wraps(wrapped)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        # One method of a group may call another: the outer one is what was issued. A
        # compiler that traces through here must not see a write to memory.
        if nesting.inside or torch.compiler.is_compiling():
            return wrapped(*args, **kwargs)
        nesting.inside, nesting.waited = True, False
        try:
            group = _resolved(kind.group_of(args, kwargs))
            sent, received = kind.shapes_of(name, args)
            # Before the call, which may never return: then it is the last record.
            record = writer.record(
                _name(group),
                name,
                _tensors(args),
                _caller(sys._getframe(1)),
                description=_description(group),
                ranks=_ranks(group),
                sent=sent,
                received=received,
            )
            result = wrapped(*args, **kwargs)
            pends = _what_pends(result, nesting.waited)
            if pends is None:
                writer.ended(record)
            else:
                pending[pends] = record
            return result
        finally:
            nesting.inside = False

    _put(owner, name, recorded)


def _wrap_wait(
    owner: Any,
    name: str,
    writer: RecordWriter,
    nesting: _Nesting,
    pending: WeakIdKeyDictionary,
) -> None:
    wrapped = getattr(owner, name) if name in vars(owner) else None
    if wrapped is None:
        return

    @functools.wraps(wrapped)
    def waited(*args: Any, **kwargs: Any) -> Any:
        result = wrapped(*args, **kwargs)
        if args and not torch.compiler.is_compiling():
            nesting.waited = True
            record = pending.pop(args[0], None)
            if record is not None:
                writer.ended(record)
        return result

    _put(owner, name, waited)


def _put(owner: Any, name: str, wrapper: Any) -> None:
    # Put back later as it is in the class, not as getattr returns it, bound.
    _wrapped.append((owner, name, vars(owner)[name]))
    setattr(owner, name, wrapper)


def _what_pends(result: Any, waited: bool) -> Any:
    """Return the object to wait for, or None if the call itself has waited."""
    if isinstance(result, list | tuple):  # all of one collective: any says when
        result = result[-1] if result else None
    # It calls wait_tensor with the tensor inside, not with itself.
    if isinstance(result, functional.AsyncCollectiveTensor):
        return None if result.completed else result.elem
    return None if waited and isinstance(result, torch.Tensor) else result


def _group_of_method(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _group_of_function(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "group" in kwargs:
        return kwargs["group"]
    # Their groups differ in position, but none of the other arguments looks like one.
    for argument in args[1:]:
        if isinstance(argument, dist.ProcessGroup | DeviceMesh | tuple):
            return argument
    return None


def _resolved(group: Any) -> Any:
    """Return the process group, where there is one."""
    if isinstance(group, tuple) and len(group) == 2:
        return group[0].get_group(group[1])
    if isinstance(group, DeviceMesh):
        return group.get_group()
    return group


def _name(group: Any) -> str:
    if isinstance(group, str):
        return group
    if group is not None and group is dist.group.WORLD:
        return "the default group"
    return str(getattr(group, "group_name", "?"))


def _description(group: Any) -> str:
    return str(getattr(group, "group_desc", ""))


def _ranks(group: Any) -> list[int]:
    if not isinstance(group, dist.ProcessGroup):
        return []
    if group is dist.group.WORLD:
        return list(range(group.size()))
    known = dist.distributed_c10d._world.pg_group_ranks.get(group)
    return list(known) if known else []


def _shapes_of_method(
    name: str, args: tuple[Any, ...]
) -> tuple[list[TensorShape], ...]:
    first, second = (_shapes(a) for a in (*args[1:3], None, None)[:2])
    return (first, first) if name in _IN_PLACE else (second, first)


def _shapes_of_function(
    name: str, args: tuple[Any, ...]
) -> tuple[list[TensorShape], ...]:
    return _shapes(args[0] if args else None), []


def _shapes(value: Any) -> list[TensorShape]:
    found: list[TensorShape] = []
    for tensor in _flat(value):
        dtype, sizes = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if found and found[-1][:2] == (dtype, sizes):
            found[-1] = found[-1]._replace(repeats=found[-1].repeats + 1)
        else:
            found.append(TensorShape(dtype, sizes, 1))
    return found


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
    # The nearest frame outside of torch and of this package: the line that the test's
    # author can change.
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
