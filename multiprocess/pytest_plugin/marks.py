"""``@pytest.mark.world(...)`` as a value."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from ..spec import WorldSpec

MARKER_HELP = (
    "world(size=2, backend='gloo', device='cpu', isolation='pool', timeout_s=60): "
    "run the test's body on every rank of a world; size may be a list of sizes"
)

DEFAULT_SIZE = 2

_ALLOWED = frozenset(field.name for field in fields(WorldSpec))


def sizes_of(args: Sequence[Any], settings: Mapping[str, Any]) -> list[int]:
    """Return the world sizes that a marker asks for.

    Raises:
        TypeError: More than one positional argument.
    """
    if len(args) > 1 or (args and "size" in settings):
        raise TypeError("@pytest.mark.world takes one size; name the other settings")
    size = args[0] if args else settings.get("size", DEFAULT_SIZE)
    return list(size) if isinstance(size, list | tuple) else [size]


def spec_of(size: int, settings: Mapping[str, Any]) -> WorldSpec:
    """Return what a marker asks for at one size.

    Raises:
        TypeError: A setting that does not exist.
        ValueError: A setting with a wrong value.
    """
    unknown = sorted(set(settings) - _ALLOWED)
    if unknown:
        close = difflib.get_close_matches(unknown[0], _ALLOWED, n=1)
        raise TypeError(
            f"@pytest.mark.world has no setting {', '.join(unknown)}; "
            + "".join(f"did you mean {name}? " for name in close)
            + f"It has {', '.join(sorted(_ALLOWED))}"
        )
    return WorldSpec(**{**settings, "size": size})


def kind_of(spec: WorldSpec) -> WorldSpec:
    """Return the spec without what may differ between calls on one cluster."""
    return replace(spec, timeout_s=60.0, isolation="pool")
