"""The session's own import of torch is the forkserver's, too: forked right after it.

torch takes a second to import. A pytest session with world tests imports it because
their modules do; a server that is forked off at that moment need not do so again. It is
as clean as a fresh one: no test module has come further than its import of torch.

1. pytest is about to collect a module whose text speaks of ``mark.world``; nothing has
   imported torch yet. Then the loader of torch is watched.
2. When torch has been loaded, this process is looked at. Where it may be forked, the
   server is; else a fresh one is started when the tests have been collected.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

VARIABLE = "GRADPARITY_FORKSERVER"
"""Environment variable: "auto", "fresh" (never a fork of the session), or "fork" (an
error that says why, where a fork of the session is not safe)."""

_MODES = ("auto", "fresh", "fork")
_WORDS = b"mark.world"


def mode() -> str:
    """Return what the environment asks for.

    Raises:
        ValueError: It is no known word.
    """
    found = os.environ.get(VARIABLE, _MODES[0])
    if found not in _MODES:
        raise ValueError(
            f"{VARIABLE} must be one of {', '.join(_MODES)}; got {found!r}"
        )
    return found


class TorchWatch:
    """A finder that waits for torch to be imported, and then forks the server."""

    def __init__(self, opened: frozenset[str]) -> None:
        """Prepare.

        Args:
            opened: What this process's descriptors led to when the session began.
        """
        self._opened = opened
        self._forked = False

    def look_at(self, path: Path) -> None:
        """Start to watch if the module at ``path`` speaks of worlds."""
        if self in sys.meta_path or "torch" in sys.modules or mode() == "fresh":
            return
        try:
            found = _WORDS in path.read_bytes()
        except OSError:
            return  # pytest says so
        if found:
            sys.meta_path.insert(0, self)

    def stop(self, *, expected: bool = False) -> None:
        """Watch no more.

        Args:
            expected: Whether there are tests for the server; else it is ended.

        Raises:
            ForkserverError: It had to be a fork, and there was no occasion.
        """
        self._unhook()
        if expected and mode() == "fork" and not self._forked:
            from ..errors import ForkserverError

            raise ForkserverError(
                f"{VARIABLE}=fork: torch was there before any world test was found"
            )
        if self._forked and not expected:
            from ..parent.forkserver_client import stop_forkserver

            stop_forkserver()
            self._forked = False

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find torch where it always is, with a loader that tells when it is done."""
        if name != "torch":
            return None
        self._unhook()
        spec = PathFinder.find_spec(name)
        if spec is not None and spec.loader is not None:
            self._follow(spec.loader)
        return spec

    def _unhook(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _follow(self, loader: Any) -> None:
        from ..parent.forkserver_client import inherit_forkserver
        from .forkable import Scene

        load, scene = loader.exec_module, Scene(opened=self._opened)

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            load(module)
            self._forked = inherit_forkserver(scene, must=mode() == "fork")

        loader.exec_module = exec_module
