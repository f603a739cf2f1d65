"""Which ranks sync: from what the caller said to one process group.

[Note: Which ranks sync]
The group of a sync must never follow from what one rank happens to hold: a rank with
plain tensors only, or without gradients, would pick another group than its peers and
both would wait for ever. Nor can it be read off the parameters: stages of one pipeline
on separate meshes look exactly like independent models on separate meshes, and the
plain parameters of a pipeline stage look exactly like those of a replica. The two
mistakes do not weigh the same: syncing with too few ranks trains on silently with
different scales, syncing with too many is loud or harmless. So all ranks of the default
process group sync by default, whatever they hold; independent models in one world are
declared in the constructor.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .config import check_choice
from .errors import InvalidSettingError
from .grads import Number, parameters_of
from .torch_internals import device_types, root_mesh

AgreeOver = Literal["world", "mesh", "local"]
"""Which ranks sync; see `GradScaler`."""


class SyncGroup:
    """The ranks that sync, as one process group (or None: this rank alone).

    All ranks of a mesh of any number of axes; ``over`` is the rule to apply when
    neither ``process_group`` nor ``mesh`` is given.

    Raises:
        InvalidSettingError: ``over`` is unknown, or more than one source was given.
    """

    def __init__(
        self,
        over: AgreeOver = "world",
        process_group: dist.ProcessGroup | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        check_choice("agree_over", over, get_args(AgreeOver))
        given = {"process_group": process_group, "mesh": mesh}
        names = [name for name, value in given.items() if value is not None]
        names += [] if over == "world" else [f"agree_over={over!r}"]
        if len(names) > 1:
            raise InvalidSettingError(
                f"Got {' and '.join(names)}: each says which ranks sync. Pass only one "
                "of them."
            )
        self.over: AgreeOver = over
        self.process_group = process_group
        self._ranks = None if mesh is None else _ranks_of(mesh)
        # Root meshes seen so far, by the "mesh" rule only: they add up.
        self._seen: set[tuple[int, ...]] = set()

    def find(self, optimizer: Any) -> dist.ProcessGroup | None:
        """Return the group to sync over, None when this rank is on its own.

        Only the ``mesh`` rule reads the optimizer, which may be None.

        Raises:
            ValueError: the ``mesh`` rule finds no mesh, or several.
        """
        widest = self._widest
        if widest is None or self.process_group is not None:
            return widest
        if self._ranks is not None:
            return _group_of(self._ranks)
        return self._root_mesh(optimizer) if self.over == "mesh" else widest

    @property
    def is_distributed(self) -> bool:
        """Whether there may be other ranks to sync with."""
        return self._widest is not None

    @property
    def _widest(self) -> dist.ProcessGroup | None:
        if self.process_group is not None:
            return _if_shared(self.process_group)
        if self.over == "local" or not dist.is_initialized():
            return None
        return _if_shared(dist.group.WORLD)

    def find_known(self) -> dist.ProcessGroup | None:
        """Return what `find` knows without any parameters, None if it needs them."""
        return self.find(None) if self.over != "mesh" or self._seen else None

    def __getstate__(self) -> dict[str, Any]:
        # A process group cannot leave its process: its ranks can.
        if self.process_group is None:
            return self.__dict__
        ranks: Any = _ranks_in(self.process_group)
        # The whole world stays "the whole world", also in a world of another size.
        ranks = ranks if 0 < len(ranks) < dist.get_world_size() else None
        return {**self.__dict__, "process_group": None, "_ranks": ranks}

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncGroup:
        # Inside one process the copy shares the group instead of losing it.
        twin = SyncGroup(self.over, self.process_group)
        twin._ranks, twin._seen = self._ranks, set(self._seen)
        return twin

    def _root_mesh(self, optimizer: Any) -> dist.ProcessGroup | None:
        parameters = () if optimizer is None else parameters_of(optimizer)
        held = [getattr(parameter, "device_mesh", None) for parameter in parameters]
        meshes = {id(mesh): mesh for mesh in held if mesh is not None}
        self._seen.update(_ranks_of(root_mesh(mesh)) for mesh in meshes.values())
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


def message_device(
    group: dist.ProcessGroup, preferred: str, scale: Number
) -> torch.device:
    """Return the device on which ``group`` exchanges a message.

    Its type must be the same on every rank (a group may have one backend per device
    type), so it follows from the scaler's ``device`` argument, ``preferred``, and the
    group alone, never from where this rank's gradients are. The scale decides which of
    several CUDA devices.

    Raises:
        NotImplementedError: the group serves neither CPU nor CUDA.
    """
    served = device_types(group)
    if preferred == "cuda" and "cpu" in served and not torch.cuda.is_available():
        preferred = "cpu"  # of a scaler that has disabled itself
    kinds = [kind for kind in (preferred, *served, "cpu") if kind in ("cpu", "cuda")]
    kind = next((kind for kind in kinds if kind in served or not served), None)
    if kind is None:
        raise NotImplementedError(
            f"Ranks sync over CPU or CUDA; this process group serves {served}. "
            'Pass process_group= with a gloo group, or agree_over="local".'
        )
    if kind == "cuda" and isinstance(scale, torch.Tensor) and scale.is_cuda:
        return scale.device
    return torch.device(kind)


def _if_shared(group: Any) -> dist.ProcessGroup | None:
    # GroupMember.NON_GROUP_MEMBER is what new_group gives to outsiders.
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER or group.size() < 2:
        return None
    return group  # type: ignore[no-any-return]


def _ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def _ranks_in(group: dist.ProcessGroup) -> tuple[int, ...]:
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return ()  # not one that torch registered, or of a world that was torn down


# Groups made here, by their ranks.
_made: dict[tuple[int, ...], Any] = {}


def _group_of(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    if len(ranks) == dist.get_world_size():
        return _if_shared(dist.group.WORLD)
    if dist.get_rank() not in ranks or len(ranks) < 2:
        return None
    if ranks not in _made or not _ranks_in(_made[ranks]):
        # Only the members take part: the other ranks may be busy with another model.
        _made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return _if_shared(_made[ranks])
