"""Coverage in ranks: if coverage.py measures the parent, it measures its ranks.

1. The parent's settings travel to the ranks with the context of each call.
2. A rank measures from when it joins its world, into a data file of its own beside the
   parent's, as coverage's parallel mode names them.
3. It saves before it answers: a rank may be killed at any time after that.

pytest-cov combines the files by itself; elsewhere ``coverage combine`` does.
"""

from __future__ import annotations

import os
import sys
from typing import Any

# What decides which lines count. Reports are made by the parent, so their options do
# not travel.
_SETTINGS = (
    "run:branch",
    "run:core",
    "run:data_file",
    "run:include",
    "run:omit",
    "run:plugins",
    "run:relative_files",
    "run:source",
    "run:source_pkgs",
)

Settings = tuple[tuple[str, Any], ...]


def current_settings() -> Settings:
    """Return the coverage settings of this process; empty if it is not measured."""
    coverage = sys.modules.get("coverage")
    current = coverage and coverage.Coverage.current()
    if not current:
        return ()
    found = {name: current.get_option(name) for name in _SETTINGS}
    found["run:data_file"] = os.path.abspath(found["run:data_file"])
    return tuple(found.items())


class RankCoverage:
    """Coverage of one rank, measured as its parent is."""

    def __init__(self) -> None:
        self._settings: Settings = ()
        self._coverage: Any = None

    def apply(self, settings: Settings) -> None:
        """Start, continue or end measuring, as the parent does."""
        if settings == self._settings:
            return
        self.save()  # what was measured by the settings so far
        if self._coverage is not None:
            self._coverage.stop()
        self._settings = settings
        self._coverage = _started(settings) if settings else None

    def save(self) -> None:
        """Write what was measured so far."""
        if self._coverage is not None:
            self._coverage.save()


def _started(settings: Settings) -> Any:
    import coverage

    inherited = coverage.Coverage.current()
    if inherited is not None:  # the forkserver's, by coverage's own patch
        inherited.stop()
    # No file: the parent's settings are complete, and the rank's folder may have
    # another one. The suffix keeps each rank's data in a file of its own.
    made = coverage.Coverage(config_file=False, data_suffix=True)
    for name, value in settings:
        made.set_option(name, value)
    # Much is imported already, and a rank may have nothing to do with the source.
    made.set_option(
        "run:disable_warnings", ["module-not-measured", "no-data-collected"]
    )
    made.start()
    return made
