"""Write a workload file from the facts about a model."""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap
from collections.abc import Iterable
from pathlib import Path

from ...fixtures import WorkloadError
from ..space.workload_checks import check_workload
from ..templates import filled
from .probe import Found
from .source import Source

__all__ = ["refusal", "workload_text"]

_TEMPLATE = Path(__file__).with_name("workload.py.jinja")
_WIDTH = 88
_BODY = " " * 8


def workload_text(source: Source, found: Found, module: str, refused: str = "") -> str:
    """Return the text of a workload file.

    Args:
        source: source text that creates the model.
        found: facts about the model: inputs, output, blocks.
        module: name by which the file is imported.
        refused: reason why the file is rejected as it is; becomes a TODO.
    """
    return filled(
        _TEMPLATE,
        found=found,
        command=_command(module),
        imports=_imports(source, found),
        refused=refused
        and _todo(f"gradparity refuses this workload as it is: {refused}"),
        problem=found.problem
        and _todo(f"no inputs were found: {found.problem}. Draw a batch here."),
        model=_model(source),
        inputs=_inputs(found),
        inputs_type="dict[str, Tensor]" if found.by_name else "Tensor",
        output_type="Tensor" if found.output == "output" else "Any",
        layout=_layout(found),
    )


def refusal(text: str) -> str:
    """Return why a workload file is rejected before its first run; "" if it is not.

    This process imports the file as a workload, and makes the checks of
    ``check_workload``.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Choose a new name: the file may have the name of a user's module.
        name = f"gradparity_draft_{os.path.basename(folder)}"
        Path(folder, f"{name}.py").write_text(text, encoding="utf-8")
        sys.path.append(folder)
        try:
            check_workload(f"{name}:Workload")
        except WorkloadError as error:
            return str(error).removeprefix(f"workload {name}:Workload: ")
        finally:
            sys.path.remove(folder)
            sys.modules.pop(name, None)
    return ""


def _command(module: str) -> str:
    words = f"--workload {module}:Workload --scaler none"
    line = f"    gradparity run --quick {words}"
    if len(line) <= _WIDTH:
        return line
    return f"    gradparity run --quick \\\n        {words}"


def _todo(text: str) -> str:
    return textwrap.fill(
        f"TODO: {text}",
        _WIDTH,
        initial_indent="    # ",
        subsequent_indent="    # ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _imports(source: Source, found: Found) -> str:
    """Return the imports, sorted like ruff and isort; modules of this folder last."""
    others = {
        "torch": ["Tensor", "nn"],
        "torch.distributed.device_mesh": ["DeviceMesh"],
        "torch.distributed.fsdp": ["MixedPrecisionPolicy", "fully_shard"],
    }
    own: dict[str, list[str]] = {}
    for module, name in source.imports:
        top = module.partition(".")[0]
        here = Path(top).is_dir() or Path(f"{top}.py").is_file()
        (own if here else others).setdefault(module, []).append(name)
    blocks = ["import torch", *_from(others)]
    typing = found.problem or found.by_name or found.output != "output"
    return "\n".join(
        [
            *(["from typing import Any", ""] if typing else []),
            *blocks,
            *(["", *_from(own)] if own else []),
        ]
    )


def _from(names: dict[str, list[str]]) -> Iterable[str]:
    for module in sorted(names):
        # Order names as isort does: constants, classes, functions.
        ordered = sorted(set(names[module]), key=lambda n: (not n[0].isupper(), n))
        line = f"from {module} import {', '.join(ordered)}"
        if len(line) > _WIDTH:
            line = _listed(f"from {module} import ", "()", ordered, "")
        yield line


def _model(source: Source) -> str:
    call = f"{_BODY}model: nn.Module = {source.call}("
    if not source.configuration:
        return f"{call})"
    if not source.settings:
        return f"{call}{source.configuration}())"
    words = [f"{name}={value!r}" for name, value in source.settings.items()]
    config = _listed(f"{_BODY}config = {source.configuration}", "()", words, _BODY)
    return f"{config}\n{call}config)"


def _inputs(found: Found) -> str:
    codes = {name: drawn.code for name, drawn in found.inputs.items()}
    if not found.by_name:
        return "\n".join(f"{_BODY}inputs = {code}" for code in codes.values())
    words = [f'"{name}": {code}' for name, code in codes.items()]
    return _listed(f"{_BODY}inputs = ", "{}", words, _BODY)


def _layout(found: Found) -> str:
    if not found.blocks:
        comment = "# no repeated blocks were found: shard large parts first, each alone"
        return f"{_BODY}{comment}"
    prefix = "model." if found.by_name else ""
    names = [f'"{prefix}{name}"' for name in found.blocks]
    shard = "fully_shard({}, mesh=mesh, mp_policy=policy)"
    if not found.containers:
        each = shard.format("model.get_submodule(name)")
        return f"{_each('name', names)}\n{_BODY}    {each}"
    each = shard.format("block")
    if len(names) == 1:
        loop = f"{_BODY}for block in model.get_submodule({names[0]}).children():"
        return f"{loop}\n{_BODY}    {each}"
    loop = f"{_BODY}    for block in model.get_submodule(stage).children():"
    return f"{_each('stage', names)}\n{loop}\n{_BODY}        {each}"


def _each(variable: str, names: list[str]) -> str:
    comma = "," if len(names) == 1 else ""
    line = f"{_BODY}for {variable} in ({', '.join(names)}{comma}):"
    if len(line) <= _WIDTH:
        return line
    return _listed(f"{_BODY}for {variable} in ", "()", names, _BODY) + ":"


def _listed(opening: str, brackets: str, words: Iterable[str], indent: str) -> str:
    """Write one word on each line, each with a comma, as formatters do."""
    lines = "".join(f"{indent}    {word},\n" for word in words)
    return f"{opening}{brackets[0]}\n{lines}{indent}{brackets[1]}"
