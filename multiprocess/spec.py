"""Settings of a world and of a call: size, backend, device, isolation, limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, get_args

Isolation = Literal["pool", "group", "process"]

ISOLATIONS: tuple[str, ...] = get_args(Isolation)

# Device types of the two usual backends. To ask torch for them, a parent would import
# torch, which takes a second.
_USUAL = MappingProxyType({"gloo": ("cpu", "cuda"), "nccl": ("cuda",)})

_TYPES = MappingProxyType(
    {
        int: ("world_size", "threads", "seed", "output_limit"),
        float: ("timeout_s", "start_timeout_s", "grace_s"),
        str: ("backend", "device", "pg_options"),
        bool: ("share_devices", "default_group"),
    }
)
"""Maps a type to the settings of ``WorldSpec`` that must have this type."""

_NOUNS = MappingProxyType(
    {int: "an int", float: "a number", str: "a str", bool: "a bool"}
)


@dataclass(frozen=True, kw_only=True)
class WorldSpec:
    """Settings of one world of ranks; validated on creation."""

    world_size: int
    """Number of ranks, at least 1."""

    backend: str = "gloo"
    """Backend of the default process group, as ``init_process_group`` takes it: a name,
    or one for each type of device, such as ``"cpu:gloo,cuda:nccl"``."""

    device: str = ""
    """Type of the device of each rank, such as ``"cuda"``. By default "cpu" if the
    backend supports CPU tensors, else the first type that it supports."""

    pg_options: str = ""
    """Function ``"module:function"`` that returns the ``pg_options`` of
    ``init_process_group``. Each rank calls it for each default group."""

    timeout_s: float = 60.0
    """Time limit of one call; it starts when all ranks are ready."""

    isolation: Isolation = "pool"
    """Processes and state that a call shares with earlier ones: "pool" keeps ranks and
    process group, "group" only the ranks, "process" nothing."""

    start_timeout_s: float = 120.0
    """Time limit of each part of the start: the forkserver's imports, joining the
    process group, the import of a test."""

    grace_s: float = 0.7
    """Seconds that the other ranks have, after the first fault, to end by themselves.
    Ranks that are then made to leave the function have as long for ``finally`` and
    teardown."""

    threads: int = 1
    """Intra-op threads of each rank; few, because the ranks share the cores."""

    seed: int = 0
    """Seed of all generators on every rank, set before each call."""

    output_limit: int = 64 * 1024
    """Number of bytes kept of the head, and of the tail, of one rank's output in a
    call."""

    share_devices: bool = False
    """True if several ranks may share a CUDA device; needs NCCL 2.31 or later."""

    visible_devices: tuple[str, ...] = ()
    """CUDA devices that the ranks may use; by default all of the parent's."""

    default_group: bool = True
    """True if a default process group exists when a call begins; otherwise the function
    creates and destroys its own."""

    preload: tuple[str, ...] = ()
    """Modules that the forkserver imports once, before it forks ranks."""

    @property
    def kind(self) -> WorldSpec:
        """Copy of this spec with default ``timeout_s`` and ``isolation``."""
        return replace(self, timeout_s=60.0, isolation="pool")

    def __post_init__(self) -> None:
        for kind, names in _TYPES.items():
            for name in names:
                _check_type(name, getattr(self, name), kind)
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {self.world_size}")
        for name in ("timeout_s", "start_timeout_s", "threads", "output_limit"):
            check_positive(name, getattr(self, name))
        if not 0 <= self.grace_s < math.inf:
            raise ValueError(f"grace_s must be finite and not negative: {self.grace_s}")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must have 64 bits at most, got {self.seed}")
        check_isolation(self.isolation)
        devices = devices_of(self.backend)
        default = "cpu" if "cpu" in devices else devices[0]
        object.__setattr__(self, "device", self.device or default)
        if self.device not in devices:
            raise ValueError(
                f'backend "{self.backend}" needs device='
                + " or ".join(f'"{device}"' for device in devices)
                + f', got device="{self.device}"'
            )
        module, _, function = self.pg_options.partition(":")
        if self.pg_options and not (module and function):
            raise ValueError(
                f'pg_options must be "module:function", got "{self.pg_options}"'
            )
        for name in ("preload", "visible_devices"):
            _make_tuple(self, name)


@dataclass(frozen=True, kw_only=True)
class CallOptions:
    """Options that may differ between calls on one cluster."""

    timeout_s: float
    """Time limit of the call; it starts when all ranks are ready."""

    isolation: Isolation = "pool"
    """Processes and state that the call shares with earlier ones: see ``WorldSpec``."""

    live: bool = False
    """True to show the ranks' output while they run, each line with its rank."""

    is_test: bool = False
    """True for a test. The ranks import the test first, within ``start_timeout_s``; its
    time limit starts when all ranks have called ``World._begin``. A test must not
    affect the next one: if it leaves a thread running, or a collective that was not
    waited for, the ranks are replaced."""

    def __post_init__(self) -> None:
        check_isolation(self.isolation)
        check_positive("timeout_s", self.timeout_s)


@lru_cache
def devices_of(backend: str) -> tuple[str, ...]:
    """Return the device types that a backend of torch supports.

    Raises:
        ValueError: torch has no such backend.
    """
    if backend in _USUAL:
        return _USUAL[backend]
    from torch.distributed import Backend, BackendConfig

    names = [name for name in Backend.backend_list if name != Backend.UNDEFINED]
    # BackendConfig accepts any name, since a backend may be registered later.
    if ":" not in backend and backend.lower() not in names:
        raise ValueError(
            f"backend must be one of {', '.join(names)}, or such as "
            f"cpu:gloo,cuda:nccl; got {backend!r}"
        )
    backends = BackendConfig(Backend(backend)).get_device_backend_map()
    for name in backends.values():
        if name not in names:
            raise ValueError(
                f"backend {backend!r} has {name!r}, expected one of {', '.join(names)}"
            )
    return tuple(backends)


def check_isolation(value: str) -> None:
    """Raise ``ValueError`` unless ``value`` names an isolation."""
    if value not in ISOLATIONS:
        raise ValueError(
            f"isolation must be one of {', '.join(ISOLATIONS)}; got {value!r}"
        )


def check_positive(name: str, value: float) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless a number is above 0 and finite."""
    _check_type(name, value, float)
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0 and finite, got {value!r}")


def _check_type(name: str, value: object, kind: type) -> None:
    """Raise ``TypeError`` unless a setting has type ``kind``; an int is a float."""
    is_of_kind = isinstance(value, (int, float) if kind is float else kind)
    if not is_of_kind or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{name} must be {_NOUNS[kind]}, got {value!r}")


def _make_tuple(spec: WorldSpec, name: str) -> None:
    """Convert a list in a setting to a tuple, which is hashable.

    Raises:
        TypeError: The setting is not a list or tuple of strings.
    """
    value = getattr(spec, name)
    if not isinstance(value, list | tuple) or not {*map(type, value)} <= {str}:
        raise TypeError(f"{name} must be a tuple of names, got {value!r}")
    object.__setattr__(spec, name, tuple(value))
