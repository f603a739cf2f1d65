"""Start to record when torch is imported; PYTHONPATH of the job has this folder."""

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
"""Folder of the package that records; the job may run in an environment without it."""


class _AfterTorch:
    """Import hook that starts the recorder after torch has been imported.

    The hook stays until torch is imported: some packages only check whether torch is
    installed.
    """

    def __init__(self) -> None:
        self.looks = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return torch's own spec with a loader that also starts the recorder."""
        if name != "torch" or self.looks:
            return None
        self.looks = True
        try:
            spec = importlib.util.find_spec("torch")
        finally:
            self.looks = False
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            run(module)
            _begin()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this spec
        return spec


def _begin() -> None:
    try:
        if importlib.util.find_spec("gradparity") is None:
            _make_importable()
        from gradparity.conformance.record.recorder import install

        install()
    except Exception as error:  # the job is not ours to end
        print(f"gradparity: nothing is recorded: {error!r}", file=sys.stderr)


def _make_importable() -> None:
    init = ROOT / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        "gradparity", init, submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["gradparity"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["gradparity"])


if os.environ.get("GRADPARITY_RECORD"):
    sys.meta_path.insert(0, _AfterTorch())

# the sitecustomize that this one hides, if there is one
_here = Path(__file__).resolve().parent
_hidden = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [p for p in sys.path if Path(p or ".").resolve() != _here]
)
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(importlib.util.module_from_spec(_hidden))
