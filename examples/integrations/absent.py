"""Import packages that were installed with ``--no-deps``; needs nothing but Python.

Not a script to run: ``stand_in("verl")`` before ``import verl`` puts empty modules in
the place of those that verl imports and that the judged methods do not use.
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
"""Package -> modules that it imports and that what we run of it does not use."""


def stand_in(package: str) -> None:
    """Let ``package`` be imported where modules it names are missing.

    An empty module takes the place of each. What is imported from one is a class that
    has every attribute and does nothing, so none of their code is run.
    """
    names = ABSENT[package]
    parts = tuple(n for n in names if "." in n)  # of packages that are there
    whole = set(names).difference(parts, sys.modules)
    absent = tuple(n for n in whole if not is_installed(n))
    finder: Any = EmptyFinder(parts + absent)
    sys.meta_path.insert(0, finder)


def is_installed(name: str) -> bool:
    """True if a module can be found, without importing it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:
        return False


class Anything(ABCMeta):
    """Class with every attribute, each of them such a class again."""

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
    """A module that is not there; what is taken from it is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = empty_class(name)
        setattr(self, name, made)
        return made


class EmptyFinder:
    """Finds every module below some packages, and makes an empty one of it."""

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
        """Nothing is in it."""
