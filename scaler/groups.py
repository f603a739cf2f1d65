"""Which ranks must agree: from what the caller said to one process group.

[Note: Who agrees]
The group of an agreement must never follow from what one rank happens to hold: a rank
with plain tensors only, or without gradients, would pick another group than its peers
and both would wait for ever. Nor can it be read off the parameters: stages of one
pipeline on separate meshes look exactly like independent models on separate meshes, and
the plain parameters of a pipeline stage look exactly like those of a replica. The two
mistakes do not weigh the same: agreeing with too few ranks trains on silently with
different scales, agreeing with too many is loud or harmless. So, unless told otherwise,
all ranks of the default process group agree, whatever they hold; who trains
independent models in one world says so once, in the constructor.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AgreeOver", "Reach", "message_device"]

AgreeOver = Literal["world", "mesh", "local"]
"""``world``: the default process group; ``mesh``: the root mesh of the DTensor
parameters; ``local``: nobody, no collective at all."""

_log = logging.getLogger("gradparity.scaler")
_HAS_GROUPS = dist.is_available()


class Reach:
    """The ranks that must agree, as one process group (or None: this rank alone).

    Args:
        over: the rule to apply when neither ``process_group`` nor ``mesh`` is given.
        process_group: the group itself; wins over everything.
        mesh: a mesh of any number of axes; all its ranks agree.

    Raises:
        ValueError: ``over`` is unknown, or more than one source was given.
    """

    def __init__(
        self,
        over: AgreeOver = "world",
        process_group: ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        if over not in _RULES:
            raise ValueError(
                f"agree_over must be one of {', '.join(map(repr, _RULES))}, "
                f"got {over!r}."
            )
        if process_group is not None and mesh is not None:
            raise ValueError("Give process_group or mesh, not both.")
        self.over: AgreeOver = over
        self.process_group = process_group
        self._ranks: tuple[int, ...] | None = None
        if mesh is not None:
            self._ranks = _ranks_of(mesh)
        # Meshes seen so far, by the "mesh" rule only. They add up over the optimizers.
        self._seen: set[tuple[int, ...]] = set()
        self._told = False

    def group(self, parameters: Callable[[], Iterable[Any]]) -> ProcessGroup | None:
        """Return the group to agree over, None when this rank is on its own.

        Args:
            parameters: gives the parameters at hand; asked only by the ``mesh`` rule.
        """
        if self.process_group is not None:
            return _if_shared(self.process_group)
        if not (_HAS_GROUPS and dist.is_initialized()):
            return None
        if self._ranks is not None:
            return _group_of(self._ranks)
        return _RULES[self.over](self, parameters)

    @property
    def is_known(self) -> bool:
        """Whether `group` can answer without any parameters."""
        given = self.process_group is not None or self._ranks is not None
        return given or self.over != "mesh" or bool(self._seen)

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot leave its process: its ranks can.
        state = self.__dict__.copy()
        if self.process_group is not None:
            state["process_group"] = None
            state["_ranks"] = _ranks_of_group(self.process_group)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Reach:
        # Inside one process the copy shares the group instead of losing it.
        twin = Reach(self.over, self.process_group)
        twin._ranks, twin._seen = self._ranks, set(self._seen)
        return twin

    def _world(self, parameters: Callable[[], Iterable[Any]]) -> ProcessGroup | None:
        group = _if_shared(dist.group.WORLD)
        if group is not None and not self._told:
            self._told = True
            _tell_if_mesh_is_smaller(group.size(), parameters())
        return group

    def _mesh(self, parameters: Callable[[], Iterable[Any]]) -> ProcessGroup | None:
        self._seen.update(_root_meshes(parameters()))
        if not self._seen:
            raise ValueError(
                'agree_over="mesh" needs DTensor parameters and found none on rank '
                f"{dist.get_rank()}. Pass mesh= or process_group= to the scaler."
            )
        widest = max(self._seen, key=len)
        if any(not set(ranks) <= set(widest) for ranks in self._seen):
            raise ValueError(
                f"No mesh of the parameters covers the others: {sorted(self._seen)}. "
                "Pass mesh= or process_group= to the scaler."
            )
        return _group_of(widest)

    def _local(self, parameters: Callable[[], Iterable[Any]]) -> ProcessGroup | None:
        return None


_Rule = Callable[[Reach, Callable[[], Iterable[Any]]], "ProcessGroup | None"]
_RULES: dict[str, _Rule] = {
    "world": Reach._world,
    "mesh": Reach._mesh,
    "local": Reach._local,
}


def message_device(group: ProcessGroup, preferred: str) -> torch.device:
    """Return the device on which ``group`` exchanges a message.

    It must be the same type on every rank (a group may have one backend per device
    type), so it follows from the scaler's ``device`` argument and the group alone,
    never from where this rank's gradients are.
    """
    served = [device.type for device in getattr(group, "_device_types", ())]
    kind = preferred if preferred in served or not served else served[0]
    if kind == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(kind)


def _if_shared(group: Any) -> ProcessGroup | None:
    # GroupMember.NON_GROUP_MEMBER is what new_group gives to outsiders.
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER or group.size() < 2:
        return None
    return group  # type: ignore[no-any-return]


def _ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _ranks_of_group(group: ProcessGroup) -> tuple[int, ...] | None:
    try:
        ranks = tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):  # not one that torch registered
        return None
    # The whole world stays "the whole world", also in a world of another size.
    return None if len(ranks) == dist.get_world_size() else ranks


# Groups made here, by their ranks.
_made: dict[tuple[int, ...], Any] = {}


def _group_of(ranks: Sequence[int]) -> ProcessGroup | None:
    ranks = tuple(ranks)
    if len(ranks) == dist.get_world_size():
        return _if_shared(dist.group.WORLD)
    if dist.get_rank() not in ranks or len(ranks) < 2:
        return None
    if not _is_alive(_made.get(ranks)):
        # Only the members take part: the other ranks may be busy with another model.
        _made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _if_shared(_made[ranks])


def _is_alive(group: Any) -> bool:
    # False for a group of a world that was torn down meanwhile.
    try:
        return group is not None and bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return False


def _root_meshes(parameters: Iterable[Any]) -> set[tuple[int, ...]]:
    meshes = {
        id(mesh): mesh
        for parameter in parameters
        if (mesh := getattr(parameter, "device_mesh", None)) is not None
    }
    return {_ranks_of(mesh._get_root_mesh()) for mesh in meshes.values()}


def _tell_if_mesh_is_smaller(world_size: int, parameters: Iterable[Any]) -> None:
    # Should the other ranks never come, this line says why the run stands still.
    for ranks in _root_meshes(parameters):
        if len(ranks) < world_size:
            _log.info(
                "the parameters live on ranks %s of %d; all %d ranks agree on every "
                'step. If the others train another model, pass agree_over="mesh".',
                list(ranks),
                world_size,
                world_size,
            )
