"""Find the code that imports and creates the model that the user has named."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...fixtures.imports import importable, look_in
from ...fixtures.resolving import named
from ..status import UsageError, as_usage

__all__ = ["Source", "find_source", "load", "names_workload"]

MOST_ELEMENTS = 2**28
"""Largest number of parameter elements of a model that is created: 1 GiB in fp32."""
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "image_size": 32,
    "patch_size": 8,
}
"""Small settings for a transformers configuration: its defaults describe large models.
Each is set if the configuration has a larger value."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Source text that imports and creates the model."""

    spec: str
    imports: tuple[tuple[str, str], ...]
    """(module, name) of each import that ``call`` needs."""
    call: str
    """Name that is called to create the model, such as ``MyModel``."""
    configuration: str = ""
    """Configuration class of the single argument of ``call``, if ``call`` takes one."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the configuration."""
    make: Callable[[], nn.Module]

    @property
    def title(self) -> str:
        """Name of the model: the part of ``spec`` after the colon."""
        return self.spec.rpartition(":")[2]


def load(spec: str) -> Any:
    """Import ``module:attribute``, also from the current folder.

    Raises:
        UsageError: if the module or the attribute does not exist.
    """
    look_in(os.getcwd())  # a script's path is where it is installed
    with as_usage(ValueError):
        return named("model", spec, "mypackage.model:MyModel")


def names_workload(found: Any) -> bool:
    """Return True for a workload or a workload class."""
    return hasattr(found, "meshes") and hasattr(found, "parallelize")


def find_source(spec: str) -> Source:
    """Find how to create the model that ``module:attribute`` names.

    Args:
        spec: name of a function without arguments that returns a module, or of a module
            class whose single argument is a configuration with defaults.

    Raises:
        UsageError: if ``spec`` names neither, or if the model cannot be created. The
            message says what to do instead.
    """
    target = load(spec)
    way = f"write a function without arguments, {_way(spec)}"
    if names_workload(target):
        raise UsageError(f"{spec} is a workload already: add --ci for its CI job")
    if isinstance(target, nn.Module):
        raise UsageError(f"{spec} is a model already; each rank makes its own: {way}")
    if not callable(target):
        got = type(target).__name__
        way = f"write one without arguments, {_way(spec, 'MyModel')}"
        raise UsageError(f"{spec} is of type {got}, expected a function: {way}")
    module, _, attribute = spec.partition(":")
    imported = (importable(module), attribute.partition(".")[0])
    needed = list(_needed(target))
    if not needed:
        source = Source(spec=spec, imports=(imported,), call=attribute, make=target)
        if problem := _problem(source):
            raise UsageError(f"{spec} {problem}: {way}")
        return source
    message = f"{spec} needs {', '.join(needed)}"
    for kind in _configurations(target, needed):
        settings = _small(kind)
        name = kind.__qualname__
        # The configuration may be an attribute of the model's class.
        inside = (kind.__module__, name.partition(".")[0]) == (
            getattr(target, "__module__", ""),
            imported[1],
        )
        more = () if inside else ((_home(kind, module), name.partition(".")[0]),)
        source = Source(
            spec=spec,
            imports=(imported, *more),
            call=attribute,
            configuration=name,
            settings=settings,
            make=partial(_configured, target, kind, settings),
        )
        # Build it without memory first: a default may have billions of elements.
        with torch.device("meta"):
            problem = _problem(source)
        problem = problem or _problem(source)
        if not problem:
            return source
        message += f", and with {name}() it {problem}"
    raise UsageError(f"{message}: {way}")


def _configured(found: Any, kind: Any, settings: Mapping[str, Any]) -> nn.Module:
    model: nn.Module = found(kind(**settings))
    return model


def _problem(source: Source) -> str:
    """Return why the model cannot be created or is too large; "" if neither holds."""
    try:
        model = source.make()
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(frame.filename)} line {frame.lineno}"
        return f"raised {type(error).__name__}: {error} ({where})"
    if not isinstance(model, nn.Module):
        return f"gave a {type(model).__name__}, expected an nn.Module"
    elements = sum(p.numel() for p in model.parameters() if not is_lazy(p))
    if elements > MOST_ELEMENTS:
        return f"has {elements:,} elements, at most {MOST_ELEMENTS:,} are allowed"
    return ""


def _way(spec: str, called: str = "") -> str:
    """Return advice: a function to write that creates the model, and how to name it.

    Args:
        spec: name of the class of the model.
        called: name that the function calls in place of that class.
    """
    module, _, attribute = spec.partition(":")
    name = called or attribute.rpartition(".")[2]
    return (
        f"such as `def make_model(): return {name}(...)`, and name {module}:make_model"
    )


def _needed(made: Callable[..., Any]) -> Iterator[str]:
    """Yield the names of a callable's parameters without a default."""
    with suppress(ValueError):  # some that are written in C have no signature
        for parameter in inspect.signature(made).parameters.values():
            variadic = parameter.kind in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            )
            if parameter.default is parameter.empty and not variadic:
                yield parameter.name


def _configurations(found: Any, needed: list[str]) -> Iterator[type]:
    """Yield possible classes of the single argument of a module class."""
    if len(needed) > 1 or not isinstance(found, type):
        return
    hints: dict[str, Any] = {}
    with suppress(Exception):  # an annotation may name what is imported for types only
        hints = typing.get_type_hints(vars(found)["__init__"])
    seen = []
    for kind in (
        getattr(found, "config_class", None),
        getattr(found, "Config", None),
        hints.get(needed[0]),
    ):
        if isinstance(kind, type) and kind not in seen and not list(_needed(kind)):
            if kind.__module__ != "builtins":
                seen.append(kind)
                yield kind


def _small(kind: Any) -> dict[str, Any]:
    """Return settings that make a transformers configuration small; {} for others."""
    if not hasattr(kind, "model_type"):
        return {}
    default = kind()
    return {
        name: size
        for name, size in SMALL.items()
        if isinstance(getattr(default, name, None), int)
        and getattr(default, name) > size
    }


def _home(kind: type, module: str) -> str:
    """Return a short name of a module from which ``kind`` can be imported."""
    name = kind.__qualname__.partition(".")[0]
    for home in (module, kind.__module__.partition(".")[0]):
        if hasattr(sys.modules.get(home), name):
            return home
    return kind.__module__
