"""Types of command-line options: each converts a text, or raises with the reason."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..status import unknown

__all__ = [
    "PATHS",
    "Once",
    "count",
    "file",
    "folder",
    "names",
    "natural",
    "noise_runs",
    "one_of",
    "positive",
    "seconds",
    "specs",
    "step_range",
    "workload_spec",
]


class Once(argparse.Action):
    """Store a value, and reject a different second one, which would hide the first."""

    def __call__(
        self, parser: Any, parsed: Any, value: Any, option: Any = None
    ) -> None:
        """Store ``value``; raise if another value was given before."""
        before = getattr(parsed, self.dest)
        if before not in (self.default, value):
            text = f"a run has one workload: got {before} and {value}"
            raise argparse.ArgumentError(self, text)
        setattr(parsed, self.dest, value)


def workload_spec(text: str) -> str:
    """Check the form of a workload, ``module:attribute`` or empty."""
    if text and not all(text.partition(":")):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not module:attribute, such as mypackage.stack:Workload"
        )
    return text


def folder(text: str) -> Path:
    """Return a folder that exists or can be created."""
    path = Path(text)
    # Refuse this now, not after a run of minutes.
    for place in (path, *path.parents):
        if place.is_dir():
            return path
        if place.exists():
            raise argparse.ArgumentTypeError(f"{place} is a file, expected a folder")
    return path


def file(text: str) -> Path:
    """Return a file that can be written; its folder may be missing."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder, expected a file")
    return folder(str(path.parent)) / path.name


PATHS = (Path, folder, file)
"""Types of options whose value is a file or a folder."""


def one_of(what: str, words: Sequence[str]) -> Callable[[str], str]:
    """Return an argparse type that accepts only the given words."""

    def word(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(unknown(what, text, words))
        return text

    return word


def count(text: str) -> int:
    """Convert a number of ranks, 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more ranks, got {text}")
    return int(text)


def positive(text: str) -> float:
    """Convert a number above 0."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be positive, got {text}")
    return number


def names(text: str) -> list[str]:
    """Split ``a,b`` into names; at least one is required."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise argparse.ArgumentTypeError(f"needs a name, got {text!r}")
    return parts


def specs(text: str) -> list[str]:
    """Split a list of scalers; each is ``module:attribute`` or ``none``."""
    parts = names(text)
    for spec in parts:
        if spec != "none" and not all(spec.partition(":")):
            raise argparse.ArgumentTypeError(
                f"{spec!r} is not module:attribute, such as torch.amp:GradScaler"
            )
    return parts


def step_range(text: str) -> tuple[int | None, int]:
    """Parse ``3``, a number of steps, as (None, 3), and ``100:104`` as (100, 104)."""
    start, colon, stop = text.rpartition(":")
    if stop.isdecimal() and (start.isdecimal() if colon else True):
        steps = int(start) if colon else None, int(stop)
        if steps[1] > (steps[0] or 0):
            return steps
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither a number of steps, at least 1, nor a range such as "
        "100:104"
    )


def natural(text: str) -> int:
    """Convert an integer of 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return int(text)


def noise_runs(text: str) -> int:
    """Convert the number of a recording's noise runs: 0, or 2 and more."""
    if (runs := natural(text)) == 1:
        raise argparse.ArgumentTypeError(
            "one run with moved weights shows too little noise for a bound: give 2 or "
            "more, or 0 for the other side"
        )
    return runs


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds(text: str) -> float:
    """Convert ``60s``, ``5m`` or ``1h`` to seconds."""
    number, unit = text[:-1], text[-1:]
    try:
        duration = float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        duration = 0.0
    if not 0 < duration < float("inf"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a positive time such as 60s, 5m or 1h"
        )
    return duration
