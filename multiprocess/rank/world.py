"""What a function on a rank can know about its world."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from ..outcomes import Place

if TYPE_CHECKING:  # the parent must not pay for torch
    import torch
    from torch.distributed import Store
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(eq=False, kw_only=True)
class World:
    """One rank's view of its world."""

    rank: int
    """This rank, from 0."""

    world_size: int
    """Number of ranks."""

    backend: str
    """Backend of the default process group."""

    device: torch.device
    """Where this rank keeps its tensors."""

    _make_store: Callable[[], Store] = field(repr=False)
    """Opens the store of the current call."""

    _meshes: dict[object, DeviceMesh] = field(default_factory=dict, repr=False)
    _store: Store | None = field(default=None, repr=False)

    @property
    def store(self) -> Store:
        """A key-value store shared by the ranks, empty at the start of each call."""
        if self._store is None:
            self._store = self._make_store()
        return self._store

    def mesh(
        self, shape: tuple[int, ...], names: tuple[str, ...] | None = None
    ) -> DeviceMesh:
        """Return the mesh of this shape; made once per process group, then reused.

        A collective call the first time: every rank must ask for the same meshes in the
        same order.

        Args:
            shape: Length of each axis; the product is the world's size.
            names: Name of each axis.
        """
        from torch.distributed.device_mesh import init_device_mesh

        key = (tuple(shape), tuple(names) if names else None)
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(
                self.device.type, key[0], mesh_dim_names=key[1]
            )
        return self._meshes[key]

    def _wait_until_all_are_done(self, limit_s: float) -> None:
        """Wait until every rank calls this, or the limit is over."""
        from .flight_recorder import placed

        self.store.set(f"done/{self.rank}", "")
        with placed(Place.DONE), contextlib.suppress(RuntimeError):  # over the limit
            self.store.wait(
                [f"done/{rank}" for rank in range(self.world_size)],
                timedelta(seconds=limit_s),
            )

    def _new_call(self) -> None:
        self._store = None

    def _new_group(self) -> None:
        self._meshes.clear()


_current: World | None = None
_of_thread = threading.local()
"""``world``: of a rank that is a thread."""


def current_world() -> World:
    """Return the world of the calling rank.

    Raises:
        RuntimeError: Outside a rank.
    """
    current = getattr(_of_thread, "world", _current)
    if current is None:
        raise RuntimeError(
            "no world is active: current_world() works inside a function that "
            "Cluster.run calls, or in a test marked with @pytest.mark.world"
        )
    return current


def _set_current(world: World | None) -> None:
    global _current
    _current = world
