"""Standalone: a violation as a short script for a bug report, without a harness.

The script needs torch and the judged scaler's package alone. It builds a model of the
same kind with the same layout, precision, recipe and faults, and judges agreement,
skips, the scale rule, the unscaled gradients and stray collectives by itself. Finer
laws (parity against the reference) are beyond it: exit code 0 then says so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from ..fixtures import Fault, parse_faults
from .scenario import Scenario

__all__ = ["standalone_script", "write_standalone"]

_LAYERS = {
    "digits": {
        "norm": "nn.LayerNorm(64)",
        "up": "nn.Linear(64, 48)",
        "gelu": "nn.GELU()",
        "down": "nn.Linear(48, 48)",
        "gelu2": "nn.GELU()",
        "head": "nn.Linear(48, 10)",
    },
    "text": {
        "embed": "nn.Embedding(256, 32)",
        "norm": "nn.LayerNorm(32)",
        "up": "nn.Linear(32, 64)",
        "gelu": "nn.GELU()",
        "down": "nn.Linear(64, 32)",
        "head": "nn.Linear(32, 256, bias=False)",
    },
}
_BATCHES = {
    "digits": "torch.randn(8, 64), torch.randint(10, (8,))",
    "text": "torch.randint(256, (4, 32)), torch.randint(256, (4, 32))",
}
_LIKENESS = {
    "token": "embed",
    "position": "embed",
    "query": "up",
    "key": "up",
    "value": "up",
    "out": "down",
    "attention_norm": "norm",
    "feed_forward_norm": "norm",
}
"""A layer of the scenario's model -> the layer of the script that stands for it."""

_FSDP = "torch.distributed.fsdp"
_TP = "torch.distributed.tensor.parallel"
_DDP_LAYOUT = ("model = nn.parallel.DistributedDataParallel(model)",)
_CUT = (
    'stage = mesh["pp"].get_local_rank()',
    "model = model[:3] if stage == 0 else model[3:]",
)
_SPLIT = 'plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}'
_SEQUENCE = (
    "plan = {",
    '    "embed": PrepareModuleOutput(',
    "        output_layouts=Replicate(), desired_output_layouts=Shard(1)",
    "    ),",
    '    "norm": SequenceParallel(),',
    '    "up": ColwiseParallel(input_layouts=Shard(1)),',
    '    "down": RowwiseParallel(output_layouts=Shard(1)),',
    '    "head": ColwiseParallel(',
    "        input_layouts=Shard(1), output_layouts=Replicate()",
    "    ),",
    "}",
)
_PARTS: dict[str, tuple[str, ...]] = {
    "single": (),
    "ddp": ("ddp",),
    "fsdp": ("fsdp",),
    "hsdp": ("fsdp",),
    "tp": ("tp",),
    "tp+sp": ("tp",),
    "fsdp+tp": ("tp", "fsdp"),
    "hsdp+tp": ("tp", "fsdp"),
    "pp": ("pp",),
    "pp+fsdp": ("pp", "fsdp"),
}
"""Topology -> what its layout is made of, in order."""
_RECIPES = {
    "plain": (),
    "unscale": ("unscale",),
    "clip-value": ("unscale", "clip"),
    "accumulate": ("parts",),
    "resume": ("resume",),
}
"""Recipe -> what differs from the plain one."""
_OPTIMIZERS = {
    "sgd": "SGD([*params.values()], lr=0.1)",
    "sgd-momentum": "SGD([*params.values()], lr=0.05, momentum=0.9)",
    "sgd-fused": "SGD([*params.values()], lr=0.05, momentum=0.9, fused=True)",
    "adam": "Adam([*params.values()], lr=1e-3)",
    "adamw": "AdamW([*params.values()], lr=1e-3)",
    "adamw-foreach": "AdamW([*params.values()], lr=1e-3, foreach=True)",
    "adamw-fused": "AdamW([*params.values()], lr=1e-3, fused=True)",
    "adagrad": "Adagrad([*params.values()], lr=1e-2)",
}
"""Optimizer -> how the script makes it; those of fixtures are functions."""
_CLIP = 2.0**-8


def standalone_script(scenario: Scenario, scaler_spec: str) -> str:
    """A Python script that shows a failure of a scaler with torch alone.

    Args:
        scenario: in which the scaler failed.
        scaler_spec: ``module:attribute`` of the scaler.

    Raises:
        ValueError: if the scenario holds something that scripts are not made for; says
            which part.
    """
    _refuse(scenario)
    if not re.fullmatch(r"[\w.]+:[\w.]+", scaler_spec):
        raise ValueError(f"no standalone script for scaler {scaler_spec!r}")
    module, _, attribute = scaler_spec.partition(":")
    root, dot, rest = attribute.partition(".")
    parts, recipe = _PARTS[scenario.topology], _RECIPES[scenario.recipe]
    data = scenario.dataset
    shape = scenario.parsed_topology.mesh_shape(scenario.world)
    package = module.partition(".")[0]
    text = _template().render(
        scaler=scaler_spec,
        id=scenario.id,
        topology=scenario.topology,
        world=scenario.world,
        steps=scenario.steps,
        seed=scenario.seed,
        needs="" if package == "torch" else f" and {package}",
        imports=_imports(scenario),
        module=module,
        root=root,
        rest=dot + rest,
        growth=scenario.growth_factor,
        backoff=scenario.backoff_factor,
        interval=scenario.growth_interval,
        init_scale=scenario.init_scale,
        faults=[_fault(f, scenario) for f in parse_faults(scenario.faults)],
        layers=_layers(data),
        layout=_layout(scenario),
        mesh_shape=tuple(shape.values()),
        mesh_axes=tuple(shape),
        optimizer=f"torch.optim.{_OPTIMIZERS[scenario.optimizer]}",
        pipeline="pp" in parts,
        resume="resume" in recipe,
        data_seed=_data_seed(scenario),
        batch=_BATCHES[data],
        passes=_passes(scenario),
        expected=_expected(recipe),
        calls=_calls(recipe),
    )
    compile(text, "standalone", "exec")
    return text


def write_standalone(path: Path, scenario: Scenario, scaler_spec: str) -> None:
    """Write the script to ``path``, whole or not at all.

    Raises:
        ValueError: as :func:`standalone_script`.
    """
    text = standalone_script(scenario, scaler_spec)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("gradparity.conformance"),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template("standalone.py.j2")


def _refuse(scenario: Scenario) -> None:
    known: Sequence[tuple[str, Mapping[str, object]]] = (
        ("topology", _PARTS),
        ("recipe", _RECIPES),
        ("data", _LAYERS),
        ("optimizer", _OPTIMIZERS),
        ("order", {"model": ""}),
    )
    for name, table in known:
        value = getattr(scenario, name)
        if value not in table:
            raise ValueError(
                f"no standalone script for {name} {value!r}: it is made for "
                f"{', '.join(table)}"
            )
    if getattr(scenario, "magnitude", 1.0) != 1.0:
        raise ValueError("no standalone script for a magnitude other than 1")


def _fault(fault: Fault, scenario: Scenario) -> tuple[object, ...]:
    name = fault.parameter
    if name not in ("first", "last"):
        *_, layer, kind = ("", *name.split("."))
        layer = _LIKENESS.get(layer, layer)
        if layer not in _LAYERS[scenario.dataset] or kind not in ("weight", "bias"):
            raise ValueError(f"no standalone script for the fault {fault}")
        name = f"{layer}.{kind}"
    return fault.kind, fault.rank, fault.step, name, fault.alone


def _layers(data: str) -> str:
    lines = [f'        "{name}": {layer},' for name, layer in _LAYERS[data].items()]
    return "\n".join(["{", *lines, "    }"])


def _uses_sequence(scenario: Scenario) -> bool:
    return scenario.topology == "tp+sp" or (
        scenario.dataset == "text" and "+tp" in scenario.topology
    )


def _imports(scenario: Scenario) -> list[str]:
    parts = _PARTS[scenario.topology]
    lines = []
    if "fsdp" in parts:
        lines.append(f"from {_FSDP} import MixedPrecisionPolicy, fully_shard")
    if "pp" in parts:
        lines.append(
            "from torch.distributed.pipelining import PipelineStage, ScheduleGPipe"
        )
    if "tp" in parts and _uses_sequence(scenario):
        lines += [
            "from torch.distributed.tensor import Replicate, Shard",
            f"from {_TP} import ColwiseParallel, PrepareModuleOutput",
            f"from {_TP} import RowwiseParallel, SequenceParallel",
        ]
    elif "tp" in parts:
        lines.append(f"from {_TP} import ColwiseParallel, RowwiseParallel")
    if "tp" in parts:
        lines.append(f"from {_TP} import parallelize_module")
    return lines


def _layout(scenario: Scenario) -> list[str]:
    lines: list[str] = []
    for part in _PARTS[scenario.topology]:
        lines += _MAKERS[part](scenario)
    return lines


def _tp(scenario: Scenario) -> Sequence[str]:
    plan = _SEQUENCE if _uses_sequence(scenario) else (_SPLIT,)
    return (*plan, 'parallelize_module(model, mesh["tp"], plan)')


def _fsdp(scenario: Scenario) -> list[str]:
    axes = [a for a in scenario.parsed_topology.mesh_shape(scenario.world)]
    data = [a for a in axes if a in scenario.parsed_topology.data_axes]
    mesh = "mesh" if data == axes else f"mesh[{', '.join(map(repr, data))}]"
    precision = scenario.parsed_precision
    policy = ", ".join(
        f"{name}={value}"
        for name, value in (
            ("param_dtype", precision.parameter_dtype),
            ("reduce_dtype", precision.reduce_dtype),
        )
        if value is not None
    )
    return [
        f"policy = MixedPrecisionPolicy({policy})",
        'for unit in (m for n, m in model.named_children() if n in ("up", "down")):',
        f"    fully_shard(unit, mesh={mesh}, mp_policy=policy)",
        f"fully_shard(model, mesh={mesh}, mp_policy=policy)",
    ]


_MAKERS: dict[str, Callable[[Scenario], Sequence[str]]] = {
    "ddp": lambda _: _DDP_LAYOUT,
    "fsdp": _fsdp,
    "pp": lambda _: _CUT,
    "tp": _tp,
}
"""Part of a layout -> its lines."""


def _data_seed(scenario: Scenario) -> str:
    axes = [
        axis
        for axis in scenario.parsed_topology.mesh_shape(scenario.world)
        if axis in scenario.parsed_topology.data_axes
    ]
    ranks = [
        f'{10**i} * mesh.get_local_rank("{axis}")' for i, axis in enumerate(axes, 1)
    ]
    return " + ".join([str(scenario.seed), *ranks])


def _passes(scenario: Scenario) -> list[str]:
    dtype = scenario.parsed_precision.autocast_dtype
    settings = f"{dtype or 'torch.float16'}, enabled={dtype is not None}"
    context = f'with torch.autocast("cpu", {settings}):'
    if "pp" in _PARTS[scenario.topology]:
        call = "schedule.step(*([x] if pp.get_local_rank() == 0 else []), target=y)"
        return [context, f"    {call}"]
    head = "for x, y in zip(x.chunk(2), y.chunk(2)):"
    if "parts" in _RECIPES[scenario.recipe]:
        return [
            head,
            f"    {context}",
            "        value = loss(model(x), y)",
            "    scaler.scale(value / 2).backward()",
        ]
    return [context, "    value = loss(model(x), y)", "scaler.scale(value).backward()"]


def _expected(recipe: Sequence[str]) -> str:
    clamp = f".clamp(-{_CLIP}, {_CLIP})" if "clip" in recipe else ""
    return f"{{n: (g / scale){clamp} for n, g in grads.items()}}"


def _calls(recipe: Sequence[str]) -> list[str]:
    lines = ["scaler.unscale_(optimizer)"] * ("unscale" in recipe)
    if "clip" in recipe:
        lines += [
            "for p in params.values():",
            f"    nn.utils.clip_grad_value_(p, {_CLIP}, foreach=False)",
        ]
    return [*lines, "scaler.step(optimizer)", "scaler.update()"]
