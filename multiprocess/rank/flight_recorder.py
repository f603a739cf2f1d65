"""Record each collective that a rank issues, and where a rank waits for others.

A record takes 20 microseconds, or twice that when cold. Three kinds of functions are
wrapped:

- the methods of ``ProcessGroup``, which every function of ``torch.distributed`` calls;
- the functional collectives (of DTensor), which do not call those methods;
- functions that wait: for a collective, for the other ranks of a new process group, or
  for a key of a store.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from ..outcomes import Place
from .flight_records import RecordWriter
from .frames import ROOM, line_outside
from .torch_internals import BACKWARD, CONNECTS, NEW_GROUP, functional

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
"""Methods of process groups that are recorded; some groups lack some of them."""

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
    ROOM,
    os.path.dirname(functools.__file__) + os.sep,
)
"""Folders whose frames are skipped in search of the line that issued a collective."""


class _Thread(threading.local):
    inside = False
    waited = False


_thread = _Thread()


def install(writer: RecordWriter) -> None:
    """Record every later collective of this process in ``writer``."""
    global _writer
    _writer = writer
    # Key: the Work or tensor that a collective returned. Weak, since many are never
    # waited for; by identity, since tensors compare by element.
    pending = WeakIdKeyDictionary()
    group = dist.ProcessGroup
    _wrap_wait(group, "monitored_barrier", Place.COLLECTIVE)  # waits inside the call
    for name in METHODS:
        _wrap(group, name, _group_of_method, pending)
    for name in _FUNCTIONS:
        _wrap(functional, name, _group_of_function, pending)
    _wrap_wait(dist.Work, "wait", Place.COLLECTIVE, pending)
    _wrap_wait(functional, "wait_tensor", Place.COLLECTIVE, pending)
    for name in ("get", "multi_get", "wait"):
        _wrap_wait(Store, name, Place.STORE)
    _wrap_wait(*NEW_GROUP, Place.JOINING)
    _wrap_new_group(*NEW_GROUP)


def note_members(group: dist.ProcessGroup, world_ranks: Sequence[int]) -> None:
    """Note the members of a default process group.

    Args:
        group: The default group.
        world_ranks: Rank in the world of each member, in the order of the group.
    """
    _members[group] = list(world_ranks)


def uninstall() -> None:
    """Stop recording, for timed code that must run without overhead."""
    while _wrapped:
        setattr(*_wrapped.pop())


@contextmanager
def placed(place: Place, record: tuple[int, int] | None = None) -> Iterator[None]:
    """Note the rank's place during this context; see ``RecordWriter.enter``."""
    writer = _writer
    assert writer is not None
    before = writer.enter(place, record)
    try:
        yield
    finally:
        writer.leave(before)


def wait_for_devices() -> None:
    """Wait for queued GPU work, so that its errors are raised in the current call.

    Does nothing if the call has not waited for one of its collectives.
    """
    last = None if _writer is None else _writer.last
    for kind in () if _unwaited else (torch.cuda, torch.xpu):
        if kind.is_initialized():
            with placed(Place.COLLECTIVE, last) if last else nullcontext():
                kind.synchronize()


def left_a_wait(error: BaseException | None) -> bool:
    """Return True if an error, or its cause, came out of a wait for other ranks.

    Such an error is caused by other ranks.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        innermost = None
        for frame, _ in traceback.walk_tb(error.__traceback__):
            innermost = frame.f_code
        # torch's own error types are for communication. DDP waits in C++, so an error
        # of Python code would have another innermost frame.
        if innermost in _WAITS or isinstance(error, dist.DistError):
            return True
        error = error.__cause__ or error.__context__
    return False


def unwaited() -> list[tuple[str, str]]:
    """Return, and forget, this call's collectives that were not waited for.

    Returns:
        Operation and caller of each.
    """
    unwaited_ops = [(op, caller) for op, caller, _ in _unwaited.values()]
    _unwaited.clear()
    return unwaited_ops


def _forget_unwaited(record: tuple[int, int] | None, storage: int) -> None:
    if record is not None:
        _unwaited.pop(record, None)
    # Waiting for a view of a functional collective's output counts for the output.
    for other in [r for r, (*_, s) in _unwaited.items() if storage and s == storage]:
        del _unwaited[other]


def _storage(pends: Any) -> int:
    if isinstance(pends, torch.Tensor):
        with suppress(Exception):  # a fake tensor, for example, has no memory
            return pends.untyped_storage().data_ptr()
    return 0


_writer: RecordWriter | None = None
_unwaited: dict[tuple[int, int], tuple[str, str, int]] = {}
"""Record of a pending collective -> (operation, caller, address of its result's
memory)."""
_members = WeakIdKeyDictionary()
"""Default process group -> rank in the world of each member, unless unknown."""
_wrapped: list[tuple[Any, str, Any]] = []
"""(owner, name, original function) of each wrapped function."""


def _wrap(
    owner: Any,
    name: str,
    group_of: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    pending: WeakIdKeyDictionary,
) -> None:
    # Only the class's own methods: an inherited one is wrapped once, in its base.
    wrapped = getattr(owner, name) if name in vars(owner) else None
    if wrapped is None:  # another version of torch has no such method
        return

    @functools.wraps(wrapped)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        # One method of a group may call another, and only the outer one is recorded. A
        # compiler that traces this function must not see a write to memory.
        writer = _writer
        if writer is None or _thread.inside or torch.compiler.is_compiling():
            return wrapped(*args, **kwargs)
        _thread.inside, _thread.waited = True, False
        before = None
        try:
            group = _resolved(group_of(args, kwargs))
            # Recorded before the call: one that never returns is then the last record.
            caller = line_outside(sys._getframe(1), _QUIET)
            group_name, ranks = _identity(group, writer)
            if name in ("send", "recv") and ranks:
                ranks = [ranks[peer] for peer in args[2:3]]  # (group, tensors, peer)
            record = writer.record(group_name, name, _tensors(args), caller, ranks)
            before = writer.enter(Place.COLLECTIVE, record)
            result = wrapped(*args, **kwargs)
            pends = _what_pends(result, _thread.waited)
            if pends is not None:
                pending[pends] = record
                _unwaited[record] = name, caller, _storage(pends)
            return result
        finally:
            _thread.inside = False
            if before is not None:
                writer.leave(before)

    _put(owner, name, recorded)


def _wrap_wait(
    owner: Any, name: str, place: Place, pending: WeakIdKeyDictionary | None = None
) -> None:
    """Wrap a function that waits for other ranks, so that the rank notes its place.

    Args:
        owner: Class or module with the function.
        name: Name of the function.
        place: Place to note during the wait.
        pending: Objects to wait for -> their records, if the function waits for a
            collective.
    """
    wrapped = getattr(owner, name) if name in vars(owner) else None
    if wrapped is None:
        return

    @functools.wraps(wrapped)
    def waits(*args: Any, **kwargs: Any) -> Any:
        writer = _writer
        if (
            writer is None
            or torch.compiler.is_compiling()
            # Making a group also waits for keys of a store, and "making a group" says
            # more.
            or (writer.waits if pending is None else not args)
        ):
            return wrapped(*args, **kwargs)
        record = None if pending is None else pending.get(args[0])
        before = writer.enter(place, record)
        try:
            result = wrapped(*args, **kwargs)
        finally:
            writer.leave(before)
        if pending is None:
            return result
        _thread.waited = True
        pending.pop(args[0], None)
        _forget_unwaited(record, _storage(args[0]))
        return result

    _put(owner, name, waits)
    _WAITS.add(_code_of(waits))
    # a Python function calls the native function that waits
    if inspect.isfunction(wrapped):
        _WAITS.add(_code_of(wrapped))


def _wrap_new_group(owner: Any, name: str) -> None:
    """Wrap the function that makes groups, to note the members of default groups.

    A test may make a default group of only some ranks, which are numbered anew there.
    So each rank publishes its number in the world through the group's store.
    """
    wrapped = getattr(owner, name)
    signature = inspect.signature(wrapped)

    @functools.wraps(wrapped)
    def joins(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs).arguments
        writer = _writer
        if writer is None or call["global_ranks_in_group"]:  # none: a default group
            return wrapped(*args, **kwargs)
        store, prefix = call["store"], f"gradparity/{call['group_name']}"
        keys = [f"{prefix}/{rank}" for rank in range(call["group_size"])]
        with suppress(Exception):  # a store of the test's own may lack these methods
            # Before the group connects: a connected group has the keys of all ranks.
            store.set(keys[call["group_rank"]], str(writer.rank))
        result = wrapped(*args, **kwargs)
        with suppress(Exception):
            if store.check(keys):  # a process that is no rank of the world has no key
                note_members(result[0], [int(rank) for rank in store.multi_get(keys)])
        return result

    _put(owner, name, joins)


def _code_of(wrapper: Any) -> CodeType:
    code: CodeType = wrapper.__code__
    return code


_WAITS: set[CodeType] = {BACKWARD, *CONNECTS}
"""Functions that wait for other ranks in native code."""


def _put(owner: Any, name: str, wrapper: Any) -> None:
    # Restored later as it is in the class; getattr would return it bound.
    _wrapped.append((owner, name, vars(owner)[name]))
    setattr(owner, name, wrapper)


def _what_pends(result: Any, waited: bool) -> Any:
    """Return the object to wait for, or None if the call has already waited."""
    # parts of one collective are complete together
    if isinstance(result, list | tuple):
        result = result[-1] if result else None
    # Waiting passes the tensor inside, not this wrapper.
    if isinstance(result, functional.AsyncCollectiveTensor):
        return None if result.completed else result.elem
    return None if waited and isinstance(result, torch.Tensor) else result


def _group_of_method(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _group_of_function(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "group" in kwargs:
        return kwargs["group"]
    # The position of the group differs, but no other argument looks like one.
    for argument in args[1:]:
        if isinstance(argument, dist.ProcessGroup | DeviceMesh | tuple):
            return argument
    return None


def _resolved(group: Any) -> Any:
    """Return the group of a mesh or (mesh, axis); any other argument unchanged."""
    if isinstance(group, tuple) and len(group) == 2:
        return group[0].get_group(group[1])
    if isinstance(group, DeviceMesh):
        return group.get_group()
    return group


def _identity(group: Any, writer: RecordWriter) -> tuple[str, list[int]]:
    """Return a group's name, and the ranks of its members in the world.

    The name is the same on all members. The ranks are empty if unknown. Some members
    may know them and others not: a backend may connect before all have made the group.
    """
    default = dist.group.WORLD
    size = writer.size if default is None else default.size()
    suffix = "" if size == writer.size else f" of {size} ranks"
    members = [] if default is None else _members.get(default, [])
    if group is not None and group is default:
        return f"the default group{suffix}", members
    name = group if isinstance(group, str) else str(getattr(group, "group_name", "?"))
    name = f"group {name}"
    description = str(getattr(group, "group_desc", ""))
    # a test may describe a group differently on each rank; a mesh does not
    if description.startswith("mesh_"):
        name = f"{name} ({description})"
    if suffix:  # the groups of several default groups have the same names in torch
        name = f"{name} of a default group{suffix}"
    # torch does not know a group that a test makes by itself
    with suppress(KeyError):
        if members and isinstance(group, dist.ProcessGroup):
            return name, [members[r] for r in dist.get_process_group_ranks(group)]
    return name, []


def _tensors(args: tuple[Any, ...]) -> str:
    tensors = _flat(args)
    if not tensors:
        return "-"
    first = f"{str(tensors[0].dtype).removeprefix('torch.')}{list(tensors[0].shape)}"
    return first if len(tensors) == 1 else f"{first} and {len(tensors) - 1} more"


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in _flat(part)]
    return []
