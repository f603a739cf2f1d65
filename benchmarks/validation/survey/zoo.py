"""Zoo: each model type of transformers that ships a parallel plan, as a workload.

``gradparity.benchmarks.validation.survey.zoo:types.qwen3`` is a workload: a tiny
model of random weights, made from its own configuration class, saved to a
temporary folder and loaded from there under its own plan, as users do. Nothing is
downloaded. One workload has the meshes of all plans, so they share one reference run.

[Note: Weights]
Initial weights hide faults: biases of zero may be added twice, norms of one may be
swapped, and matrices of 0.02 make an attention so flat that its norms have almost no
gradient. So matrices are drawn with the size that preserves activations, and vectors
are perturbed.

[Note: fp32 inside]
Many models compute norms, softmax or routers in fp32 whatever their dtype. In fp64 that
would leave a truth with the errors of fp32. So in the reference's fp64 run a request
for fp32 is taken as "at least fp32" and gives fp64.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from gradparity.benchmarks.validation.survey.catalogue import (
    PLANS,
    ModelType,
    Plan,
    model_types,
)
from gradparity.benchmarks.validation.survey.records import Rule, wildcards
from gradparity.benchmarks.validation.survey.tiny import (
    FIRST_TOKEN,
    HIDDEN,
    VOCAB,
    shrink,
    with_odd_heads,
)

__all__ = ["WRITTEN_INPUTS", "Net", "Stack", "odd", "types"]

ROWS, TOKENS = 8, 8
SAME_OUTPUT = 0.01
"""Relative error of an output that counts as equal: far above rounding, far below the
error of wrong weights."""


class Net(nn.Module):
    """Model of transformers that maps a dict of inputs to one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.net = model

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return logits, or hidden states if the model has no head."""
        wide = next(self.parameters()).dtype == torch.float64
        if wide:  # torch has no grouped products in fp64
            self.net.set_experts_implementation("eager")  # type: ignore[operator]  # of an untyped package
        with AtLeastDouble() if wide else nullcontext():
            output = self.net(**inputs)
        found = (getattr(output, name, None) for name in _OUTPUTS)
        chosen: Tensor = next(tensor for tensor in found if tensor is not None)
        return chosen


_OUTPUTS = ("logits", "last_hidden_state")
"""Names of outputs that a loss can use, the best first."""


class AtLeastDouble(TorchFunctionMode):
    """Gives a model fp64 when it asks for fp32; see [Note: fp32 inside]."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` with fp64 in place of fp32."""
        if func is Tensor.float:
            func = Tensor.double
        kwargs = kwargs or {}
        # not ``in``: it would compare tensors with a dtype, which raises and is caught
        if any(a is torch.float32 for a in args):
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


class Stack:
    """Workload of one model type; the mesh selects the plan."""

    meshes = tuple(plan.mesh for plan in PLANS.values())
    model_axes = ("tp", "ep")

    def __init__(self, kind: ModelType, *, odd_heads: bool = False) -> None:
        self.kind, self.odd_heads = kind, odd_heads

    def settings(self) -> dict[str, Any]:
        """Return the arguments of the configuration class."""
        small = shrink(config_class(self.kind))
        if self.odd_heads:
            odd = with_odd_heads(small)
            if odd is None:
                raise ValueError(f"{self.kind.name} has no number of heads to change")
            return odd
        return small

    def model(self) -> Net:
        """Return the whole model; see [Note: Weights]."""
        config = config_class(self.kind)(**self.settings())
        net = Net(model_class(self.kind)(config))
        for parameter in net.parameters():
            if parameter.requires_grad and parameter.is_floating_point():
                draw(parameter)
        return net

    def batch(self, step: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        """Return tokens and the next tokens."""
        generator = torch.Generator().manual_seed(1000 * seed + step)
        tokens = torch.randint(
            FIRST_TOKEN, VOCAB, (ROWS, TOKENS + 1), generator=generator
        )
        inputs = {"input_ids": tokens[:, :-1]}
        if self.kind.name in _INPUTS:
            inputs = _INPUTS[self.kind.name](tokens)
        takes = inspect.signature(model_class(self.kind).forward).parameters
        if "decoder_input_ids" in takes:
            inputs["decoder_input_ids"] = tokens[:, 1:]
        return inputs, tokens[:, 1:].contiguous()

    def output_name(self) -> str:
        """Return the name of the output that the loss uses."""
        with torch.no_grad():
            found = self.model().net(**self.batch(0, 0)[0])
        return next(n for n in _OUTPUTS if getattr(found, n, None) is not None)

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Return the cross entropy; hidden states count as logits."""
        classes = output.shape[-1]
        return nn.functional.cross_entropy(
            output.flatten(0, -2), targets.flatten() % classes
        )

    def parallelize(self, model: Net, mesh: DeviceMesh) -> nn.Module:
        """Load the model under the plan of a mesh."""
        axes = mesh.mesh_dim_names
        plan = next(plan for plan in PLANS.values() if (*plan.mesh,) == axes)
        return self.load(model, plan)

    def load(self, model: Net, plan: Plan) -> nn.Module:
        """Load the model under a plan, as users do; transformers makes the meshes."""
        from transformers.distributed import DistributedConfig

        once = patch.object(dist, "init_device_mesh", _mesh_made_once)
        with tempfile.TemporaryDirectory() as folder, once:
            shared = [folder]
            if dist.get_rank() == 0:
                model.net.save_pretrained(folder)  # type: ignore[operator]  # of an untyped package
            dist.broadcast_object_list(shared)  # the folder of rank 0
            loaded = type(model.net).from_pretrained(  # type: ignore[attr-defined]  # of an untyped package
                shared[0],
                dtype=torch.float32,
                distributed_config=DistributedConfig(
                    **plan.sizes, tp_plan=replaced_rules(self.kind) or None
                ),
            )
            dist.barrier()  # rank 0 removes the folder once all have read it
        return Net(loaded.train())

    def optimizer(self, parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.SGD:
        """Return SGD, whose update is a multiple of the gradient."""
        # foreach kernels refuse plain tensors beside DTensors, and plans leave both
        return torch.optim.SGD([p for _, p in parameters], lr=0.1, foreach=False)


def _mesh_made_once(
    device: str, shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...]
) -> DeviceMesh:
    """Return a mesh as ``init_device_mesh`` does, created once in a process.

    Each load makes two meshes of four axes: with four ranks that are 24 process groups,
    each with a barrier. A user loads once in a process; the survey loads often. torch
    also caches layouts by mesh, and returns those of an equal earlier mesh.
    """
    return _known_mesh(dist.group.WORLD, device, shape, mesh_dim_names)


@cache
def _known_mesh(
    world: dist.ProcessGroup | None,  # a new world needs new meshes
    device: str,
    shape: tuple[int, ...],
    names: tuple[str, ...],
) -> DeviceMesh:
    return init_device_mesh(device, shape, mesh_dim_names=names)


def _waves(tokens: Tensor, width: int = HIDDEN) -> Tensor:
    """Return a vector for each token, in place of another model's output."""
    return torch.sin(tokens[..., None] * torch.arange(1.0, width + 1))


_INPUTS: Mapping[str, Callable[[Tensor], dict[str, Tensor]]] = {
    "muse_glimmer_assistant": lambda tokens: {
        "noise_embeds": _waves(tokens[:, :-1]),
        "context_hidden_states": _waves(tokens[:, :4], 2 * HIDDEN),
    },
    "dots3_note_vision_encoder": lambda tokens: {
        "pixel_values": _waves(tokens[:, :-1], 3 * 2 * 2),
        "grid_thw": torch.tensor([[1, 2, TOKENS // 2]]).expand(len(tokens), 3),
    },
    "qwen3_omni_moe_talker_text": lambda tokens: {
        "inputs_embeds": _waves(tokens[:, :-1])
    },
    "voxtral_realtime_text": lambda tokens: {
        "input_ids": tokens[:, :-1],
        "t_cond": _waves(tokens[:, :1]),
    },
}
"""Model type -> function from tokens to its inputs, if it takes more than tokens."""

WRITTEN_INPUTS: Mapping[str, Mapping[str, str]] = {
    "muse_glimmer_assistant": {
        "noise_embeds": """torch.sin(
            tokens[:, :-1, None] * torch.arange(1.0, 33)
        ).to(model.dtype)""",
        "context_hidden_states": """torch.sin(
            tokens[:, :4, None] * torch.arange(1.0, 65)
        ).to(model.dtype)""",
    },
    "qwen3_omni_moe_talker_text": {
        "inputs_embeds": """torch.sin(
            tokens[:, :-1, None] * torch.arange(1.0, 33)
        ).to(model.dtype)"""
    },
}
"""Model type -> argument -> source code of its value, for scripts of findings."""
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_REPLACED: Mapping[str, tuple[str, ...]] = {
    "doge": tuple(
        f"model.layers.*.self_attn.{letter}_proj"
        for letter in ("q", "k", "v", "dt", "o")
    ),
    "esmc": tuple(f"esmc.layers.*.self_attn.{letter}_proj" for letter in "qkvo"),
    "glm5_next_text": tuple(
        f"layers.*.self_attn.{name}"
        for name in ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    ),
    "inkling_text": (
        "model.embed_tokens",
        "model.layers.*.mlp.shared_experts",
        *(f"model.layers.*.mlp.shared_experts.{name}" for name in _PROJECTIONS),
    ),
    "llama4_text": tuple(
        f"model.layers.*.feed_forward.shared_expert.{name}" for name in _PROJECTIONS
    ),
    "muse_glimmer": ("model.language_model.embed_tokens",),
    "muse_glimmer_text": ("embed_tokens",),
    "muse_spark_text": ("embed_tokens",),
    "neomme": (
        *(f"model.layers.*.self_attn.{letter}_proj" for letter in "qkv"),
        "model.layers.*.self_attn.output_projection.gate_proj",
        "model.layers.*.self_attn.output_projection.o_proj",
        "lm_head",
    ),
    # tensor parallel raises if the experts have the only plan
    "openai_privacy_filter": ("norm",),
    "zaya": ("model.norm",),
    "t5gemma2_text": (
        "model.encoder.text_model.embed_tokens",
        "model.decoder.embed_tokens",
        "lm_head.out_proj",
    ),
}
"""Model type -> modules kept whole, because the plan's own rules raise."""


def replaced_rules(kind: ModelType) -> Mapping[str, str]:
    """Return rules that replace those of a plan, so that the rest can be checked.

    Args:
        kind: a model type; it raises in every forward pass with its own rules.
    """
    return dict.fromkeys(_REPLACED.get(kind.name, ()), "replicate")


@torch.no_grad()
def misloaded(plan: str, model: str) -> dict[str, float]:
    """Return parameters that differ after a model was saved and loaded under a plan.

    Empty if the output of the loaded model is right: then the plan only concatenates
    the parts of a DTensor in another order, and parity checks the rest. Runs on every
    rank of a world.

    Args:
        plan: a key of ``PLANS``.
        model: a model type.

    Returns:
        Name -> relative norm of the difference.
    """
    stack = Stack(model_types()[model])
    torch.manual_seed(0)
    saved = stack.model()
    loaded = stack.load(saved, PLANS[plan])
    found = {}
    for name, parameter in loaded.named_parameters():
        whole, true = _whole(parameter), saved.get_parameter(name)
        if not torch.equal(whole, true):
            error = (whole - true).norm() / true.norm()
            found[name.removeprefix("net.")] = float(f"{error:.3g}")
    if found:
        inputs, _ = stack.batch(0, 0)
        output, true = _whole(loaded.eval()(inputs)), saved.eval()(inputs)
        if (output - true).norm() <= SAME_OUTPUT * true.norm():
            return {}
    return found


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def draw(parameter: Tensor) -> None:
    """Draw a parameter from torch's generator; see [Note: Weights]."""
    noise = torch.randn(parameter.shape)
    if parameter.ndim < 2:
        parameter += 0.1 * noise
    else:
        parameter.copy_(noise / parameter.shape[-1] ** 0.5)


_WHOLES = {
    "T5GemmaModuleConfig": "T5GemmaConfig",
    "T5Gemma2TextConfig": "T5Gemma2Config",
    "T5Gemma2DecoderConfig": "T5Gemma2Config",
}
"""Configuration class of a part -> class of the whole, if no model takes the part."""


@cache
def config_class(kind: ModelType) -> Any:
    """Return the configuration class of a model type, or that of the whole model."""
    name = f"transformers.models.{kind.folder}.{kind.configuration}"
    wanted = _WHOLES.get(kind.config, kind.config)
    return getattr(importlib.import_module(name), wanted)


def rule_of(kind: ModelType, plan: Plan, parameter: str) -> Rule:
    """Return the rule by which transformers lays out a parameter under a plan.

    Args:
        kind: a model type.
        plan: how it is laid out.
        parameter: its name in the model.
    """
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

    with torch.device("meta"):  # for its module names and rules: no values are needed
        model = model_class(kind)(config_class(kind)(**Stack(kind).settings()))
    rules = {**model.tp_plan, **(model.ep_plan if "ep_size" in plan.sizes else {})}
    owner = parameter.rpartition(".")[0]
    general = (wildcards(parameter), wildcards(owner))
    # a rule may name the parameter itself (experts) or the module that holds it
    style = next((rules[name] for name in general if name in rules), "")
    made_by = type(ALL_PARALLEL_STYLES[style]) if style else None
    return Rule(
        style=style,
        where=_place_of(made_by or type(model.get_submodule(owner))),
        module=type(model.get_submodule(owner)).__name__,
    )


def rule_of_loader() -> Rule:
    """Return the rule by which transformers loads a parameter under a plan."""
    from transformers.distributed.sharding_utils import DtensorShardOperation

    return Rule(
        style="checkpoint-conversion",
        where=_place_of(DtensorShardOperation),
        module="",
    )


def _place_of(kind: Any) -> str:
    """Return the name of a class, and the file and line where it begins."""
    path = Path(inspect.getsourcefile(kind) or "")
    parts = path.parts[path.parts.index("site-packages") + 1 :] or path.parts[-1:]
    return f"{kind.__name__} ({'/'.join(parts)}:{inspect.getsourcelines(kind)[1]})"


_HEADS = ("ForCausalLM", "ForConditionalGeneration", "ForMaskedLM", "Model", "")
"""Endings of class names of models, the best to train first."""
_NO_HEADS = ("Classification", "QuestionAnswering", "PreTrainedModel", "Answering")


@cache
def model_class(kind: ModelType) -> Any:
    """Return the model class to train with a configuration class.

    Raises:
        ValueError: if no model takes the configuration alone.
    """
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = config_class(kind)
    part = kind.configuration.removeprefix("configuration_")
    name = f"transformers.models.{kind.folder}.modeling_{part}"
    if importlib.util.find_spec(name) is None:  # the model of another type
        return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind.name])
    module = importlib.import_module(name)
    found = [
        each
        for name, each in vars(module).items()
        if inspect.isclass(each)
        and issubclass(each, transformers.PreTrainedModel)
        and getattr(each, "config_class", None) is config
        and not any(word in name for word in _NO_HEADS)
    ]
    if not found:
        raise ValueError(f"no model takes a {kind.config} alone")
    return min(found, key=lambda each: _rank(each.__name__))


def _rank(name: str) -> int:
    return next(n for n, end in enumerate(_HEADS) if name.endswith(end))


class _Types:
    """Workloads as attributes: a scenario id names one as ``zoo:types.qwen3``."""

    def __init__(self, *, odd_heads: bool = False) -> None:
        self.odd_heads = odd_heads

    # not a dict: ``module:attribute`` is resolved by getattr alone
    def __getattr__(self, name: str) -> Stack:
        kind = model_types().get(name)
        if kind is None:
            raise AttributeError(name)
        return Stack(kind, odd_heads=self.odd_heads)


types = _Types()
odd = _Types(odd_heads=True)
"""Workloads of models with an odd number of heads, as attributes."""
