"""The process group of the ranks that sync, and the collective over it.

[Note: Which ranks sync]
The group of a sync must not depend on the tensors of one rank: a rank with plain
tensors only, or without gradients, would pick another group than other ranks, and all
would wait for ever. The parameters do not determine the group either. Stages of one
pipeline on separate meshes look exactly like independent models on separate meshes. The
plain parameters of a pipeline stage look exactly like those of a replica. Of the two
possible mistakes one is worse: with too few ranks in a sync, training goes on silently
with different scales. With too many ranks, a sync raises or does no harm. So by default
all ranks of the default process group sync, whatever they hold. To use other ranks,
pass a group or a mesh to the constructor on each of them.

[Note: One collective]
gloo sends rows by an all-to-all, directly from rank to rank. For small messages that is
as fast as an all-reduce of one number; its all-gather goes around a ring and takes up
to three times as long (docs/scale.md has the figures).
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .errors import InvalidSettingError
from .grads import Number
from .torch_internals import device_types, groups_named

SyncOver = Literal["world", "local"] | dist.ProcessGroup | DeviceMesh
"""Ranks that sync; see `GradScaler`."""


class SyncGroup:
    """Process group of the ranks that sync; None if this rank is alone.

    Attributes:
        over: ``"world"``, ``"local"``, a process group, or for a mesh its ranks in
            ascending order. May be set.

    Raises:
        InvalidSettingError: ``over`` is none of these.
    """

    def __init__(self, over: SyncOver = "world") -> None:
        self.over: Any = _ranks_of(over) if isinstance(over, DeviceMesh) else over
        # new_group returns NON_GROUP_MEMBER on ranks outside of the group.
        names = ("world", "local", dist.GroupMember.NON_GROUP_MEMBER)
        if not hasattr(over, "size") and self.over not in names:
            raise InvalidSettingError(
                'sync_over must be "world", "local", a process group or a device mesh, '
                f"got {over!r}."
            )

    def find(self) -> dist.ProcessGroup | None:
        """Return the group to sync over; None if this rank is alone."""
        if isinstance(self.over, str):
            if self.over == "local" or not dist.is_initialized():
                return None
            return _if_shared(dist.group.WORLD)
        if not isinstance(self.over, tuple):
            return _if_shared(self.over)
        return _group_of(self.over) if dist.is_initialized() else None

    @property
    def is_distributed(self) -> bool:
        """True if there may be other ranks to sync with."""
        if isinstance(self.over, tuple):  # do not create its group here
            return dist.is_initialized() and len(self.over) > 1
        return self.find() is not None

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot leave its process, but its list of ranks can.
        if isinstance(self.over, str | tuple):
            return {"over": self.over}
        ranks = _ranks_in(self.over)
        # A group of all ranks is saved as "world": it may be loaded on other ranks.
        is_part = 0 < len(ranks) < dist.get_world_size()
        return {"over": ranks if is_part else "world"}

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncGroup:
        # A copy in the same process shares the group instead of losing it.
        twin = SyncGroup()
        twin.over = self.over
        return twin


def message_device(
    group: dist.ProcessGroup, preferred: str, scale: Number
) -> torch.device:
    """Return the device on which ``group`` exchanges a message.

    Its type must be the same on every rank, because a group may have one backend for
    each device type. So it depends only on the group and on ``preferred``, the scaler's
    ``device`` argument, and not on this rank's gradients. The scale selects one of
    several CUDA devices.

    Raises:
        NotImplementedError: the group supports neither CPU nor CUDA.
    """
    served = device_types(group)
    if preferred == "cuda" and "cpu" in served and not torch.cuda.is_available():
        preferred = "cpu"  # of a scaler that has disabled itself
    kinds = [kind for kind in (preferred, *served, "cpu") if kind in ("cpu", "cuda")]
    kind = next((kind for kind in kinds if kind in served or not served), None)
    if kind is None:
        raise NotImplementedError(
            f"Ranks sync over CPU or CUDA; this process group serves {served}. "
            'Pass a gloo group as sync_over=, or sync_over="local".'
        )
    if kind == "cuda" and isinstance(scale, torch.Tensor) and scale.is_cuda:
        return scale.device
    return torch.device(kind)


# The function's name before torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass
class GroupState:
    """State of a process group in this process.

    Attributes:
        turn: lock held during a whole sync. gloo aborts on concurrent calls, and the
            collectives of one sync belong together.
        is_gloo: True if it exchanges CPU messages by gloo.
        scalers: number of scalers that any rank has synced over it.
        numbers: numbers of this rank's scalers, by their index among all scalers that
            this process has made.
        parts: groups that scalers have created, by their ranks; only the state of the
            whole world has them.
    """

    turn: Any = field(default_factory=threading.RLock)
    is_gloo: bool = False
    scalers: int = 0
    numbers: dict[int, int] = field(default_factory=dict)
    parts: dict[tuple[int, ...], list[Any]] = field(default_factory=dict)


_states: weakref.WeakKeyDictionary[Any, GroupState] = weakref.WeakKeyDictionary()


def state_of(group: dist.ProcessGroup) -> GroupState:
    """Return the state of a group, the same object in each call."""
    state = _states.get(group)
    if state is None:
        is_gloo = "cpu:gloo" in str(dist.get_backend_config(group))
        state = _states.setdefault(group, GroupState(is_gloo=is_gloo))
    return state


def exchange(group: dist.ProcessGroup, method: str, mine: torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks, (number of ranks, elements), by one collective.

    If the collective fails, the error names the ``method`` and the possible cause.
    """
    ranks, state = group.size(), state_of(group)
    try:
        rows = mine.new_empty(ranks, len(mine))
        with state.turn:
            if state.is_gloo and mine.is_cpu:
                dist.all_to_all_single(rows.flatten(), mine.repeat(ranks), group=group)
            else:
                _all_gather(rows.flatten(), mine, group=group)
    except RuntimeError as error:
        error.add_note(
            f"gradparity: in the sync of {method} on rank {group.rank()} of {ranks}. "
            "Each of these ranks must call step() and update() the same number of "
            "times. If only this rank has a scaler, or ranks need not agree, pass "
            'sync_over="local" to it; if some ranks have one, or ranks train '
            "independent models, their process group or mesh."
        )
        raise
    return rows


def _if_shared(group: Any) -> dist.ProcessGroup | None:
    # new_group returns GroupMember.NON_GROUP_MEMBER on ranks outside of the group.
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER or group.size() < 2:
        return None
    return group  # type: ignore[no-any-return]


def _ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _ranks_in(group: dist.ProcessGroup) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return ()  # torch did not register it, or its world was torn down


def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    if len(ranks) == dist.get_world_size():
        return _if_shared(dist.group.WORLD)
    if dist.get_rank() not in ranks or len(ranks) < 2:
        return None
    world: Any = dist.group.WORLD
    parts = state_of(world).parts.setdefault(ranks, [])
    if not parts or not _ranks_in(parts[-1]):  # none yet, or the last was destroyed
        parts.append(_new_group_of_members(ranks, len(parts)))
    return _if_shared(parts[-1])


def _new_group_of_members(ranks: tuple[int, ...], number: int) -> dist.ProcessGroup:
    """Create a group of these ranks without a call on other ranks.

    The other ranks may be busy with another model.

    Args:
        ranks: members of the group.
        number: number of groups of these ranks that scalers made before.
    """
    name = "_".join(map(str, ("gradparity", *ranks, number)))
    # torch splits the communicator of a world that is bound to a device
    # (`init_process_group(device_id=...)`), and all ranks of the world must take part.
    world: Any = dist.group.WORLD
    device, world.bound_device_id = world.bound_device_id, None
    try:
        with groups_named(name):
            group: dist.ProcessGroup = dist.new_group(
                list(ranks), use_local_synchronization=True
            )
    finally:
        world.bound_device_id = device
    return group
