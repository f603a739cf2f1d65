"""Settings of a marked test.

The marker wins over the command line, which wins over the ini file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import pytest

from ..environment import cores
from ..spec import WorldSpec

MARKER_HELP = (
    "world(world_size=2, backend='gloo', device='cpu', isolation='pool', "
    "timeout_s=60): run the test's body on every rank; world_size may be a list, or "
    "'all' for as many ranks as there are GPUs or cores"
)

ALL = "all"
"""World size for as many ranks as possible: all ranks of torchrun, else one rank for
each device or, on the CPU, for each core."""

DEFAULT_SIZE = 2

_MIN_SIZE = "min_size"
_ALLOWED = frozenset((*(field.name for field in fields(WorldSpec)), _MIN_SIZE))

_DEFAULTS = {
    "timeout_s": "limit of a test on ranks, in seconds",
    "backend": "backend of the default process group, as torch takes it",
    "isolation": "isolation of tests on ranks: pool, group or process",
}
"""Settings that the command line and the ini file can set for markers."""


@dataclass(frozen=True)
class Wanted:
    """World that a test needs."""

    spec: WorldSpec
    too_small: str = ""
    """Reason why there are fewer ranks here than the test needs; empty if there are
    enough."""


def add_options(parser: pytest.Parser, group: pytest.OptionGroup) -> None:
    """Add a command-line option and an ini entry for each default."""
    for name, text in _DEFAULTS.items():
        text = f"{text}, unless a marker sets it"
        parser.addini(f"world_{name}", text, default=None)
        option = f"--world-{name.replace('_', '-')}"
        group.addoption(option, metavar=name.upper(), help=text)


def defaults_of(config: pytest.Config) -> dict[str, Any]:
    """Return the settings of the command line and the ini file.

    Raises:
        UsageError: A setting has a wrong value.
    """
    defaults: dict[str, Any] = {}
    for name in _DEFAULTS:
        option = f"world_{name}"
        value = config.getoption(option, None) or config.getini(option)
        if value:
            defaults[name] = value
    try:
        if "timeout_s" in defaults:
            defaults["timeout_s"] = float(defaults["timeout_s"])
        spec_of(1, {}, defaults)
    except ValueError as error:
        raise pytest.UsageError(
            f"world_{', world_'.join(defaults)} of the command line or the "
            f"ini file: {error}"
        ) from None
    return defaults


def settings_of(markers: Iterable[pytest.Mark]) -> dict[str, Any]:
    """Return the settings of the markers of a test.

    Args:
        markers: The closest one first, which wins: that of a function, then those of
            its class and module.

    Raises:
        TypeError: A marker has several positional arguments, or names the size twice.
    """
    settings: dict[str, Any] = {}
    for marker in markers:
        own = {**marker.kwargs}
        if len(marker.args) > 1 or (marker.args and "world_size" in own):
            raise TypeError(
                f"@pytest.mark.world takes one size, got {marker.args} {own}: name the "
                "other settings, as in world(2, timeout_s=60)"
            )
        if marker.args:
            own["world_size"] = marker.args[0]
        if "world_size" in settings:
            own.pop(_MIN_SIZE, None)  # it belongs to the size of its marker
        settings = own | settings
    return settings


def sizes_of(settings: Mapping[str, Any]) -> list[Any]:
    """Return the world sizes of a test.

    Raises:
        ValueError: There is no size, or the minimum size is not a positive int, or it
            is given although the size is fixed.
    """
    size = settings.get("world_size", DEFAULT_SIZE)
    sizes = list(size) if isinstance(size, list | tuple) else [size]
    if not sizes:
        raise ValueError("world_size has no size")
    if _MIN_SIZE in settings:
        least = settings[_MIN_SIZE]
        if isinstance(least, bool) or not isinstance(least, int) or least < 1:
            raise ValueError(f"min_size must be an int of at least 1, got {least!r}")
        if ALL not in sizes:
            raise ValueError(
                f'min_size is for world_size="all", got world_size={size!r}'
            )
    return sizes


def spec_of(
    size: Any, settings: Mapping[str, Any], defaults: Mapping[str, Any]
) -> WorldSpec:
    """Return the world of a marker at one size; ``ALL`` counts as one rank.

    Raises:
        TypeError: A setting does not exist.
        ValueError: A setting has a wrong value.
    """
    unknown = sorted(set(settings) - _ALLOWED)
    if unknown:
        close = difflib.get_close_matches(unknown[0], _ALLOWED, n=1)
        raise TypeError(
            f"@pytest.mark.world has no setting {', '.join(unknown)}; "
            + "".join(f"did you mean {name}? " for name in close)
            + f"It has {', '.join(sorted(_ALLOWED))}"
        )
    if isinstance(size, str) and size != ALL:
        raise ValueError(f'world_size must be an int or "{ALL}", got {size!r}')
    merged = {**defaults, **settings, "world_size": 1 if size == ALL else size}
    merged.pop(_MIN_SIZE, None)
    return WorldSpec(**merged)


def world_of(
    size: Any,
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any],
    torchrun_size: int | None,
) -> Wanted:
    """Return the world of a test; for ``ALL`` with as many ranks as available.

    Args:
        size: One of ``sizes_of``.
        settings: Settings of the marker.
        defaults: Result of ``defaults_of``.
        torchrun_size: Number of torchrun's ranks; None without torchrun.

    Raises:
        TypeError: As for ``spec_of``.
        ValueError: As for ``spec_of``.
    """
    if size != ALL:
        return Wanted(spec_of(size, settings, defaults))
    device = spec_of(size, settings, defaults).device
    if torchrun_size is not None:
        count, counted = torchrun_size, "ranks of torchrun"
    elif device == "cuda":
        from ..parent.slots import visible_gpus

        count, counted = len(visible_gpus()), "visible CUDA devices"
    elif device == "cpu":
        count, counted = cores(), "CPU cores"
    else:
        import torch

        count = torch.get_device_module(device).device_count()
        counted = f"visible {device.upper()} devices"
    least = settings.get(_MIN_SIZE, 1)
    if count < least:
        reason = f"needs at least {least} {counted}, and there are {count}"
        return Wanted(spec_of(least, settings, defaults), reason)
    return Wanted(spec_of(count, settings, defaults))
