"""What standalone scripts are made of: models, layouts, recipes and optimizers as text.

Each table maps a choice of a scenario to lines of the script, or to words that switch
parts of it on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...fixtures import is_workload
from ..space.recipes import CLIP_NORM, CLIP_VALUE, LR_DECAY, Z_LOSS
from ..space.scenario import Scenario

__all__ = [
    "BATCHES",
    "LAYERS",
    "LIKENESS",
    "OPTIMIZERS",
    "PARAM_ORDERS",
    "PARTS",
    "calls",
    "import_policy",
    "imports",
    "layout",
    "passes",
    "policy",
    "schedule",
    "uses_sequence",
]


def _digits(hidden: int, down: str) -> dict[str, str]:
    return {
        "norm": "nn.LayerNorm(64)",
        "up": f"nn.Linear(64, {hidden})",
        "gelu": "nn.GELU()",
        "down": down,
        "gelu2": "nn.GELU()",
        "head": f"nn.Linear({hidden}, 10)",
    }


_TEXT = {
    "embed": "nn.Embedding(256, 32)",
    "norm": "nn.LayerNorm(32)",
    "up": "nn.Linear(32, 64)",
    "gelu": "nn.GELU()",
    "down": "nn.Linear(64, 32)",
    "head": "nn.Linear(32, 256, bias=False)",
}
LAYERS = {
    "digits": _digits(48, "nn.Linear(48, 48)"),
    "digits-uneven": _digits(3, "nn.Linear(3, 3)"),
    "digits-experts": _digits(16, "Experts()"),
    "text": _TEXT,
    "text-tied": _TEXT,
}
"""Model -> layers of the script's, one after the other."""
BATCHES = {
    "digits": "torch.randn(8, 64), torch.randint(10, (8,))",
    "text": "torch.randint(256, (4, 32)), torch.randint(256, (4, 32))",
}
LIKENESS = {
    "token": "embed",
    "position": "embed",
    "query": "up",
    "key": "up",
    "value": "up",
    "out": "down",
    "experts": "down",
    "attention_norm": "norm",
    "feed_forward_norm": "norm",
}
"""A layer of the scenario's model -> the layer of the script that stands for it."""

PARTS: dict[str, tuple[str, ...]] = {
    "single": (),
    "ddp": ("ddp",),
    "fsdp1": ("fsdp1",),
    "fsdp": ("fsdp",),
    "fsdp+plain": ("policy", "plain"),
    "hsdp": ("fsdp",),
    "tp": ("tp",),
    "tp+sp": ("tp",),
    "fsdp+tp": ("tp", "fsdp"),
    "hsdp+tp": ("tp", "fsdp"),
    "pp": ("pp",),
    "pp+fsdp": ("pp", "fsdp"),
    "ep": ("spread", "ep"),
    "fsdp+ep": ("policy", "spread", "fsdp+ep"),
    "fsdp+ep-local": ("policy", "spread", "own", "fsdp+ep"),
}
"""Topology -> what its layout is made of, in order."""
OPTIMIZERS = {
    "sgd": "SGD([*params.values()], lr=0.1)",
    "sgd-momentum": "SGD([*params.values()], lr=0.05, momentum=0.9)",
    "sgd-fused": "SGD([*params.values()], lr=0.05, momentum=0.9, fused=True)",
    "adam": "Adam([*params.values()], lr=1e-3)",
    "adamw": "AdamW([*params.values()], lr=1e-3)",
    "adamw-foreach": "AdamW([*params.values()], lr=1e-3, foreach=True)",
    "adamw-fused": "AdamW([*params.values()], lr=1e-3, fused=True)",
    "adamw-groups": "AdamW(groups(params), lr=1e-3)",
    "adagrad": "Adagrad([*params.values()], lr=1e-2)",
}
"""Optimizer -> how the script makes it; those of fixtures are functions."""
PARAM_ORDERS = {
    "model": "names",
    "reversed": "names[::-1]",
    "vectors-first": "sorted(names, key=lambda n: params[n].ndim > 1)",
}
"""Order -> the names of an optimizer's parameters, in it."""

# - Layouts

_FSDP = "torch.distributed.fsdp"
_TP = "torch.distributed.tensor.parallel"
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
_PLAIN = (
    "plain = {*model.norm.parameters()}",
    "fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=plain)",
    "for p in plain:",
    "    p.register_hook(average)",
)
_EXPERTS = (
    "for n, p in model.named_parameters():",
    "    if p.requires_grad:",
    '        p.register_hook((lambda g: g / WORLD) if "down" in n else average)',
)
_SPREAD = 'model.down.spread(mesh["ep"])'
_OWN_EXPERTS = (
    "for n, p in list(model.down.named_parameters()):",
    "    own = nn.Parameter(p.to_local().detach(), requires_grad=p.requires_grad)",
    "    model.down.register_parameter(n, own)",
)
_SHARDED_EXPERTS = (
    'fully_shard(model.down, mesh=mesh["dp"], mp_policy=policy)',
    "model.down.set_gradient_divide_factor(WORLD)",
    "model.down.set_force_sum_reduction_for_comms(True)  # gloo cannot scale by itself",
    'everybody = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("all",))',
    "fully_shard(model, mesh=everybody, mp_policy=policy)",
)


def uses_sequence(scenario: Scenario) -> bool:
    """Whether activations are split along the sequence."""
    return scenario.topology == "tp+sp" or (
        scenario.dataset == "text" and "+tp" in scenario.topology
    )


def layout(scenario: Scenario) -> list[str]:
    """Lines that lay ``model`` out over ``mesh``."""
    lines: list[str] = []
    for part in PARTS[scenario.topology]:
        lines += _MAKERS[part](scenario)
    return lines


def _tp(scenario: Scenario) -> Sequence[str]:
    plan = _SEQUENCE if uses_sequence(scenario) else (_SPLIT,)
    return (*plan, 'parallelize_module(model, mesh["tp"], plan)')


def policy(scenario: Scenario, kind: str = "MixedPrecisionPolicy") -> str:
    """The line that makes the precision's policy."""
    precision = scenario.parsed_precision
    settings = ", ".join(
        f"{name}={value}"
        for name, value in (
            ("param_dtype", precision.parameter_dtype),
            ("reduce_dtype", precision.reduce_dtype),
        )
        if value is not None
    )
    return f"policy = {kind}({settings})"


def _fsdp(scenario: Scenario) -> list[str]:
    axes = [*scenario.parsed_topology.mesh_shape(scenario.world_size)]
    data = [a for a in axes if a in scenario.parsed_topology.data_axes]
    mesh = "mesh" if data == axes else f"mesh[{', '.join(map(repr, data))}]"
    return [
        policy(scenario),
        'for unit in (m for n, m in model.named_children() if n in ("up", "down")):',
        f"    fully_shard(unit, mesh={mesh}, mp_policy=policy)",
        f"fully_shard(model, mesh={mesh}, mp_policy=policy)",
    ]


def _fsdp1(scenario: Scenario) -> list[str]:
    return [
        policy(scenario, "MixedPrecision"),
        "model = FullyShardedDataParallel(",
        '    model, device_id=torch.device("cpu"), mixed_precision=policy,',
        "    use_orig_params=True,",
        ")",
    ]


_MAKERS: dict[str, Callable[[Scenario], Sequence[str]]] = {
    "ddp": lambda _: ("model = nn.parallel.DistributedDataParallel(model)",),
    "ep": lambda _: _EXPERTS,
    "fsdp": _fsdp,
    "fsdp+ep": lambda _: _SHARDED_EXPERTS,
    "fsdp1": _fsdp1,
    "own": lambda _: _OWN_EXPERTS,
    "plain": lambda _: _PLAIN,
    "policy": lambda s: (policy(s),),
    "pp": lambda _: _CUT,
    "spread": lambda _: (_SPREAD,),
    "tp": _tp,
}
"""Part of a layout -> its lines."""


def import_policy() -> str:
    """The line that imports what :func:`policy` makes."""
    return f"from {_FSDP} import MixedPrecisionPolicy"


def imports(scenario: Scenario) -> list[str]:
    """Lines that import what the script needs besides the usual."""
    parts = PARTS[scenario.topology]
    lines = []
    if scenario.parsed_recipe.recompute:
        lines.append("from functools import partial")
        lines.append("from torch.utils.checkpoint import checkpoint")
    if scenario.model == "digits-experts":
        lines += [
            "from torch.distributed._functional_collectives import (",
            "    all_gather_tensor_autograd, reduce_scatter_tensor_autograd",
            ")  # fmt: skip",
        ]
    if "fsdp1" in parts:
        lines.append(f"from {_FSDP} import FullyShardedDataParallel, MixedPrecision")
    if {"fsdp", "policy"} & {*parts}:
        lines.append(f"{import_policy()}, fully_shard")
    if "pp" in parts:
        lines.append(
            "from torch.distributed.pipelining import PipelineStage, ScheduleGPipe"
        )
    if "tp" in parts and uses_sequence(scenario):
        lines += [
            "from torch.distributed.tensor import Replicate, Shard",
            f"from {_TP} import ColwiseParallel, PrepareModuleOutput",
            f"from {_TP} import RowwiseParallel, SequenceParallel",
        ]
    elif "tp" in parts:
        lines.append(f"from {_TP} import ColwiseParallel, RowwiseParallel")
    if "tp" in parts:
        lines.append(f"from {_TP} import parallelize_module")
    if scenario.model == "digits-experts":
        lines.append("from torch.distributed.tensor import Shard, distribute_tensor")
    return lines


# - Recipes


def schedule(scenario: Scenario) -> list[str]:
    """Lines that make the schedule of a pipeline."""
    if not scenario.parsed_topology.pipelined:
        return []
    begins = scenario.resume_step if scenario.parsed_recipe.resharded else 0
    return [
        "losses = []",
        "",
        "def scaled(out, y):  # the first call of all is there to infer shapes",
        "    losses.append(loss(out, y))",
        f"    part = len(losses) - 1 - (step == {begins})",
        "    return scaler.scale(spoilt(losses[-1], part, 2))",
        "",
        'pp = mesh["pp"]',
        "stage = PipelineStage(",
        '    model, pp.get_local_rank(), pp.size(), torch.device("cpu"),',
        "    group=pp.get_group(),",
        ")",
        "schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=scaled)",
    ]


def passes(scenario: Scenario) -> list[str]:
    """Lines of one step's passes over ``x`` and ``y``."""
    dtype = scenario.parsed_precision.autocast_dtype
    settings = f"{dtype or 'torch.float16'}, enabled={dtype is not None}"
    context = f'with torch.autocast("cpu", {settings}):'
    if scenario.parsed_topology.pipelined:
        call = "schedule.step(*([x] if pp.get_local_rank() == 0 else []), target=y)"
        return ["losses.clear()", context, f"    {call}"]
    recipe = scenario.parsed_recipe
    if recipe.training.losses == 2:
        second = f"{Z_LOSS} * LOSS_FACTOR * out.float().logsumexp(-1).square().mean()"
        return [
            context,
            "    out = model(x)",
            f"    both = [spoilt(loss(out, y), 0, 1), {second}]",
            "torch.autograd.backward(scaler.scale(both))",
        ]
    if recipe.parts == 1:
        return [
            context,
            "    value = spoilt(loss(model(x), y), 0, 1)",
            "scaler.scale(value).backward()",
        ]
    body = [
        context,
        "    value = spoilt(loss(model(x), y), part, 2)",
        "scaler.scale(value / 2).backward()",
    ]
    if recipe.defer_sync and PARTS[scenario.topology][0] in ("ddp", "fsdp1"):
        body = [
            "with contextlib.nullcontext() if part else model.no_sync():",
            *(f"    {line}" for line in body),
        ]
    elif recipe.defer_sync:
        body = ["model.set_requires_gradient_sync(part == 1)", *body]
    halves = "zip(x.chunk(2), y.chunk(2))"
    if is_workload(scenario.model):  # its batches are nests of tensors
        halves = "[(rows(x, i, 2), rows(y, i, 2)) for i in (0, 1)]"
    head = f"for part, (x, y) in enumerate({halves}):"
    return [head, *(f"    {line}" for line in body)]


def calls(scenario: Scenario) -> list[str]:
    """Lines of the judged calls of one step."""
    recipe = scenario.parsed_recipe
    lines = []
    if recipe.unscale:
        lines += ["for optimizer in optimizers:", "    scaler.unscale_(optimizer)"]
    lines += _CLIPPING[recipe.training.clip]
    lines += ["for optimizer in optimizers:", "    scaler.step(optimizer)"]
    manual = "" if recipe.new_scale is None else "*[MANUAL] * (step == 2)"
    lines.append(f"scaler.update({manual})")
    if recipe.training.decay:
        lines += [
            "for optimizer in optimizers:",
            "    for group in optimizer.param_groups:",
            f'        group["lr"] *= {LR_DECAY}',
        ]
    return lines


_CLIPPING = {
    "": [],
    "value": [
        "for p in params.values():",
        f"    nn.utils.clip_grad_value_(p, {CLIP_VALUE}, foreach=False)",
        f"expected = {{n: g.clamp(-{CLIP_VALUE}, {CLIP_VALUE})"
        " for n, g in expected.items()}",
    ],
    "norm": [
        "square = torch.zeros((), dtype=torch.float64)",
        "for n in grads.keys() & held.keys():  # each element once",
        "    copies = sum(other.get(n) == held[n] for other in holdings)",
        "    square += grads[n].double().square().sum() / copies",
        "dist.all_reduce(square)",
        f"factor = ({CLIP_NORM} / (square.sqrt() + 1e-6)).clamp(max=1).float()",
        "for g in grads.values():",
        "    g.mul_(factor)",
        "expected = {n: g * factor for n, g in expected.items()}",
    ],
}
"""How unscaled gradients are clipped -> lines that do so, and what is expected then."""
