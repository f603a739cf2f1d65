"""Import packages that were installed with ``--no-deps``; needs only Python.

Call ``stand_in("verl")`` before ``import verl``: empty modules then replace the missing
ones that verl imports and that the tested methods do not use. Not a script to run.
"""

from __future__ import annotations

import importlib.util
import sys
from abc import ABCMeta
from types import ModuleType
from typing import Any

ABSENT = {
    "fairseq2": "fairseq2n".split(),
    "lerobot": """
        lerobot.configs lerobot.datasets.backward_compatibility lerobot.datasets.factory
        lerobot.datasets.sampler lerobot.envs lerobot.optim.factory lerobot.policies
        lerobot.processor lerobot.rl lerobot.scripts.lerobot_eval PIL datasets deepdiff
        draccus imageio jsonlines pandas pyarrow termcolor torchvision
    """.split(),
    "rlinf": """
        rlinf.scheduler ray omegaconf hydra peft datasets pynvml gymnasium vllm sglang
        torchvision imageio cv2 PIL matplotlib
    """.split(),
    "verl": """
        ray peft tensordict hydra omegaconf codetiming torchdata datasets liger_kernel
        flash_attn cachetools pylatexenc pyvers vllm sglang dill wandb uvicorn fastapi
        mathruler torchvision qwen_vl_utils PIL pandas pyarrow orjson
    """.split(),
}
"""Package -> modules that it imports, but that our use of it does not need."""


def stand_in(package: str) -> None:
    """Let ``package`` be imported although modules that it imports are missing.

    An empty module replaces each of them. Any name imported from it is a class that has
    every attribute and does nothing, so none of the missing code is run.
    """
    names = ABSENT[package]
    parts = tuple(n for n in names if "." in n)  # of packages that are there
    whole = set(names).difference(parts, sys.modules)
    absent = tuple(n for n in whole if not is_installed(n))
    finder: Any = EmptyFinder(parts + absent)
    sys.meta_path.insert(0, finder)


def is_installed(name: str) -> bool:
    """Return True if a module can be found; does not import it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        return False


class Anything(ABCMeta):
    """Metaclass of classes with every attribute; each attribute is such a class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return empty_class(name)

    def __getitem__(cls, _: Any) -> Any:
        return cls


def empty_class(name: str) -> Any:
    """Make a class that can be constructed, called and used as a decorator."""
    take = {"__init__": lambda *_, **__: None}
    return Anything(name, (), {**take, "__call__": lambda _, f=None, *__, **___: f})


class EmptyModule(ModuleType):
    """Stand-in for a missing module; any name imported from it is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = empty_class(name)
        setattr(self, name, made)
        return made


class EmptyFinder:
    """Import finder that creates an empty module for any name below some packages."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if not any(f"{name}.".startswith(f"{n}.") for n in self.names):
            return None
        loader: Any = self
        return importlib.util.spec_from_loader(name, loader, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return EmptyModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module is empty."""
