"""World of a rank, for the function that runs on it."""

from __future__ import annotations

import contextlib
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..messages import pickled
from ..outcomes import Failed, Place

if TYPE_CHECKING:  # importing torch would slow the parent down
    import torch
    from torch.distributed import ProcessGroup, Store
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@dataclass(eq=False, kw_only=True, repr=False)
class World:
    """World of this rank, as ``current_world`` returns it."""

    rank: int
    """Number of this rank, from 0."""

    world_size: int
    """Number of ranks."""

    backend: str
    """Backend of the default process group."""

    device: torch.device
    """Device of this rank's tensors."""

    _make_store: Callable[[], Store]
    """Opens the store of the current call."""

    _begin: Callable[[], None]
    """Tells the parent that this rank has imported the test. The clock of the call
    starts when all ranks have done so. Threads and settings that the import left count
    as present before the call."""

    _fail: Callable[[Failed], None]
    """Reports a failure of the test to the parent before the teardown, or a failure of
    one of its parts."""

    _trace_crashes: Callable[[], None]
    """Makes faulthandler write the stacks of a crash where the parent reads them."""

    _meshes: dict[object, DeviceMesh] = field(default_factory=dict)
    _default_group: Callable[[], ProcessGroup | None] = lambda: None
    """Weak reference to the default process group to which the meshes belong."""

    _store: Store | None = None
    _onces: int = 0

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, world_size={self.world_size})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # else Hypothesis would show all fields

    @property
    def store(self) -> Store:
        """Key-value store shared by the ranks; empty at the start of each call."""
        if self._store is None:
            self._store = self._make_store()
        return self._store

    def once(self, make: Callable[[], T]) -> T:
        """Return the result of ``make`` on rank 0; the other ranks do not call it.

        This is a collective call: every rank must make the same calls in the same
        order. The value is pickled. If ``make`` raises or skips, all ranks do.

        Args:
            make: Called on rank 0, with no arguments.

        Example:
            >>> folder = world.once(lambda: tmp_path)
        """
        __tracebackhide__ = True
        key = f"once/{self._onces}"
        self._onces += 1
        if self.rank == 0:
            store: Any = self.store  # accepts bytes, unlike its stub
            try:
                value = make()
                store.set(key, pickled((True, value)))
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
                store.set(key, pickled((False, (text, _for_all(error)))))
                raise
            return value
        is_made, value = pickle.loads(self.store.get(key))
        if not is_made:
            from torch.distributed import DistError  # the error of another rank

            text, data = value
            cause = DistError(f"rank 0 could not make the value: {text}")
            if data is None:
                raise cause
            raise _of_rank_0(data) from cause
        return cast("T", value)

    def mesh(
        self, shape: tuple[int, ...], names: tuple[str, ...] | None = None
    ) -> DeviceMesh:
        """Return the mesh of this shape; created once in a process group, then reused.

        The first call is collective: every rank must ask for the same meshes in the
        same order. A new default process group has new meshes.

        Args:
            shape: Length of each axis; the product is the world's size.
            names: Name of each axis.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        key = (tuple(shape), tuple(names) if names else None)
        if self._default_group() is not dist.group.WORLD:
            self._forget_meshes()
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(
                self.device.type, key[0], mesh_dim_names=key[1]
            )
            # The first mesh makes the default group if there is none.
            self._default_group = weakref.ref(dist.group.WORLD)
        return self._meshes[key]

    def _wait_until_all_are_done(self, limit_s: float) -> None:
        """Wait until every rank has called this method, or for ``limit_s`` seconds."""
        from .flight_recorder import placed

        self.store.set(f"done/{self.rank}", "")
        # RuntimeError: the limit has passed
        with placed(Place.DONE), contextlib.suppress(RuntimeError):
            self.store.wait(
                [f"done/{rank}" for rank in range(self.world_size)],
                timedelta(seconds=limit_s),
            )

    def _new_call(self) -> None:
        self._store = None
        self._onces = 0

    def _forget_meshes(self) -> None:
        self._meshes.clear()


def _for_all(error: BaseException) -> bytes | None:
    """Return an error pickled for the other ranks; None if they cannot raise it."""
    from .endings import early_end

    early = early_end(error)
    if early is None and not isinstance(error, Exception):
        return None
    with contextlib.suppress(Exception, SystemExit):
        # pytest's own exceptions cannot be pickled
        pickle.loads(data := pickled(error if early is None else early))
        return data
    return None


def _of_rank_0(data: bytes) -> BaseException:
    from .endings import early_error

    error = pickle.loads(data)
    return error if isinstance(error, BaseException) else early_error(error)


_current: World | None = None


def current_world() -> World:
    """Return the world of the calling rank.

    Raises:
        RuntimeError: The caller is not on a rank.
    """
    if _current is None:
        raise RuntimeError(
            "no world is active: current_world() works inside a function that "
            "Cluster.run calls, and in a test marked with @pytest.mark.world or of "
            "a TestCase, run by pytest"
        )
    return _current


def _set_current(world: World | None) -> None:
    global _current
    _current = world
